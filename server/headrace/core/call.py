"""One inference request on its way, what it brings along, and its response.

`Call` is a request from its door to its answer; `Stages` are what its answers pass; `InferResponse`
is an answer. Doors, streams and models that ask others derive their own calls.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.tensors import Tensor

log = logging.getLogger(__name__)

Parameter = str | int | float | bool

MAX_TENSORS = 4096  # inputs, or named outputs, of a request; no model comes near
# Of a request, and of each of its tensors. A parameter is an option with a name, of which clients
# set a handful; each costs some microseconds to look at.
MAX_PARAMETERS = 1024


# What a call is made with.
ASKED = (
    "model_name", "model_version", "id", "inputs", "outputs", "parameters", "priority", "timeout",
    "sequence_id", "sequence_start", "sequence_end", "classes", "nbytes", "shared", "raw",
)  # fmt: skip


class Owner(Protocol):
    """Holder of a call for now: a stage, the scheduler, or an execution."""

    def cancel(self, call: "Call") -> None:
        """Nobody waits for a call any more."""

    def hold(self, call: "Call", held: bool) -> None:
        """Pause the responses to a call, or go on; `call.held` says so to whoever has it next."""


class Nobody:
    """The owner of calls that are not under way yet."""

    def cancel(self, call: "Call") -> None:
        """There is nothing to call off."""

    def hold(self, call: "Call", held: bool) -> None:
        """Keep it for who has the call next."""
        call.held = held


NOBODY = Nobody()


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`byte_size` bytes of a shared memory region, from `offset` in it on."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input whose data are in shared memory."""

    datatype: Datatype
    shape: tuple[int, ...]
    place: RegionSlice


class Shared(NamedTuple):
    """The tensors of a request that are in shared memory: inputs, and places for outputs."""

    inputs: Mapping[str, SharedInput] = {}
    outputs: Mapping[str, RegionSlice] = {}


class Raw(Enum):
    """The form of a raw body, which is a model's only input and not decoded yet."""

    INFER = "what `headrace.protocol.v2_json.decode_raw` reads"
    GENERATE = "what `headrace.protocol.generate.decode_generate` reads"


