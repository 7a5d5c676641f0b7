"""The calls that an ensemble makes of its steps' models."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.core.call import Call, InferResponse, Timing, context_of
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.identity import EVERYTHING, Identity, Role
from headrace.core.limits import ModelLoad, Payer
from headrace.engine.admission import Admission
from headrace.observability.statistics import VersionStatistics
from headrace.plugins.ensembles.scheduler import EnsembleScheduler
from tests.plugins.ensembles.graphs import graph_of, text
from tests.scheduling.fakes import FakeCall, FakeClock

CLIENT = Identity("night", "key", [Role("scorer", EVERYTHING)])
ACCOUNT = Admission(0, 0).connect("http", "192.0.2.1")


class FakeHost:
    """Models that answer nothing; a `ModelServices`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def submit(self, call: Call, inside: bool) -> None:
        self.calls.append(call)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None: ...

    def metric(self, document: Mapping[str, Any]) -> None: ...


RESPONSE = InferResponse("one", "1", "7", [text("b", "b")], Timing(1, 2, 1))


class HastyHost(FakeHost):
    """Models that answer while they are asked, with this response, which may be the last one."""

    def __init__(self, final: bool = True) -> None:
        super().__init__()
        self.final = final

    def submit(self, call: Call, inside: bool) -> None:
        super().submit(call, inside)
        call.pass_response(RESPONSE, self.final)


class FailingHost(FakeHost):
    """Models that fail while they are asked."""

    def submit(self, call: Call, inside: bool) -> None:
        super().submit(call, inside)
        call.pass_end(ExecutionFailed("broken"))


class Asked(FakeCall):
    """A request of a client."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.take(Call("ensemble", "", "7", {"a": text("a")}))
        self.context, self.nbytes, self.rows = context_of(CLIENT), 1_000, 1

    def respond(self, response: InferResponse, final: bool) -> None:
        self.told.append("final" if final else "response")

    def finish(self) -> None:
        self.told.append("end")

    def fail(self, error: ServerError) -> None:
        self.told.append(str(error))

    @property
    def payer(self) -> Payer | None:
        return ACCOUNT


def test_steps_are_charged_to_the_client_with_the_bytes_of_its_request() -> None:
    host, asked = FakeHost(), Asked()
    graph = graph_of("a", "bc", {"one": ("a", "b"), "two": ("a", "c")})
    scheduler = EnsembleScheduler(
        graph, "1", host, lambda callback, *given: None, VersionStatistics(), ModelLoad()
    )
    scheduler.submit(asked)
    assert [call.model_name for call in host.calls] == ["one", "two"]
    for call in host.calls:
        assert (call.id, call.context.identity, call.payer) == ("7", CLIENT, ACCOUNT)
        assert call.nbytes == 1_000
    asked.cancel()


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_answer_that_came_while_the_request_was_submitted(cancelled: bool) -> None:
    clock, load, asked = FakeClock(), ModelLoad(), Asked()
    scheduler = EnsembleScheduler(
        graph_of("a", "b", {"one": ("a", "b")}), "1", HastyHost(), clock.soon, VersionStatistics(),
        load,
    )  # fmt: skip
    scheduler.submit(asked)
    if cancelled:
        asked.cancel()
    clock.settle()
    assert asked.told == ([] if cancelled else ["final"])
    assert (scheduler.busy, load.requests) == (False, 0)


@pytest.mark.parametrize(("then", "told"), [
    ("end", ["response", "end"]),
    ("fail", ["response", "in ensemble 'ensemble', broken"]),
    ("respond", ["response", "response", "end"]),
    ("cancel", []),
])  # fmt: skip
def test_the_order_of_early_responses_and_the_end(then: str, told: list[str]) -> None:
    """A decoupled step has responded at once, and goes on in the same turn of the event loop."""
    clock, load, asked, host = FakeClock(), ModelLoad(), Asked(), HastyHost(final=False)
    graph = graph_of("a", "b", {"one": ("a", "b")}, ["one"])
    scheduler = EnsembleScheduler(graph, "1", host, clock.soon, VersionStatistics(), load)
    scheduler.submit(asked)
    [step] = host.calls
    if then == "cancel":
        asked.cancel()
    elif then == "fail":
        step.pass_end(ExecutionFailed("broken"))
    else:
        if then == "respond":
            step.pass_response(RESPONSE, False)
        step.pass_end()
    assert asked.told == []
    clock.settle()
    assert asked.told == told
    assert (scheduler.busy, load.requests, asked.execution) == (False, 0, None)


def test_a_step_that_fails_while_the_request_is_submitted() -> None:
    clock, asked = FakeClock(), Asked()
    scheduler = EnsembleScheduler(
        graph_of("a", "b", {"one": ("a", "b")}), "1", FailingHost(), clock.soon,
        VersionStatistics(), ModelLoad(),
    )  # fmt: skip
    scheduler.submit(asked)
    assert asked.told == []
    clock.settle()
    assert asked.told == ["in ensemble 'ensemble', broken"]
    assert not scheduler.busy
