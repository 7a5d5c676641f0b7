"""One inference request on its way through the server, and its response.

`Call` is a request from its door to its answer, `Stages` are the stages that its responses pass,
`InferResponse` is one response. Doors, streams and model-to-model calls derive their own calls.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.identity import ANYONE, Identity
from headrace.core.limits import Payer
from headrace.core.tensors import Tensor

log = logging.getLogger(__name__)

Parameter = str | int | float | bool

MAX_TENSORS = 4096  # inputs, or named outputs, of a request; far more than any model has
# Per request, and per tensor. Parameters are named options, of which clients set a handful; each
# costs a few microseconds to check.
MAX_PARAMETERS = 1024
# Bytes of an id, of a parameter's name and of its text: larger things are tensors.
MAX_TEXT = 8 << 10
SHORT_TEXT = MAX_TEXT // 4  # characters, which take at most as many bytes


# The constructor's arguments.
ASKED = (
    "model_name", "model_version", "id", "inputs", "outputs", "parameters", "options", "nbytes",
)  # fmt: skip


class Owner(Protocol):
    """The current holder of a call: a stage, the scheduler, or an execution.

    A subclass keeps the pause of a call for later owners.
    """

    __slots__ = ()

    def cancel(self, call: "Call") -> None:
        """Stop working on a call: the client no longer waits for it."""

    def hold(self, call: "Call", held: bool) -> None:
        """Pause or resume the responses to a call; `call.held` has the state for later owners."""
        call.held = held


class Execution(Owner, Protocol):
    """An owner that is executing the call."""

    __slots__ = ()

    def call_off(self, call: "Call") -> bool:
        """Notify the model of a cancellation, and pass on the responses that it still gives.

        False if that is not possible; nothing has changed then.
        """


class Nobody(Owner):
    """Owner of calls that have not been submitted yet."""

    def cancel(self, call: "Call") -> None:
        """Do nothing: no work has begun."""


NOBODY = Nobody()


class CallContext(NamedTuple):
    """Facts about a call beside the client's request, for those that run or trace it.

    `forwarded` are the headers for other servers, by lower-case name; `deadline` is the client's,
    in nanoseconds of the monotonic clock, 0 for none; `trace` is the call's link to its trace, ""
    for none; `identity` is the client. Stages set what later ones, and placements, read.
    """

    forwarded: Mapping[str, str] = {}
    deadline: int = 0
    trace: str = ""
    identity: Identity = ANYONE

    @property
    def told(self) -> bool:
        """True if a backend has to know anything of it."""
        return bool(self.trace or self.deadline or self.forwarded)


NO_CONTEXT = CallContext()  # of nearly all calls


def context_of(identity: Identity) -> CallContext:
    """The context of calls of which no more is known than who asks."""
    return NO_CONTEXT if identity is ANYONE else CallContext(identity=identity)


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`byte_size` bytes of a shared memory region, starting at `offset`."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input whose data is in shared memory."""

    datatype: Datatype
    shape: tuple[int, ...]
    place: RegionSlice


class Shared(NamedTuple):
    """The tensors of a request in shared memory: inputs, and destinations of outputs."""

    inputs: Mapping[str, SharedInput] = {}
    outputs: Mapping[str, RegionSlice] = {}


class Raw(Enum):
    """The form of a raw body: an undecoded request body that is a model's only input."""

    INFER = "what `headrace.protocol.v2_json.decode_raw` reads"
    GENERATE = "what `headrace.protocol.generate.decode_generate` reads"
    ARROW = "what `headrace.protocol.arrow_ipc.decode_stream` reads"


class CallOptions(NamedTuple):
    """Rare wishes of a request.

    `priority` 0 means the model's default level. `timeout` is in microseconds and bounds the wait
    in the queue; 0 means none. `sequence_id` 0 or "" means none.

    `classes` names the outputs of which only the highest classes are wanted, and how many. It is
    not None whenever a stage has to act on the request, for `shared` too, so that one check
    suffices. Inputs in shared memory are not among the call's `inputs`. A call with `raw` has its
    undecoded body as its only input, without a name; the stage that knows the signature decodes it.
    The request is a `table` if it may have any number of rows.
    """

    priority: int = 0
    timeout: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    classes: Mapping[str, int] | None = None
    shared: Shared | None = None
    raw: Raw | None = None
    table: bool = False


