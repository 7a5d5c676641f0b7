"""The scheduler of an ensemble: runs the steps of each request as calls of their models.

A request has no queue here: its first steps are submitted at once, and each step waits in the queue
of its own model, where it shares batches with whatever else waits there. Tensors are handed on as
they are. A request has one id, one deadline and one priority in all of its steps; when it is
cancelled, or one step fails, the others are cancelled. Owned by the event-loop thread.

Invariant: `EnsembleRun.calls` has every call of a step that was submitted and has not ended.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from time import monotonic_ns

from headrace.core.call import (
    NO_OPTIONS,
    NOBODY,
    Call,
    InferResponse,
    InnerCall,
    Owner,
    new_timing,
)
from headrace.core.errors import Cancelled, ExecutionFailed, QueueTimeout, ServerError, is_fault
from headrace.core.limits import ModelLoad
from headrace.core.tensors import Tensor
from headrace.observability.statistics import StepCounts, VersionStatistics
from headrace.placement.placement import ModelServices
from headrace.plugins.ensembles.graph import Graph
from headrace.plugins.ensembles.progress import EnsembleProgress, Moves, Start
from headrace.protocol.status import INTERNAL_TEXT
from headrace.scheduling.batch import Part

log = logging.getLogger(__name__)


class EnsembleScheduler:
    """Runs the calls of one ensemble; a `Scheduler`."""

    def __init__(
        self,
        graph: Graph,
        version: str,
        host: ModelServices,
        soon: Callable[..., object],
        statistics: VersionStatistics,
        load: ModelLoad,
    ) -> None:
        """`soon` runs a callback at the end of the event loop's tick."""
        self.graph = graph
        self.version = version
        self.submit_step = host.submit
        self.soon = soon
        self.statistics = statistics
        self.counts = [statistics.steps.setdefault(step.name, StepCounts()) for step in graph.steps]
        self._load = load
        self._runs: set[EnsembleRun] = set()
        self._expected = 0
        self._on_drained: list[Callable[[], None]] = []

    @property
    def pending(self) -> int:
        """None: every call has been begun."""
        return 0

    @property
    def busy(self) -> bool:
        """True if any call is in progress, or announced."""
        return bool(self._runs or self._expected)

    def submit(self, call: Call, target: object = None) -> None:
        """Begin a call that has been checked, with its rows; raises `ServerError`."""
        self._load.admit(call.nbytes, call.payer)
        call.arrived = call.began = monotonic_ns()
        call.level, call.run_number = 1, 0
        call.key = call.deadline = call.outcome = None
        run = EnsembleRun(self, call)
        call.owner = call.execution = run
        self._runs.add(run)
        run.begin()

    def expect(self, count: int) -> None:
        """Announce `count` more, or fewer, calls, which count as not drained."""
        self._expected += count
        self._check_drained()

    def cancel(self, call: Call) -> None:
        """End `call` without an answer."""
        call.owner.cancel(call)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is in progress or announced."""
        self._on_drained.append(callback)
        self._check_drained()

    def close(self) -> None:
        """Do nothing: the instances are those of other models."""

    def ended(self, run: "EnsembleRun") -> None:
        """Forget a call that has ended, before it is answered."""
        self._runs.discard(run)
        self._load.release(run.call.nbytes)
        if self._on_drained:
            self.soon(self._check_drained)

    def _check_drained(self) -> None:
        if self._on_drained and not self.busy:
            callbacks, self._on_drained = self._on_drained, []
            for callback in callbacks:
                callback()


class StepCall(InnerCall):
    """The call of a step. `times` are those of its last response: gathering and execution."""

    __slots__ = ("begun", "run", "start", "times")

    def __init__(self, run: "EnsembleRun", start: Start, outputs: tuple[str, ...]) -> None:
        """Raises `QueueTimeout` if nothing is left of the request's time-out."""
        request, step, options = run.call, start.step, run.call.options
        if options is not NO_OPTIONS:
            left = options.timeout
            if left:
                left -= (monotonic_ns() - request.arrived) // 1_000
                if left <= 0:
                    raise QueueTimeout("Request timeout expired")
            options = options._replace(
                timeout=left, classes=None, shared=None, raw=None, table=False
            )
        super().__init__(
            step.model, step.version, request.id, start.tensors, outputs,
            dict(request.parameters), options,  # stages take theirs out of them
            request.nbytes,
        )  # fmt: skip
        self.context = request.context
        self.charged = request.payer
        self.run = run
        self.start = start
        self.begun = monotonic_ns()
        self.times = 0, 0

    def header(self, name: str) -> str:
        return self.run.call.header(name)

    def remaining(self) -> float:
        return self.run.call.remaining()

    def respond(self, response: InferResponse, final: bool) -> None:
        _, compute, _, gather = response.timing
        self.times = gather, compute - gather
        self.run.answered(self, response, final)

    def finish(self) -> None:
        if self.start.step.number in self.run.scheduler.graph.decoupled:
            self.run.answered(self, None, True)
        else:
            super().finish()

    def fail(self, error: ServerError) -> None:
        self.run.failed(self, error)


