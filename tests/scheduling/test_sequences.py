"""Sequences before a scheduler: order, waiting starts, and forgetting."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Call, CallOptions, InferResponse, Timing
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    QueueFull,
    RemoteLost,
    Unavailable,
)
from headrace.scheduling.sequences import SequenceQueue, SequenceRules, SequenceTable
from headrace.scheduling.upstreams import Pin
from tests.scheduling.fakes import FakeCall, FakeClock, ends_by_tick, submitted

IDLE = 1_000


@dataclass(eq=False)
class Server:
    """An upstream with the states of sequences."""

    usable: bool = True


class Scheduler:
    """Records its requests and answers them on request, as from the server `here`."""

    busy = False

    def __init__(self, table: SequenceTable) -> None:
        self.expected = 0
        self.here = Server()
        self.got: list[Call] = []
        self.targets: list[object] = []
        self.cancelled: list[str] = []
        self.held: list[tuple[str, bool]] = []
        self.full = False
        self._table = table

    @property
    def ids(self) -> list[str]:
        """Ids of the requests it has."""
        return [request.id for request in self.got]

    @property
    def pending(self) -> int:
        return len(self.got)

    def submit(self, call: Call, target: object = None) -> None:
        if self.full:
            raise QueueFull("full")
        self.got.append(call)
        self.targets.append(target)
        call.owner = self
        if call.held is not None:
            self.held.append((call.id, call.held))

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call.id)
        self.got = [request for request in self.got if request is not call]

    def hold(self, call: Call, held: bool) -> None:
        self.held.append((call.id, held))

    def expect(self, count: int) -> None:
        self.expected += count
        assert self.expected >= 0

    def when_drained(self, callback: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def answer(self, index: int = 0) -> None:
        """Answer a request, and pin or end its sequence."""
        request = self.got.pop(index)
        pin = None if request.options.sequence_end else Pin(self.here)
        self._table.put(request.options.sequence_id, pin)
        request.pass_response(InferResponse("m", "1", request.id, [], Timing(0, 0, 1)), True)

    def fail(self) -> None:
        """Fail a request that has not begun."""
        self.got.pop(0).pass_end(ExecutionFailed("failed"))


class World:
    """A queue between a test and a scheduler."""

    def __init__(self, most_starts: int = 8, **rules: Any) -> None:
        self.clock = FakeClock()
        self.table = SequenceTable(IDLE, self.clock.now)
        self.scheduler = Scheduler(self.table)
        self.log: list[str] = []
        self.failed: list[tuple[str, int]] = []  # reasons and waiting times
        self.queue = SequenceQueue(
            "m", self.table, SequenceRules(IDLE, **rules), most_starts,
            self.scheduler, lambda reason, waited: self.failed.append((reason, waited)),
            self.clock.soon,
        )  # fmt: skip

    def send(self, name: str, id: int | str, kind: str = "") -> tuple[Call, FakeCall]:
        """Submit a request; `kind` has "s" for a start and "e" for an end."""
        options = CallOptions(sequence_id=id, sequence_start="s" in kind, sequence_end="e" in kind)
        request = Call("m", "", name, {}, options=options)
        call = submitted(self.queue.submit, request, FakeCall(name, self.log), 1)
        return call, call


def test_one_request_of_a_sequence_at_a_time() -> None:
    world = World()
    for name, kind in (("a1", "s"), ("a2", ""), ("a3", "e")):
        world.send(name, 1, kind)
    world.send("b1", "1", "s")
    assert world.scheduler.ids == ["a1", "b1"]
    assert (world.queue.waiting, world.scheduler.expected) == (2, 2)
    world.scheduler.answer()
    assert world.scheduler.ids == ["b1", "a2"]
    world.scheduler.answer(1)
    world.scheduler.answer(1)
    assert world.log == ["a1", "a2", "a3"]
    assert (world.queue.waiting, world.scheduler.expected) == (0, 0)
    assert 1 not in world.table
    assert "1" in world.table


def test_requests_after_the_first_are_for_the_server_with_the_state() -> None:
    world = World()
    for kind in ("s", "", "s", "e"):
        world.send(kind, 1, kind)
        world.scheduler.answer()
    world.send("another", 1, "s")
    here = world.scheduler.here
    assert world.scheduler.targets == [None, here, here, here, None]


def test_a_sequence_is_lost_with_its_server() -> None:
    world = World()
    world.send("a", 1, "s")
    _, follows = world.send("b", 1)
    world.scheduler.here.usable = False
    world.scheduler.answer()
    [error] = follows.errors
    assert isinstance(error, RemoteLost)
    assert str(error).startswith("sequence 1 of model 'm' is lost: its server cannot be reached")
    assert (follows.started, world.failed) == (False, [("OTHER", 0)])
    world.scheduler.here.usable = True
    with pytest.raises(RemoteLost, match="it has to be begun again"):
        world.send("c", 1)  # the server may have come back without its states
    world.send("d", 1, "s")
    assert world.scheduler.targets == [None, None]
    world.scheduler.answer()
    world.send("e", 1)
    assert world.scheduler.targets == [None, None, world.scheduler.here]


@pytest.mark.parametrize("again", [False, True])
def test_many_requests_of_a_lost_sequence_end_in_turns(again: bool) -> None:
    world = World()
    world.send("a", 1, "s")
    calls = [
        world.send(str(number), 1, "s" * (again and number == 420))[1] for number in range(500)
    ]
    ended = ends_by_tick(world.clock, calls)
    calls[300].cancel()
    calls[0].then = calls[1].cancel
    world.scheduler.here.usable = False
    world.scheduler.answer()
    waiting = [call for call in calls if not call.calls and call not in (calls[1], calls[300])]
    waiting[0].cancel()  # the next one
    late = world.send("late", 1)[1]
    assert world.queue.waiting == world.scheduler.expected > 400
    world.clock.settle()
    assert max(ended.values()) <= 100
    silent = {1, 300, calls.index(waiting[0]), *(range(420, 500) if again else ())}
    assert {place for place, call in enumerate(calls) if not call.calls} == silent
    assert {type(error) for call in calls for error in call.errors} == {RemoteLost}
    if not again:
        assert (late.calls, world.queue.waiting, world.scheduler.expected) == (1, 0, 0)
        return
    world.scheduler.here.usable = True
    while world.scheduler.got:
        world.scheduler.answer()
    assert [call.calls for call in (*calls[420:], late)] == [1] * 81
    assert (world.queue.waiting, world.scheduler.expected) == (0, 0)


def test_the_instance_learns_of_the_sequence() -> None:
    world = World()
    world.send("a", 7, "se")
    [request] = world.scheduler.got
    assert request.parameters == {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    world.scheduler.answer()
    world.send("b", 8, "s")
    assert world.scheduler.got[0].parameters == {"sequence_id": 8, "sequence_start": True}


@pytest.mark.parametrize("id", [0, ""])
def test_sequences_need_ids(id: int | str) -> None:
    world = World()
    with pytest.raises(InvalidRequest, match="must specify a non-zero or non-empty correlation ID"):
        world.send("a", id, "s")
    unnamed = World(named=False)
    unnamed.send("a", id)
    assert unnamed.scheduler.got[0].parameters == {}


def test_a_sequence_begins_with_a_start() -> None:
    world = World()
    with pytest.raises(InvalidRequest, match="sequence 5 to model 'm' must specify the START flag"):
        world.send("a", 5)
    assert len(world.table) == 0
    world.send("b", 5, "s")
    _, follows = world.send("c", 5)  # a valid continuation as far as the queue knows
    world.scheduler.fail()
    assert [type(error) for error in follows.errors] == [InvalidRequest]
    assert world.log == ["b", "c"]
    assert len(world.table) == 0
    assert (world.queue.waiting, world.scheduler.expected) == (0, 0)


def test_cancelled_waiting_requests_are_counted() -> None:
    """The scheduler counts what reaches it; refused requests are not counted."""
    world = World(most_starts=1)
    with pytest.raises(InvalidRequest):
        world.send("refused", 3)
    begun, _ = world.send("a", 1, "s")
    follows, _ = world.send("a2", 1)
    start, _ = world.send("b", 2, "s")
    world.clock.advance(5)
    follows.cancel()
    world.send("a3", 1)
    world.clock.advance(2)
    start.cancel()
    start.cancel()
    begun.cancel()
    assert world.failed == [("CANCELED", 5), ("CANCELED", 7), ("OTHER", 2)]


def test_starts_leave_room_for_running_sequences() -> None:
    world = World(most_starts=2)
    world.send("a", "a", "s")
    world.scheduler.answer()
    for id in "bcde":
        world.send(id, id, "s")
    world.send("d2", "d", "")
    world.send("a2", "a")
    assert world.scheduler.ids == ["b", "c", "a2"]
    assert world.queue.waiting == 3
    world.scheduler.answer(2)
    assert world.scheduler.ids == ["b", "c"]
    world.scheduler.answer()
    assert world.scheduler.ids == ["c", "d"]
    world.scheduler.answer(1)
    assert world.scheduler.ids == ["c", "d2", "e"]


def test_a_cancelled_start_makes_room() -> None:
    world = World(most_starts=1)
    first, _ = world.send("a", "a", "s")
    waiting_start, _ = world.send("b", "b", "s")
    waiting, _ = world.send("a2", "a")
    world.send("c", "c", "s")
    waiting.cancel()
    waiting_start.cancel()
    waiting_start.cancel()
    assert world.queue.waiting == 1
    first.cancel()
    assert world.scheduler.cancelled == ["a"]
    assert world.scheduler.ids == ["c"]
    assert len(world.table) == 1
    assert world.log == []
    assert world.scheduler.expected == 0


def test_a_sequence_is_forgotten_when_it_is_idle() -> None:
    world = World()
    world.send("a", 1, "s")
    world.clock.advance(10 * IDLE)
    world.table.forget_idle()
    assert 1 in world.table
    world.scheduler.answer()
    world.clock.advance(IDLE - 1)
    world.send("b", 1)
    world.scheduler.answer()
    world.clock.advance(IDLE)
    with pytest.raises(InvalidRequest, match="START"):
        world.send("c", 1)
    assert len(world.table) == 0


def test_the_number_of_sequences_is_bounded() -> None:
    world = World(most=2)
    world.send("a", 1, "s")
    world.send("b", 2, "s")
    with pytest.raises(Unavailable, match="at its limit of 2 sequences of model 'm'"):
        world.send("c", 3, "s")
    world.scheduler.answer()
    world.send("a2", 1, "e")
    world.scheduler.answer(1)
    world.send("c", 3, "s")


def test_a_full_queue() -> None:
    world = World()
    world.send("a", 1, "s")
    _, follows = world.send("a2", 1)
    world.scheduler.full = True
    with pytest.raises(QueueFull):
        world.send("b", 2, "s")
    assert 2 not in world.table
    world.scheduler.answer()
    assert [type(error) for error in follows.errors] == [QueueFull]
    world.scheduler.full = False
    world.send("a3", 1)
    assert world.scheduler.ids == ["a3"]


def test_a_hold_of_a_waiting_request_is_passed_on() -> None:
    world = World()
    first, _ = world.send("a", 1, "s")
    waiting, _ = world.send("a2", 1)
    first.hold(True)
    waiting.hold(True)
    assert world.scheduler.held == [("a", True)]
    world.scheduler.answer()
    assert world.scheduler.held == [("a", True), ("a2", True)]


def test_an_answer_may_submit_the_next_request() -> None:
    """The model submits the next request within the answer of the last."""
    world = World()
    _, call = world.send("a", 1, "s")

    def ask_again() -> None:
        world.send("b", 1, "e")

    call.then = ask_again
    world.scheduler.answer()
    assert world.scheduler.ids == ["b"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "start", "end", "answer", "fail", "cancel"]),
              st.integers(0, 3)),
    max_size=60,
)  # fmt: skip


@given(STEPS, st.integers(1, 3))
def test_any_order_of_events_leaves_nothing_behind(
    steps: list[tuple[str, int]], most_starts: int
) -> None:
    """Each request ends once or is refused; a sequence runs in order, one request at a time."""
    world = World(most_starts)
    tickets: list[tuple[Call, FakeCall]] = []
    kinds = {"send": "", "start": "s", "end": "e"}
    for number, (step, which) in enumerate(steps):
        if step in kinds:
            try:
                tickets.append(world.send(f"{number}", which + 1, kinds[step]))
            except InvalidRequest:
                continue
        elif step == "cancel" and tickets:
            ticket, call = tickets.pop(which % len(tickets))
            if not call.calls:
                ticket.cancel()
        elif step == "answer" and world.scheduler.got:
            world.scheduler.answer(which % len(world.scheduler.got))
        elif step == "fail" and world.scheduler.got:
            world.scheduler.fail()
        sequences = [request.options.sequence_id for request in world.scheduler.got]
        assert len(set(sequences)) == len(sequences)
        assert sum(r.options.sequence_start for r in world.scheduler.got) <= most_starts
        assert world.queue.waiting == world.scheduler.expected
    while world.scheduler.got:
        world.scheduler.answer()
    assert (world.queue.waiting, world.scheduler.expected) == (0, 0)
    assert all(call.calls == 1 for _, call in tickets)
    answered = [name for name in world.log if name]
    assert len(answered) == len(set(answered))
    world.clock.advance(IDLE)
    world.table.forget_idle()
    assert len(world.table) == 0