NO_OPTIONS = CallOptions()  # of nearly all calls


class Call:
    """One inference request, from its door to its answer, and the way back.

    A call is the decoded request, not yet checked against a model's signature; it is also the
    entry in the model's queue, the handle by which its door cancels, and the receiver of the
    responses. Doors and other callers derive their own. Owned by the event-loop thread.

    `model_version` is empty for "the version that the server's policy picks". `outputs` names the
    wanted outputs; empty means all. `parameters` holds what is not reserved by the protocol: that
    is in `options`. `nbytes` is the size of the request as received, which admission counts.

    From `Batcher.submit` on, which sets the remaining fields, a call is queued, then started, then
    ended; `cancel` ends it from either of the first two states. An ended call is `started` unless
    no model has begun it: then it may be sent again, here or by its client. `rows` is set before.
    `arrived`, `began` and `deadline` are nanoseconds of the scheduler's clock. `key` is equal for
    calls that may share a batch. `outcome` is set from the call's end until it is answered, which
    may be later where answers keep the order of calls; `cancel` clears it until then. An execution
    that supports messages about single calls sets `execution`, and `run_number` as the call's id in
    it.
    `held` is None until the model has been asked to pause. `first` is the call's first row in a
    computed batch.

    The methods from `respond` to `refuse` deliver to the client: they run on the event-loop
    thread and must not block or raise. The owner of a call answers it by `pass_response`,
    `pass_end` and `pass_refusal`, or checks `stages` itself. After `cancel` nothing is delivered.
    """

    __slots__ = (
        "arrived", "began", "context", "deadline", "ended", "execution", "first", "held", "id",
        "inputs", "key", "level", "model_name", "model_version", "nbytes", "options", "outcome",
        "outputs", "owner", "parameters", "rows", "run_number", "stages", "started",
    )  # fmt: skip

    context: CallContext
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
    execution: Execution | None
    outcome: "InferResponse | Computed | Exception | None"
    first: int

    # The door that the call came through, in capitals, such as `HTTP`; "" for internal calls.
    door = ""
    # True for a part of a request whose other parts may have run: it waits however long it takes.
    committed = False
    # Reason why a model that may answer any number of times is refused; "" if it is not.
    refusal = ""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,
        inputs: dict[str, Tensor],
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        options: CallOptions = NO_OPTIONS,
        nbytes: int = 0,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters = {} if parameters is None else parameters
        self.options = options
        self.nbytes = nbytes
        self.context = NO_CONTEXT
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False

    # For a door that creates its call early: the request is either known at once, or taken over
    # when it has been decoded.
    ask = __init__

    def begin(self) -> None:
        """Start the call before its request has been decoded."""
        self.context = NO_CONTEXT
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False

    def take(self, asked: "Call") -> None:
        """Take over the request of `asked`; `nbytes` stays as counted by the door."""
        self.model_name = asked.model_name
        self.model_version = asked.model_version
        self.id = asked.id
        self.inputs = asked.inputs
        self.outputs = asked.outputs
        self.parameters = asked.parameters
        self.options = asked.options
        if asked.context is not NO_CONTEXT:
            self.context = asked.context

    def bound_wait(self, timeout: int) -> None:
        """Bound the wait in the queue by a further timeout in microseconds; 0 means none."""
        if timeout and not 0 < self.options.timeout < timeout:
            self.options = self.options._replace(timeout=timeout)

    def like(self, **changes: Any) -> "Call":
        """Return a detached call with the same request, but for `changes`."""
        found = Call(**{name: getattr(self, name) for name in ASKED} | changes)
        found.context = self.context
        return found

    # --- for the caller

    def cancel(self) -> None:
        """Cancel the call; a batch that has begun goes on, but its answer is dropped."""
        owner, self.owner = self.owner, NOBODY
        owner.cancel(self)
        if self.stages is not None:
            self.stages.cancel(self)

    def hold(self, held: bool) -> None:
        """Pause the model's further responses, or resume them."""
        self.owner.hold(self, held)

    # --- about the client; defaults for calls without one

    @property
    def begun_ns(self) -> int:
        """Arrival of the first byte, in nanoseconds of the monotonic clock; 0 if not measured."""
        return 0

    @property
    def payer(self) -> Payer | None:
        """The client in whose name work is done, and which takes turns with others."""
        return None

    def charge(self, nbytes: int) -> None:
        """Charge bytes of the decoded request to the client; raises `ServerError`."""

    def header(self, name: str) -> str:
        """The value of a request header, by its lower-case name; "" if there is none."""
        return ""

    def remaining(self) -> float:
        """Seconds until the client's deadline; 0 if it has set none."""
        return 0.0

    # --- the way back

    def routed(self, target: Any) -> None:
        """Note the `Target` that the call is routed to."""

    def answered_by(self, backend: str) -> None:
        """Note the backend that is about to run the call, for a model with several.

        Called again for each further attempt; the last one counts.
        """

    def respond(self, response: "InferResponse", final: bool) -> None:
        """Deliver a response; `final` marks the last one."""
        raise NotImplementedError

    def respond_from(self, batch: "Computed") -> None:
        """Deliver the only response, which is the call's part of `batch`."""
        self.respond(batch.response(self), True)

    def finish(self) -> None:
        """End the call without a response, or without a further one.

        Fails the call where exactly one response is promised.
        """
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        """End the call with an error."""
        raise NotImplementedError

    def refuse(self, error: ServerError) -> None:
        """Refuse the call with an error that `Target.submit` would have raised; nothing follows."""
        self.fail(error)

    # --- for the owner

    def pass_response(self, response: "InferResponse", final: bool) -> None:
        """Deliver a response through the stages."""
        if self.stages is None:
            self.respond(response, final)
        else:
            self.stages.respond(self, response, final)

    def pass_routed(self, target: Any) -> None:
        """Report the `Target` of the call, to the stages too."""
        self.routed(target)
        if self.stages is not None:
            self.stages.routed(target)

    def pass_backend(self, backend: str) -> None:
        """Report the backend of the call, to the stages too."""
        self.answered_by(backend)
        if self.stages is not None:
            self.stages.answered_by(backend)

    def pass_end(self, error: ServerError | None = None) -> None:
        """End the call through the stages, with an error or without a further response."""
        if self.stages is not None:
            self.stages.end(self, error, False)
        elif error is None:
            self.finish()
        else:
            self.fail(error)

    def pass_refusal(self, error: ServerError) -> None:
        """Refuse the call through the stages."""
        if self.stages is None:
            self.refuse(error)
        else:
            self.stages.end(self, error, True)

    def enter(self, stage: "Stage", submit: "Submit") -> None:
        """Submit the call with `stage` on its way back; if that raises, the stage is told."""
        stages = self.stages = self.stages or Stages()
        stages.add(stage)
        try:
            submit(self)
        except BaseException as error:
            stages.remove(stage)
            stage.ended(self, error if isinstance(error, ServerError) else _bug())
            stage.over(self)
            raise


