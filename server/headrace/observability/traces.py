"""Traces as values: the trace context of a request, and its record.

A request carries the W3C Trace Context and a number of this server as a parameter, from the door to
the engine and on to a Python model, and back with that model's calls. The text is the trace's
number in this server, 0 for none, the `traceparent` and the `tracestate`, separated by spaces;
missing parts at the end are left out.

The record has the timestamps of a request and, optionally, its tensors. Times are nanoseconds of
the monotonic clock. Their names are Triton's, so that its tools understand them.
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
    """A span of a trace, possibly of another program; `state` is the text of `tracestate`."""

    trace_id: int
    span_id: int
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        """True if the span is recorded."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags & _SAMPLED:02x}"


class TraceLink(NamedTuple):
    """The trace of a request: its number in this server, 0 for none, and the context."""

    number: int
    context: TraceContext | None


def read_traceparent(text: str, state: str = "") -> TraceContext | None:
    """Parse both headers; None if they are invalid, and to be ignored."""
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
    """Format a link as text, as in a call's context and between processes."""
    context = link.context
    if context is None:
        return str(link.number)
    return f"{link.number} {context.traceparent} {context.state}".rstrip()


def read_link(text: object) -> TraceLink:
    """Parse a link; a worker may have changed it."""
    number, _, rest = str(text).partition(" ")
    parent, _, state = rest.partition(" ")
    known = number.isascii() and number.isdigit() and len(number) <= _LONGEST_NUMBER
    return TraceLink(int(number) if known else 0, read_traceparent(parent, state))


def new_context(parent: TraceContext | None, sampled: bool = True) -> TraceContext:
    """A span that starts a trace, or continues a client's."""
    flags = _SAMPLED if sampled else 0
    if parent is not None:
        return TraceContext(parent.trace_id, _number(64), flags, parent.state)
    return TraceContext(_number(128), _number(64), flags)


def child_span(parent: TraceContext) -> TraceContext:
    """A new span of the same trace, sampled as its parent."""
    return TraceContext(parent.trace_id, _number(64), parent.flags & _SAMPLED, parent.state)


def _number(bits: int) -> int:
    return getrandbits(bits) or 1


QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
MOST_BYTES = 16 << 20  # of a trace's tensors; further ones are recorded without data
MOST_TIMES = 10_000  # timestamps after which responses and their tensors are left out
_REPEATED = ("INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_SEND_START",
             "GRPC_SEND_END")  # fmt: skip
_OBJECT = 40  # object overhead in bytes


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call to an upstream for a request, with its error, or ""."""

    context: TraceContext
    endpoint: str
    begun: int
    ended: int
    error: str


@dataclass(slots=True)
class Trace:
    """The trace of one request. Filled on the event-loop thread, then passed on unchanged.

    `door` is HTTP, GRPC, or "" for a model's call; that has a `parent`, 0 for none. `version` is -1
    if none was found. `offset` converts times to the wall clock. `nbytes` is the size of the
    tensors. A trace that was not `picked` is recorded in case its request is slow or fails: `kept`
    says so at its end. A model's call is decided with the request, whose number is its `root`.
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
    last: bool = False  # the last of its sampler's count
    nbytes: int = 0
    backend: str = ""  # the answering backend, for a model with several
    picked: bool = True
    kept: bool = True
    root: int = 0

    def time(self, name: str, ns: int) -> None:
        """Record a timestamp."""
        if len(self.times) < MOST_TIMES or name not in _REPEATED:
            self.times.append((name, ns))

    def keep(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Record copies of tensors, since their memory may be reused."""
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
    """Bytes of a tensor; of strings beyond `most` bytes, only the size of a part."""
    size: int = array.nbytes
    if datatype is Datatype.BYTES and 0 < size <= most and not isinstance(array, BytesArray):
        size += sum(map(len, array.ravel().tolist())) + _OBJECT * array.size
    return size


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The spans of a traced request.

    `root` is the span of the whole exchange, 0 for a model's call; `parent` is the parent of that,
    or of the model's span.
    """

    trace_id: int
    root: int
    model: TraceContext
    parent: TraceContext | None