class EnsembleRun(Owner):
    """One request to an ensemble, under way; the owner of its call, and of those of its steps."""

    __slots__ = ("_early", "_held", "_over", "_progress", "_times", "call", "calls", "scheduler")

    def __init__(self, scheduler: EnsembleScheduler, call: Call) -> None:
        self.scheduler = scheduler
        self.call = call
        self.calls: set[StepCall] = set()
        self._progress = EnsembleProgress(scheduler.graph, call.outputs)
        self._times = [0, 0]  # of all steps: gathering, and execution
        self._held = False  # the client does not read
        self._over = False
        # What came while the call was being submitted, and is passed on later, in order: responses,
        # or the end.
        self._early: deque[Callable[[], None]] | None = None

    # --- for the owner of the request

    def begin(self) -> None:
        """Start the first steps; raises the `ServerError` of one that is refused."""
        self._early = deque()
        try:
            self._go(self._progress.begin(self.call.inputs))
        except ServerError as error:
            self._let_go()
            raise self._end_failed(error) from None
        if self._early:
            self.scheduler.soon(self._pass_early)
        else:
            self._early = None

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`: cancels all steps."""
        if self._early is not None:
            self._early.clear()
        if not self._over:
            self._end()
            self.scheduler.statistics.request_failed("CANCELED", monotonic_ns() - call.arrived)
            self._let_go()

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`: pauses, or resumes, the steps with many responses."""
        call.held = held
        self._held = held
        self._hold_steps()

    def call_off(self, call: Call) -> bool:
        """Implements `Execution.call_off`: a cancelled ensemble gives no more responses."""
        return False

    # --- from steps

    def answered(self, call: StepCall, response: InferResponse | None, final: bool) -> None:
        """Go on after a response of a step, None for its end alone."""
        if self._over:
            return
        self.call.started = True
        if final:
            self._ended_step(call, False)
        throttles = self.scheduler.graph.most  # else none of its steps waits for another call
        throttled = throttles and self._progress.throttled
        try:
            outputs = None if response is None else response.outputs
            self._go(self._progress.answered(call.start, outputs, final))
        except ServerError as error:
            self._fail(error)
            return
        if throttles and throttled is not self._progress.throttled and not self._over:
            self._hold_steps()

    def failed(self, call: StepCall, error: ServerError) -> None:
        """Fail the request with the error of a step."""
        if not self._over:
            self.call.started |= call.started
            self._ended_step(call, True)
            self._fail(error)

    def _ended_step(self, call: StepCall, failed: bool) -> None:
        self.calls.discard(call)
        counts = self.scheduler.counts[call.start.step.number]
        counts.requests += 1
        counts.failures += failed
        counts.ns += monotonic_ns() - call.begun
        self._times[0] += call.times[0]
        self._times[1] += call.times[1]

    # --- moves

    def _go(self, moves: Moves) -> None:
        """Make the moves that follow from an event; raises `ServerError`."""
        last = len(moves.responses) - 1 if self._progress.over else -1
        for number, outputs in enumerate(moves.responses):
            self._respond(outputs, number == last)
        for start in moves.starts:
            if self._over:
                return
            self._start(start)
        if self._progress.over and not self._over:
            self._complete()
            self._pass(self.call.pass_end)

    def _start(self, start: Start) -> None:
        progress, number = self._progress, start.step.number
        call = StepCall(self, start, progress.plan.wanted[number])
        self.calls.add(call)
        try:
            self.scheduler.submit_step(call, False)
        except ServerError:
            self._ended_step(call, True)
            raise
        except Exception as error:
            log.exception("bug while submitting a step of ensemble '%s'", self.call.model_name)
            raise ExecutionFailed(INTERNAL_TEXT) from error
        if number in self.scheduler.graph.decoupled and (self._held or progress.throttled):
            call.hold(True)

    def _hold_steps(self) -> None:
        held = self._held or self._progress.throttled
        decoupled = self.scheduler.graph.decoupled
        for call in list(self.calls):
            if call.start.step.number in decoupled:
                call.hold(held)

    # --- the way back

    def _respond(self, outputs: Iterable[Tensor], final: bool) -> None:
        call, scheduler = self.call, self.scheduler
        timing = new_timing((0, monotonic_ns() - call.arrived, call.rows, 0))
        part = Part({tensor.name: tensor.array for tensor in outputs}, {})
        signature = scheduler.graph.signature
        response = part.response_to(signature, scheduler.version, call, timing)
        if final:
            self._complete()
        self._pass(partial(call.pass_response, response, final))

    def _pass(self, given: Callable[[], None]) -> None:
        """Pass a response or the end on, once the call has been submitted."""
        if self._early is not None:
            self._early.append(given)
            return
        given()
        if self._over:
            self._let_go()

    def _pass_early(self) -> None:
        """Pass on what came before the call had been submitted, and since then."""
        early = self._early
        while early:
            early.popleft()()
        self._early = None
        if self._over:
            self._let_go()

    def _complete(self) -> None:
        """Count the request as answered."""
        self._end()
        call = self.call
        inputs, infer = self._times
        self.scheduler.statistics.request_composed(
            call.arrived, call.rows, monotonic_ns(), inputs, infer, call.held is not None
        )

    def _fail(self, error: ServerError) -> None:
        self._pass(partial(self.call.pass_end, self._end_failed(error)))

    def _end_failed(self, error: ServerError) -> ServerError:
        """Count the request as failed; returns the error for its client, in Triton's words."""
        self._end()
        call, scheduler = self.call, self.scheduler
        took = monotonic_ns() - call.arrived
        reason = "CANCELED" if isinstance(error, Cancelled) else "OTHER"
        scheduler.statistics.request_failed(reason, took, is_fault(error, call.started))
        told = copy(error).without_frames()
        told.args = (f"in ensemble '{scheduler.graph.signature.model}', {error}",)
        return told.of_request(0, took, call.rows)

    def _let_go(self) -> None:
        """Forget the request, which has been answered: it has the tensors of its steps."""
        call = self.call
        call.execution = None
        if call.owner is self:
            call.owner = NOBODY

    def _end(self) -> None:
        """End the request, and with it the steps that are under way."""
        self._over = True
        self.call.ended = True
        calls, self.calls = self.calls, set()
        for step in calls:
            step.cancel()
        self.scheduler.ended(self)
