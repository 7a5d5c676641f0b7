"""Transforms and observers of a call: order, waiting, and a single end."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace.core.call import Call, InferResponse, Stage, Stages, Timing
from headrace.core.errors import ExecutionFailed, InvalidRequest, QueueFull, ServerError
from headrace.core.tensors import Tensor

Log = list[Any]
Done = Callable[[Exception | None], None]


class Asked(Call):
    """A call that records its answers and the events of its stages."""

    def __init__(self, log: Log) -> None:
        super().__init__("m", "", "", {})
        self.log = log

    def respond(self, response: InferResponse, final: bool) -> None:
        self.log.append(("response", response.id, final))

    def finish(self) -> None:
        self.log.append("finish")

    def fail(self, error: ServerError) -> None:
        self.log.append(error)

    def refuse(self, error: ServerError) -> None:
        self.log.append(("refused", error))


class Owner:
    """The holder of a call."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def submit(self, call: Call) -> None:
        call.owner = self

    def cancel(self, call: Call) -> None:
        self.log.append("cancelled")

    def hold(self, call: Call, held: bool) -> None:
        self.log.append(held)


class Noted(Stage):
    """A stage that records events; it delays responses with the id `slow`."""

    def __init__(self, name: str, log: Log, refusal: ServerError | None = None) -> None:
        self.name = name
        self.log = log
        self.refusal = refusal
        self.kept: list[Done] = []

    def transform(
        self, call: Call, response: InferResponse, final: bool, done: Done
    ) -> Owner | None:
        if self.refusal is not None:
            raise self.refusal
        self.log.append(self.name)
        if response.id != "slow":
            return None
        self.kept.append(done)
        return Owner(self.log)

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        self.log.append(f"{self.name} passed")

    def ended(self, call: Call, error: ServerError | None) -> None:
        self.log.append(f"{self.name} ended")

    def cancelled(self, call: Call) -> None:
        self.log.append(f"{self.name} cancelled")

    def over(self, call: Call) -> None:
        self.log.append(f"{self.name} over")


def staged(log: Log, *stages: Stage) -> Asked:
    """A call submitted through stages, from left to right."""
    submit: Callable[[Call], None] = Owner(log).submit
    for stage in reversed(stages):
        submit = entering(stage, submit)
    call = Asked(log)
    submit(call)
    return call


def entering(stage: Stage, submit: Callable[[Call], None]) -> Callable[[Call], None]:
    return lambda call: call.enter(stage, submit)


def response(id: str = "") -> InferResponse:
    return InferResponse("m", "1", id, [], Timing(1, 2, 3))


def test_a_call_without_transforms_is_answered_at_once() -> None:
    log: Log = []
    call = staged(log)
    call.pass_response(response("a"), False)
    call.pass_end()
    call.pass_end(error := ExecutionFailed("no"))
    call.pass_refusal(error)
    assert log == [("response", "a", False), "finish", error, ("refused", error)]


def test_transforms_run_in_reverse_order() -> None:
    log: Log = []
    call = staged(log, Noted("outer", log), Noted("inner", log))
    call.pass_response(response("a"), False)
    assert log == ["inner", "outer", ("response", "a", False), "inner passed", "outer passed"]
    del log[:]
    call.pass_end()
    assert log == ["finish", "inner ended", "outer ended", "inner over", "outer over"]
    del log[:]
    call.pass_response(response("late"), True)
    call.pass_end(ExecutionFailed("late"))
    assert log == []


class Passive(Stage):
    """A stage that records the end of the call."""

    passive = True

    def __init__(self, log: Log) -> None:
        self.log = log

    def over(self, call: Call) -> None:
        self.log.append("over")


class Batch:
    """A computed batch, whose response is taken from it as a whole, or made for a stage."""

    rows, version, started, compute_ns, gather_ns = 1, "1", 0, 0, 0

    def __init__(self, log: Log) -> None:
        self.log = log
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []
        self.encoded: dict[object, Any] = {}

    def response(self, call: Call) -> InferResponse:
        self.log.append("made")
        return response("a")


