"""Invariants of the batcher under any order of requests, runs, time and cancellations."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.errors import ExecutionFailed, QueueFull, QueueTimeout
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction
from tests.scheduling.fakes import POISON, Bench, FakeCall, signature

MAX_ROWS = 4
LEVELS = st.integers(0, 3)
ROWS = st.sampled_from([1, 1, 1, 2, 3, 4, 0])
WIDTHS = st.sampled_from([1, 1, 1, 2])
POISONED = st.sampled_from([False, False, False, False, False, True])


@dataclass
class Asked:
    """An accepted request as its caller knows it."""

    name: str
    values: list[int]
    level: int
    width: int
    arrived: int
    call: FakeCall
    cancelled: bool = False
    calls_at_cancel: int = field(default=0)


class Scheduling(RuleBasedStateMachine):
    """A state machine of a batcher."""

    @initialize(
        batches=st.sampled_from([True, True, True, False]),
        delay=st.sampled_from([0, 10_000]),
        preferred=st.frozensets(st.integers(1, MAX_ROWS), max_size=2),
        levels=st.sampled_from([0, 2]),
        ordered=st.booleans(),
        limit=st.sampled_from([0, 3]),
        timeout=st.sampled_from([0, 15]),
        action=st.sampled_from(TimeoutAction),
        instances=st.integers(1, 3),
        inline=st.booleans(),
    )
    def configure(
        self,
        batches: bool,
        delay: int,
        preferred: frozenset[int],
        levels: int,
        ordered: bool,
        limit: int,
        timeout: int,
        action: TimeoutAction,
        instances: int,
        inline: bool,
    ) -> None:
        self.ordered = ordered and not levels and action is TimeoutAction.REJECT
        self.max_rows = MAX_ROWS if batches else 0
        self.delay = delay if batches else 0
        self.limit = limit
        self.delays = action is TimeoutAction.DELAY and timeout > 0
        policy = SchedulingPolicy(
            BatchPolicy(self.max_rows, self.delay, preferred),
            QueuePolicy(limit, timeout * 1_000, action, allow_override=True),
            levels,
            levels,
            preserve_ordering=self.ordered,
        )
        self.policy = policy
        self.bench = Bench(policy, instances, inline=inline, shape=signature(MAX_ROWS))
        self.asked: list[Asked] = []
        self.settled = True

    @rule(burst=st.lists(st.tuples(ROWS, WIDTHS, POISONED, LEVELS), min_size=1, max_size=5))
    def submit(self, burst: list[tuple[int, int, bool, int]]) -> None:
        for rows, width, poisoned, priority in burst:
            self.submit_one(rows, width, poisoned, priority)

    def submit_one(self, rows: int, width: int, poisoned: bool, priority: int) -> None:
        number = len(self.asked)
        values = [10 * number + row for row in range(rows)]
        if poisoned and values:
            values[-1] = POISON
        level = self.policy.level(priority)
        waiting = sum(asked.level == level for asked in self.waiting())
        name = str(number)
        call = FakeCall(name, self.bench.log)
        try:
            self.bench.submit_to(
                call, values, width, priority=priority, timeout=5 * (number % 4 == 1)
            )
        except QueueFull:
            assert self.limit
            assert waiting >= self.limit
            return
        assert not self.limit or waiting < self.limit
        arrived = self.bench.clock.time
        self.asked.append(Asked(name, values * width, level, width, arrived, call))
        self.settled = False

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        if not asked.cancelled:
            asked.cancelled, asked.calls_at_cancel = True, asked.call.calls
        asked.call.cancel()
        self.settled = False

    @rule(which=st.integers(0, 2))
    def finish(self, which: int) -> None:
        if busy := [instance for instance in self.bench.instances if instance.busy]:
            busy[which % len(busy)].finish()
            self.settled = False

    @rule()
    def tick(self) -> None:
        self.bench.clock.settle()
        self.settled = True

    @rule(ns=st.integers(1, 12_000))
    def pass_time(self, ns: int) -> None:
        self.bench.clock.settle()
        self.bench.clock.advance(ns)
        self.bench.clock.settle()
        self.settled = True

    def started(self) -> list[str]:
        """Ids in the order of their first execution, over all instances."""
        return list(dict.fromkeys(self.bench.started))

    def waiting(self) -> list[Asked]:
        started = set(self.bench.started)
        return [asked for asked in self.asked if asked.name not in started and not asked.call.ended]

    @invariant()
    def nobody_is_answered_twice_or_after_cancelling(self) -> None:
        for asked in self.asked:
            assert asked.call.calls <= 1
            if asked.cancelled:
                assert asked.call.calls == asked.calls_at_cancel

    @invariant()
    def everybody_gets_their_own_rows(self) -> None:
        for asked in self.asked:
            if asked.call.responses:
                assert sorted(asked.call.values) == sorted(2 * value for value in asked.values)
            for error in asked.call.errors:
                assert isinstance(error, QueueTimeout) or POISON in asked.values

    @invariant()
    def no_batch_is_too_large(self) -> None:
        for instance in self.bench.instances:
            for ids, rows in zip(instance.runs, instance.rows, strict=True):
                assert rows <= MAX_ROWS
                assert self.max_rows or len(ids) == 1

    @invariant()
    def what_waits_is_counted(self) -> None:
        assert self.bench.batcher.pending == len(self.waiting())

    @invariant()
    def each_level_is_served_in_order(self) -> None:
        """Order holds within one shape; other shapes may be passed over."""
        if self.delays:
            return  # timed out requests go behind the others
        for line in {(asked.level, asked.width) for asked in self.asked}:
            names = {asked.name for asked in self.asked if (asked.level, asked.width) == line}
            served = [int(name) for name in self.started() if name in names]
            assert served == sorted(served)

    @invariant()
    def answers_are_in_order_if_asked_for(self) -> None:
        if self.ordered:
            late = [
                asked.name
                for asked in self.asked
                if any(isinstance(error, QueueTimeout) for error in asked.call.errors)
            ]  # they are answered when they expire
            answered = [int(name) for name in self.bench.log if name not in late]
            assert answered == sorted(answered)

    @invariant()
    def no_instance_is_idle_while_something_may_run(self) -> None:
        if not self.settled or all(instance.busy for instance in self.bench.instances):
            return
        for asked in self.waiting():
            assert self.bench.clock.time < asked.arrived + self.delay

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        drained: list[bool] = []
        self.bench.batcher.when_drained(lambda: drained.append(True))
        for _ in range(3):  # delays and timeouts need time
            self.bench.finish_all()
            self.bench.clock.advance(20_000)
        assert drained == [True]
        self.nobody_is_answered_twice_or_after_cancelling()
        self.everybody_gets_their_own_rows()
        self.answers_are_in_order_if_asked_for()
        for asked in self.asked:
            assert asked.call.calls == 1 or asked.cancelled
            if POISON in asked.values and asked.call.calls:
                assert isinstance(asked.call.errors[0], ExecutionFailed | QueueTimeout)
        counted = self.bench.statistics
        assert counted.success_count + counted.fail_count == len(self.asked)
        assert self.bench.batcher.pending == 0
        self.bench.batcher.close()
        assert self.bench.clock.armed == []


Scheduling.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestScheduling = Scheduling.TestCase
