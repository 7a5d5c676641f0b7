"""Open requests: answered after their batch, individually, and more than once."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.core.call import InferResponse
from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.scheduling.batch import Deferral, Part
from tests.scheduling.fakes import Bench, FakeExecution, ManyCall, part, signature

LATER, AGAIN = Deferral.LATER, Deferral.AGAIN


def opened(bench: Bench) -> tuple[ManyCall, FakeExecution]:
    """A request whose batch is done."""
    call = ManyCall()
    bench.submit_to(call, [1], 1, priority=0, timeout=0)
    bench.clock.settle()
    call.execution = execution = FakeExecution()
    bench.instances[0].report(parts=[LATER])
    return call, execution


def test_responses_are_delivered_one_by_one() -> None:
    bench = Bench()
    call, _ = opened(bench)
    assert not call.calls
    bench.batcher.answer(call, part(1), False)
    assert bench.batcher.busy == (len(call.responses) == 1)
    bench.batcher.answer(call, part(2), True)
    assert [int(np.asarray(r.outputs[0].array)[0, 0]) for r in call.responses] == [1, 2]
    assert call.finals == [False, True]
    assert not bench.batcher.busy
    assert (bench.statistics.success_count, bench.statistics.execution_count) == (1, 1)
    bench.batcher.answer(call, part(3), True)
    assert len(call.responses) == 2
    call, _ = opened(bench)
    bench.batcher.answer(call, None, True)  # an end without a response
    assert call.finished
    assert not call.calls
    assert bench.statistics.success_count == 2
    call, _ = opened(bench)
    bench.batcher.answer(call, AGAIN, True)  # it may be given back
    bench.clock.settle()
    bench.instances[0].report(parts=[part(7)])
    assert call.finals == [True]


def test_an_answer_before_the_batch_is_done() -> None:
    bench = Bench()
    call = ManyCall()
    bench.submit_to(call, [1], 1, priority=0, timeout=0)
    bench.clock.settle()
    bench.batcher.answer(call, part(1), True)
    assert call.finals == [True]
    bench.instances[0].report(parts=[LATER])
    assert not bench.batcher.busy
    assert bench.statistics.success_count == 1


@pytest.mark.parametrize(("fate", "stateful"), [(LATER, False), (AGAIN, False), (AGAIN, True)])
def test_the_answer_to_one_request_cancels_another_of_its_batch(
    fate: Deferral, stateful: bool
) -> None:
    """Ensembles do that when one of their steps has failed."""
    bench = Bench(shape=replace(signature(), stateful=stateful))
    failing, other = ManyCall(), ManyCall()
    for call in (failing, other):
        bench.submit_to(call, [1], 1, priority=0, timeout=0)
    bench.clock.settle()
    failing.then = other.cancel
    bench.instances[0].report(parts=[InvalidRequest("no"), fate])
    bench.clock.settle()
    assert (bench.batcher.busy, bench.batcher.pending) == (False, 0)
    assert not other.calls
    assert bench.drained() == [True]
    last = bench.submit("a", 2)
    bench.finish_all()
    assert last.values == [4]


def test_an_error_or_a_response_that_breaks_the_signature_ends_a_request() -> None:
    bench = Bench()
    call, _ = opened(bench)
    bench.batcher.answer(call, part(1), False)
    bench.batcher.answer(call, InvalidRequest("no"), False)
    assert len(call.responses) == 1
    assert isinstance(call.errors[0], InvalidRequest)
    assert not bench.batcher.busy
    call, execution = opened(bench)
    wrong = Part({"y": np.zeros((1, 1), np.float32)}, {})
    bench.batcher.answer(call, wrong, False)
    assert isinstance(call.errors[0], ExecutionFailed)
    assert execution.cancelled == [call]
    assert not bench.batcher.busy


def test_the_execution_learns_of_a_cancellation() -> None:
    bench = Bench()
    drained: list[int] = []
    call, execution = opened(bench)
    bench.batcher.when_drained(lambda: drained.append(1))
    call.hold(True)
    call.hold(False)
    assert execution.held == [True, False]
    call.cancel()
    assert execution.cancelled == [call]
    assert drained == [1]
    bench.batcher.answer(call, part(1), False)
    call.hold(True)
    assert not call.calls
    assert len(execution.held) == 2


def test_a_request_that_is_given_back_runs_again_alone() -> None:
    bench = Bench()
    calls = [bench.submit(name) for name in "ab"]
    bench.clock.settle()
    bench.instances[0].report(parts=[AGAIN, part(5)])
    bench.finish_all()
    assert bench.instances[0].runs == [["a", "b"], ["a"]]
    assert (calls[0].values, calls[1].values) == ([2], [5])


def test_an_exception_in_one_call_does_not_affect_others() -> None:
    bench = Bench()
    call, _ = opened(bench)

    def respond(response: InferResponse, final: bool) -> None:
        raise RuntimeError("a bug")

    call.respond = respond  # type: ignore[method-assign]
    bench.batcher.answer(call, part(1), False)
    bench.batcher.answer(call, None, True)
    assert call.finished
