"""The stage of a version with a cache, before a real scheduler on a manual clock."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.core.cache_options import CacheOptions
from headrace.core.call import Call, CallOptions, Stage
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest, Overloaded, QueueFull
from headrace.core.limits import ModelLoad, Payer
from headrace.core.tensors import Array, Tensor
from headrace.engine.caching import CachedParts
from headrace.engine.chain import StageModel
from headrace.engine.workbench import LARGE, Workbench
from headrace.observability.statistics import CacheCounts
from headrace.plugins.cache.answers import packed
from headrace.plugins.cache.flights import SharedCache
from headrace.repository.model_files import Content
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy
from tests.scheduling.fakes import (
    POISON,
    Bench,
    FakeCall,
    Model,
    double,
    ends_by_tick,
    part,
    request,
    signature,
)

MS = 1_000_000


class FullLoad(ModelLoad):
    """The requests of a model, of which there may be so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.free_requests = most

    def check(self, payer: Payer | None) -> None:
        raise Overloaded("too many")


class CacheBench(Bench):
    """A batcher behind a cache."""

    def __init__(
        self,
        policy: SchedulingPolicy | None = None,
        size: int = 1 << 20,
        load: ModelLoad | None = None,
        model: Model = double,
    ) -> None:
        super().__init__(policy, model=model)
        self.cache = SharedCache(CacheOptions(size))
        self.counts = self.statistics.cache = CacheCounts(summaries=True)
        self.load = load or ModelLoad()
        self.follow()

    def follow(self, config: bytes = b"", composed: bool = False) -> None:
        """Serve another configuration of the model."""
        model = StageModel("double", 3, {}, signature())
        self.version = self.cache.version(model, Content(Path(), {}, config, frozenset()), composed)
        parts = CachedParts(
            self.clock, self.batcher.expect, self.load, Workbench(), self.statistics, ()
        )
        self.stage = self.version.stage(parts, self.batcher.submit)

    def ask(self, name: str, *values: int, width: int = 1, **options: int) -> FakeCall:
        """Submit a request through the cache without ending the tick."""
        return self.enter(FakeCall(name, self.log), request(name, *values, width=width, **options))

    def enter(self, call: FakeCall, asked: Call) -> FakeCall:
        call.take(asked)
        call.rows = len(asked.inputs["x"].array)
        self.stage(call)
        return call

    @property
    def runs(self) -> list[list[str]]:
        return self.instances[0].runs

    @property
    def counted(self) -> tuple[int, int]:
        """Hits and misses."""
        return self.counts.hits.count, self.counts.misses.count


class Remote:
    """Answers on another server, which has none, once it is asked to `answer`."""

    usable = True

    def __init__(self) -> None:
        self.answer: Callable[[bytes | None], None] = lambda answer: None

    def get(self, key: bytes, done: Callable[[bytes | None], None]) -> None:
        self.answer = done


def test_an_equal_request_is_answered_without_a_run() -> None:
    bench = CacheBench()
    first = bench.ask("a", 3)
    bench.clock.tick()
    bench.clock.advance(5)
    bench.instances[0].finish()
    assert first.values == [6]
    second = bench.ask("b", 3)
    assert second.calls == 0  # at the end of the tick, like from a light model
    bench.clock.tick()
    assert second.values == [6]
    assert (second.responses[0].id, second.responses[0].model_version) == ("b", "3")
    other = bench.ask("c", 4)
    bench.finish_all()
    assert other.values == [8]
    assert bench.runs == [["a"], ["c"]]
    assert bench.counted == (1, 2)
    assert bench.statistics.success_count == 3
    assert (bench.statistics.inference_count, bench.statistics.execution_count) == (2, 2)
    assert bench.load.requests == 0


