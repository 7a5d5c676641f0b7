"""The log of a scheduler's batches: off until it is asked for, bounded, and off again."""

from headrace.observability.statistics import Closed
from headrace.scheduling.batch import Batch, Outcome
from headrace.scheduling.batch_log import MOST_BATCHES, MOST_REQUESTS, BatchLog, LoggedBatch
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import POISON, Bench, request, signature

SECOND = 10**9


def rows(batches: list[LoggedBatch]) -> list[list[int]]:
    return [[each.rows for each in batch.requests] for batch in batches]


def run(bench: Bench, *names: str) -> None:
    """Run requests of one row each, one after the other."""
    for name in names:
        bench.send(name)
        bench.finish_all()


def test_the_log_begins_with_the_first_question() -> None:
    bench = Bench()
    run(bench, "before")
    assert bench.batcher.logged() == ([], 0)
    bench.clock.advance(100)
    bench.send("a", 1, 2)
    bench.clock.advance(10)
    bench.submit("b")
    bench.submit("c", 1, 2, 3)
    bench.clock.advance(40)
    bench.finish_all()
    found, lasted = bench.batcher.logged()
    assert lasted == 150
    assert rows(found) == [[2], [1, 3]]
    first, second = found
    assert (first.rows, second.rows) == (2, 4)
    assert (first.closed, second.closed) == (Closed.IDLE, Closed.FULL)
    assert [each.arrived for each in second.requests] == [110, 110]
    assert (first.started, first.gathered, first.computed, first.ended) == (100, 103, 150, 150)
    assert (second.started, second.free) == (150, 150)
    assert (first.answered, second.answered) == (150, 150)
    assert {each.begun for batch in found for each in batch.requests} == {0}  # from no door
    assert {each.targeted for batch in found for each in batch.requests} == {False}


def test_reasons_of_batches() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(4, max_delay=50)))
    bench.batcher.logged()
    bench.send("waits")
    bench.clock.advance(60)
    bench.finish_all()
    bench.submit("narrow")
    bench.submit("wide", width=2)
    bench.finish_all()
    bench.clock.advance(60)
    bench.finish_all()
    found = [batch.closed for batch in bench.batcher.logged()[0]]
    assert found == [Closed.DELAY, Closed.SHAPE, Closed.DELAY]


def test_batches_that_run_again_were_not_formed_from_a_queue() -> None:
    bench = Bench()
    bench.batcher.logged()
    for name, value in (("a", 1), ("b", POISON), ("c", 2)):
        bench.submit(name, value)
    bench.finish_all()
    found, _ = bench.batcher.logged()
    assert sorted(rows(found)) == [[1], [1]]  # the third has failed
    assert [batch.closed for batch in found] == [None, None]


def test_requests_for_some_instances_are_marked() -> None:
    bench = Bench()
    bench.batcher.logged()
    bench.submit("a", target=bench.instances[0])
    bench.finish_all()
    [batch] = bench.batcher.logged()[0]
    assert [each.targeted for each in batch.requests] == [True]


def test_the_log_ends_when_nobody_asks() -> None:
    bench = Bench()
    run(bench, "before")
    bench.batcher.logged()
    bench.clock.advance(599 * SECOND)
    run(bench, "a")
    assert len(bench.batcher.logged()[0]) == 1  # it goes on from now
    bench.clock.advance(599 * SECOND)
    run(bench, "b")
    bench.clock.advance(2 * SECOND)
    run(bench, "c", "d")
    assert bench.batcher.logged() == ([], 0)
    run(bench, "e")
    assert len(bench.batcher.logged()[0]) == 1


def test_priority_levels() -> None:
    for levels, expected in ((0, [1, 1, 1]), (2, [1, 2, 2])):
        policy = SchedulingPolicy(BatchPolicy(4), levels=levels, default_level=levels)
        bench = Bench(policy)
        bench.batcher.logged()
        for priority in (2, 0, 1):
            bench.submit("", priority=priority)
        bench.finish_all()
        [batch] = bench.batcher.logged()[0]
        assert [each.level for each in batch.requests] == expected


def batch_of(count: int) -> Batch:
    calls = [request(str(at), 1) for at in range(count)]
    for call in calls:
        call.rows, call.arrived, call.key = 1, 0, None
    return Batch(signature(count), calls)


def add(log: BatchLog, batch: Batch, moment: int) -> bool:
    outcome = Outcome((), None, moment, moment, moment)
    return log.add(log.requests_of(batch), batch, outcome, moment, moment)


def test_the_log_has_a_limit_of_batches() -> None:
    log, one = BatchLog(0), batch_of(1)
    for moment in range(MOST_BATCHES + 10):
        assert add(log, one, moment)
    found = log.read(0)
    assert len(found) == MOST_BATCHES
    assert (found[0].started, found[-1].started) == (10, MOST_BATCHES + 9)


def test_the_log_has_a_limit_of_requests() -> None:
    log, many = BatchLog(0), batch_of(MOST_REQUESTS // 4)
    for moment in range(6):
        assert add(log, many, moment)
    assert [batch.started for batch in log.read(0)] == [2, 3, 4, 5]
    assert add(log, batch_of(MOST_REQUESTS + 1), 6)
    assert log.read(0) == []