class Call:
    """One inference request on its way, from its door to its answer, and the way back.

    It is what was asked, decoded but not yet checked against a model's signature, the entry of the
    model's queue, what its door cancels, and where its responses go: whoever answers or awaits
    derives its own. Owned by the event-loop thread.

    `model_version` is empty for "the version that the server's policy picks". `outputs` names the
    wanted outputs; empty means all. `timeout` is in microseconds and bounds the wait in the queue;
    0 means none. `priority` 0 means the model's default level. `nbytes` is the size of the request
    as received, which admission counts. `parameters` holds what is not reserved by the protocol.

    `classes` says of which outputs only the so many highest classes are wanted. It is not None
    wherever something is asked that is not a model's to do, `shared` too: one look tells. The
    inputs in shared memory are not among `inputs`. A `raw` call has its body as its one input,
    under no name; what knows the signature makes a request of it.

    From `Batcher.submit` on, which sets the rest, it is queued, then started, then ended; `cancel`
    ends it from either of the first two. `rows` is set before. `arrived`, `began` and `deadline`
    are nanoseconds of the scheduler's clock. `key` is what it has in common with those that it may
    share a batch with. `outcome` is there from its end until it is answered, which may be later
    where answers keep the order of calls; `cancel` takes it back until then. An execution that can
    be told about single calls has put itself into `execution`, with `run_number`, which it knows
    the call by, and when it began. `held` is None until the model has been asked to pause. `first`
    is its first row in a batch that has been computed.

    The way back, `respond` to `refuse`, is called on the event-loop thread and must not wait or
    raise. Who has a call answers it by `pass_response`, `pass_end` and `pass_refusal`, or looks
    itself whether there are `stages`. After `cancel` nothing comes any more.
    """

    __slots__ = (
        "arrived", "began", "classes", "deadline", "ended", "execution", "first", "held", "id",
        "inputs", "key", "level", "model_name", "model_version", "nbytes", "outcome", "outputs",
        "owner", "parameters", "priority", "raw", "rows", "run_number", "sequence_end",
        "sequence_id", "sequence_start", "shared", "stages", "started", "timeout",
    )  # fmt: skip

    owner: Owner
    stages: "Stages | None"
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

    # The door that it came through, `HTTP` or `GRPC`; "" for calls that no client has made.
    door = ""
    # Why a model that may answer any number of times is refused; "" where it is not.
    refusal = ""

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
        shared: Shared | None = None,
        raw: Raw | None = None,
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
        self.shared = shared
        self.raw = raw
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False

    # For a door that has the call already: either it knows what is asked at once, or it begins the
    # call, and takes what is asked once that is known.
    ask = __init__

    def begin(self) -> None:
        """Begin the call before what is asked is known."""
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False

    def take(self, asked: "Call") -> None:
        """Ask what another call does; its size stays what its door has counted."""
        self.model_name = asked.model_name
        self.model_version = asked.model_version
        self.id = asked.id
        self.inputs = asked.inputs
        self.outputs = asked.outputs
        self.parameters = asked.parameters
        self.priority = asked.priority
        self.timeout = asked.timeout
        self.sequence_id = asked.sequence_id
        self.sequence_start = asked.sequence_start
        self.sequence_end = asked.sequence_end
        self.classes = asked.classes
        self.shared = asked.shared
        self.raw = asked.raw

    def like(self, **changes: Any) -> "Call":
        """Another call that asks the same, but for `changes`; it goes nowhere."""
        return Call(**{name: getattr(self, name) for name in ASKED} | changes)

    # --- for whoever has made it

    def cancel(self) -> None:
        """Drop the call; a run that has begun goes on, but its answer goes nowhere."""
        owner, self.owner = self.owner, NOBODY
        owner.cancel(self)
        if self.stages is not None:
            self.stages.cancel(self)

    def hold(self, held: bool) -> None:
        """Pause the model's further responses, or let them go on."""
        self.owner.hold(self, held)

    # --- what is known of the client; for calls of none there are answers, too

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

    # --- the way back

    def routed(self, target: Any) -> None:
        """Take which `Target` serves the call, now that it is decided."""

    def answered_by(self, backend: str) -> None:
        """Take which backend answers, just before it does, of a model that has several.

        The last one counts.
        """

    def respond(self, response: "InferResponse", final: bool) -> None:
        """Take a response; after the one with `final` nothing more comes."""
        raise NotImplementedError

    def respond_from(self, batch: "Computed") -> None:
        """Take the only response, which is the call's part of `batch`."""
        self.respond(batch.response(self), True)

    def finish(self) -> None:
        """Take the end of the call, which gets no response, or no further one.

        An error, where one response is promised.
        """
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the call."""
        raise NotImplementedError

    def refuse(self, error: ServerError) -> None:
        """Take what `Target.submit` would have raised; nothing else comes."""
        self.fail(error)

    # --- for whoever has it

    def pass_response(self, response: "InferResponse", final: bool) -> None:
        """Answer with a response, by way of the stages."""
        if self.stages is None:
            self.respond(response, final)
        else:
            self.stages.respond(self, response, final)

    def pass_routed(self, target: Any) -> None:
        """Pass on which `Target` serves the call, to the stages too."""
        self.routed(target)
        if self.stages is not None:
            self.stages.routed(target)

    def pass_backend(self, backend: str) -> None:
        """Pass on which backend answers, to the stages too."""
        self.answered_by(backend)
        if self.stages is not None:
            self.stages.answered_by(backend)

    def pass_end(self, error: ServerError | None = None) -> None:
        """End the call, with an error or without a further response, by way of the stages."""
        if self.stages is not None:
            self.stages.end(self, error, False)
        elif error is None:
            self.finish()
        else:
            self.fail(error)

    def pass_refusal(self, error: ServerError) -> None:
        """Refuse the call, by way of the stages."""
        if self.stages is None:
            self.refuse(error)
        else:
            self.stages.end(self, error, True)

    def enter(self, stage: "Stage", submit: "Submit") -> None:
        """`submit` the call with a stage on its way back; if that raises, the stage is told."""
        stages = self.stages = self.stages or Stages()
        stages.add(stage)
        try:
            submit(self)
        except BaseException as error:
            stages.remove(stage)
            stage.ended(self, error if isinstance(error, ServerError) else _bug())
            stage.over(self)
            raise


# A stage of a chain, or the scheduler at its end: passes a call on, keeps it, or ends it. Raises
# `ServerError`, with which the call has ended.
Submit = Callable[[Call], None]
# Called by a stage that has changed a response, with the error if there was one.
Done = Callable[[Exception | None], None]


class Stage:
    """The part of a chain's stage that changes or watches the answers to one call."""

    __slots__ = ()

    def transform(
        self,
        call: Call,
        response: "InferResponse",
        final: bool,
        done: "Done",
    ) -> Owner | None:
        """Change a response before it is passed on; raises `ServerError`, which ends the call.

        What takes long is done by who is given back; at its end `done` is called, with the error
        if there was one. Whatever else comes for the call waits until then.
        """
        return None

    def passed(self, call: Call, response: "InferResponse", final: bool) -> None:
        """A response has been passed on."""

    def routed(self, target: Any) -> None:
        """Take which `Target` serves the call, now that it is decided."""

    def answered_by(self, backend: str) -> None:
        """A backend is about to answer, of a model that has several."""

    def ended(self, call: Call, error: ServerError | None) -> None:
        """The call has ended with an error, or without a further response."""

    def cancelled(self, call: Call) -> None:
        """Nobody waits for the call any more."""

    def over(self, call: Call) -> None:
        """Nothing more comes for the call, whichever way it has ended; told last."""


