"""The ledger of an inbox: what runs, what is delivered in which order, what may be committed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.plugins.inboxes.ledger import GivenUp, Ledger, Message, Taken

TRIES, DELIVERIES = 3, 5
SOURCES = st.sampled_from(["p0", "p1"])
PICK = st.integers(0, 1000)


def message(
    position: int, key: bytes | None = None, source: str = "p0", deliveries: int = 1
) -> Message:
    return Message(source, position, key, {}, b"", deliveries)


class Consumer(RuleBasedStateMachine):
    """A broker with two partitions, and a consumer that decides by a ledger."""

    whole = False

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TRIES, 1.0, DELIVERIES, self.whole)
        self.now = 0.0
        self.written: dict[str, list[bytes | None]] = {"p0": [], "p1": []}
        self.fetched = {"p0": 0, "p1": 0}  # next position
        self.committed = {"p0": 0, "p1": 0}
        self.running: list[Taken] = []
        self.delivering: list[Taken] = []
        self.order: list[tuple[str, bytes | None, int]] = []  # delivered since the last `forget`
        self.ever: set[tuple[str, int]] = set()

    @rule(source=SOURCES, key=st.sampled_from([None, b"a", b"b"]))
    def take(self, source: str, key: bytes | None) -> None:
        at = self.fetched[source]
        if at == len(self.written[source]):
            self.written[source].append(key)
        entry = self.ledger.take(message(at, self.written[source][at], source), self.now)
        assert entry is not None
        self.running.append(entry)
        self.fetched[source] += 1

    @precondition(lambda self: self.running)
    @rule(at=PICK)
    def answer(self, at: int) -> None:
        self.ledger.answered(self.picked(at), "answer")

    @precondition(lambda self: self.running)
    @rule(at=PICK, final=st.booleans())
    def fail(self, at: int, final: bool) -> None:
        entry = self.picked(at)
        tries = entry.tries + 1
        over = self.ledger.failed(entry, "Error", "why", final, self.now)
        if not entry.forgotten:
            assert over == (final or tries == TRIES)
            assert not over or entry.outcome == GivenUp("Error", "why", tries)

    @precondition(lambda self: self.running)
    @rule(at=PICK)
    def postpone(self, at: int) -> None:
        self.ledger.postpone(self.picked(at), self.now)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.running += self.ledger.due(self.now)

    @rule(acknowledged=st.booleans())
    def deliver(self, acknowledged: bool) -> None:
        self.delivering += self.ledger.deliverable()
        if not acknowledged:  # the outbox failed: all of them are sent again
            return
        entries, self.delivering = self.delivering, []
        for entry in entries:
            if not entry.forgotten:
                found = entry.message
                assert isinstance(found.position, int)
                self.order.append((str(found.source), found.key, found.position))
                self.ever.add((str(found.source), found.position))
        progress = self.ledger.delivered(entries)
        assert [m.position for m in progress.each] == [
            e.message.position for e in entries if not e.forgotten
        ]
        for source, last in progress.upto.items():
            assert isinstance(last.position, int)
            assert last.position >= self.committed[str(source)]
            self.committed[str(source)] = last.position + 1

    @rule(source=SOURCES)
    def rebalance(self, source: str) -> None:
        """The partition goes to another consumer, and comes back from the committed position."""
        self.ledger.forget(source)
        self.fetched[source] = self.committed[source]
        self.order = [each for each in self.order if each[0] != source]

    def picked(self, at: int) -> Taken:
        return self.running.pop(at % len(self.running))

    @invariant()
    def nothing_is_committed_before_its_turn(self) -> None:
        for source, upto in self.committed.items():
            assert {(source, at) for at in range(upto)} <= self.ever

    @invariant()
    def order_is_kept(self) -> None:
        last: dict[tuple[str, bytes | None], int] = {}
        for source, key, position in self.order:
            lane = (source, None if self.whole else key)
            if self.whole or key is not None:
                assert last.get(lane, -1) < position
            last[lane] = position

    def teardown(self) -> None:
        """Everything ends, and then everything is delivered and committed."""
        while self.running or self.ledger.next_due() is not None:
            for entry in self.running:
                self.ledger.answered(entry, "answer")
            self.running = []
            self.wait(1000.0)
        self.deliver(True)
        assert len(self.ledger) == 0
        assert self.ledger.oldest() is None
        assert self.committed == self.fetched


class WholeConsumer(Consumer):
    """The same with the order of whole partitions, as transactions need it."""

    whole = True


TestByKey = Consumer.TestCase
TestByKey.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWhole = WholeConsumer.TestCase
TestWhole.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_message_that_is_delivered_again_renews_its_handle() -> None:
    ledger = Ledger()
    entry = ledger.take(message(1), 0.0)
    assert entry is not None
    assert ledger.take(message(1)._replace(handle="new"), 1.0) is None
    ledger.answered(entry, "answer")
    assert [m.handle for m in ledger.delivered(ledger.deliverable()).each] == ["new"]


def test_a_message_whose_consumers_end_is_a_failure_at_last() -> None:
    ledger = Ledger(deliveries=2)
    assert ledger.take(message(1, deliveries=2), 0.0) is not None
    assert ledger.take(message(2, deliveries=3), 0.0) is None
    [failed] = ledger.deliverable()
    assert isinstance(failed.outcome, GivenUp)
    assert failed.outcome.reason == "delivered 3 times without an outcome: its consumers ended"


def test_tries_are_apart() -> None:
    ledger = Ledger(tries=3, retry_secs=2.0)
    entry = ledger.take(message(1), 0.0)
    assert entry is not None
    assert not ledger.failed(entry, "E", "", False, 10.0)
    assert ledger.next_due() == 12.0
    assert ledger.due(11.9) == []
    assert ledger.due(12.0) == [entry]
    assert not ledger.failed(entry, "E", "", False, 12.0)
    assert ledger.next_due() == 16.0


def test_a_model_that_is_not_available_takes_no_try() -> None:
    ledger, now = Ledger(tries=1), 0.0
    entry = ledger.take(message(1), now)
    assert entry is not None
    for _ in range(100):
        ledger.postpone(entry, now)
        due = ledger.next_due()
        assert due is not None
        assert due - now <= 1.0
        now = due
        assert ledger.due(now) == [entry]
    assert entry.tries == 0


def test_at_the_end_those_that_wait_are_dropped_with_those_behind_them() -> None:
    ledger = Ledger()
    entries = [ledger.take(message(at, key), 0.0) for at, key in enumerate([b"a", b"a", None])]
    first, second, third = entries
    assert first is not None
    assert second is not None
    assert third is not None
    ledger.postpone(first, 0.0)
    ledger.answered(second, "answer")
    assert [m.position for m in ledger.drop_waiting()] == [0, 1]
    assert list(ledger) == [third.message]
    ledger.answered(third, "answer")
    assert ledger.delivered(ledger.deliverable()).upto == {}  # the first has not been delivered


@pytest.mark.parametrize("whole", [False, True])
def test_without_keys(whole: bool) -> None:
    ledger = Ledger(whole=whole)
    first, second = (ledger.take(message(at), 0.0) for at in range(2))
    assert first is not None
    assert second is not None
    ledger.answered(second, "answer")
    assert ledger.deliverable() == ([] if whole else [second])
    ledger.answered(first, "answer")
    assert ledger.deliverable() == ([first, second] if whole else [first])
