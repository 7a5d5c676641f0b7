"""Fail-over between several backends of one model: decisions, and the instances that apply them.

Backends have an order. The first that can run anything gets all requests. One that recovers gets
them again at once; if it is lost again soon, it must first be available for a while, which doubles
each time. An available backend that keeps failing is skipped like a lost one. Skipped ones are
still used if there is nothing else. These decisions are pure, over values and times in seconds of
one monotonic clock.

Each backend is a tier, with a rank, in front of the model's single queue. To its instances, a tier
is the scheduler; the scheduler only sees the instances of the tier that gets requests, so that it
knows nothing about backends. When that tier is lost, the next one takes over, since it is the same
queue. A batch refused by a tier goes on to the next one that can run anything; to the scheduler,
the first instance still has it. An instance that runs such a batch takes nothing else meanwhile.

Owned by the event-loop thread. Invariant: an instance takes part if its tier is open, it can run
something, and it has no batch handed on from another tier.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import inf

from headrace.core.call import Call
from headrace.core.errors import (
    Cancelled,
    ExecutionTimeout,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    ServerError,
    WorkerDied,
)
from headrace.observability.statistics import BackendCounts
from headrace.scheduling.batch import (
    Answer,
    Batch,
    Deferral,
    Instance,
    NamedInstance,
    NotStarted,
    Outcome,
)
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import Clock, Timer
from headrace.scheduling.quarantine import Quarantine

_LOST = (RemoteLost, RemoteTimeout, RemoteUnavailable)
FAILURES = 5  # consecutive failures after which a backend is skipped
STEADY_SECS = 10.0  # a backend that has run for so long counts as stable
FIRST_PAUSE_SECS = 1.0
LONGEST_PAUSE_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Health of a backend: whether it can run requests, and its recent failures.

    `able` is true if any of its instances can run something. It gets requests from `trusted_from`
    on. `setbacks` is the number of consecutive losses soon after a recovery, `failures` that of
    consecutive failed batches.
    """

    able: bool = False
    trusted_from: float = -inf
    setbacks: int = 0
    failures: int = 0


class Verdict(Enum):
    """The meaning of a batch's end for its backend."""

    SERVED = "the backend worked, even if the model failed"
    REFUSED = "not started, any other backend may run the batch"
    FAILED = "lost, or not answered in time"
    NOTHING = "given back, or no longer wanted"


def choose(standings: Sequence[Standing], now: float) -> int | None:
    """The index of the backend that gets requests now; None if there is none."""
    able = [index for index, one in enumerate(standings) if one.able]
    trusted = (index for index in able if standings[index].trusted_from <= now)
    return next(trusted, able[0] if able else None)


def next_look(standings: Sequence[Standing], now: float) -> float | None:
    """The time at which `choose` may change without an event."""
    return min((one.trusted_from for one in standings if one.able and one.trusted_from > now),
               default=None)  # fmt: skip


def lost(standing: Standing, now: float) -> Standing:
    """Update for the loss of a backend's last working instance."""
    setbacks = _setbacks(standing, now)
    return replace(standing, able=False, failures=0, setbacks=setbacks, trusted_from=now)


def found(standing: Standing, now: float) -> Standing:
    """Update for an instance that can run something, initially or again."""
    if standing == Standing():  # never lost before
        return replace(standing, able=True)
    return replace(standing, able=True, failures=0, trusted_from=now + _pause(standing.setbacks))


def ended(standing: Standing, verdict: Verdict, now: float) -> Standing:
    """Update for the end of a batch."""
    if verdict is Verdict.NOTHING:
        return standing
    if verdict is Verdict.SERVED:
        return replace(standing, failures=0) if standing.failures else standing
    if standing.failures + 1 < FAILURES:
        return replace(standing, failures=standing.failures + 1)
    setbacks = max(_setbacks(standing, now), 1)
    return replace(standing, failures=0, setbacks=setbacks, trusted_from=now + _pause(setbacks))


def verdict(outcome: Outcome) -> Verdict:
    """The verdict on an outcome."""
    if isinstance(outcome.error, NotStarted):
        return Verdict.NOTHING if outcome.error.refusal is None else Verdict.REFUSED
    if isinstance(outcome.error, Cancelled):
        return Verdict.NOTHING
    answers = [outcome.error] if outcome.error is not None else outcome.parts or ()
    errors = [answer for answer in answers if answer is not Deferral.AGAIN]
    if any(isinstance(error, _LOST) for error in errors):
        return Verdict.FAILED
    if errors and all(isinstance(error, Cancelled) for error in errors):
        return Verdict.NOTHING
    return Verdict.SERVED


