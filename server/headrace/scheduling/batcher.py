"""The scheduler of one model version.

Requests are queued and given to free instances in batches. An instance is reserved first and the
batch is formed then, so that the queue grows a better batch while instances are busy. Requests that
arrive within one tick of the event loop run together: a flush is scheduled for the end of the tick.
If fewer arrive than ran together last time, the flush waits one more tick for the others.

Owned by the event-loop thread: every method runs there, never blocks, and there is no lock. Calls
are answered when all state is updated: their callbacks may submit or cancel at once. Only the
counters come after that. Those of a lone call come a turn of the event loop later: answers are
written at the end of a turn, so its client would wait for the counting. After a batch of several
they come in the same turn, since another turn would split the next calls into smaller batches. Any
reader of the counters for a later message is scheduled behind them.
Invariant: while a request is queued, an instance is busy, a flush is scheduled or a timer is armed.

A failed batch of several requests is run again in halves, until the failing request is alone; not
if a worker has died of it, which would die again, nor if it took too long, nor if the model is
stateful. A batch that an instance returns unstarted waits for the next instance. An instance that
cannot run anything for now is suspended.

A request may be answered after its batch, individually and more than once: it is open from the end
of its batch to its own. Inputs that workers have died of are in quarantine: they run alone, or not
at all.

Calls for a target have a line of their own while any waits, with all that is true of the common
one. Of the lines with an idle instance, the one whose first call has waited longest comes first.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from headrace.core.call import Call, InferResponse, Timing, end_after_bug
from headrace.core.errors import (
    ExecutionFailed,
    ExecutionTimeout,
    ModelNotReady,
    QueueTimeout,
    ServerError,
    WorkerDied,
    is_fault,
)
from headrace.core.limits import FEW, ModelLoad
from headrace.core.signature import Signature
from headrace.core.turns import ENDED_AT_ONCE, TurnQueue
from headrace.observability.statistics import Closed, VersionStatistics
from headrace.scheduling.batch import (
    Aimed,
    Answer,
    Batch,
    Deferral,
    Instance,
    NoResponse,
    NotStarted,
    Outcome,
    Part,
    Unanswered,
)
from headrace.scheduling.batch_log import BatchLog, LoggedBatch, LoggedRequests
from headrace.scheduling.clock import Clock, Timer
from headrace.scheduling.gates import DelayGate, InstanceGate
from headrace.scheduling.lending import JoinedCall, Lender, LentInstance, counts, taken
from headrace.scheduling.overload import Overload
from headrace.scheduling.policy import NO_POLICY, SchedulingPolicy
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.queue import LIGHT, MANY, RequestQueue

log = logging.getLogger(__name__)
_LENT_NS = 500_000_000  # between looks at instances that are lent
_ALONE_NS = 200_000  # for calls that run one after the other in a tick of the event loop
_load = attrgetter("load")


class Instances:
    """The instances of one scheduler, and their states.

    An instance that is neither idle nor suspended has a batch in progress.
    """

    def __init__(self) -> None:
        self.idle: list[Instance] = []
        self._suspended: list[Instance] = []
        self._all: list[Instance] = []
        self.leaving: dict[Instance, Callable[[], None]] = {}

    @property
    def busy(self) -> bool:
        """True if any instance has a batch in progress."""
        return len(self.idle) + len(self._suspended) < len(self._all)

    def serve(self, target: object) -> bool:
        """True if any instance that stays serves `target`."""
        return any(one.serves(target) for one in self._all if one not in self.leaving)

    def idle_for(self, target: object) -> Instance | None:
        """The idle instance for calls with this target, None for any; the soonest to begin."""
        able = (one for one in self.idle if target is None or one.serves(target))
        return min(able, key=_load, default=None)

    def add(self, instance: Instance) -> None:
        """Add an idle instance."""
        self._all.append(instance)
        self.idle.append(instance)

    def remove(self, instance: Instance, removed: Callable[[], None]) -> bool:
        """Remove an instance; if it is busy (False), `removed` is called when it comes back."""
        for resting in (self.idle, self._suspended):
            if instance in resting:
                resting.remove(instance)
                self._all.remove(instance)
                return True
        self.leaving[instance] = removed
        return False

    def suspend(self, instance: Instance) -> None:
        """Give an idle instance no batches until it is resumed."""
        if instance in self.idle:
            self.idle.remove(instance)
            self._suspended.append(instance)

    def resume(self, instance: Instance) -> bool:
        """Make a suspended instance idle again; True if it was suspended."""
        if instance not in self._suspended:
            return False
        self._suspended.remove(instance)
        self.idle.append(instance)
        return True

    def give_back(self, instance: Instance) -> Callable[[], None] | None:
        """Make a busy instance idle; returns the callback of a pending removal instead, if any."""
        if (removed := self.leaving.pop(instance, None)) is not None:
            self._all.remove(instance)
            return removed
        self.idle.append(instance)
        return None

    def close(self) -> None:
        """Close all instances; only while none is busy."""
        for instance in self._all:
            instance.close()
        self._all.clear()
        self.idle.clear()
        self._suspended.clear()


class _Line:
    """Calls for the same instances: those that wait, and batches that are to run before them.

    `target` is what the instances have to serve; None for any.
    """

    __slots__ = ("queue", "retries", "target")

    def __init__(self, policy: SchedulingPolicy, target: object = None) -> None:
        self.queue = RequestQueue(policy)
        self.retries: deque[Batch] = deque()
        self.target = target

    @property
    def waits(self) -> bool:
        """True if any call waits."""
        return bool(self.queue.waiting or self.retries)

    @property
    def since(self) -> int:
        """The arrival of the first call; only while one waits."""
        first = self.retries[0].calls[0] if self.retries else next(iter(self.queue))
        return first.arrived


class Batcher:
    """Queues calls, gives batches to instances, and answers each call; a `Scheduler`."""

    def __init__(
        self,
        signature: Signature,
        version: str,
        policy: SchedulingPolicy,
        clock: Clock,
        statistics: VersionStatistics,
        report: Callable[[Sequence[Call], Exception], None],
        quarantine: Quarantine | None = None,
        load: ModelLoad | None = None,
        alike: Callable[[Call], object] | None = None,
    ) -> None:
        """`report` receives failed requests, unless the error was reported already.

        `load` counts the model's requests in flight, and may refuse more of them. Only requests
        with equal, hashable `alike` share batches, for instances that depend on more of a request
        than its tensors.
        """
        self._load = load or ModelLoad()
        self._alike = alike
        self.quarantine = Quarantine(signature.model) if quarantine is None else quarantine
        self._signature = signature
        self._version = version
        self._policy = policy
        self._clock = clock
        self._statistics = statistics
        self._closed = statistics.batches_closed
        self._report = report
        self._line = _Line(policy)  # of calls that any instance may run
        self._queue = self._line.queue
        self._lines: dict[object, _Line] = {}  # of others, by target
        self._overload = Overload(policy.overload)
        self._open: set[Call] = set()
        self._instances = Instances()
        self._idle = self._instances.idle
        self._free_since = 0  # nanoseconds: since when an instance has been idle, if any is
        # Unanswered calls, where answers keep the order of calls; None where they do not.
        self._order: deque[Call] | None = deque() if policy.preserve_ordering else None
        self._ordering = False  # calls of `_order` are being answered, here or in the next turn
        self._uniform = signature.uniform
        self._now, self._soon = clock.now, clock.soon
        self.soon = clock.soon
        self._flush_scheduled = False
        self._together = 0  # calls of the last batch
        self._timer: Timer | None = None
        self._timer_at = 0
        self._on_drained: list[Callable[[], None]] = []
        self._expected = 0
        self._lender: Lender | None = None
        self._able: dict[Instance, LentInstance] = {}  # that any thread may run
        self._simple = (
            not (policy.batch.max_delay or policy.levels or policy.preserve_ordering or self._alike)
            and policy.queue == NO_POLICY
        )
        self._gate: InstanceGate | None = None
        self._log: BatchLog | None = None  # only while somebody asks for it
        self._alone_since = 0  # nanoseconds; 0 if the loop has had a turn since the last such call
        self._joined: list[JoinedCall] = []  # they run together at the end of the tick
        # Calls that have ended with others, and are not released yet.
        self._leaving = TurnQueue(self._let_go, clock.soon, self._all_gone)
        self._hopeless: ServerError | None = None  # of all requests, as long as no instance comes

    @property
    def pending(self) -> int:
        """Accepted requests that no instance has started."""
        return self._queue.waiting + sum(line.queue.waiting for line in self._lines.values())

    @property
    def busy(self) -> bool:
        """True if any request is queued, in progress, or announced."""
        if self._open or self._expected or self._joined or self._waits:
            return True
        if self._leaving or self._ordering:
            return True
        return self._instances.busy and (self._lender is None or self._lender.in_use)

    def logged(self) -> tuple[list[LoggedBatch], int]:
        """The last batches, the oldest first, and for how many nanoseconds they have been logged.

        The log begins with the first question, and ends some time after the last one.
        """
        now = self._now()
        if self._log is None:
            self._log = BatchLog(now, self._policy.levels > 0)
        return self._log.read(now), now - self._log.since

    def limit(self, gate: InstanceGate) -> None:
        """Form batches for instances that may pass a gate alone; before any is added."""
        self._gate, self._simple = gate, False

    def delay(self, enough: Callable[[Instance], bool]) -> None:
        """Give each instance its first batch once `enough` is true of it; before any is added.

        `wake` makes it ask again; so does a new call.
        """
        self.limit(DelayGate(enough, self._gate))

    def waiting_for(self, instance: Instance) -> int:
        """The number of queued calls that an instance may run."""
        lines = (self._line, *self._lines.values())
        return sum(
            line.queue.waiting
            for line in lines
            if line.target is None or instance.serves(line.target)
        )

    def wake(self) -> None:
        """Try to form batches: an instance may pass the gate."""
        self._schedule_flush()

    def add_instance(self, instance: Instance) -> None:
        """Add an instance, which receives batches from now on."""
        self._hopeless = None
        self._instances.add(instance)
        if isinstance(instance, LentInstance):
            self._able[instance] = instance
        self._schedule_flush()

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Give `instance` no more batches; `removed` is called once it has none in progress."""
        self._take_back()
        self._able.pop(instance, None)
        if self._instances.remove(instance, removed):
            self._removed(instance, removed)
        for line in list(self._lines.values()):
            if not self._instances.serve(line.target):
                self._refuse(line, self._unserved())
                self._check_drained()

    def _removed(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Report an instance without a batch as removed, later in this turn."""
        if self._gate is not None:
            self._soon(self._gate.forget, instance)
        self._soon(removed)

    def suspend(self, instance: Instance) -> None:
        """Give an idle instance no batches until it is resumed."""
        self._take_back()
        self._instances.suspend(instance)

    def resume(self, instance: Instance) -> None:
        """Give a suspended instance batches again."""
        self._hopeless = None
        if self._instances.resume(instance):
            self._schedule_flush()

    def fail_waiting(self, error: ServerError) -> bool:
        """End all requests not begun: no instance is left to run them; returns True."""
        self._queue_joined()
        self._hopeless = error
        # The end of one may submit the next of its sequence.
        while waiting := [one for one in (self._line, *self._lines.values()) if one.waits]:
            for line in waiting:
                self._refuse(line, error)
        self._check_drained()
        return True

    def refuse(self, target: object, error: ServerError) -> None:
        """End the calls for `target` that have not begun."""
        if (line := self._lines.get(target)) is not None:
            self._refuse(line, error)
            self._check_drained()

    def _refuse(self, line: _Line, error: ServerError) -> None:
        """End the calls of a line, which no instance is left to run."""
        now = self._now()
        waiting = [(call, batch.again) for batch in line.retries for call in batch.calls]
        line.retries.clear()
        waiting += [(call, False) for call in line.queue.popleft(line.queue.waiting)]
        ended = [call for call, _ in waiting if not call.ended]
        for call, again in waiting:
            self._end(call, error, "OTHER", now, begun=again, release=False)
        if self._order is None:
            self._leaving.process(ended)
        else:
            self._release(ended)

    def _unserved(self) -> ModelNotReady:
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: the instance that the request is for"
            " is gone"
        )

    def submit(self, call: Call, target: object = None) -> None:
        """Queue a call that has been checked, with its rows; raises `QueueFull` or `Overloaded`.

        `target` as in `Scheduler.submit`.
        """
        load = self._load
        if load.requests >= load.free_requests or load.bytes >= load.free_bytes:
            load.check(call.payer)
        call.key = None if self._uniform else self._signature.batch_key(call)
        call.arrived = call.began = self._now()
        call.level, call.run_number = 1, 0
        call.deadline = call.execution = call.outcome = None
        queue = self._queue if target is None else self._aim(call, target)
        if queue.waiting < MANY or self._order is not None:
            deadline = queue.append(call)
        else:
            payer = call.payer
            deadline = queue.append(call, payer is not None and payer.requests <= FEW)
        call.owner = self
        load.requests += 1
        load.bytes += call.nbytes
        if self._order is not None:
            self._order.append(call)
        if self._idle:
            if not self._flush_scheduled:
                self._flush_scheduled = True
                self._soon(self._flush)
        elif self._lender is not None:
            self._take_back()
        if deadline is not None:
            self._arm(deadline)

    def _aim(self, call: Call, target: object) -> RequestQueue:
        """The queue of calls for `target`; raises `ModelNotReady` if no instance serves it."""
        if not self._instances.serve(target):
            raise self._unserved()
        call.key = Aimed(target, call.key)
        return self._line_of(call).queue

    def _line_of(self, call: Call) -> _Line:
        """The line of a call that was submitted."""
        if type(call.key) is not Aimed:
            return self._line
        target = call.key.target
        if (line := self._lines.get(target)) is None:
            line = self._lines[target] = _Line(self._policy, target)
        return line

    def expect(self, count: int) -> None:
        """Announce `count` more, or fewer, requests, which count as not drained."""
        self._expected += count
        self._check_drained()

    def cancel(self, call: Call) -> None:
        """End `call` without an answer."""
        call.outcome = None  # the call may still wait to be released, or to be run again
        if call.ended:
            return
        call.ended = True
        line = self._line_of(call)
        if not call.started:
            line.queue.discard(call)
        elif line.retries:  # drop batches without live calls
            wanted = [b for b in line.retries if not all(p.ended for p in b.calls)]
            line.retries = deque(wanted)
        if call.execution is not None:
            self._open.discard(call)
            call.execution.cancel(call)
        self._statistics.request_failed("CANCELED", self._now() - call.arrived)
        self._release([call])
        self._check_drained()

    def hold(self, call: Call, held: bool) -> None:
        """Ask the model to pause, or resume, the further responses to `call`."""
        call.held = held
        if call.execution is not None and not call.ended:
            call.execution.hold(call, held)

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Receive an execution's individual answer to one request; None is the end alone.

        In or after its batch; an error or a `Deferral` ends the request there.
        """
        now = self._now()
        if self.quarantine.cases or isinstance(answer, WorkerDied):
            self.quarantine.learn_answer(call, answer, final, now)
        if call.ended:
            return
        if isinstance(answer, Part):
            try:
                timing = Timing(call.began - call.arrived, now - call.began, call.rows)
                response = answer.response_to(self._signature, self._version, call, timing)
            except ExecutionFailed as error:
                self._report([call], error)
                self._close_open(call, error, now)
                if call.execution is not None and not final:
                    call.execution.cancel(call)
                return
            if not final:
                _give(call, response)
                return
            self._close_open(call, response, now)
        elif answer is None:
            self._close_open(call, NoResponse(), now)
        elif isinstance(answer, ServerError):
            self._close_open(call, answer, now)
        else:
            self._open.discard(call)
            self._run_again(call)

    def close(self) -> None:
        """Close all instances; only when not `busy`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._statistics.overloaded = False
        self._instances.close()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is queued or in progress."""
        self._take_back()
        self._on_drained.append(callback)
        self._check_drained()

    @property
    def _quiet(self) -> bool:
        """True if a call that comes now may run at once, whatever the policy."""
        lines = self._lines or self._line.retries or self._queue.waiting
        return self._simple and not (lines or self.quarantine.cases)

    def join(self, call: JoinedCall) -> bool:
        """Run a checked call, with its rows and key, outside of the queue; False if it has to be
        submitted.

        A call that comes alone runs at once. So do the calls of a single caller, who waits for
        each: for such the end of the event loop's tick would bring no other. Other callbacks of the
        loop have their turn after `_ALONE_NS`. Otherwise it runs at the end of the tick, together
        with others that join by then. Such calls have no limits, and are charged to nobody: that
        takes 2 µs less than `submit` and all that follows.
        """
        joined, now = self._joined, self._now()
        if joined:
            if len(joined) >= MANY:
                return False
        else:
            instance = self._free
            if instance is None:
                return False
            if self._together <= 1 and self._run_alone(instance, call, now):
                return True
            if not self._flush_scheduled:
                self._schedule_flush()
        call.arrived = now
        joined.append(call)
        return True

    @property
    def free(self) -> bool | None:
        """True if a call that comes now may run at once; None if that is so after a turn of the
        event loop.
        """
        if self._free is None or self._joined:
            return False
        return None if self._alone_since else True

    def run_alone(self, calls: Sequence[Call]) -> bool:
        """Run checked calls, with their rows, one after the other, while `free`; False if they are
        too heavy for the event loop.

        For calls that fill a batch each; they are charged to nobody. A run takes what it needs out
        of the processor's caches, so all else is done before the first, or after the last.
        """
        instance = self._free
        if instance is None:
            return False
        batches = [Batch(self._signature, [call]) for call in calls]
        if not instance.light(batches[0]):
            return False
        self._alone_since = now = self._now()
        for call in calls:
            call.key = None if self._uniform else self._signature.batch_key(call)
            call.arrived = now
        self._idle.pop()
        outcomes = instance.run_each(batches)
        self._idle.append(instance)
        for batch, outcome in zip(batches, outcomes, strict=True):
            if taken(batch, self._version, outcome):
                self._answered(batch, outcome, Closed.FULL)
            else:
                self._idle.remove(instance)
                self._returned(instance, batch, outcome)
        if not self._flush_scheduled:
            self._schedule_flush()
        return True

    def _run_alone(self, instance: LentInstance, call: Call, now: int) -> bool:
        """Run a call at once; False if others have to have their turn before."""
        if not self._alone_since:
            self._alone_since = now
        elif now - self._alone_since > _ALONE_NS:
            return False
        batch = Batch(self._signature, [call])
        if not instance.light(batch):
            return False
        call.arrived = now
        self._run_here(instance, batch, Closed.IDLE)
        if not self._flush_scheduled:
            self._schedule_flush()
        return True

    @property
    def _free(self) -> LentInstance | None:
        """An idle instance that any thread may run, if a call that comes now may run at once."""
        if not self._idle or not self._quiet:
            return None
        return self._able.get(self._idle[-1])

    def _run_joined(self, now: int) -> None:
        """Run the calls that have joined as one batch; those that do not fit are queued."""
        instance = self._free
        calls = [call for call in self._joined if not call.ended]
        if instance is not None and calls:
            places, reason, _ = self._policy.batch.take(calls, now)
            batch = Batch(self._signature, [calls[place] for place in places])
            if instance.light(batch):
                self._joined = []
                if len(calls) > len(places):
                    chosen = set(places)
                    self._joined = [one for at, one in enumerate(calls) if at not in chosen]
                self._together = len(places)
                self._run_here(instance, batch, reason)
        self._queue_joined()

    def _queue_joined(self) -> None:
        """Let calls that have joined be submitted."""
        calls, self._joined = self._joined, []
        for call in calls:
            if not call.ended:
                call.queue(self.submit)

    def _run_here(self, instance: LentInstance, batch: Batch, reason: Closed) -> None:
        """Run a batch of calls that are in no queue on the last idle instance."""
        self._idle.pop()
        outcome = instance.run(batch)
        if not taken(batch, self._version, outcome):
            self._returned(instance, batch, outcome)
            return
        self._idle.append(instance)
        self._answered(batch, outcome, reason)

    def _answered(self, batch: Batch, outcome: Outcome, reason: Closed) -> None:
        """Answer and count calls that were in no queue."""
        ended, log = 0, self._log
        if log is not None:
            ended, requests = self._now(), log.requests_of(batch)
        for call in batch.calls:
            call.outcome = None  # which refers to the call
            call.respond_from(batch)
        self._statistics.batch_succeeded(*counts(batch, outcome))
        self._closed[reason] += 1
        if log is not None:
            batch.closed = reason
            self._log_batch(log, requests, batch, outcome, ended)

    def _log_batch(
        self, log: BatchLog, requests: LoggedRequests, batch: Batch, outcome: Outcome, ended: int
    ) -> None:
        if not log.add(requests, batch, outcome, ended, self._now()):
            self._log = None

    def lend(self, call_soon: Callable[..., Any]) -> Lender | None:
        """Lend the idle instances to threads, until they are needed here; None if that is not
        possible now.

        `call_soon` passes a callback to the event loop, from any thread.
        """
        if self._lender is not None or not self._quiet:
            return None
        able = [self._able[one] for one in self._idle if one in self._able]
        lent = [one for one in able if one.lendable]
        if lent:
            for instance in lent:
                self._idle.remove(instance)
            self._lender = Lender(
                self._signature, self._version, self._policy.batch, self._statistics, lent,
                call_soon, self._returned,
            )  # fmt: skip
            self._look_at_lender()
        return self._lender

    def _look_at_lender(self) -> None:
        """Take the instances back if no thread has used them for a while."""
        if (lender := self._lender) is None:
            return
        if not (lender.used or lender.in_use):
            self._take_back()
            return
        lender.used = False
        self._statistics.settle()
        self._clock.at(self._now() + _LENT_NS, self._look_at_lender)

    def _take_back(self) -> None:
        """Take lent instances back; those in use are returned when their batch has ended."""
        if (lender := self._lender) is not None:
            self._lender = None
            for instance in lender.take_back():
                self._returned(instance, None, None)

    def _returned(self, instance: Instance, batch: Batch | None, outcome: Outcome | None) -> None:
        """Receive an instance that was lent, possibly with a batch that has failed there."""
        if batch is not None and outcome is not None:
            self._take_back()  # what waits for this instance there is to be run here
            for call in batch.calls:
                ended = call.ended  # its caller has given up: nothing would release it
                if isinstance(call, JoinedCall):
                    call.complete()
                call.level, call.run_number, call.began = 1, 0, call.arrived
                call.started = True
                call.deadline = call.execution = call.outcome = None
                call.owner = self
                call.ended = ended
                self._load.requests += not ended
                self._load.bytes += 0 if ended else call.nbytes
            self._finished(instance, batch, outcome)
            return
        if (removed := self._instances.give_back(instance)) is not None:
            self._soon(removed)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._soon(self._flush)

    def _flush(self) -> None:
        """Give queued requests to idle instances; runs at the end of the event loop's tick."""
        line, queue = self._line, self._queue
        waiting = queue.waiting + len(self._joined)
        if self._lines:
            waiting += sum([each.queue.waiting for each in self._lines.values()])
        if 0 < waiting < self._together and not line.retries:
            # Fewer calls than ran together last time: what their clients have sent meanwhile costs
            # less in this batch, a turn later, than in one of its own.
            self._together = 0
            self._soon(self._flush)
            return
        self._flush_scheduled = False
        self._alone_since = 0
        now = self._now()
        if self._joined:
            self._run_joined(now)
        if queue.deadlines:
            self._expire(queue, now)
        # One batch per instance: an inline instance is idle again at once, and between two of its
        # batches the event loop must read what has arrived.
        idle = self._idle
        turns = len(idle)
        if self._lines:
            self._flush_lines(now, turns)
            turns = 0
        for _ in range(turns):
            if not (queue.waiting or line.retries):
                break
            if self._gate is not None:
                if not self._run_gated(self._gate, line, now):
                    break
                continue
            if (batch := self._next_batch(line, now)) is None:
                break
            for instance in idle:  # the one that can begin soonest; mostly any of them can
                if not instance.load:
                    break
            else:
                instance = min(idle, key=_load)
            idle.remove(instance)
            instance.execute(batch, self._finished)
        if queue.deadlines and (deadline := queue.next_deadline()) is not None:
            self._arm(deadline)
        if self._gate is not None:
            self._gate.rest(self._waits)
        if self._on_drained:
            self._check_drained()

    @property
    def _waits(self) -> bool:
        """True if any call waits."""
        return self._line.waits or any(line.waits for line in self._lines.values())

    def _run_gated(self, gate: InstanceGate, line: _Line, now: int) -> bool:
        """Run a batch of a line on an instance that may pass the gate; False if there is none."""
        able = [i for i in self._idle if line.target is None or i.serves(line.target)]
        instance = gate.enter(able)
        if instance is None:
            return False
        if (batch := self._next_batch(line, now)) is None:
            gate.decline(instance)
            return False
        self._idle.remove(instance)
        instance.execute(batch, self._finished)
        return True

    def _flush_lines(self, now: int, turns: int) -> None:
        """Give queued requests to idle instances while some are for certain ones."""
        for line in list(self._lines.values()):
            if line.queue.deadlines:
                self._expire(line.queue, now)
        for _ in range(turns):
            if not self._run_first(now):
                break
        self._lines = {line.target: line for line in self._lines.values() if line.waits}
        for line in self._lines.values():
            if (deadline := line.queue.next_deadline()) is not None:
                self._arm(deadline)

    def _run_first(self, now: int) -> bool:
        """Run a batch of the line that has waited longest, of those that can run any."""
        lines = [line for line in (self._line, *self._lines.values()) if line.waits]
        for line in sorted(lines, key=attrgetter("since")):
            if self._gate is not None:
                if self._run_gated(self._gate, line, now):
                    return True
                continue
            instance = self._instances.idle_for(line.target)
            if instance is not None and (batch := self._next_batch(line, now)) is not None:
                self._idle.remove(instance)
                instance.execute(batch, self._finished)
                return True
        return False

    def _next_batch(self, line: _Line, now: int) -> Batch | None:
        """The batch to run now; None if there is nothing to run, or it may still grow."""
        queue, refused = line.queue, 0
        reason: Closed | None
        while True:
            again, reason = False, None
            if line.retries:
                batch = line.retries.popleft()
                calls, again = [call for call in batch.calls if not call.ended], batch.again
            elif queue.waiting:
                calls, reason, ask_at = queue.take(now)
                if not calls:
                    if ask_at is not None:
                        self._arm(ask_at)
                    return None
                self._closed[reason] += 1
                overload = self._overload
                first = calls[0]
                # Others, behind it, may have waited for longer.
                if first.level == LIGHT or queue.fair:
                    first = min(calls, key=attrgetter("arrived"))
                waited = now - first.arrived
                if waited > overload.late:
                    if overload.late_start(now, queue.waiting):
                        refused += len(calls)
                        calls = self._in_time(calls, now)
                        refused -= len(calls)
                    if not calls:
                        self._closed[reason] -= 1
                        if refused >= ENDED_AT_ONCE:
                            self._schedule_flush()  # others have their turn of the event loop
                            return None
                elif (
                    overload.since
                    and now - queue.oldest <= overload.late
                    and overload.timely(waited, queue.waiting)
                ):
                    self._tell_end()
            else:
                return None
            if self.quarantine.cases:
                calls = self._screened(line, calls, again, now)
            if calls:
                self._together = len(calls)
                if self._alike is not None and len(calls) > 1:
                    calls = self._divided(line, calls, again, self._alike)
                return Batch(self._signature, calls, again, self._free_since, reason)

    def _in_time(self, calls: list[Call], now: int) -> list[Call]:
        """The calls that are not refused for their delay; those with a limit of their own stay."""
        overload, counts = self._overload, self._statistics
        late = [
            call
            for call in calls
            if now - call.arrived > overload.late and call.deadline is None and not call.committed
        ]
        if late and not counts.overloaded:
            counts.overloaded = True
            log.warning(
                "model %s version %s is overloaded: requests that have waited for more than %.3g s"
                " are refused (--overload-delay-ms)", self._signature.model, self._version,
                overload.late / 1e9, extra={"model": self._signature.model},
            )  # fmt: skip
        counts.overload_refusals += len(late)
        self._expected += 1  # it is not drained: the other calls are in no queue
        for call in late:
            error = QueueTimeout(
                f"model '{self._signature.model}' is overloaded: the request has waited in its"
                f" queue for {(now - call.arrived) / 1e6:.0f} ms; try again later"
            )
            self._end(call, error, "REJECTED", now, begun=False)
        self._expected -= 1
        if not self._queue.waiting and overload.timely(0, 0):
            self._tell_end()
        return [call for call in calls if not call.ended]

    def _tell_end(self) -> None:
        """Log the end of an overload, if any request was refused."""
        counts = self._statistics
        if not counts.overloaded:
            return
        counts.overloaded = False
        log.info(
            "model %s version %s is not overloaded any more: %d requests were refused for their"
            " delay so far", self._signature.model, self._version, counts.overload_refusals,
            extra={"model": self._signature.model},
        )  # fmt: skip

    def _divided(
        self, line: _Line, calls: list[Call], again: bool, alike: Callable[[Call], object]
    ) -> list[Call]:
        """The calls like the first one; the others run next, by kind.

        Calls of one kind run together, in parallel with the others if there are instances for them:
        so interleaved calls of two kinds do not keep each other from growing batches.
        """
        groups: dict[object, list[Call]] = {}
        for call in calls:
            groups.setdefault(alike(call), []).append(call)
        first, *others = groups.values()
        line.retries.extendleft(Batch(self._signature, group, again) for group in reversed(others))
        return first

    def _screened(self, line: _Line, calls: list[Call], again: bool, now: int) -> list[Call]:
        """The calls that may run now; suspects run alone next, refused calls end."""
        clear, suspects, refused = self.quarantine.screen(calls, now)
        if not clear:
            clear, suspects = suspects[:1], suspects[1:]
        line.retries.extend([Batch(self._signature, [call], again) for call in suspects])
        for call in refused:
            self._end(call, self.quarantine.error(), "REJECTED", now, begun=again)
        # The answer to one may have cancelled others.
        return [call for call in clear if not call.ended] if refused else clear

    def _finished(self, instance: Instance, batch: Batch, outcome: Outcome) -> None:
        """Process a batch's outcome: answers, errors, or another run."""
        if not self._instances.leaving:
            if not self._idle:
                self._free_since = outcome.computed
            self._idle.append(instance)
        elif (removed := self._instances.give_back(instance)) is not None:
            self._removed(instance, removed)
        took = outcome.computed - outcome.started
        if took > self._overload.brief:
            self._overload.ran(took)
        error = outcome.error
        if error is not None or self.quarantine.cases:
            self.quarantine.learn_batch(batch, outcome, self._now())
        others: Sequence[Unanswered] = ()
        if error is None:
            try:
                if outcome.parts is None:
                    batch.take(self._version, outcome)
                else:
                    others = batch.respond_each(self._version, outcome.parts, outcome)
            except Exception as broken:  # malformed outputs count like an exception of the backend
                error = broken
                if len(batch.calls) == 1 and isinstance(broken, ServerError):
                    self._report(batch.calls, broken)
        if error is None:
            if others:
                self._deal_with(others, batch, outcome)
            if len(others) < len(batch.calls):
                self._succeed(batch, outcome)
        else:
            self._without_answer(batch, error, outcome)
        del error  # one raised here refers to this frame, and both, and the batch, would stay
        if self._gate is not None:
            self._gate.leave(instance, self._waits)
        if self._queue.waiting or self._line.retries or self._lines:
            self._schedule_flush()
        elif self._on_drained:
            self._check_drained()

    def _without_answer(self, batch: Batch, error: Exception, outcome: Outcome) -> None:
        """Fail a batch, return it to its line, or let its halves run."""
        calls = batch.calls
        if isinstance(error, NotStarted):
            if error.refusal is not None:
                spent = outcome.computed, outcome.started, batch.rows
                for call in calls:
                    self._end(call, error.refusal, "BACKEND", *spent, begun=batch.again)
            elif not all(call.ended for call in calls):
                self._line_of(calls[0]).retries.append(batch)
        elif (
            len(calls) == 1
            or isinstance(error, WorkerDied | ExecutionTimeout)
            or self._signature.stateful
        ):
            for call in calls:
                self._fail(call, error, outcome, batch.rows)
        else:
            if not isinstance(error, ServerError):
                self._report(calls, error)
            self._line_of(calls[0]).retries.extend(batch.halves())

    def _deal_with(self, others: Sequence[Unanswered], batch: Batch, outcome: Outcome) -> None:
        """Process the requests without a response from their batch."""
        later = 0
        for call, reason, broken in others:
            if isinstance(reason, ServerError):
                if broken:
                    self._report([call], reason)
                self._end(call, reason, "BACKEND", outcome.computed, outcome.started, batch.rows)
            elif reason is Deferral.AGAIN:
                if not call.ended:  # by the answer to another one, as any of these
                    self._run_again(call)
            else:
                later += 1
                if not call.ended:
                    self._open.add(call)
        if later and len(others) == len(batch.calls):
            executed = outcome.rows or batch.rows
            self._statistics.batch_opened(
                executed, outcome.started, outcome.gathered, outcome.computed
            )

    def _run_again(self, call: Call) -> None:
        line = self._line_of(call)
        if self._signature.stateful:  # as its model has asked for: with others, as before
            call.started = False
            line.queue.append(call)
        else:
            line.retries.append(Batch(self._signature, [call], again=True))
        self._schedule_flush()

    def _close_open(
        self, call: Call, outcome: InferResponse | ServerError | NoResponse, now: int
    ) -> None:
        """End an individually answered request."""
        self._open.discard(call)
        if isinstance(outcome, ServerError):
            self._end(call, outcome, "BACKEND", now, call.began, call.rows)
        else:
            call.ended = True
            call.outcome = outcome
            self._release([call])
            moments = call.began, now, call.held is not None
            self._statistics.request_completed(call.arrived, call.rows, *moments)
        self._check_drained()

    def _succeed(self, batch: Batch, outcome: Outcome) -> None:
        """Answer the calls of a batch that have not ended, and count the batch."""
        alive: list[Call] = []
        arrived: list[int] = []
        rows = 0
        for call in batch.calls:
            if call.outcome is not None and not call.ended:
                call.ended = True
                alive.append(call)
                arrived.append(call.arrived)
                rows += call.rows
        ended, log = self._now(), self._log
        requests = () if log is None else log.requests_of(batch)
        self._release(alive)
        if log is not None:
            self._log_batch(log, requests, batch, outcome, ended)
        started, gathered, computed = outcome.started, outcome.gathered, outcome.computed
        executed = outcome.rows or batch.rows
        counts = arrived, rows, executed, started, gathered, computed, ended, batch.free
        if len(alive) == 1:
            self._soon(self._statistics.batch_succeeded, *counts)
        else:
            self._statistics.batch_succeeded(*counts)

    def _release(self, ended: Sequence[Call], in_order: bool = True) -> None:
        """Answer ended calls, or let them wait for earlier ones, if there is an order."""
        load = self._load
        load.requests -= len(ended)
        for call in ended:
            load.bytes -= call.nbytes
        answered: Iterable[Call] = ended
        if in_order and self._order is not None:
            answered = self._next_in_order(self._order)
        for call in answered:
            outcome, call.outcome = call.outcome, None  # None if the call was cancelled
            try:
                if type(outcome) is Batch:
                    if call.stages is None:
                        call.respond_from(outcome)
                    else:
                        call.stages.respond_from(call, outcome)
                elif isinstance(outcome, InferResponse):
                    call.pass_response(outcome, True)
                elif isinstance(outcome, NoResponse):
                    call.pass_end()
                elif isinstance(outcome, ServerError):
                    call.pass_end(outcome)
            except Exception:  # a bug in one answer must not affect others of its batch
                end_after_bug(call)

    def _next_in_order(self, order: deque[Call]) -> Iterator[Call]:
        """The ended calls that none is before: few at once, the others in later turns."""
        if self._ordering:  # by whoever is answering one of them, or in the next turn
            return
        self._ordering = True
        for _ in range(ENDED_AT_ONCE):
            if not (order and order[0].ended):
                self._ordering = False
                return
            yield order.popleft()
        self._soon(self._go_on_in_order)

    def _go_on_in_order(self) -> None:
        self._ordering = False
        self._all_gone()

    def _fail(self, call: Call, error: Exception, outcome: Outcome, rows: int) -> None:
        if not isinstance(error, ServerError):
            self._report([call], error)
            error = ExecutionFailed(
                f"model '{self._signature.model}' failed to execute the request"
            )
        self._end(call, error, "BACKEND", outcome.computed, outcome.started, rows)

    def _let_go(self, call: Call) -> None:
        """Release a call that has ended together with others."""
        self._release((call,), in_order=False)

    def _all_gone(self) -> None:
        self._release(())  # what was behind them in order
        if self._hopeless is not None:  # the end of one may have submitted another
            self.fail_waiting(self._hopeless)
        else:
            self._check_drained()

    def _end(
        self,
        call: Call,
        error: ServerError,
        reason: str,
        now: int,
        started: int = 0,
        rows: int = 0,
        begun: bool = True,
        release: bool = True,
    ) -> None:
        """End a request with an error, unless it has ended; `started` is 0 if it was never run.

        `begun` is false only if no instance has begun it, as far as this scheduler knows. Without
        `release`, that is left to the caller.
        """
        if call.ended:
            return
        call.ended = True
        call.started = begun
        started = started or now
        call.outcome = error.of_request(started - call.arrived, now - started, rows)
        fault = is_fault(error, begun)
        self._statistics.request_failed(reason, now - call.arrived, fault)
        if release:
            self._release([call])

    def _expire(self, queue: RequestQueue, now: int) -> None:
        expired = queue.expire(now)
        for call in expired:
            error = self._late(call)
            call.outcome = error.of_request(now - call.arrived, 0, 0)
            self._statistics.request_failed("REJECTED", now - call.arrived)
        # Few at once, also where answers keep an order: whatever runs before them may take long.
        self._leaving.process(expired)
        if not self._leaving:
            self._release(())

    def _late(self, call: Call) -> QueueTimeout:
        """The error of a request whose queue time has expired."""
        assert call.deadline is not None
        limit = call.deadline - call.arrived
        configured = self._policy.queue_policy(call.level).configured
        own = not configured or call.options.timeout * 1_000 == limit
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


def _give(call: Call, response: InferResponse) -> None:
    """Give a call a response that is not its last."""
    try:
        call.pass_response(response, False)
    except Exception:
        log.exception("bug while answering a request")