class InnerCall(Call):
    """A call that a model makes for a client's request.

    `charged` is its payer: that of the request, or the account of the call itself.
    """

    __slots__ = ("charged",)

    charged: Payer | None

    @property
    def payer(self) -> Payer | None:
        return self.charged


# One step of a chain, or the scheduler at its end: passes a call on, holds it, or ends it. Raises
# `ServerError`, which ends the call.
Submit = Callable[[Call], None]
# Called by a stage when it has transformed a response, with the error if it failed.
Done = Callable[[Exception | None], None]


class Stage:
    """The part of a chain's stage that transforms or observes the responses to one call.

    A `passive` one observes the end of the call alone: then its response may be taken from a batch.
    """

    __slots__ = ()
    passive = False

    def transform(
        self,
        call: Call,
        response: "InferResponse",
        final: bool,
        done: "Done",
    ) -> Owner | None:
        """Transform a response before it is passed on; raises `ServerError`, which ends the call.

        Slow work goes on in the returned owner, which calls `done` at its end, with the error if
        it failed. Further responses to the call wait until then.
        """
        return None

    def passed(self, call: Call, response: "InferResponse", final: bool) -> None:
        """Observe a response that has been passed on."""

    def routed(self, target: Any) -> None:
        """Observe the `Target` that the call is routed to."""

    def answered_by(self, backend: str) -> None:
        """Observe the backend that is about to answer, for a model with several."""

    def ended(self, call: Call, error: ServerError | None) -> None:
        """Observe the end of the call: an error, or no further response."""

    def cancelled(self, call: Call) -> None:
        """Observe the cancellation of the call."""

    def over(self, call: Call) -> None:
        """Observe the end of the call, however it ended; the last method called."""