def test_equal_concurrent_requests_are_one_run() -> None:
    bench = CacheBench()
    calls = [bench.ask(name, 1, 2) for name in "ab"]
    bench.clock.tick()
    calls.append(bench.ask("c", 1, 2))
    assert bench.load.requests == 2  # the run is the batcher's
    bench.finish_all()
    assert bench.runs == [["a"]]
    assert [call.values for call in calls] == [[2, 4]] * 3
    assert [call.responses[0].id for call in calls] == ["a", "b", "c"]
    assert all(call.responses[0].timing.queue_ns >= 0 for call in calls)
    assert bench.counted == (2, 1)
    assert (bench.load.requests, bench.batcher.busy) == (0, False)


def test_runs_share_batches() -> None:
    bench = CacheBench()
    calls = [bench.ask(name, value) for name, value in (("a", 1), ("b", 2), ("c", 1), ("d", 3))]
    bench.finish_all()
    assert bench.runs == [["a", "b", "d"]]
    again = [bench.ask(name, value) for name, value in (("e", 2), ("f", 3))]
    bench.clock.settle()
    assert [call.values for call in calls + again] == [[2], [4], [2], [6], [4], [6]]


def test_a_failure_is_the_first_requests_own_and_is_not_kept() -> None:
    bench = CacheBench()
    calls = [bench.ask(name, POISON) for name in "ab"]
    bench.clock.tick()
    bench.instances[0].finish()
    assert [len(call.errors) for call in calls] == [1, 0]
    bench.finish_all()
    assert bench.runs == [["a"], ["b"]]
    assert isinstance(calls[1].errors[0], ExecutionFailed)
    third = bench.ask("c", POISON)
    bench.finish_all()
    assert len(third.errors) == 1
    assert bench.counted == (0, 0)
    assert (bench.load.requests, bench.batcher.busy) == (0, False)
    assert sum(bench.statistics.failures.values()) == 3


def test_a_failure_of_the_run_of_a_cancelled_request_is_not_anothers() -> None:
    bench = CacheBench()
    first, second = bench.ask("a", POISON), bench.ask("b", POISON)
    bench.clock.tick()
    first.cancel()  # as at its deadline, for which an upstream may end the run as well
    bench.instances[0].finish()
    assert (first.errors, second.errors) == ([], [])
    bench.finish_all()
    assert bench.runs == [["a"], ["b"]]
    assert len(second.errors) == 1
    assert (bench.load.requests, bench.batcher.busy) == (0, False)


@pytest.mark.parametrize("value", [1, POISON])
def test_the_answer_to_one_request_cancels_an_equal_one(value: int) -> None:
    """Ensembles do that when one of their steps has failed."""
    bench = CacheBench()
    first, second, third = [bench.ask(name, value) for name in "abc"]
    first.then = second.cancel
    bench.finish_all()
    assert (first.calls, second.calls, third.calls) == (1, 0, 1)
    assert bench.runs == ([["a"]] if value == 1 else [["a"], ["c"]])
    assert bench.statistics.failures["CANCELED"] == 1
    assert (bench.load.requests, bench.batcher.busy) == (0, False)


def test_a_refused_run_refuses_its_request() -> None:
    limits = SchedulingPolicy(BatchPolicy(1), QueuePolicy(max_size=1))
    bench = CacheBench(limits)
    bench.ask("a", 1)
    bench.clock.tick()
    bench.ask("b", 2)
    with pytest.raises(QueueFull):
        bench.ask("c", 3)
    joined = bench.ask("d", 2)
    bench.finish_all()
    assert joined.values == [4]


def test_cancelled_requests() -> None:
    bench = CacheBench()
    first, second, third = [bench.ask(name, 1) for name in "abc"]
    bench.clock.tick()
    first.cancel()
    third.cancel()
    assert bench.load.requests == 0  # the run, which the batcher counts, is the second one's
    bench.finish_all()
    assert (first.calls, second.values, third.calls) == (0, [2], 0)
    late = bench.ask("d", 1)
    late.cancel()
    bench.clock.settle()
    assert late.calls == 0
    assert bench.statistics.failures["CANCELED"] == 3
    assert bench.statistics.success_count == 1


