"""Traces as values: what a request carries of its trace, and what is recorded of it.

A request carries the W3C Trace Context and a number of ours as a parameter, from the door to the
engine and on to a Python model, and back with what that model asks of others. The text is the
number of the trace here, 0 for none, the `traceparent` and the `tracestate`, with spaces between;
what is not there at the end is left out.

Recorded is when what has happened to the request, and, if asked for, its tensors. Times are
nanoseconds of the monotonic clock. Their names are Triton's, so that its tools know them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import NamedTuple

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor, TensorArray, elsewhere
from headrace.observability.trace_settings import Sampler

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{0,512}")
_SAMPLED = 1
_LONGEST_NUMBER = 19  # digits


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, which may be another program's; `state` is the text of `tracestate`."""

    trace_id: int
    span_id: int
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        """True if it is recorded."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags & _SAMPLED:02x}"


class TraceLink(NamedTuple):
    """The trace of a request: its number in this server, 0 for none, and the context."""

    number: int
    context: TraceContext | None


def read_traceparent(text: str, state: str = "") -> TraceContext | None:
    """The context of these two headers; None if they are none, which is to be ignored."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    context = TraceContext(
        int(trace, 16), int(span, 16), int(flags, 16), state if _STATE.fullmatch(state) else ""
    )
    return context if context.trace_id and context.span_id else None


def write_link(link: TraceLink) -> str:
    """The text of the parameter."""
    context = link.context
    if context is None:
        return str(link.number)
    return f"{link.number} {context.traceparent} {context.state}".rstrip()


def read_link(text: object) -> TraceLink:
    """Read the parameter, in which clients may have put anything."""
    number, _, rest = str(text).partition(" ")
    parent, _, state = rest.partition(" ")
    known = number.isascii() and number.isdigit() and len(number) <= _LONGEST_NUMBER
    return TraceLink(int(number) if known else 0, read_traceparent(parent, state))


def new_context(parent: TraceContext | None) -> TraceContext:
    """A span that begins a trace, or goes on with a client's."""
    if parent is not None:
        return child_span(parent)
    return TraceContext(_number(128), _number(64), _SAMPLED)


def child_span(parent: TraceContext) -> TraceContext:
    """A span of the same trace."""
    return TraceContext(parent.trace_id, _number(64), _SAMPLED, parent.state)


def _number(bits: int) -> int:
    return getrandbits(bits) or 1


QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
MOST_BYTES = 16 << 20  # of the tensors of a trace; what is beyond is there without its data
MOST_TIMES = 10_000  # from which on the times of responses are left out, and their tensors
_REPEATED = ("INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_SEND_START",
             "GRPC_SEND_END")  # fmt: skip
_OBJECT = 40  # bytes of an object beside its text


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call to another server that had part in a request, and what it failed with, "" for none."""

    context: TraceContext
    endpoint: str
    begun: int
    ended: int
    error: str


@dataclass(slots=True)
class Trace:
    """One request. Made and filled on the event-loop thread, then handed on and left alone.

    `door` is HTTP, GRPC, or "" for what a model has asked for; that has a `parent`, 0 for none.
    `version` is -1 where none was found. `offset` makes times those of the wall clock. `nbytes` are
    those of the tensors.
    """

    number: int
    parent: int
    sampler: Sampler
    door: str
    model: str
    request_id: str
    offset: int
    version: int = -1
    times: list[tuple[str, int]] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    error: str = ""
    spans: "SpanIds | None" = None
    calls: list[CallSpan] = field(default_factory=list)
    last: bool = False  # of all that its sampler may pick
    nbytes: int = 0
    backend: str = ""  # that has answered, of a model that has several

    def time(self, name: str, ns: int) -> None:
        """Record when something has happened."""
        if len(self.times) < MOST_TIMES or name not in _REPEATED:
            self.times.append((name, ns))

    def keep(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Record tensors; copies, since what they lie in may be used again."""
        if len(self.times) >= MOST_TIMES or len(self.tensors) >= MOST_TIMES:
            return
        for tensor in tensors:
            name, datatype, array = tensor.name, tensor.datatype, tensor.array
            nbytes = _size(datatype, array, MOST_BYTES - self.nbytes)
            if self.nbytes + nbytes > MOST_BYTES:
                kept = elsewhere(name, datatype, array.shape)
            else:
                kept = Tensor(name, datatype, array.copy())
                self.nbytes += nbytes
            self.tensors.append((activity, kept))


def _size(datatype: Datatype, array: TensorArray, most: int) -> int:
    """Bytes of a tensor; of strings that are too many for `most` bytes, only a part of them."""
    size: int = array.nbytes
    if datatype is Datatype.BYTES and 0 < size <= most and not isinstance(array, BytesArray):
        size += sum(map(len, array.ravel().tolist())) + _OBJECT * array.size
    return size


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The spans of a traced request.

    `root` is the span of the whole exchange, 0 where a model has asked; `parent` is what that, or
    else the model's span, is part of.
    """

    trace_id: int
    root: int
    model: TraceContext
    parent: TraceContext | None