def answered(batch: Batch, outcome: Outcome) -> list[Call]:
    """The requests of a batch that its outcome answers."""
    waiting = [call for call in batch.calls if not call.ended]
    if outcome.error is not None:
        whole = isinstance(outcome.error, WorkerDied | ExecutionTimeout | NotStarted)
        alone = len(batch.calls) == 1 or whole
        return waiting if alone else []
    if outcome.parts is None:
        return waiting
    parts = zip(batch.calls, outcome.parts, strict=True)
    return [p for p, part in parts if not (p.ended or isinstance(part, Deferral))]


def _setbacks(standing: Standing, now: float) -> int:
    """Consecutive setbacks, including one that happens now."""
    return standing.setbacks + 1 if now - standing.trusted_from < STEADY_SECS else 0


def _pause(setbacks: int) -> float:
    """Seconds that a backend must be available before it gets requests."""
    if not setbacks:
        return 0.0
    return min(FIRST_PAUSE_SECS * 2.0 ** min(setbacks - 1, 16), LONGEST_PAUSE_SECS)


log = logging.getLogger(__name__)

Done = Callable[[Instance, Batch, Outcome], None]


@dataclass(frozen=True, slots=True)
class _Job:
    """A batch, and the guard that received it from the scheduler."""

    batch: Batch
    origin: "_Guard"
    done: Done

    @property
    def wanted(self) -> bool:
        """True if any of its requests is still wanted."""
        return not all(call.ended for call in self.batch.calls)


class Tier:
    """A backend, which acts as the scheduler for its instances.

    `open` is true if its instances take part.
    """

    def __init__(self, tiers: "Tiers", rank: int, name: str, counts: BackendCounts) -> None:
        self.rank = rank
        self.name = name
        self.standing = Standing()
        self.open = False
        self.hopeless = True  # without instances, and none expected
        self.counts = counts
        self.handed_on: deque[_Job] = deque()
        self.tiers = tiers
        self._guards: dict[Instance, _Guard] = {}

    @property
    def quarantine(self) -> Quarantine:
        """Implements `Batcher.quarantine`."""
        return self.tiers.batcher.quarantine

    @property
    def guards(self) -> "Iterable[_Guard]":
        """The instances that represent its own at the scheduler."""
        return self._guards.values()

    def take_part(self, opens: bool) -> None:
        """Let its instances take part, or not."""
        if self.open is not opens:
            self.open = opens
            for guard in self._guards.values():
                guard.settle()

    def add_instance(self, instance: Instance) -> None:
        """Implements `Batcher.add_instance`."""
        guard = self._guards[instance] = _Guard(self, instance)
        self.tiers.batcher.add_instance(guard)
        self.hopeless = False
        self.tiers.changed(guard)

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Implements `Batcher.remove_instance`."""
        guard = self._guards.pop(instance)
        guard.leaves, guard.removed = True, removed
        self.tiers.changed(guard)

    def suspend(self, instance: Instance) -> None:
        """Implements `Batcher.suspend`."""
        self._rest(instance, True)

    def resume(self, instance: Instance) -> None:
        """Implements `Batcher.resume`."""
        self.hopeless = False
        self._rest(instance, False)

    def fail_waiting(self, error: ServerError) -> bool:
        """End all waiting requests, unless another tier may run them; True if they have ended."""
        self.hopeless = True
        return self.tiers.hopeless and self.tiers.batcher.fail_waiting(error)

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Implements `Batcher.answer`."""
        if not (call.ended or answer is Deferral.AGAIN):
            self.name_to([call])
            self.counts.requests += final
        self.tiers.batcher.answer(call, answer, final)

    def name_to(self, calls: Sequence[Call]) -> None:
        """Report the backend to the requests that it answers."""
        for call in calls:
            if not call.ended:
                call.pass_backend(self.name)

    def take(self, job: _Job) -> None:
        """Run a batch that another tier has refused, once an instance is free."""
        self.handed_on.append(job)
        for guard in self._guards.values():
            if guard.job is None and not guard.resting:
                guard.settle()
                return

    def _rest(self, instance: Instance, resting: bool) -> None:
        guard = self._guards.get(instance)
        if guard is not None and guard.resting is not resting:
            guard.resting = resting
            self.tiers.changed(guard)