class Stages:
    """The stages that answers to one call pass, from the last added on.

    Invariant: while a stage works on a response, what comes after it waits in `_behind`. Once the
    call has ended or was cancelled, nothing is passed on any more.
    """

    __slots__ = ("_behind", "_over", "_stages", "_work")

    def __init__(self) -> None:
        self._stages: tuple[Stage, ...] = ()
        self._work: Owner | None = None
        self._behind: deque[Callable[[], None]] = deque()
        self._over = False

    def add(self, stage: Stage) -> None:
        """Add a stage, which answers pass first."""
        self._stages = (stage, *self._stages)

    def remove(self, stage: Stage) -> None:
        """Remove a stage."""
        self._stages = tuple(one for one in self._stages if one is not stage)

    def routed(self, target: Any) -> None:
        """Pass on which `Target` serves the call."""
        for stage in self._stages:
            stage.routed(target)

    def answered_by(self, backend: str) -> None:
        """Pass on which backend answers."""
        for stage in self._stages:
            stage.answered_by(backend)

    def respond(self, call: Call, response: "InferResponse", final: bool) -> None:
        """Pass a response on, or have it wait."""
        if self._work is not None:
            self._behind.append(partial(self.respond, call, response, final))
        elif not self._over:
            self._pass_on(call, response, final, 0)

    def end(self, call: Call, error: ServerError | None, refused: bool) -> None:
        """Pass on the end of a call, or have it wait."""
        if self._work is not None:
            self._behind.append(partial(self.end, call, error, refused))
            return
        if self._over:
            return
        self._over = True
        try:
            if error is None:
                call.finish()
            elif refused:
                call.refuse(error)
            else:
                call.fail(error)
        finally:
            for stage in self._stages:
                stage.ended(call, error)
            self._close(call)

    def cancel(self, call: Call) -> None:
        """Pass nothing on any more."""
        if self._over:
            return
        self._over = True
        if self._work is not None:
            self._work.cancel(call)
        for stage in self._stages:
            stage.cancelled(call)
        self._close(call)

    def _pass_on(self, call: Call, response: "InferResponse", final: bool, at: int) -> None:
        """Pass a response on that the stages before `at` have seen."""
        for place, stage in enumerate(self._stages[at:], at + 1):
            done = partial(self._go_on, call, response, final, place)
            try:
                self._work = stage.transform(call, response, final, done)
            except ServerError as error:
                self._give_up(call, error, final)
                return
            if self._work is not None:
                return
        self._over = final
        try:
            call.respond(response, final)
        finally:
            for stage in self._stages:
                stage.passed(call, response, final)
            if final:
                self._close(call)

    def _go_on(
        self, call: Call, response: "InferResponse", final: bool, at: int, error: Exception | None
    ) -> None:
        """A stage has done what it does to a response."""
        self._work = None
        if self._over:
            return
        if error is None:
            self._pass_on(call, response, final, at)
        elif isinstance(error, ServerError):
            self._give_up(call, error, final)
        else:
            log.error("bug in a stage", exc_info=error)
            self._give_up(call, _bug(), final)
        while self._behind and self._work is None:
            self._behind.popleft()()

    def _give_up(self, call: Call, error: ServerError, final: bool) -> None:
        """End the call with an error, whatever more its model has for it."""
        self._behind.clear()
        if not final:
            call.owner.cancel(call)
        self.end(call, error, False)

    def _close(self, call: Call) -> None:
        stages, self._stages = self._stages, ()
        self._behind.clear()
        for stage in stages:
            stage.over(call)


def _bug() -> ServerError:
    return ExecutionFailed("internal error")


class Timing(NamedTuple):
    """Where a request's time went: nanoseconds in the queue and in execution, rows of its batch.

    `gather_ns` is the part of the execution in which inputs were put together.
    """

    queue_ns: int
    compute_ns: int
    batch_rows: int
    gather_ns: int = 0


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
    texts: Any
    raws: Any

    def response(self, call: Call) -> InferResponse:
        """The response to one of its calls."""
