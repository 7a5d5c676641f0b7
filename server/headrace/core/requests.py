"""What every transport turns its input into, and what it gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Tensor

Parameter = str | int | float | bool

MAX_TENSORS = 4096  # inputs, or named outputs, of a request; no model comes near
# Of a request, and of each of its tensors. A parameter is an option with a name, of which clients
# set a handful; each costs some microseconds to look at.
MAX_PARAMETERS = 1024


@dataclass(slots=True)
class InferRequest:
    """One inference request, decoded but not yet checked against a model's signature.

    `model_version` is empty for "the version that the server's policy picks". `outputs` names the
    wanted outputs; empty means all. `classes` says of which outputs only the so many highest
    classes are wanted. `timeout` is in microseconds and bounds the wait in the queue; 0 means none.
    `priority` 0 means the model's default level. `nbytes` is the size of the request as received,
    which admission counts. `parameters` holds what is not reserved by the protocol.
    """

    model_name: str
    model_version: str
    id: str
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    classes: Mapping[str, int] | None = None
    nbytes: int = 0


class RawRequest(InferRequest):
    """A request that is nothing yet but the bytes of a model's only input.

    They are its one input, under no name. What knows the signature makes a request of them.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """`byte_size` bytes of a shared memory region, from `offset` in it on."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input whose data are in shared memory."""

    datatype: Datatype
    shape: tuple[int, ...]
    place: Stretch


@dataclass(slots=True)
class SharedRequest(InferRequest):
    """A request with tensors in shared memory: inputs that are not among `inputs`, and outputs.

    Its `classes` are never None, so that one look tells requests of which something is asked that
    is not a model's to do.
    """

    classes: Mapping[str, int] | None = field(default_factory=dict)
    shared_inputs: Mapping[str, SharedInput] = field(default_factory=dict)
    shared_outputs: Mapping[str, Stretch] = field(default_factory=dict)


@dataclass(slots=True)
class Timing:
    """Where a request's time went: nanoseconds in the queue and in execution, rows of its batch."""

    queue_ns: int
    compute_ns: int
    batch_rows: int


@dataclass(slots=True)
class InferResponse:
    """One response; `model_version` is the version that computed it."""

    model_name: str
    model_version: str
    id: str
    outputs: list[Tensor]
    timing: Timing
    parameters: dict[str, Parameter] = field(default_factory=dict)


class Sink(Protocol):
    """Where the responses to one request go.

    Called on the event-loop thread; must not wait or raise.
    """

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response; after the one with `final` nothing more comes."""

    def finish(self) -> None:
        """Take the end of a request that gets no response, or no further one."""

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the request."""


def name_backend(sink: Sink, backend: str) -> None:
    """Tell a sink which backend answers just before it does, of a model that has several.

    Those of doors take that by `answered_by`, of which the last call counts; others need not.
    """
    named: Any = getattr(sink, "answered_by", None)
    if named is not None:
        named(backend)


class Ticket(Protocol):
    """What a transport holds while its request is under way."""

    def cancel(self) -> None:
        """Drop the request, started or not; afterwards its sink is not called."""

    def hold(self, held: bool) -> None:
        """Have a model that answers many times pause, or go on: its answers are not read."""
