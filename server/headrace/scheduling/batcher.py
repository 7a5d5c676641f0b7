"""The scheduler of one model version.

It queues requests and gives them to free instances in batches. An instance is taken first and the
batch is formed then, so that the queue grows a better batch while instances are busy. What arrives
within one tick of the event loop runs together: a flush is scheduled for the end of the tick.

Owned by the event-loop thread: every method runs there, none of them waits, and there is no lock.
Sinks are called when everything is in its new state: a sink may submit or cancel at once. Only the
counters come after them, in the same call: a client that waits should not wait for those.
Invariant: while a request is queued, an instance is busy, a flush is scheduled or a timer is armed.

A batch of several that fails is run again in halves, until the request to blame stands alone; not
if a worker has died of it, which would then die again, nor if it took too long. What an instance
gives back without having begun it waits for the next one. An instance that cannot run anything for
now is suspended.

A request may be answered later than its batch, by itself and more than once: it is open from the
end of its batch to its own. Inputs that workers have died of are known to the quarantine: they run
alone, or not at all.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from headrace.core.errors import (
    ExecutionFailed,
    ExecutionTimeout,
    QueueTimeout,
    ServerError,
    WorkerDied,
)
from headrace.core.requests import InferRequest, InferResponse, Sink, Timing
from headrace.core.shares import ModelLoad
from headrace.core.signature import Signature
from headrace.scheduling.batch import (
    Answer,
    Batch,
    Deferral,
    Instance,
    NoResponse,
    NotStarted,
    Outcome,
    Part,
    Pending,
    Unanswered,
)
from headrace.scheduling.clock import Clock, Timer
from headrace.scheduling.delivery import Delivery, give
from headrace.scheduling.instances import Instances
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.queue import RequestQueue
from headrace.scheduling.recorder import Recorder
from headrace.scheduling.rollback import is_fault
from headrace.scheduling.watching import Computed, WatchingRecorder

log = logging.getLogger(__name__)


class Batcher:
    """Takes requests in, gives batches to instances, and hands each request its own answer."""

    def __init__(
        self,
        signature: Signature,
        version: str,
        policy: SchedulingPolicy,
        clock: Clock,
        recorder: Recorder,
        report: Callable[[Sequence[Pending], Exception], None],
        quarantine: Quarantine | None = None,
        load: ModelLoad | None = None,
    ) -> None:
        """`report` is told which requests a backend failed on, unless it has said so itself.

        `load` counts the model's requests that are under way, and may refuse more of them.
        """
        self._load = load or ModelLoad()
        self.quarantine = Quarantine(signature.model) if quarantine is None else quarantine
        self._signature = signature
        self._version = version
        self._policy = policy
        self._clock = clock
        self._recorder = recorder
        self._closed = recorder.batches_closed
        self._report = report
        self._queue = RequestQueue(policy)
        self._retries: deque[Batch] = deque()
        self._open: set[Pending] = set()
        self._delivery = Delivery(policy.preserve_ordering, self._load)
        self._instances = Instances()
        self._idle = self._instances.idle
        self._flush_scheduled = False
        self._timer: Timer | None = None
        self._timer_at = 0
        self._on_drained: list[Callable[[], None]] = []
        self._expected = 0

    @property
    def waiting(self) -> int:
        """Accepted requests that no instance has started."""
        return self._queue.waiting

    @property
    def busy(self) -> bool:
        """Whether any request is queued or under way, or about to come."""
        waiting = self._queue.waiting or self._retries or self._open or self._expected
        return bool(waiting) or self._instances.busy

    def add_instance(self, instance: Instance) -> None:
        """Let `instance` take part from now on."""
        self._instances.add(instance)
        self._schedule_flush()

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Give `instance` nothing more; `removed` is called once it has no batch under way."""
        if self._instances.remove(instance, removed):
            self._clock.soon(removed)

    def suspend(self, instance: Instance) -> None:
        """Give an idle instance nothing until it is resumed."""
        self._instances.suspend(instance)

    def resume(self, instance: Instance) -> None:
        """Let a suspended instance take part again."""
        if self._instances.resume(instance):
            self._schedule_flush()

    def fail_waiting(self, error: ServerError) -> bool:
        """End everything that no instance has begun: there is none to run it; True."""
        now = self._clock.now()
        while self._retries or self._queue.waiting:  # what ends may bring the next of a sequence
            waiting = [p for batch in self._retries for p in batch.pendings if not p.ended]
            self._retries.clear()
            waiting += self._queue.popleft(self._queue.waiting)
            for pending in waiting:
                self._end(pending, error, "OTHER", now)
        self._check_drained()
        return True

    def submit(self, request: InferRequest, sink: Sink, rows: int) -> Pending:
        """Queue a request that has been checked; raises `QueueFull` or `Overloaded`."""
        load = self._load
        if load.requests >= load.free_requests or load.bytes >= load.free_bytes:
            load.check()
        key = self._signature.batch_key(request)
        pending = Pending(request, sink, rows, key, self._clock.now(), self)
        self._queue.append(pending)
        self._delivery.expect(pending)
        if self._idle:
            self._schedule_flush()
        if pending.deadline is not None:
            self._arm(pending.deadline)
        return pending

    def expect(self, count: int) -> None:
        """So many requests more, or less, are about to be submitted: it is not drained before."""
        self._expected += count
        self._check_drained()

    def cancel(self, pending: Pending) -> None:
        """End `pending` without an answer."""
        if pending.ended:
            pending.outcome = None  # it may still wait for its turn to be released
            return
        pending.ended = True
        if not pending.started:
            self._queue.discard(pending)
        elif self._retries:  # a batch of which nobody wants anything any more is none
            wanted = [b for b in self._retries if not all(p.ended for p in b.pendings)]
            self._retries = deque(wanted)
        if pending.execution is not None:
            self._open.discard(pending)
            pending.execution.cancel(pending)
        self._recorder.request_failed("CANCELED", self._clock.now() - pending.arrived)
        self._delivery.release([pending])
        self._check_drained()

    def answer(self, pending: Pending, answer: Answer | None, final: bool) -> None:
        """Take what an execution gives one request by itself; None is the end alone.

        In or after its batch; with an error or a `Deferral` the request is done with there.
        """
        now = self._clock.now()
        if self.quarantine.cases or isinstance(answer, WorkerDied):
            self.quarantine.learn_answer(pending, answer, final, now)
        if pending.ended:
            return
        if isinstance(answer, Part):
            try:
                timing = Timing(pending.began - pending.arrived, now - pending.began, pending.rows)
                response = answer.response_to(self._signature, self._version, pending, timing)
            except ExecutionFailed as error:
                self._report([pending], error)
                self._close_open(pending, error, now)
                if pending.execution is not None and not final:
                    pending.execution.cancel(pending)
                return
            if not final:
                give(pending, response)
                return
            self._close_open(pending, response, now)
        elif answer is None:
            self._close_open(pending, NoResponse(), now)
        elif isinstance(answer, ServerError):
            self._close_open(pending, answer, now)
        else:
            self._open.discard(pending)
            self._run_again(pending)

    def watch(self, pending: Pending, tell: Computed) -> None:
        """Tell when `pending` is computed, if it is and before `unwatch` is called."""
        recorder = self._recorder
        if not isinstance(recorder, WatchingRecorder):
            recorder = self._recorder = WatchingRecorder(recorder)
        recorder.watch(pending.arrived, tell)

    def unwatch(self, pending: Pending, tell: Computed) -> None:
        """Tell no more of a request."""
        recorder = self._recorder
        if isinstance(recorder, WatchingRecorder):
            recorder.unwatch(pending.arrived, tell)
            if recorder.idle:
                self._recorder = recorder.recorder

    def close(self) -> None:
        """Close all instances; only when not `busy`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._instances.close()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is queued or under way."""
        self._on_drained.append(callback)
        self._check_drained()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._clock.soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        now = self._clock.now()
        self._expire(now)
        # Each instance runs one batch at most: an inline one is idle again at once, and between two
        # of its batches the event loop must get to read what has arrived.
        for _ in range(len(self._idle)):
            batch = self._next_batch(now)
            if batch is None:
                break
            self._instances.pick().execute(batch, self._finished)
        if (deadline := self._queue.next_deadline()) is not None:
            self._arm(deadline)
        self._check_drained()

    def _next_batch(self, now: int) -> Batch | None:
        while True:
            if self._retries:
                batch = self._retries.popleft()
                pendings = [pending for pending in batch.pendings if not pending.ended]
            elif self._queue.waiting:
                positions, reason, ask_at = self._policy.batch.take(self._queue, now)
                if not positions:
                    if ask_at is not None:
                        self._arm(ask_at)
                    return None
                self._closed[reason] += 1
                if type(positions) is range:  # as nearly always: from the head on
                    pendings = self._queue.popleft(len(positions))
                else:
                    pendings = self._queue.pick(positions)
            else:
                return None
            if self.quarantine.cases:
                pendings = self._screened(pendings, now)
            if pendings:
                return Batch(self._signature, pendings)

    def _screened(self, pendings: list[Pending], now: int) -> list[Pending]:
        """Those that may run now; those that are to run alone do so next."""
        clear, suspects, refused = self.quarantine.screen(pendings, now)
        if not clear:
            clear, suspects = suspects[:1], suspects[1:]
        self._retries.extend([Batch(self._signature, [pending]) for pending in suspects])
        for pending in refused:
            self._end(pending, self.quarantine.error(), "REJECTED", now)
        return clear

    def _finished(self, instance: Instance, batch: Batch, outcome: Outcome) -> None:
        if (removed := self._instances.give_back(instance)) is not None:
            self._clock.soon(removed)
        error = outcome.error
        if error is not None or self.quarantine.cases:
            self.quarantine.learn_batch(batch, outcome, self._clock.now())
        others: Sequence[Unanswered] = ()
        if error is None:
            try:
                if outcome.parts is None:
                    batch.respond(self._version, batch.split(outcome.arrays), outcome)
                else:
                    others = batch.respond_each(self._version, outcome.parts, outcome)
            except Exception as broken:  # not even an array, say: the backend's fault like a raise
                error = broken
                if len(batch.pendings) == 1 and isinstance(broken, ServerError):
                    self._report(batch.pendings, broken)
        if error is None:
            if others:
                self._deal_with(others, batch, outcome)
            if len(others) < len(batch.pendings):
                self._succeed(batch, outcome)
        elif isinstance(error, NotStarted):
            if not all(pending.ended for pending in batch.pendings):
                self._retries.append(batch)
        elif len(batch.pendings) == 1 or isinstance(error, WorkerDied | ExecutionTimeout):
            for pending in batch.pendings:
                self._fail(pending, error, outcome, batch.rows)
        else:
            if not isinstance(error, ServerError):
                self._report(batch.pendings, error)
            self._retries.extend(batch.halves())
        if self._retries or self._queue.waiting:
            self._schedule_flush()
        else:
            self._check_drained()

    def _deal_with(self, others: Sequence[Unanswered], batch: Batch, outcome: Outcome) -> None:
        """Deal with requests that a batch has brought no response."""
        later = 0
        for pending, reason, broken in others:
            if isinstance(reason, ServerError):
                if broken:
                    self._report([pending], reason)
                self._end(pending, reason, "BACKEND", outcome.computed, outcome.started, batch.rows)
            elif reason is Deferral.AGAIN:
                self._run_again(pending)
            else:
                later += 1
                self._open.add(pending)
        if later and len(others) == len(batch.pendings):
            self._recorder.batch_opened(
                batch.rows, outcome.started, outcome.gathered, outcome.computed
            )

    def _run_again(self, pending: Pending) -> None:
        self._retries.append(Batch(self._signature, [pending]))
        self._schedule_flush()

    def _close_open(
        self, pending: Pending, outcome: InferResponse | ServerError | NoResponse, now: int
    ) -> None:
        """End a request that is answered by itself."""
        self._open.discard(pending)
        if isinstance(outcome, ServerError):
            self._end(pending, outcome, "BACKEND", now, pending.began, pending.rows)
        else:
            pending.ended = True
            pending.outcome = outcome
            self._delivery.release([pending])
            moments = pending.began, now, pending.held is not None
            self._recorder.request_completed(pending.arrived, pending.rows, *moments)
        self._check_drained()

    def _succeed(self, batch: Batch, outcome: Outcome) -> None:
        """Let those have their answers who still wait, and count the batch."""
        alive = [p for p in batch.pendings if p.outcome is not None and not p.ended]
        ended = self._clock.now()
        for pending in alive:
            pending.ended = True
        self._delivery.release(alive)
        self._recorder.batch_succeeded(
            [pending.arrived for pending in alive],
            sum([pending.rows for pending in alive]),
            batch.rows,
            outcome.started,
            outcome.gathered,
            outcome.computed,
            ended,
        )

    def _fail(self, pending: Pending, error: Exception, outcome: Outcome, rows: int) -> None:
        if not isinstance(error, ServerError):
            self._report([pending], error)
            error = ExecutionFailed(
                f"model '{self._signature.model}' failed to execute the request"
            )
        self._end(pending, error, "BACKEND", outcome.computed, outcome.started, rows)

    def _end(
        self,
        pending: Pending,
        error: ServerError,
        reason: str,
        now: int,
        started: int = 0,
        rows: int = 0,
    ) -> None:
        """End a request with an error, unless it has ended; `started` is 0 if it was never run."""
        if not pending.ended:
            pending.ended = True
            begun = started or now
            pending.outcome = error.of_request(begun - pending.arrived, now - begun, rows)
            self._recorder.request_failed(reason, now - pending.arrived, is_fault(error))
            self._delivery.release([pending])

    def _expire(self, now: int) -> None:
        expired = self._queue.expire(now)
        for pending in expired:
            error = self._late(pending)
            pending.outcome = error.of_request(now - pending.arrived, 0, 0)
            self._recorder.request_failed("REJECTED", now - pending.arrived)
        self._delivery.release(expired)

    def _late(self, pending: Pending) -> QueueTimeout:
        """The error of a request that has waited for as long as it may."""
        assert pending.deadline is not None
        limit = pending.deadline - pending.arrived
        configured = self._policy.queue_policy(pending.level).configured
        own = not configured or pending.request.timeout * 1_000 == limit
        whose = "its own timeout" if own else "the timeout of the model's queue policy"
        return QueueTimeout(
            f"Request timeout expired: it has waited in the queue of model"
            f" '{self._signature.model}' for {limit / 1e6:g} ms, {whose}"
        )

    def _arm(self, when: int) -> None:
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._clock.at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _check_drained(self) -> None:
        if self._on_drained and not self.busy:
            callbacks, self._on_drained = self._on_drained, []
            for callback in callbacks:
                callback()
