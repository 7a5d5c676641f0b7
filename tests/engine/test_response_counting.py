"""What is counted of the responses of a model that answers many times."""

from dataclasses import replace

from headrace.core.call import Call
from headrace.core.errors import ExecutionFailed, ModelNotReady
from headrace.engine.chain import count_responses
from headrace.observability.statistics import MOST_ORDINALS, Duration, ResponseCounters, Responses
from headrace.scheduling.batch import Deferral, Part
from tests.scheduling.fakes import Bench, request, signature, submitted
from tests.scheduling.test_open_requests import FakeExecution, ManyCall, part

LATER = Deferral.LATER


class Counted:
    """A scheduler whose responses are counted, and one request that waits 5 ns in its queue."""

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench or Bench(shape=replace(signature(), decoupled=True))
        self.responses = Responses()
        self.submit = count_responses(
            self.responses, self.bench.batcher.submit, now=self.bench.clock.now
        )
        self.call: Call
        self.sink = ManyCall()

    def open(self) -> Call:
        """Have a batch done with, whose request is open."""
        instance = self.bench.instances[0]
        self.call = submitted(self.submit, request("a", 1), self.sink, 1)
        self.bench.clock.settle()
        self.call.execution = FakeExecution()
        self.bench.clock.advance(5)
        self.call.began = 5
        instance.report(parts=[LATER])
        return self.call

    def answer(self, after: int, answer: Part | None, final: bool = False) -> None:
        """An answer of the model, so many ns after the last one."""
        self.bench.clock.advance(after)
        self.bench.batcher.answer(self.call, answer, final)

    def told(self, ordinal: int, name: str) -> tuple[int, int]:
        """A counter."""
        found: Duration = getattr(self.responses.ordinals[ordinal], name)
        return found.count, found.ns


def zero(counters: ResponseCounters) -> set[str]:
    """The names of the counters that have counted nothing."""
    return {name for name in counters.__slots__ if not getattr(counters, name).count}


def test_each_response_by_its_ordinal() -> None:
    counted = Counted()
    counted.open()
    counted.answer(10, part(1))
    counted.answer(20, part(2))
    counted.answer(30, None, True)
    assert (counted.sink.finals, counted.sink.finished) == ([False, False], True)
    assert counted.told(0, "success") == counted.told(0, "compute_infer") == (1, 10)
    assert counted.told(0, "compute_output") == (1, 0)
    assert counted.told(1, "success") == (1, 20)
    assert counted.told(2, "empty_response") == (1, 30)
    assert zero(counted.responses.ordinals[0]) == {"fail", "empty_response", "cancel"}
    assert len(zero(counted.responses.ordinals[2])) == 5
    assert counted.responses.first is not None
    assert sum(counted.responses.first.counts) == 1
    assert counted.responses.first.total_ns == 15
    assert counted.bench.statistics.success_count == 1


def test_time_that_a_door_takes_is_that_of_the_output() -> None:
    counted = Counted()
    counted.open()
    counted.bench.clock.advance(10)
    plain = counted.sink.respond

    def slow(*given: object) -> None:
        counted.bench.clock.advance(3)
        plain(*given)  # type: ignore[arg-type]

    counted.sink.respond = slow  # type: ignore[method-assign, assignment]
    counted.answer(0, part(1), True)
    assert counted.told(0, "compute_infer") == (1, 10)
    assert counted.told(0, "compute_output") == (1, 3)
    assert counted.told(0, "success") == (1, 13)


def test_an_error_after_a_response() -> None:
    counted = Counted()
    counted.open()
    counted.answer(10, part(1))
    counted.bench.clock.advance(7)
    counted.bench.batcher.answer(counted.call, ExecutionFailed("no"), True)
    assert counted.told(1, "fail") == (1, 7)
    assert counted.told(0, "fail") == (0, 0)


def test_a_request_that_is_given_up() -> None:
    counted = Counted()
    ticket = counted.open()
    counted.answer(10, part(1))
    counted.bench.clock.advance(4)
    ticket.cancel()
    ticket.cancel()
    assert counted.told(1, "cancel") == (1, 4)


def test_what_has_not_begun_is_no_response() -> None:
    counted = Counted(Bench(instances=0))
    submitted(counted.submit, request("a", 1), ManyCall(), 1).cancel()
    submitted(counted.submit, request("b", 1), counted.sink, 1)
    counted.bench.batcher.fail_waiting(ModelNotReady("none"))
    assert not counted.responses.ordinals
    assert len(counted.sink.errors) == 1


def test_a_ticket_holds_the_model() -> None:
    counted = Counted()
    counted.open().hold(True)
    assert counted.call.held


def test_a_batch_with_the_only_responses() -> None:
    bench = Bench(shape=replace(signature(), decoupled=True))
    counted = Counted(bench)
    submitted(counted.submit, request("a", 1), counted.sink, 1)
    bench.clock.settle()
    bench.clock.advance(8)
    bench.instances[0].finish()
    assert counted.told(0, "success") == (1, 8)


def test_a_long_stream_takes_little_memory() -> None:
    counted = Counted()
    counted.open()
    for _ in range(3 * MOST_ORDINALS):
        counted.answer(1, part(1))
    counted.answer(1, None, True)
    assert sorted(counted.responses.ordinals) == list(range(MOST_ORDINALS + 1))
    assert counted.told(MOST_ORDINALS, "success") == (2 * MOST_ORDINALS, 2 * MOST_ORDINALS)
    assert counted.told(MOST_ORDINALS, "empty_response") == (1, 1)


def test_counting_goes_on_and_other_bounds_begin_anew() -> None:
    counted = Counted()
    counted.open()
    counted.answer(1, part(1), True)
    first = counted.responses.first
    count_responses(counted.responses, counted.bench.batcher.submit)
    assert counted.responses.first is first
    count_responses(counted.responses, counted.bench.batcher.submit, (1.0, 2.0))
    assert counted.responses.first is not first
    assert counted.told(0, "success")[0] == 1
