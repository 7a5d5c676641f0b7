"""The policies of batches and queues: pure decisions without clock or queue.

Times are in nanoseconds of one monotonic clock. Deadlines are absolute, so that a late wake-up can
neither stretch nor shrink a delay.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.call import Call
from headrace.observability.statistics import Closed

# Nanoseconds that a request may wait whatever its own timeout: the event loop's tick, at whose end
# free instances get their batches.
_LEAST_WAIT = 1_000_000
# Requests of other shapes that may be passed over for one batch; looking further costs more than
# batches gain, about 70 ns a request.
LOOK_AHEAD = 256
_NOBODY, _ALONE = range(0), range(1)


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The rule by which requests of a queue form the next batch.

    The head of the queue is in every batch, with those behind it of the same key. Others keep their
    places: `LOOK_AHEAD` of them may be passed over for one batch, so that a request at position n
    waits for n batches at most.

    With no delay, whatever waits runs as soon as an instance is free. With a delay, a batch that
    has neither reached a preferred size nor become unable to grow waits until its oldest request
    is `max_delay` old, or, where `keeps_deadlines`, has waited for half of the time it has. A
    request of another key behind it ends the delay: so it is in Triton. Precondition: no request
    has more than `max_rows` rows, unless `max_rows` is 0 (the model does not batch, and every
    request runs alone).
    """

    max_rows: int
    max_delay: int = 0
    preferred: frozenset[int] = frozenset()
    keeps_deadlines: bool = False

    def take(self, queue: Iterable[Call], now: int) -> tuple[Sequence[int], Closed, int | None]:
        """The positions in `queue` of the requests to run now, and why they are no more.

        If there are none, when to ask again; None where nothing but a new request can change the
        answer.
        """
        rows = count = best = oldest = passed = 0
        first: Call | None = None
        picked: list[int] | None = None  # once another shape lies between
        full = False
        for request in queue:
            if first is None:
                if not self.max_rows:
                    return _ALONE, Closed.FULL, None
                first = request
                oldest = request.arrived
            elif request.key != first.key:
                if passed == LOOK_AHEAD:
                    break
                if picked is None:
                    picked = list(range(count))
                passed += 1
                continue
            elif rows + request.rows > self.max_rows:
                full = True  # the next one does not fit: this batch cannot grow any more
                break
            if picked is not None:
                picked.append(count + passed)
            rows += request.rows
            count += 1
            if request.arrived < oldest:
                oldest = request.arrived  # from a lower priority level than the first
            if rows in self.preferred:
                best = count
            if rows >= self.max_rows:
                full = True
                break
        if first is None:
            return _NOBODY, Closed.IDLE, None
        positions: Sequence[int] = range(count) if picked is None else picked
        ripe_at = oldest + self.max_delay
        ripe = bool(self.max_delay) and now >= ripe_at
        if best and not ripe:
            return positions[:best], Closed.FULL, None
        if full or rows >= max(self.preferred, default=self.max_rows):
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


def _half_time(request: Call) -> int:
    assert request.deadline is not None
    return (request.arrived + request.deadline) // 2


class TimeoutAction(Enum):
    """The fate of a request that has waited for too long."""

    REJECT = 0
    DELAY = 1  # it goes behind all others of its level that have not timed out


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one priority level's queue; `default_timeout` in nanoseconds; 0 is no limit.

    `configured` is whether the model's configuration has a policy for the level, be it an empty
    one. Without a policy, a request's own timeout bounds its wait.
    """

    max_size: int = 0
    default_timeout: int = 0
    action: TimeoutAction = TimeoutAction.REJECT
    allow_override: bool = False
    configured: bool = True

    def deadline(self, arrived: int, timeout_us: int) -> int | None:
        """The deadline of a request that asked for `timeout_us` (0: did not ask); None for none.

        Under a configured policy a request can only shorten the default, and with no default it has
        nothing to shorten: so it is in Triton, and clients rely on it.
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
    """All that a model's configuration says about its queue.

    `levels` counts priority levels, 1 being the most urgent; 0 means that priorities are not used.
    """

    batch: BatchPolicy
    queue: QueuePolicy = NO_POLICY
    levels: int = 0
    default_level: int = 0
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    preserve_ordering: bool = False

    def level(self, priority: int) -> int:
        """The level, from 1, of a request that asked for `priority`; else the default."""
        if not self.levels:
            return 1
        return priority if 1 <= priority <= self.levels else self.default_level

    def queue_policy(self, level: int) -> QueuePolicy:
        """The limits of a level's queue."""
        return self.by_level.get(level, self.queue)