class Stages:
    """The stages that responses to one call pass, beginning with the one added last.

    Invariant: while a stage transforms a response, later ones wait in `_behind`. Once the call
    has ended or was cancelled, nothing is passed on.
    """

    __slots__ = ("_behind", "_over", "_passive", "_stages", "_work")

    def __init__(self) -> None:
        self._stages: tuple[Stage, ...] = ()
        self._passive = True
        self._work: Owner | None = None
        self._behind: deque[Callable[[], None]] = deque()
        self._over = False

    def add(self, stage: Stage) -> None:
        """Add a stage; responses pass it first."""
        self._stages = (stage, *self._stages)
        self._passive = self._passive and stage.passive

    def remove(self, stage: Stage) -> None:
        self._stages = tuple(one for one in self._stages if one is not stage)

    def routed(self, target: Any) -> None:
        for stage in self._stages:
            stage.routed(target)

    def answered_by(self, backend: str) -> None:
        for stage in self._stages:
            stage.answered_by(backend)

    def respond(self, call: Call, response: "InferResponse", final: bool) -> None:
        """Pass a response on, or queue it behind the one being transformed."""
        if self._work is not None:
            self._behind.append(partial(self.respond, call, response, final))
        elif not self._over:
            self._pass_on(call, response, final, 0)

    def respond_from(self, call: Call, batch: "Computed") -> None:
        """Pass the only response on, as a part of `batch` if all stages are passive."""
        if not self._passive or self._over:
            self.respond(call, batch.response(call), True)
            return
        self._over = True
        try:
            call.respond_from(batch)
        except Exception:
            self._over = False  # so that the call can still be ended
            raise
        finally:
            self._close(call)

    def end(self, call: Call, error: ServerError | None, refused: bool) -> None:
        """Pass on the end of a call, or queue it behind the response being transformed."""
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
        """Drop everything that has not been passed on."""
        if self._over:
            return
        self._over = True
        if self._work is not None:
            self._work.cancel(call)
        for stage in self._stages:
            stage.cancelled(call)
        self._close(call)

    def _pass_on(self, call: Call, response: "InferResponse", final: bool, at: int) -> None:
        """Pass on a response, starting at stage `at`."""
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
        except Exception:
            self._over = False  # so that the call can still be ended
            raise
        finally:
            for stage in self._stages:
                stage.passed(call, response, final)
            if final:
                self._close(call)

    def _go_on(
        self, call: Call, response: "InferResponse", final: bool, at: int, error: Exception | None
    ) -> None:
        """Continue after a stage has transformed a response."""
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
        """End the call with an error and drop later responses of its model."""
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


def deliver(call: Call, answer: Callable[..., None], *given: Any) -> None:
    """Answer a call by `answer(*given)`; a bug in one answer must not affect others."""
    try:
        answer(*given)
    except Exception:
        end_after_bug(call)


def end_after_bug(call: Call) -> None:
    """End a call after a bug in its answer, which is being handled."""
    log.exception("bug while answering a request")
    with suppress(Exception):
        call.pass_end(_bug())


class Timing(NamedTuple):
    """Times of a request in nanoseconds, queued and executing, and the rows of its batch.

    `gather_ns` is the part of the execution spent on assembling inputs.
    """

    queue_ns: int
    compute_ns: int
    batch_rows: int
    gather_ns: int = 0


# A `Timing` of its four numbers, without the checks of a named tuple's constructor.
new_timing: Callable[[tuple[int, int, int, int]], Timing] = partial(tuple.__new__, Timing)


@dataclass(slots=True)
class InferResponse:
    """One response of a model; `model_version` is the version that computed it."""

    model_name: str
    model_version: str
    id: str
    outputs: list[Tensor]
    timing: Timing
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of the outputs in bytes."""
        return sum(tensor.array.nbytes for tensor in self.outputs)


class Computed(Protocol):
    """A computed batch; implemented by `headrace.scheduling.batch.Batch`.

    `encoded` is what codecs have encoded for all rows, by codec.
    """

    calls: list[Call]
    rows: int
    version: str
    tensors: list[Tensor]
    started: int
    compute_ns: int
    gather_ns: int
    encoded: dict[object, Any]

    def response(self, call: Call) -> InferResponse:
        """The response to one call of the batch."""
