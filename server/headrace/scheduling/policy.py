"""The policies of batches and queues: pure decisions without clock or queue.

Times are in nanoseconds of one monotonic clock. Deadlines are absolute, so that a late wake-up can
neither stretch nor shrink a delay.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.observability.statistics import Closed
from headrace.scheduling.overload import DelayBound

# Minimum queue time granted to a request whatever its timeout: the event loop's tick, at whose end
# free instances get their batches.
_LEAST_WAIT = 1_000_000
# Requests of other shapes that may be skipped for one batch; searching further costs more than
# batches gain, about 70 ns per request.
LOOK_AHEAD = 256
_NOBODY, _ALONE = range(0), range(1)


class WaitingRequest(Protocol):
    """A queued request, as far as policies are concerned: a call, or the record of one."""

    @property
    def arrived(self) -> int:
        """The moment when it was queued."""

    @property
    def rows(self) -> int:
        """The rows of a request in a batch."""

    @property
    def key(self) -> object:
        """The key that all requests of a batch share."""

    @property
    def deadline(self) -> int | None:
        """The moment when its time in the queue expires, if any."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The rule by which requests of a queue form the next batch.

    The head of the queue is in every batch, with later requests of the same key. Others keep their
    places: `LOOK_AHEAD` of them may be skipped for one batch, so that a request at position n waits
    for at most n batches.

    Without a delay, everything queued runs as soon as an instance is free. With a delay, a batch
    that has neither reached a preferred size nor become unable to grow waits until its oldest
    request is `max_delay` old, or, with `keeps_deadlines`, has used half of its time. A later
    request of another key ends the delay, as in Triton. Precondition: no request has more than
    `max_rows` rows, unless `max_rows` is 0 (the model does not batch, and every request runs
    alone).
    """

    max_rows: int
    max_delay: int = 0
    preferred: frozenset[int] = frozenset()
    keeps_deadlines: bool = False

    def take(
        self, queue: Iterable[WaitingRequest], now: int
    ) -> tuple[Sequence[int], Closed, int | None]:
        """The positions in `queue` of the requests to run now, and why the batch closed.

        If there are none, the third value is the time to ask again; None if only a new request can
        change the answer.
        """
        max_rows, preferred = self.max_rows, self.preferred
        rows = count = best = oldest = passed = 0
        first = key = None
        picked: list[int] | None = None  # None until another shape is skipped
        full = False
        for request in queue:
            if first is None:
                if not max_rows:
                    return _ALONE, Closed.FULL, None
                first, key = request, request.key
                oldest = request.arrived
                added = rows + request.rows
            elif request.key != key:
                if passed == LOOK_AHEAD:
                    break
                if picked is None:
                    picked = list(range(count))
                passed += 1
                continue
            elif (added := rows + request.rows) > max_rows:
                full = True  # the next one does not fit: this batch cannot grow any more
                break
            if picked is not None:
                picked.append(count + passed)
            rows = added
            count += 1
            if (arrived := request.arrived) < oldest:
                oldest = arrived  # from a lower priority level than the first
            if preferred and rows in preferred:
                best = count
            if rows >= max_rows:
                full = True
                break
        if first is None:
            return _NOBODY, Closed.IDLE, None
        positions: Sequence[int] = range(count) if picked is None else picked
        ripe_at = oldest + self.max_delay
        ripe = bool(self.max_delay) and now >= ripe_at
        if best and not ripe:
            return positions[:best], Closed.FULL, None
        if full or rows >= max(preferred, default=max_rows):
            return positions, Closed.FULL, None
        if ripe:
            return positions, Closed.DELAY, None
        if passed:
            return positions, Closed.SHAPE, None
        if not self.max_delay:
            return positions, Closed.IDLE, None
        if self.keeps_deadlines:  # all that waits is in this batch
            hurry_at = min(
                (_half_time(r) for r in queue if r.deadline is not None), default=ripe_at
            )
            if now >= hurry_at:
                return positions, Closed.DEADLINE, None
            ripe_at = min(ripe_at, hurry_at)
        return _NOBODY, Closed.IDLE, ripe_at


def _half_time(request: WaitingRequest) -> int:
    assert request.deadline is not None
    return (request.arrived + request.deadline) // 2


class TimeoutAction(Enum):
    """The fate of a request whose queue time has expired."""

    REJECT = 0
    DELAY = 1  # moved behind all others of its level that have not timed out


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of one priority level's queue; `default_timeout` in nanoseconds; 0 is no limit.

    `configured` is true if the configuration has a policy for the level, even an empty one. Without
    a policy, a request's own timeout bounds its wait.
    """

    max_size: int = 0
    default_timeout: int = 0
    action: TimeoutAction = TimeoutAction.REJECT
    allow_override: bool = False
    configured: bool = True

    def deadline(self, arrived: int, timeout_us: int) -> int | None:
        """The deadline of a request with `timeout_us` (0: none given); None for no deadline.

        Under a configured policy a request can only shorten the default; without a default it
        cannot set one, as in Triton, and clients rely on it.
        """
        if not self.configured:
            return arrived + max(timeout_us * 1000, _LEAST_WAIT) if timeout_us else None
        timeout = self.default_timeout
        if self.allow_override and timeout_us and timeout_us * 1000 < timeout:
            timeout = timeout_us * 1000
        return arrived + timeout if timeout else None


NO_POLICY = QueuePolicy(configured=False)


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """The queue settings of a model's configuration.

    `levels` is the number of priority levels, 1 being the most urgent; 0: priorities are ignored.
    With `fair_share`, clients share each level by their weights, in rows.
    """

    batch: BatchPolicy
    queue: QueuePolicy = NO_POLICY
    levels: int = 0
    default_level: int = 0
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    preserve_ordering: bool = False
    overload: DelayBound | None = None
    fair_share: bool = False

    def level(self, priority: int) -> int:
        """The level, from 1, for a request's `priority`; the default for 0."""
        if not self.levels:
            return 1
        return priority if 1 <= priority <= self.levels else self.default_level

    def queue_policy(self, level: int) -> QueuePolicy:
        """The limits of a level's queue."""
        return self.by_level.get(level, self.queue)
