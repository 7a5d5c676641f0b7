"""Tiers of backends behind one queue: choice, changes, and reports."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ExecutionFailed, ModelNotReady, RemoteTimeout, Unavailable
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batch import Batch, Deferral, NotStarted, Part
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.fail_over import FAILURES, Tiers
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import (
    Done,
    FakeCall,
    FakeClock,
    FakeInstance,
    request,
    signature,
    submitted,
)

SECOND = 1_000_000_000


class NamedCall(FakeCall):
    """Records the backend that answered."""

    backend = ""

    def answered_by(self, backend: str) -> None:
        assert not self.calls, "it is told before the answer"
        self.backend = backend


class Bench:
    """Tiers of the given sizes before a batcher with batches of one row."""

    def __init__(
        self, *counts: int, inline: Sequence[int] = (), queue_size: int = 0, rows: int = 1
    ) -> None:
        self.queue_size = queue_size
        self.clock = FakeClock()
        self.statistics = VersionStatistics()
        self.batcher = Batcher(
            signature(rows), "1", SchedulingPolicy(BatchPolicy(rows)), self.clock, self.statistics,
            lambda calls, error: None,
        )  # fmt: skip
        names = "abcd"[: len(counts)]
        self.tiers = Tiers("double", names, self.batcher, self.clock, {}, queue_size)
        self.instances = [
            [FakeInstance(self.clock, inline=rank in inline) for _ in range(count)]
            for rank, count in enumerate(counts)
        ]
        for tier, instances in zip(self.tiers, self.instances, strict=True):
            for instance in instances:
                tier.add_instance(instance)
        self.calls: list[NamedCall] = []
        self.clock.settle()

    def submit(self, name: str = "r") -> NamedCall:
        call = NamedCall(name)
        self.calls.append(call)
        return submitted(self.tiers.submit, request(name, 1), call, 1)

    def send(self, count: int = 1) -> NamedCall:
        """Submit requests, each in a tick of its own; the last one."""
        for _ in range(count):
            call = self.submit()
            self.clock.settle()
        return call

    def refuse(self, rank: int) -> None:
        """Make the instances of a backend refuse their batches."""
        for instance in self.instances[rank]:
            instance.report(NotStarted(Unavailable("full")))

    def ask(self) -> NamedCall:
        """Submit a request, and run it wherever it is given to."""
        call = self.submit()
        self.run()
        return call

    def run(self) -> None:
        self.clock.settle()
        while busy := [i for instances in self.instances for i in instances if i.busy]:
            busy[0].finish()
            self.clock.settle()

    def lose(self, rank: int) -> None:
        for instance in self.instances[rank]:
            self.tiers[rank].suspend(instance)
        self.clock.settle()

    def find(self, rank: int) -> None:
        for instance in self.instances[rank]:
            self.tiers[rank].resume(instance)
        self.clock.settle()


def test_the_first_backend_gets_all() -> None:
    bench = Bench(1, 1)
    for _ in range(3):
        bench.submit()
    bench.run()
    assert [call.backend for call in bench.calls] == ["a"] * 3
    assert (bench.tiers[0].counts.requests, bench.tiers[0].counts.batches) == (3, 3)
    assert not bench.instances[1][0].runs


def test_queued_requests_go_to_the_next_backend_and_new_ones_back_to_the_first() -> None:
    bench = Bench(1, 1)
    begun, waiting = bench.submit(), bench.submit()
    bench.clock.settle()
    [instance] = bench.instances[0]
    instance.report(NotStarted())
    bench.lose(0)
    bench.run()
    assert (begun.values, waiting.values) == ([2], [2])
    assert (begun.backend, waiting.backend) == ("b", "b")
    assert (bench.tiers.active, bench.tiers[1].counts.switches) == (1, 1)
    bench.find(0)
    assert bench.ask().backend == "a"
    assert (bench.tiers.active, bench.tiers[0].counts.switches) == (0, 1)


def test_a_busy_instance_that_is_suspended_gets_nothing_more() -> None:
    bench = Bench(2, 1)
    bench.send()
    bench.lose(0)
    waiting = bench.submit()
    bench.run()
    assert [call.backend for call in bench.calls] == ["a", "b"]
    assert waiting.values == [2]


def test_a_flapping_backend_has_to_wait() -> None:
    bench = Bench(1, 1)
    bench.lose(0)
    bench.find(0)
    assert bench.ask().backend == "a"
    bench.lose(0)
    bench.find(0)
    assert bench.ask().backend == "b"
    bench.clock.advance(SECOND + 1)
    assert bench.ask().backend == "a"
    assert bench.clock.armed == []


def test_a_refused_batch_moves_on_although_the_first_backend_gets_requests() -> None:
    bench = Bench(2, 1)
    refused, other = bench.submit(), bench.submit()
    bench.clock.settle()
    bench.refuse(0)
    assert bench.instances[1][0].busy
    assert bench.batcher.busy
    bench.run()
    assert [refused.backend, other.backend] == ["b", "b"]
    assert bench.tiers.active == 0
    assert bench.ask().backend == "a"
    assert bench.statistics.fail_count == 0


def test_a_batch_refused_by_an_inline_instance_moves_on() -> None:
    bench = Bench(1, 1, inline=[1])
    bench.send()
    bench.instances[0][0].report(NotStarted(Unavailable("full")))
    bench.run()
    assert bench.calls[0].backend == "b"
    assert bench.ask().backend == "a"


def test_a_refused_batch_does_not_wait_for_a_backend_lost_meanwhile() -> None:
    """One backend refuses while it is given the batch; the next is lost in the same turn."""
    bench = Bench(0, 1, 1)
    [second] = bench.instances[1]

    class Refusing(FakeInstance):
        def execute(self, batch: Batch, done: Done) -> None:
            super().execute(batch, done)
            self.report(NotStarted(Unavailable("full")))
            bench.tiers[1].suspend(second)

    first = Refusing(bench.clock)
    bench.tiers[0].add_instance(first)
    assert bench.ask().backend == "c"
    assert not second.runs
    bench.tiers[0].suspend(first)
    bench.find(1)
    assert bench.ask().backend == "b"


def test_a_refused_batch_is_returned_if_no_backend_is_left() -> None:
    bench = Bench(0, 1)
    [second] = bench.instances[1]

    class Refusing(FakeInstance):
        def execute(self, batch: Batch, done: Done) -> None:
            super().execute(batch, done)
            if len(self.runs) == 1:
                self.report(NotStarted(Unavailable("full")))
                bench.tiers[1].suspend(second)

    first = Refusing(bench.clock)
    bench.instances[0].append(first)
    bench.tiers[0].add_instance(first)
    assert bench.ask().backend == "a"
    assert len(first.runs) == 2


def test_the_last_backend_refuses_for_good() -> None:
    bench = Bench(1, 1)
    call = bench.send()
    bench.refuse(0)
    bench.refuse(1)
    assert [str(error) for error in call.errors] == ["full"]
    assert call.backend == "b"


def test_a_failing_backend_is_skipped() -> None:
    bench = Bench(1, 1)
    for _ in range(FAILURES):
        call = bench.send()
        bench.instances[0][0].report(parts=[RemoteTimeout("late")])
        assert call.backend == "a"
    assert bench.ask().backend == "b"
    bench.clock.advance(SECOND + 1)
    assert bench.ask().backend == "a"


def test_a_moved_batch_moves_again_when_its_backend_is_lost() -> None:
    bench = Bench(2, 1, 1)
    for _ in range(2):
        bench.submit()
    bench.clock.settle()
    bench.refuse(0)
    [middle] = bench.instances[1]
    assert middle.busy
    bench.lose(1)
    bench.run()
    assert sorted(call.backend for call in bench.calls) == ["b", "c"]


def test_nothing_is_returned_while_any_backend_is_able() -> None:
    bench = Bench(2, 1)
    for _ in range(2):
        bench.submit()
    bench.clock.settle()
    bench.refuse(0)
    [second] = bench.instances[1]
    bench.tiers[1].suspend(second)  # with one batch under way and one that waits
    second.report(NotStarted())
    bench.run()
    assert [call.backend for call in bench.calls] == ["a", "a"]


def test_queued_requests_fail_only_without_any_backend() -> None:
    bench = Bench(1, 1)
    bench.lose(0)
    bench.lose(1)
    call = bench.send()
    assert not bench.tiers[0].fail_waiting(ModelNotReady("gone"))
    assert [tier.hopeless for tier in bench.tiers] == [True, False]
    assert call.calls == 0
    assert bench.tiers[1].fail_waiting(ModelNotReady("gone as well"))
    assert [tier.hopeless for tier in bench.tiers] == [True, True]
    assert [str(error) for error in call.errors] == ["gone as well"]
    bench.find(1)
    assert [tier.hopeless for tier in bench.tiers] == [True, False]
    assert bench.ask().backend == "b"


def test_an_absent_backend_counts_as_lost() -> None:
    bench = Bench(0, 1)
    assert bench.tiers.active == 1
    assert bench.tiers[1].counts.switches == 0
    assert bench.ask().backend == "b"
    bench.lose(1)
    bench.tiers[1].fail_waiting(ModelNotReady("gone"))
    assert bench.tiers.hopeless


def test_with_a_long_queue_the_next_backend_helps() -> None:
    bench = Bench(1, 1, queue_size=3)
    bench.send(3)
    assert [i.busy for [i] in bench.instances] == [True, False]
    bench.send()
    assert [i.busy for [i] in bench.instances] == [True, True]
    bench.run()
    assert sorted(call.backend for call in bench.calls) == ["a", "a", "a", "b"]
    for _ in range(2):
        bench.submit()
    bench.run()
    assert [call.backend for call in bench.calls[4:]] == ["a", "a"]


def test_an_instance_is_removed_after_its_moved_batch() -> None:
    bench = Bench(1, 1)
    bench.send()
    bench.refuse(0)
    removed: list[str] = []
    [helper] = bench.instances[1]
    bench.tiers[1].remove_instance(helper, lambda: removed.append("helper"))
    bench.clock.settle()
    assert not removed
    helper.finish()
    bench.clock.settle()
    assert removed == ["helper"]
    assert bench.calls[0].backend == "b"
    bench.instances[1].clear()
    bench.lose(0)
    bench.find(0)
    assert bench.ask().backend == "a"


def test_cancelled_requests_do_not_move() -> None:
    bench = Bench(2, 1)
    calls = [submitted(bench.batcher.submit, request("r", 1), FakeCall(), 1) for _ in range(2)]
    bench.clock.settle()
    bench.refuse(0)
    for call in calls:
        call.cancel()
    bench.run()
    assert len(bench.instances[1][0].runs) == 1
    assert not bench.batcher.busy


def test_open_requests_over_tiers() -> None:
    bench = Bench(1, 1)
    call = submitted(bench.batcher.submit, request("r", 1), NamedCall(), 1)
    bench.clock.settle()
    bench.instances[0][0].report(parts=[Deferral.LATER])
    assert not call.backend
    bench.tiers[0].answer(call, ExecutionFailed("no"), True)
    assert (call.backend, bench.tiers[0].counts.requests) == ("a", 1)
    bench.tiers[0].answer(call, Part({}, {}), True)
    assert bench.tiers[0].counts.requests == 1


STEPS = st.lists(
    st.one_of(
        st.just(("submit", 0, 0)),
        st.tuples(st.sampled_from(["lose", "find"]), st.integers(0, 2), st.just(0)),
        st.tuples(
            st.sampled_from(["finish", "refuse", "back"]), st.integers(0, 2), st.integers(0, 1)
        ),
        st.just(("wait", 0, 0)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(steps=STEPS, queue_size=st.sampled_from([0, 1, 3]), inline=st.sampled_from([(), (2,)]))
def test_any_order_of_events_answers_each_request_once(
    steps: list[tuple[str, int, int]], queue_size: int, inline: tuple[int, ...]
) -> None:
    """A request refused by all backends fails; every other names the backend that answered."""
    bench = Bench(2, 2, 2, queue_size=queue_size, inline=inline)
    for what, rank, number in steps:
        instance = bench.instances[rank][number]
        if what == "submit":
            bench.submit()
        elif what == "lose":
            bench.lose(rank)
        elif what == "find":
            bench.find(rank)
        elif what == "wait":
            bench.clock.advance(40 * SECOND)
        elif instance.busy:
            if what == "finish":
                instance.finish()
            elif what == "refuse":
                instance.report(NotStarted(Unavailable("full")))
            else:
                instance.report(NotStarted())
        bench.clock.settle()
    for rank in range(3):
        bench.find(rank)
    bench.run()
    for call in bench.calls:
        assert call.calls == 1
        assert call.backend in "abc"
        assert call.backend
    assert not bench.batcher.busy
    answered = sum(tier.counts.requests for tier in bench.tiers)
    assert answered == len(bench.calls)
    bench.tiers.close()
    assert all(i.closed for instances in bench.instances for i in instances)


class SometimesInline(FakeInstance):
    """An instance that runs its batches at once from some time on."""

    at_once = False

    def execute(self, batch: Batch, done: Done) -> None:
        super().execute(batch, done)
        if self.at_once:
            self.finish()


def test_an_instance_with_a_moved_batch_gets_no_other_when_its_own_ends_elsewhere() -> None:
    bench = Bench(2, 1, 0)
    [one, other], [second] = bench.instances[:2]
    third = SometimesInline(bench.clock)
    bench.tiers[2].add_instance(third)
    bench.instances[2].append(third)
    refusal = NotStarted(Unavailable("full"))
    bench.send()
    one.report(refusal)
    second.report(refusal)
    assert third.busy  # with the first request
    bench.lose(0)
    bench.send()
    second.report(refusal)  # so that the second one waits for the third backend
    bench.find(0)
    moved = bench.send()
    other.report(refusal)
    assert second.busy  # with the third request, while its own is elsewhere
    bench.send(2)
    third.at_once = True
    third.finish()
    bench.run()
    assert [call.values for call in bench.calls] == [[2]] * 5
    assert (moved.backend, bench.calls[0].backend, bench.calls[1].backend) == ("b", "c", "c")
    assert not bench.batcher.busy


def test_a_request_for_an_instance_is_not_handed_on() -> None:
    bench = Bench(1, 1)
    [[first], [second]] = bench.instances
    call = NamedCall("r")
    submit = partial(bench.tiers.submit, target=first)
    submitted(submit, request("r", 1), call, 1)
    assert (bench.tiers.busy, bench.tiers.pending) == (True, 1)
    bench.clock.settle()
    bench.refuse(0)
    bench.run()
    assert [str(error) for error in call.errors] == ["full"]
    assert not second.runs
    waits = NamedCall("w")
    bench.lose(0)
    submitted(submit, request("w", 1), waits, 1)
    bench.run()
    assert (waits.calls, bench.tiers.pending) == (0, 1)
    bench.find(0)
    bench.run()
    assert (waits.values, waits.backend, bench.tiers.busy) == ([2], "a", False)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_next_backend_helps_if_either_of_two_is_lost(lost: int) -> None:
    bench = Bench(1, 1, 1, queue_size=2)
    bench.send(6)
    assert [i.busy for [i] in bench.instances] == [True, True, False]
    bench.lose(lost)
    assert bench.tiers.active == (1 if lost == 0 else 0)
    assert bench.instances[2][0].busy
    bench.run()
    assert [call.values for call in bench.calls] == [[2]] * 6
