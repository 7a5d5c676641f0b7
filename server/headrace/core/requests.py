"""What every transport turns its input into, and what it gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Tensor

Parameter = str | int | float | bool

MAX_TENSORS = 4096  # inputs, or named outputs, of a request; no model comes near
# Of a request, and of each of its tensors. A parameter is an option with a name, of which clients
# set a handful; each costs some microseconds to look at.
MAX_PARAMETERS = 1024


# What a call is made with.
ASKED = (
    "model_name", "model_version", "id", "inputs", "outputs", "parameters", "priority", "timeout",
    "sequence_id", "sequence_start", "sequence_end", "classes", "nbytes",
)  # fmt: skip


class Owner(Protocol):
    """The scheduler or the execution that has a call, and is told what its client wants."""

    def cancel(self, call: "Call") -> None:
        """Nobody waits for a call any more."""

    def hold(self, call: "Call", held: bool) -> None:
        """Pause the responses to a call, or go on."""


class Call:
    """One inference request on its way, from its door to its answer.

    It is what was asked, decoded but not yet checked against a model's signature, the entry of the
    model's queue, and the ticket by which its door cancels it. Owned by the event-loop thread.

    `model_version` is empty for "the version that the server's policy picks". `outputs` names the
    wanted outputs; empty means all. `classes` says of which outputs only the so many highest
    classes are wanted. `timeout` is in microseconds and bounds the wait in the queue; 0 means none.
    `priority` 0 means the model's default level. `nbytes` is the size of the request as received,
    which admission counts. `parameters` holds what is not reserved by the protocol.

    From `Batcher.submit` on, which sets the rest, it is queued, then started, then ended; `cancel`
    ends it from either of the first two. `arrived`, `began` and `deadline` are nanoseconds of the
    scheduler's clock. `key` is what it has in common with those that it may share a batch with.
    `outcome` is there from its end until its sink has been called, which may be later where answers
    keep the order of calls; `cancel` takes it back until then. An execution that can be told about
    single calls has put itself into `execution`, with `run_number`, which it knows the call by, and
    when it began. `held` is None until the model has been asked to pause. `first` is its first row
    in a batch that has been computed.
    """

    __slots__ = (
        "arrived", "began", "classes", "deadline", "ended", "execution", "first", "held", "id",
        "inputs", "key", "level", "model_name", "model_version", "nbytes", "outcome", "outputs",
        "owner", "parameters", "priority", "rows", "run_number", "sequence_end", "sequence_id",
        "sequence_start", "sink", "started", "timeout",
    )  # fmt: skip

    sink: "Sink"
    owner: Owner
    key: object
    rows: int
    arrived: int
    began: int
    deadline: int | None
    level: int
    run_number: int
    started: bool
    ended: bool
    held: bool | None
    execution: Owner | None
    outcome: "InferResponse | Computed | Exception | None"
    first: int

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,
        inputs: dict[str, Tensor],
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        priority: int = 0,
        timeout: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        classes: Mapping[str, int] | None = None,
        nbytes: int = 0,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters = {} if parameters is None else parameters
        self.priority = priority
        self.timeout = timeout
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.classes = classes
        self.nbytes = nbytes

    ask = __init__  # for a door that knows what is asked when the call is there already

    def like(self, **changes: Any) -> "Call":
        """Another call that asks the same, but for `changes`."""
        return type(self)(**{name: getattr(self, name) for name in ASKED} | changes)

    def cancel(self) -> None:
        """Drop the call; a run that has begun goes on, but its answer goes nowhere."""
        self.owner.cancel(self)

    def hold(self, held: bool) -> None:
        """Pause the model's further responses, or let them go on."""
        self.owner.hold(self, held)


class RawRequest(Call):
    """A request that is nothing yet but the bytes of a model's only input.

    They are its one input, under no name. What knows the signature makes a request of them: one to
    generate with where it `generates`.
    """

    __slots__ = ("generates",)

    def __init__(self, *asked: Any, generates: bool = False, **more: Any) -> None:
        super().__init__(*asked, **more)
        self.generates = generates


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