def test_the_last_cancelled_request_takes_the_run_with_it() -> None:
    bench = CacheBench()
    bench.ask("a", 1)
    bench.clock.tick()
    calls = [bench.ask(name, 2) for name in "bc"]
    for call in calls:
        call.cancel()
    again = bench.ask("d", 2)
    bench.finish_all()
    assert bench.runs == [["a"], ["d"]]
    assert again.values == [4]
    assert bench.statistics.failures["CANCELED"] == 2
    assert bench.counted == (0, 2)


def test_requests_with_a_wait_of_their_own_share_no_run() -> None:
    bench = CacheBench(SchedulingPolicy(BatchPolicy(1), levels=2, default_level=2))
    bench.ask("a", 1)
    bench.clock.tick()
    bench.ask("b", 2)
    urgent = bench.ask("c", 2, priority=1)
    short = bench.ask("d", 2, timeout=1_000)
    bench.finish_all()
    assert bench.runs[:2] == [["a"], ["c"]]
    assert (urgent.values, short.values) == ([4], [4])
    bench.ask("e", 2, priority=1)
    bench.clock.settle()
    assert bench.counted == (1, 4)


@pytest.mark.parametrize(
    "options", [CallOptions(sequence_id=7), CallOptions(sequence_id="s", sequence_start=True)]
)
def test_requests_of_sequences_pass_by(options: CallOptions) -> None:
    bench = CacheBench()
    for name in "ab":
        asked = request(name, 1).like(options=options)
        bench.enter(FakeCall(name), asked)
        bench.finish_all()
    assert bench.runs == [["a"], ["b"]]
    assert bench.counted == (0, 0)


def test_requests_may_opt_out() -> None:
    bench = CacheBench()
    bench.ask("a", 1)
    bench.finish_all()
    for name, wanted in (("b", False), ("c", True)):
        asked = request(name, 1).like(parameters={"response_cache": wanted})
        call = bench.enter(FakeCall(name), asked)
        assert call.parameters == {}
        bench.finish_all()
    assert bench.runs == [["a"], ["b"]]
    with pytest.raises(InvalidRequest, match="'response_cache' must be true or false, got 'no'"):
        bench.enter(FakeCall("d"), request("d", 1).like(parameters={"response_cache": "no"}))


def test_the_stages_of_each_request_see_its_response() -> None:
    class Noted(Stage):
        seen = 0

        def passed(self, call: Call, response: object, final: bool) -> None:
            self.seen += 1

    bench = CacheBench()
    stage = Noted()
    for name in ("a", "b"):
        asked, call = request(name, 1), FakeCall(name)
        call.take(asked)
        call.rows = 1
        call.enter(stage, bench.stage)
    bench.finish_all()
    call = FakeCall("c")
    call.take(request("c", 1))
    call.rows = 1
    call.enter(stage, bench.stage)
    bench.clock.settle()
    assert (stage.seen, call.values) == (3, [2])


def test_a_model_at_its_share_takes_no_more_waiting_requests() -> None:
    bench = CacheBench(load=FullLoad(1))
    bench.ask("a", 1)
    bench.ask("b", 1)
    with pytest.raises(Overloaded):
        bench.ask("c", 1)
    bench.finish_all()
    assert bench.ask("d", 1).errors == []


def test_another_configuration_begins_without_answers() -> None:
    bench = CacheBench()
    bench.ask("a", 1)
    bench.finish_all()
    old = bench.version
    bench.follow(b"other")
    bench.ask("b", 1)
    bench.finish_all()
    assert bench.runs == [["a"], ["b"]]
    assert len(bench.cache.answers) == 2
    old.close()
    bench.clock.settle()
    assert len(bench.cache.answers) == 1
    bench.version.close()
    assert (len(bench.cache.answers), bench.cache.answers.nbytes) == (0, 0)