class _Guard:
    """Represents an instance at the scheduler; a `NamedInstance`, "" for one of an upstream."""

    __slots__ = ("_runs", "instance", "job", "leaves", "removed", "resting", "tier")

    def __init__(self, tier: Tier, instance: Instance) -> None:
        self.tier = tier
        self.instance = instance
        self.job: _Job | None = None
        self.resting = False  # the instance reports that it can run nothing
        self.leaves = False
        self.removed: Callable[[], None] | None = None  # called when it has been removed
        self._runs = False  # `execute` of the instance is on the stack

    @property
    def name(self) -> str:
        """Implements `NamedInstance.name`."""
        return self.instance.name if isinstance(self.instance, NamedInstance) else ""

    @property
    def load(self) -> int:
        """Implements `Instance.load`."""
        return self.instance.load

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`: calls for an instance wait while its tier is closed."""
        return self.instance.serves(target)

    def execute(self, batch: Batch, done: Done) -> None:
        """Implements `Instance.execute`."""
        job = _Job(batch, self, done)
        if self.job is None:
            self._run(job)
        else:  # begun for another tier while its own batch was elsewhere; it is about to settle
            self.tier.tiers.give_back(job, at_once=True)

    def close(self) -> None:
        """Implements `Instance.close`."""
        self.instance.close()

    @property
    def goes_on(self) -> bool:
        """True if it takes part as before, after a batch served by its backend."""
        tier = self.tier
        return (
            tier.rank == tier.tiers.active
            and not (self.resting or self.leaves or tier.handed_on or tier.standing.failures)
            and not tier.tiers.helped
        )

    def settle(self) -> None:
        """Take part, or not, or run a batch handed on to it."""
        tiers, tier = self.tier.tiers, self.tier
        if self.leaves:
            if self.removed is not None and (self.job is None or self.job.origin is self):
                removed, self.removed = self.removed, None
                tiers.batcher.remove_instance(self, removed)
            return
        if self.job is None and not self.resting:
            while tier.handed_on:
                job = tier.handed_on.popleft()
                if job.wanted:
                    tiers.batcher.suspend(self)
                    self._run(job)
                    return
                tiers.give_back(job)
            if tier.open:
                tiers.batcher.resume(self)
                return
        tiers.batcher.suspend(self)

    def _run(self, job: _Job) -> None:
        self.job = job
        self._runs = True
        self.instance.execute(job.batch, self._done)
        self._runs = False

    def _done(self, instance: Instance, batch: Batch, outcome: Outcome) -> None:
        job, self.job = self.job, None
        assert job is not None, "the end of a batch that was not begun. This is a bug."
        self.tier.tiers.ended(self, job, outcome, self._runs)


class Tiers:
    """All backends of one version, in order: its `Scheduler`, in front of the batcher."""

    def __init__(
        self,
        model: str,
        names: Sequence[str],
        batcher: Batcher,
        clock: Clock,
        counts: dict[str, BackendCounts],
        queue_size: int = 0,
    ) -> None:
        """`counts` has the counters of tiers by name; new ones are added.

        With `queue_size` requests waiting the next tier helps out; 0: never.
        """
        self.batcher = batcher
        # A queue of unlimited size gets no help, and its calls need not be counted here.
        self.submit = self._submit if queue_size else batcher.submit
        self.expect, self.cancel = batcher.expect, batcher.cancel
        self.when_drained = batcher.when_drained
        self.active: int | None = None  # the rank of the tier that gets requests
        self._model = model
        self._clock = clock
        self._queue_size = queue_size
        self._tiers = [
            Tier(self, rank, name, counts.setdefault(name, BackendCounts()))
            for rank, name in enumerate(names)
        ]
        self._last: int | None = None  # the previously active rank
        self._helper: Tier | None = None
        self._timer: Timer | None = None

    def __getitem__(self, rank: int) -> Tier:
        return self._tiers[rank]

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    @property
    def helped(self) -> bool:
        """True if another tier helps out."""
        return self._helper is not None

    @property
    def hopeless(self) -> bool:
        """True if no tier is expected to run anything."""
        return all(tier.hopeless for tier in self._tiers)

    @property
    def pending(self) -> int:
        """Implements `Scheduler.pending`."""
        return self.batcher.pending

    @property
    def busy(self) -> bool:
        """Implements `Scheduler.busy`."""
        return self.batcher.busy

    def _submit(self, call: Call, target: object = None) -> None:
        """Queue a call, and have the next tier help out with a long queue."""
        self.batcher.submit(call, target)
        if self._helper is None and self.batcher.pending >= self._queue_size:
            self._have_helped()

    def close(self) -> None:
        """Stop deciding, and close all instances."""
        self._disarm()
        self.batcher.close()

    # --- for tiers and guards

    def changed(self, guard: _Guard) -> None:
        """Update for an instance that was added, is being removed, failed or recovered."""
        tier, now = guard.tier, self._now()
        guard.settle()
        able = any(not other.resting for other in tier.guards)
        if able is not tier.standing.able:
            tier.standing = (found if able else lost)(tier.standing, now)
            self._look()
            if not able:
                self._pass_on(tier)

    def ended(self, guard: _Guard, job: _Job, outcome: Outcome, at_once: bool) -> None:
        """Process the end of a batch; `at_once` if it ended within `execute`.

        In that case the scheduler is giving out further batches, and the set of participating
        instances must not change.
        """
        tier, judged = guard.tier, verdict(outcome)
        elsewhere = judged is Verdict.REFUSED and job.batch.target is None
        if elsewhere and self._after(tier.rank) is not None:
            hand_on = partial(self._hand_on, tier, job)
            self._clock.soon(hand_on) if at_once else hand_on()
        else:
            if judged is not Verdict.NOTHING:
                calls = answered(job.batch, outcome)
                tier.counts.batches += 1
                tier.counts.requests += len(calls)
                tier.name_to(calls)
            job.done(job.origin, job.batch, outcome)
            if job.origin is guard and judged is Verdict.SERVED and guard.goes_on:
                return  # the usual case: nothing has changed
        settle = partial(self._settle, guard, job.origin, judged)
        self._clock.soon(settle) if at_once else settle()

    def give_back(self, job: _Job, at_once: bool = False) -> None:
        """Return a batch that no tier has started to the scheduler; `at_once` as of `ended`."""
        now = self._clock.now()
        job.done(job.origin, job.batch, Outcome((), NotStarted(), now, now, now))
        if not at_once:
            job.origin.settle()

    # --- choice of the active tier

    def _settle(self, guard: _Guard, origin: _Guard, verdict: Verdict) -> None:
        tier, now = guard.tier, self._now()
        tier.standing = ended(tier.standing, verdict, now)
        helper = self._helper
        if helper is not None and self.batcher.pending < self._queue_size:
            self._helper = None
        self._look()
        guard.settle()
        if origin is not guard:
            origin.settle()

    def _look(self) -> None:
        """Choose the active tier."""
        now = self._now()
        standings = [tier.standing for tier in self._tiers]
        self.active = choose(standings, now)
        if self.active is not None and self.active != self._last:
            self._tell(self.active)
            self._last = self.active
        if self._helper is not None:  # it may be lost, or active by now
            self._helper = self._after(self.active)
        for tier in self._tiers:
            tier.take_part(tier.rank == self.active or tier is self._helper)
        self._disarm()
        if (when := next_look(standings, now)) is not None:
            self._timer = self._clock.at(int(when * 1e9) + 1, self._on_time)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        self._look()

    def _tell(self, active: int) -> None:
        tier = self._tiers[active]
        if self._last is None:
            return
        tier.counts.switches += 1
        log.log(
            logging.WARNING if active > self._last else logging.INFO,
            "model %s: requests go to %s instead of %s", self._model, tier.name,
            self._tiers[self._last].name, extra={"model": self._model},
        )  # fmt: skip

    def _have_helped(self) -> None:
        """Let the next tier help out with a long queue."""
        self._helper = self._after(self.active)
        if self._helper is not None:
            self._helper.take_part(True)

    def _after(self, rank: int | None) -> Tier | None:
        """The tier after `rank` that can run anything, if any."""
        further = () if rank is None else self._tiers[rank + 1 :]
        return next((tier for tier in further if tier.standing.able), None)

    def _pass_on(self, tier: Tier) -> None:
        """Hand on the pending batches of a lost tier."""
        for _ in range(len(tier.handed_on)):
            self._hand_on(tier, tier.handed_on.popleft())

    def _hand_on(self, tier: Tier, job: _Job) -> None:
        """Hand on batches that a tier does not run to the next available one."""
        after = self._after(tier.rank)
        (after.take if after is not None else self.give_back)(job)

    def _now(self) -> float:
        return self._clock.now() / 1e9
