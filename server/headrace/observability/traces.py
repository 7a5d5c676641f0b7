"""What is recorded of one request: when what has happened to it, and, if asked for, its tensors.

Times are nanoseconds of the monotonic clock. Their names are Triton's, so that its tools know them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.tensors import Tensor
from headrace.core.trace_context import TraceContext
from headrace.observability.trace_settings import Sampler

QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"


@dataclass(slots=True)
class Trace:
    """One request. Made and filled on the event-loop thread, then handed on and left alone.

    `door` is HTTP, GRPC, or "" for what a model has asked for; that has a `parent`, 0 for none.
    `version` is -1 where none was found. `offset` makes times those of the wall clock.
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
    last: bool = False  # of all that its sampler may pick

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.array.nbytes for _, tensor in self.tensors)

    def time(self, name: str, ns: int) -> None:
        """Record when something has happened."""
        self.times.append((name, ns))

    def keep(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Record tensors; copies, since what they lie in may be used again."""
        for tensor in tensors:
            copied = Tensor(tensor.name, tensor.datatype, tensor.array.copy())
            self.tensors.append((activity, copied))


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