def test_a_composed_model_begins_anew_when_any_model_changes() -> None:
    bench = CacheBench()
    bench.follow(composed=True)
    bench.ask("a", 1)
    bench.finish_all()
    bench.ask("b", 2)
    bench.clock.tick()
    bench.cache.renew(lambda model: ())
    bench.clock.settle()
    assert len(bench.cache.answers) == 0
    bench.ask("c", 2)  # not with the run of before
    bench.finish_all()
    bench.ask("d", 1)
    bench.finish_all()
    assert bench.runs == [["a"], ["b"], ["c"], ["d"]]
    bench.ask("e", 1)
    bench.clock.settle()
    assert bench.counted == (1, 4)


def test_other_models_keep_their_answers_when_one_changes() -> None:
    bench = CacheBench()
    bench.ask("a", 1)
    bench.finish_all()
    bench.cache.renew(lambda model: ())
    bench.ask("b", 1)
    bench.clock.settle()
    assert bench.counted == (1, 1)


def test_an_answer_that_comes_after_the_end_is_not_kept() -> None:
    bench = CacheBench()
    call = bench.ask("a", 1)
    bench.clock.tick()
    bench.version.close()
    bench.finish_all()
    assert call.values == [2]
    assert len(bench.cache.answers) == 0


def test_an_answer_is_apart_from_the_arrays_of_its_caller() -> None:
    bench = CacheBench()
    first = bench.ask("a", 1)
    bench.finish_all()
    np.asarray(first.responses[0].outputs[0].array)[:] = 9
    second = bench.ask("b", 1)
    bench.clock.settle()
    assert second.values == [2]


def test_a_bug_in_one_answer_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bench = CacheBench()
    first, second = [bench.ask(name, 1) for name in "ab"]

    def broken() -> None:
        if not first.errors:
            raise ZeroDivisionError

    first.then = broken
    bench.finish_all()
    assert (len(first.errors), second.values) == (1, [2])
    assert "bug while answering a request" in caplog.text


def test_counters_of_waiting_and_found_requests() -> None:
    bench = CacheBench()
    bench.ask("a", 1)
    bench.clock.tick()
    bench.clock.advance(10 * MS)
    bench.ask("b", 1)
    bench.clock.advance(5 * MS)
    bench.instances[0].finish()
    bench.clock.settle()
    statistics = bench.statistics
    assert (statistics.success_count, statistics.success_ns) == (2, 20 * MS)
    assert (statistics.queue_ns, bench.counts.hits.ns) == (5 * MS, 0)
    bench.ask("c", 1)
    bench.clock.advance(MS)
    bench.clock.settle()
    assert (bench.counts.hits.count, bench.counts.hits.ns) == (2, MS)
    assert sum(statistics.request_histogram.counts) == 3
    assert sum(statistics.queue_histogram.counts) == 1


# --- thousands of equal requests


@pytest.mark.parametrize("how", ["a run", "a run that gives responses", "elsewhere"])
def test_many_equal_requests_are_answered_in_turns(how: str) -> None:
    bench = CacheBench()
    remote = Remote()
    if how == "elsewhere":
        bench.version.redis = remote  # type: ignore[assignment]
    calls = [bench.ask(str(number), 1) for number in range(500)]
    answered, told = ends_by_tick(bench.clock, calls), bench.drained()
    bench.clock.tick()
    calls[100].cancel()
    calls[0].then = calls[400].cancel
    bench.clock.advance(5)
    if how == "a run":
        bench.instances[0].finish()
    elif how == "elsewhere":
        remote.answer(packed("3", 1, {}, [Tensor("y", Datatype.INT64, np.array([[2]]))]))
    else:
        bench.instances[0].report(parts=[part(2)])
    calls[450].cancel()
    bench.version.close()  # no request needs it any more, but for its answer
    assert not told
    bench.clock.settle()
    assert max(answered.values()) <= 100
    assert [place for place, call in enumerate(calls) if not call.calls] == [100, 400, 450]
    assert {value for call in calls if call.calls for value in call.values} == {2}
    assert (told, bench.load.requests) == ([True], 0)
    assert bench.statistics.failures["CANCELED"] == 3
    assert bench.statistics.success_count == 497