class SharedRequest(Call):
    """A request with tensors in shared memory: inputs that are not among `inputs`, and outputs.

    Its `classes` are never None, so that one look tells requests of which something is asked that
    is not a model's to do.
    """

    __slots__ = ("shared_inputs", "shared_outputs")

    def __init__(
        self,
        *asked: Any,
        shared_inputs: Mapping[str, SharedInput] | None = None,
        shared_outputs: Mapping[str, Stretch] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*asked, **more)
        self.classes = self.classes or {}
        self.shared_inputs = shared_inputs or {}
        self.shared_outputs = shared_outputs or {}


class Timing(NamedTuple):
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


class Computed(Protocol):
    """A batch that has been computed; see `headrace.scheduling.batch.Batch`."""

    calls: list[Call]
    rows: int
    version: str
    tensors: list[Tensor]
    started: int
    compute_ns: int

    def response(self, call: Call) -> InferResponse:
        """The response to one of its calls."""


class Sink:
    """Where the responses to one call go, and what is known of who made it.

    Called on the event-loop thread; must not wait or raise. What is asked of a client, or told to
    it, has an answer here for calls that no client has made, such as those of models.
    """

    __slots__ = ()

    # Why a model that may answer any number of times is refused; "" where it is not.
    refusal = ""

    @property
    def door(self) -> str:
        """The door that the call came through, `HTTP` or `GRPC`; "" for none."""
        return ""

    @property
    def begun_ns(self) -> int:
        """When it began to come, in nanoseconds of the monotonic clock; 0 if it came at once."""
        return 0

    def header(self, name: str) -> str:
        """The value of a header of the client, by its name in lower case; "" without one."""
        return ""

    def remaining(self) -> float:
        """Seconds that the client still waits; 0 if it does not say."""
        return 0.0

    def routed(self, call: Call, target: Any) -> None:
        """Take which `Target` serves the call, now that it is decided."""

    def answered_by(self, backend: str) -> None:
        """Take which backend answers, just before it does, of a model that has several.

        The last one counts.
        """

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response; after the one with `final` nothing more comes."""
        raise NotImplementedError

    def respond_from(self, batch: Computed, call: Call) -> None:
        """Take the only response to `call`, which is its part of `batch`."""
        self.respond(batch.response(call), True)

    def finish(self) -> None:
        """Take the end of a call that gets no response, or no further one."""
        raise NotImplementedError

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the call."""
        raise NotImplementedError

    def refuse(self, error: ServerError) -> None:
        """Take what `Target.submit` would have raised; nothing else comes."""
        self.fail(error)


class StageSink(Sink):
    """A sink that hands on to another one; stages derive theirs, and override what they change."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def door(self) -> str:
        return self._sink.door

    @property
    def begun_ns(self) -> int:
        return self._sink.begun_ns

    def header(self, name: str) -> str:
        return self._sink.header(name)

    def remaining(self) -> float:
        return self._sink.remaining()

    def routed(self, call: Call, target: Any) -> None:
        self._sink.routed(call, target)

    def answered_by(self, backend: str) -> None:
        self._sink.answered_by(backend)

    def respond(self, response: InferResponse, final: bool) -> None:
        self._sink.respond(response, final)

    def finish(self) -> None:
        self._sink.finish()

    def fail(self, error: ServerError) -> None:
        self._sink.fail(error)

    def refuse(self, error: ServerError) -> None:
        self._sink.refuse(error)


class Ticket(Protocol):
    """What a transport holds while its request is under way."""

    def cancel(self) -> None:
        """Drop the request, started or not; afterwards its sink is not called."""

    def hold(self, held: bool) -> None:
        """Have a model that answers many times pause, or go on: its answers are not read."""
