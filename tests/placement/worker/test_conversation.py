"""Calls of a model to other models: pausing and continuing."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from headrace.core.call import Call, context_of
from headrace.core.errors import ServerError
from headrace.core.identity import ANYONE, EVERYTHING, Identity, Role
from headrace.core.limits import Payer
from headrace.engine.admission import Admission
from headrace.placement.worker.conversation import ModelCalls
from headrace.placement.worker.worker_process import WorkerProcess
from headrace.scheduling.batch import Batch
from headrace.workers.triton_requests import TritonError
from tests.scheduling.fakes import signature


class FakeLink:
    """A worker's socket that accepts nothing while `unsent`."""

    def __init__(self) -> None:
        self.unsent = 0
        self.on_empty: Callable[[], None] = lambda: None
        self.sent: list[dict[str, Any]] = []

    def send_loose(
        self, kind: object, document: dict[str, Any], blocks: object, encode: object = None
    ) -> None:
        self.sent.append(document)


class FakeProcess:
    """A worker."""

    def __init__(self) -> None:
        self.link = FakeLink()


class FakeOwner:
    """A request under way."""

    def __init__(self) -> None:
        self.held = False
        self.cancelled = False

    def cancel(self, call: Call) -> None:
        self.cancelled = True

    def hold(self, call: Call, held: bool) -> None:
        self.held = held


class FakeHost:
    """Models that answer when the test does."""

    def __init__(self) -> None:
        self.owners: list[FakeOwner] = []
        self.calls: list[Call] = []
        self.problem: Exception | None = None

    def submit(self, call: Call, inside: bool) -> None:
        if self.problem is not None:
            raise self.problem
        call.owner = owner = FakeOwner()
        self.owners.append(owner)
        self.calls.append(call)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        answer(document["op"], None)

    def metric(self, document: Mapping[str, Any]) -> None: ...


class Asked(Call):
    """A request of a client."""

    def __init__(self, identity: Identity = ANYONE, payer: Payer | None = None) -> None:
        super().__init__("", "", "", {})
        self.context, self.rows = context_of(identity), 1
        self._payer = payer

    @property
    def payer(self) -> Payer | None:
        return self._payer


def batch_of(*calls: Call) -> Batch:
    return Batch(signature(8), list(calls))


class Bench:
    """The calls of one worker, and their surroundings."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.link = self.process.link
        self.host = FakeHost()
        self.calls = ModelCalls(cast("WorkerProcess", self.process), self.host)

    def begin(self, number: int, batch: Batch | None = None) -> FakeOwner:
        """Start a call to a decoupled model."""
        document = {
            "call": number, "op": "infer", "model": "m", "version": -1, "id": "", "inputs": [],
            "outputs": [], "parameters": {}, "timeout": 0, "correlation_id": 0, "flags": 0,
            "decoupled": True, "sizes": [], "inside": batch is not None,
        }  # fmt: skip
        self.calls.begin(document, b"", 0, batch)
        return self.host.owners[-1]

    def fill(self) -> None:
        """Block the worker's socket while a reply arrives."""
        self.link.unsent = 1000
        self.calls.reply(99, False, {"response": None})

    def empty(self) -> None:
        """Unblock the worker's socket."""
        self.link.unsent = 0
        self.link.on_empty()


def test_a_blocked_worker_pauses_every_model() -> None:
    bench = Bench()
    first = bench.begin(1)
    bench.fill()
    second = bench.begin(2)
    assert (first.held, second.held) == (True, True)
    bench.empty()
    assert (first.held, second.held) == (False, False)


def test_two_reasons_for_a_pause_are_independent() -> None:
    bench = Bench()
    slow, quick = bench.begin(1), bench.begin(2)
    bench.calls.hold(1, True)
    bench.fill()
    bench.empty()
    assert (slow.held, quick.held) == (True, False)
    bench.calls.hold(1, False)
    assert not slow.held
    # Nor does the model release what the server holds.
    held_by_server = Bench()
    ticket = held_by_server.begin(1)
    held_by_server.calls.hold(1, True)
    held_by_server.fill()
    held_by_server.calls.hold(1, False)
    assert ticket.held
    held_by_server.empty()
    assert not ticket.held


def test_a_call_that_is_dropped_is_cancelled_and_still_replied_to() -> None:
    bench = Bench()
    ticket = bench.begin(1)
    bench.calls.drop(1)
    assert ticket.cancelled
    gone = TritonError.CANCELLED, "the model that has asked for this has called it off"
    assert bench.link.sent == [{"call": 1, "final": True, "response": {"error": gone}}]


def test_a_bug_while_a_call_is_submitted_is_not_its_workers_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.begin(1)
    bench.host.problem = ZeroDivisionError()
    bench.begin(2)
    [told] = bench.link.sent
    assert (told["call"], told["final"]) == (2, True)
    assert told["response"]["error"][1].endswith("internal error")
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_waits_before_its_queue_is_called_off() -> None:
    """For a place in a sequence, an equal one's answer, or its model: nothing executes it."""
    bench = Bench()
    ticket = bench.begin(1)
    bench.calls.call_off(1)
    assert ticket.cancelled
    [told] = bench.link.sent
    assert told["response"]["error"][0] == TritonError.CANCELLED


def test_a_divided_call_that_has_begun_is_not_called_off() -> None:
    bench = Bench()
    ticket = bench.begin(1)
    [call] = bench.host.calls
    call.started = True  # by its first part
    bench.calls.call_off(1)
    assert not ticket.cancelled
    assert bench.link.sent == []


def test_calls_of_a_batch_without_clients_are_cancelled() -> None:
    bench = Bench()
    batch, other = batch_of(Asked()), batch_of(Asked())
    inside, beside = bench.begin(1, batch), bench.begin(2, other)
    bench.calls.abandon(batch)
    assert (inside.cancelled, beside.cancelled) == (True, False)
    [told] = bench.link.sent
    assert told["response"]["error"][1].startswith("the request that made")
    bench.calls.end()
    assert beside.cancelled


def test_calls_are_those_of_the_client_whose_request_came_first() -> None:
    bench = Bench()
    client = Identity("night", "key", [Role("scorer", EVERYTHING)])
    account = Admission(0, 0).connect("http", "192.0.2.1")
    bench.begin(1, batch_of(Asked(client, account), Asked()))
    bench.begin(2)
    first, second = bench.host.calls
    assert (first.context.identity, first.payer) == (client, account)
    assert (second.context.identity, second.payer) == (ANYONE, None)
