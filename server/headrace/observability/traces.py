"""What is recorded of one request: when what has happened to it, and, if asked for, its tensors.

Times are nanoseconds of the monotonic clock. Their names are Triton's, so that its tools know them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor, TensorArray, elsewhere
from headrace.core.trace_context import TraceContext
from headrace.observability.trace_settings import Sampler

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
    """What a tensor takes; of strings that are too many for `most` bytes, only a part of it."""
    size: int = array.nbytes
    if datatype is Datatype.BYTES and 0 < size <= most and not isinstance(array, BytesArray):
        size += sum(map(len, array.ravel().tolist())) + _OBJECT * array.size
    return size


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Who a traced request is among spans.

    `root` is the span of the whole exchange, 0 where a model has asked; `parent` is what that, or
    else the model's span, is part of.
    """

    trace_id: int
    root: int
    model: TraceContext
    parent: TraceContext | None
