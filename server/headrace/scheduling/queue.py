"""The waiting requests of one model: priority levels, limits, timeouts, cancellation.

A plain data structure without a clock; `now` comes from the caller. Requests that were cancelled or
timed out stay in their deque, marked as ended, until they reach its head: removing from the middle
would require a search. They count nowhere, their tensors are released at once, and when they
outnumber the waiting ones, all of them are removed.

While many requests wait, those of clients with few requests have a deque of their own. The other
requests have a turn if the oldest of them is older, and at most every other one: so a client that
fills the queue delays itself, not others. With fair shares, each level has the order of these
instead.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from sys import maxsize
from typing import TypeAlias

from headrace.core.call import Call
from headrace.core.errors import QueueFull
from headrace.observability.statistics import Closed
from headrace.scheduling.fair_share import FairQueue
from headrace.scheduling.policy import NO_POLICY, SchedulingPolicy, TimeoutAction

MANY = 256  # waiting requests from which on those of light clients have turns of their own
LIGHT = 0  # their level
_Waiting: TypeAlias = deque[Call] | FairQueue
_SWEEP = 64  # dead entries below which sweeping never pays


class RequestQueue:
    """The queue of one model: by priority level, then by whether it timed out, then by arrival.

    Invariant: `waiting` counts the requests in it that have not ended.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        # Most models have one level and no limits: their requests need not check for them.
        self._plain = not policy.levels and policy.queue_policy(1) == NO_POLICY
        # Rows from which on a batch is full, even of a single call; see `BatchPolicy.take`.
        batch = policy.batch
        self._enough = min(batch.max_rows, max(batch.preferred, default=batch.max_rows))
        # The levels that requests have named, in order: clients may name any number.
        self._levels = [1]
        # Two deques per level: in time, and timed out with the action DELAY.
        self.fair = policy.fair_share
        self._deques: list[_Waiting] = [self._new(), deque()]
        self._light: deque[Call] = deque()
        self._light_first = False
        self._sizes = {LIGHT: 0, 1: 0}
        self.deadlines: list[tuple[int, int, Call]] = []
        self._count = 0
        self._dead = 0  # ended, but still in a deque
        self.waiting = 0

    def append(self, call: Call, light: bool = False) -> int | None:
        """Add a request and set its deadline, which is returned, if any; raises `QueueFull`.

        `light` requests share the turns; without effect beside levels, limits and timeouts.
        """
        if self._plain and not call.options.timeout:
            if light and not self.fair:
                call.level = LIGHT
                self._light.append(call)
                self._sizes[LIGHT] += 1
            else:
                self._deques[0].append(call)
                self._sizes[1] += 1
            self.waiting += 1
            return None
        level = self._policy.level(call.options.priority)
        policy = self._policy.queue_policy(level)
        place = self._place(level)
        if policy.max_size and self._sizes[level] >= policy.max_size:
            raise QueueFull(
                f"[request id: {call.id or '<id_unknown>'}] Exceeds maximum queue size"
                f" of {policy.max_size} for model '{call.model_name}'"
            )
        call.level = level
        call.deadline = policy.deadline(call.arrived, call.options.timeout)
        if call.deadline is not None:
            self._count += 1  # breaks ties, so that two requests are never compared
            heapq.heappush(self.deadlines, (call.deadline, self._count, call))
            if len(self.deadlines) > 2 * self.waiting + _SWEEP:
                self._sweep_deadlines()
        self._deques[place].append(call)
        self._sizes[level] += 1
        self.waiting += 1
        return call.deadline

    def _new(self) -> _Waiting:
        """An empty deque of those in time."""
        return FairQueue() if self.fair else deque()

    def _place(self, level: int) -> int:
        """The index of the first deque of a level, which may be new."""
        at = bisect_left(self._levels, level)
        if at < len(self._levels) and self._levels[at] == level:
            return 2 * at
        if len(self._levels) > 2 * (self.waiting + self._dead) + _SWEEP:
            self._sweep_levels()
            at = bisect_left(self._levels, level)
        self._levels.insert(at, level)
        self._deques[2 * at : 2 * at] = [self._new(), deque()]
        self._sizes[level] = 0
        return 2 * at

    def take(self, now: int) -> tuple[list[Call], Closed, int | None]:
        """Start the calls of the batch to run at `now`; returns them as `BatchPolicy.take`."""
        first = self._deques[0]
        single = len(self._deques) == 2 and not (self._dead or self._deques[1] or self._light)
        if self._light:  # others have their turn if they would have it without turns
            others = self._deques[0]
            older = bool(others) and others[0].arrived < self._light[0].arrived
            self._light_first = not (self._light_first and older)
        batch = self._policy.batch
        if single and self.waiting == 1 and not batch.max_delay:  # the usual case
            call = first.popleft()
            call.started = True
            self._sizes[call.level] -= 1
            self.waiting = 0
            full = call.rows >= self._enough or call.rows in batch.preferred
            return [call], Closed.FULL if full else Closed.IDLE, None
        positions, reason, ask_at = batch.take(first if single else self, now)
        if type(positions) is range:  # the usual case: from the head on
            return self.popleft(len(positions)), reason, ask_at
        return self.pick(positions), reason, ask_at

    @property
    def oldest(self) -> int:
        """The arrival of the oldest request at the head of a deque, if there are light ones; else
        that of a future one.
        """
        heads = [queue[0].arrived for queue in (self._light, self._deques[0]) if queue]
        return min(heads) if self._light else maxsize

    def __iter__(self) -> Iterator[Call]:
        first, *others = self._in_turn()
        if not self._dead and not any(others):
            return iter(first)
        return self._alive()

    def _in_turn(self) -> list[_Waiting]:
        """The deques in the order in which they are taken from."""
        if not self._light:
            return self._deques
        return [self._light, *self._deques] if self._light_first else [*self._deques, self._light]

    def _alive(self) -> Iterator[Call]:
        for queue in self._in_turn():
            for call in queue:
                if not call.ended:
                    yield call

    def popleft(self, count: int) -> list[Call]:
        """Take the first `count` requests, as started."""
        first = self._deques[0]
        if not (self._dead or self._light) and len(first) >= count:  # the usual case
            taken = [first.popleft() for _ in range(count)]
            for call in taken:
                call.started = True
            self._sizes[self._levels[0]] -= count
            self.waiting -= count
            return taken
        return self.pick(range(count))

    def pick(self, positions: Sequence[int]) -> list[Call]:
        """Take the requests at these ascending positions, as started."""
        taken: list[Call] = []
        position = 0
        for queue in self._in_turn():
            passed: list[Call] = []
            while queue and len(taken) < len(positions):
                call = queue.popleft()
                if call.ended:
                    self._dead -= 1
                    continue
                if position == positions[len(taken)]:
                    call.started = True
                    taken.append(call)
                    self._sizes[call.level] -= 1
                else:
                    passed.append(call)
                position += 1
            queue.extendleft(reversed(passed))
        self.waiting -= len(taken)
        return taken

    def discard(self, call: Call) -> None:
        """Uncount a request that ended while queued, and release its tensors."""
        call.inputs = {}
        self._sizes[call.level] -= 1
        self.waiting -= 1
        self._dead += 1
        if self._dead > self.waiting + _SWEEP:
            self._sweep()

    def expire(self, now: int) -> list[Call]:
        """Remove the requests to be rejected at `now`; move those to be delayed."""
        rejected: list[Call] = []
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, call = heapq.heappop(self.deadlines)
            if call.started or call.ended:
                continue
            if self._policy.queue_policy(call.level).action is TimeoutAction.REJECT:
                call.ended = True
                self.discard(call)
                rejected.append(call)
            else:
                place = self._place(call.level)
                self._deques[place].remove(call)
                self._deques[place + 1].append(call)
        return rejected

    def next_deadline(self) -> int | None:
        """The earliest deadline of a queued request; None without any."""
        while self.deadlines and (self.deadlines[0][2].started or self.deadlines[0][2].ended):
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def _sweep(self) -> None:
        self._light = deque(call for call in self._light if not call.ended)
        for index, queue in enumerate(self._deques):
            if isinstance(queue, FairQueue):
                queue.drop_ended()
            else:
                self._deques[index] = deque(call for call in queue if not call.ended)
        self._dead = 0
        self._sweep_deadlines()

    def _sweep_levels(self) -> None:
        """Remove empty levels: clients choose which ones exist."""
        pairs = zip(self._levels, self._deques[::2], self._deques[1::2], strict=True)
        kept = [pair for pair in pairs if pair[1] or pair[2]]
        self._levels = [level for level, _, _ in kept]
        self._deques = [queue for _, *queues in kept for queue in queues]
        self._sizes = {level: self._sizes[level] for level in (LIGHT, *self._levels)}

    def _sweep_deadlines(self) -> None:
        alive = [entry for entry in self.deadlines if not (entry[2].started or entry[2].ended)]
        heapq.heapify(alive)
        self.deadlines = alive