class Whole(Asked):
    """A call that takes its response from a batch."""

    def respond_from(self, batch: object) -> None:
        self.log.append("taken")


@pytest.mark.parametrize(("others", "expected"), [
    (False, ["taken", "over"]),
    (True, ["made", "noted", ("response", "a", True), "noted passed", "over", "noted over"]),
])  # fmt: skip
def test_passive_stages_do_not_see_responses(others: bool, expected: Log) -> None:
    log: Log = []
    call = Whole(log)
    stages = call.stages = Stages()
    if others:
        stages.add(Noted("noted", log))
    stages.add(Passive(log))
    for _ in range(2):
        stages.respond_from(call, Batch(log))
    assert log == [*expected, "made"]  # and dropped, since the call has ended


def test_later_responses_wait_for_a_slow_transform() -> None:
    log: Log = []
    stage = Noted("stage", log)
    call = staged(log, stage)
    call.pass_response(response("slow"), False)
    call.pass_response(response("quick"), False)
    call.pass_end()
    assert log == ["stage"]
    stage.kept[0](None)
    answers = [item for item in log if isinstance(item, tuple) or item == "finish"]
    assert answers == [("response", "slow", False), ("response", "quick", False), "finish"]


@pytest.mark.parametrize(("final", "cancelled"), [(True, []), (False, ["cancelled"])])
def test_a_failing_transform_ends_the_call(final: bool, cancelled: Log) -> None:
    log: Log = []
    refusal = InvalidRequest("no such form")
    call = staged(log, Noted("stage", log, refusal))
    call.pass_response(response(), final)
    assert log == [*cancelled, refusal, "stage ended", "stage over"]


@pytest.mark.parametrize("problem", [InvalidRequest("no such form"), ValueError("secret")])
def test_work_that_fails_ends_the_call(problem: Exception) -> None:
    log: Log = []
    stage = Noted("stage", log)
    call = staged(log, stage)
    call.pass_response(response("slow"), True)
    stage.kept[0](problem)
    [_, error, *_] = log
    assert error is problem or isinstance(error, ExecutionFailed)
    assert "secret" not in str(error)


class Broken(Asked):
    """A call that cannot encode its response."""

    def respond(self, response: InferResponse, final: bool) -> None:
        raise ValueError("a bug")

    def respond_from(self, batch: object) -> None:
        raise ValueError("a bug")


@pytest.mark.parametrize("passive", [True, False])
def test_a_call_whose_response_cannot_be_encoded_can_be_ended_once(passive: bool) -> None:
    log: Log = []
    call = Broken(log)
    stages = call.stages = Stages()
    stages.add(Passive(log))
    answer = partial(call.pass_response, response(), True)
    with pytest.raises(ValueError, match="a bug"):
        stages.respond_from(call, Batch(log)) if passive else answer()
    error = ExecutionFailed("internal error")
    for _ in range(2):
        call.pass_end(error)
    assert log == ["over", error]


def test_nothing_is_passed_on_after_a_cancellation() -> None:
    log: Log = []
    stage = Noted("stage", log)
    call = staged(log, stage)
    call.pass_response(response("slow"), False)
    call.pass_response(response("quick"), False)
    call.cancel()
    call.cancel()
    stage.kept[0](None)
    expected = ["stage", "cancelled", "cancelled", "stage cancelled", "stage over"]
    assert log == expected  # first the owner, then the work, then the stages


def test_an_exception_leaves_all_stages() -> None:
    log: Log = []

    def full(call: Call) -> None:
        raise QueueFull("full")

    call = Asked(log)
    inner = entering(Noted("inner", log), full)
    with pytest.raises(QueueFull):
        call.enter(Noted("outer", log), inner)
    assert log == ["inner ended", "inner over", "outer ended", "outer over"]
    call.pass_refusal(error := QueueFull("full"))
    assert log[-1] == ("refused", error)


def test_a_call_without_an_owner_is_held() -> None:
    call = Asked([])
    call.hold(True)
    call.cancel()
    assert call.held