def test_many_equal_requests_are_apart_from_the_arrays_of_the_first_ones_caller() -> None:
    bench = CacheBench()
    calls = [bench.ask(str(number), 1) for number in range(500)]
    bench.clock.tick()
    bench.instances[0].finish()
    np.asarray(calls[0].responses[0].outputs[0].array)[:] = 9
    bench.clock.settle()
    assert {value for call in calls[100:] for value in call.values} == {2}


@pytest.mark.parametrize("how", ["the run fails", "no run is possible"])
def test_many_equal_requests_without_an_answer_go_on_in_turns(how: str) -> None:
    bench = CacheBench()
    remote, submitted = Remote(), Counter[int]()

    def submit(call: Call) -> None:
        submitted[bench.clock.ticks] += 1
        if how == "no run is possible":
            raise Overloaded("full")
        bench.batcher.submit(call)

    bench.version.redis = remote  # type: ignore[assignment]
    bench.stage = bench.version.stage(bench.version.parts, submit)
    calls = [bench.ask(str(number), POISON) for number in range(500)]
    refused, told = ends_by_tick(bench.clock, calls), bench.drained()
    calls[100].cancel()
    remote.answer(None)
    bench.clock.tick()
    if how == "the run fails":
        bench.instances[0].finish()
    calls[450].cancel()
    assert not told
    bench.finish_all()
    assert max(submitted.values()) <= 100
    assert [place for place, call in enumerate(calls) if not call.calls] == [100, 450]
    if how == "no run is possible":
        assert max(refused.values()) <= 100
        assert {type(error) for call in calls for error in call.errors} == {Overloaded}
    assert refused.total() == 498
    assert (told, bench.load.requests) == ([True], 0)
    assert (bench.version.flights, bench.version.waiting) == ({}, {})


# --- large requests and answers, on threads


def on_a_loop(run: Callable[[CacheBench], object], model: Model = double) -> CacheBench:
    """A bench whose clock is turned while threads work."""

    async def main() -> CacheBench:
        bench = CacheBench(model=model, size=64 << 20)
        run(bench)
        for _ in range(20_000):
            await asyncio.sleep(0.001)
            bench.finish_all()
            if not bench.batcher.busy:
                return bench
        raise AssertionError("it does not end")

    return asyncio.run(main())


WIDTH = LARGE // 8 + 1


def test_large_requests() -> None:
    calls: list[FakeCall] = []

    values = {"a1": 1, "b1": 1, "c2": 2}

    def run(bench: CacheBench) -> None:
        calls.extend(bench.ask(name, value, width=WIDTH) for name, value in values.items())
        assert bench.batcher.busy
        calls[2].cancel()

    bench = on_a_loop(run)
    assert [call.calls for call in calls] == [1, 1, 0]
    assert calls[1].values == [2] * WIDTH
    assert bench.counted == (1, 1)


def test_large_answers() -> None:
    calls: list[FakeCall] = []

    def grown(inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        return [np.ones((1, 300_000), np.int64)]

    def run(bench: CacheBench) -> None:
        calls.extend(bench.ask(name, 1) for name in "ab")

    bench = on_a_loop(run, grown)
    assert [call.values for call in calls] == [[1] * 300_000] * 2
    assert bench.counted == (1, 1)
    assert bench.cache.answers.nbytes > 2_400_000


def test_a_bug_after_a_search_elsewhere_ends_all_equal_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = CacheBench()
    remote = Remote()
    bench.version.redis = remote  # type: ignore[assignment]

    def broken(call: Call) -> None:
        raise ValueError("a bug")

    bench.stage = bench.version.stage(bench.version.parts, broken)
    calls = [bench.ask(name, 1) for name in "ab"]
    assert bench.batcher.busy
    remote.answer(None)
    assert [str(error) for call in calls for error in call.errors] == ["internal error"] * 2
    assert "a bug" in caplog.text
    assert (bench.version.flights, bench.load.requests, bench.batcher.busy) == ({}, 0, False)
