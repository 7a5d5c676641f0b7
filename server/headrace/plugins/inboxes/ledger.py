"""The messages of an inbox: which of them are to be run, delivered and committed.

A message is taken, runs (again, after a while, if it failed or its model was not available), has an
outcome, is delivered, and then acknowledged. Messages are taken from *sources*, such as a partition
of a topic, in the order of their positions. Decisions only, without I/O or a clock: times are
seconds of the caller's.

Invariants:
- Outcomes of messages with the same key of one source are delivered in the order in which these
  were taken; with `whole`, all those of a source.
- `Committable.upto` names a message only if it, and every one taken before it from its source, has
  been delivered.
- A message is run at most `tries` times in vain, and at most `deliveries` times if its consumers
  die of it; then a failure is its outcome. Waiting for a model is not counted.
- A message is delivered once for each time that it is taken, unless its source is forgotten.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

_MOST_WAIT = 60.0  # seconds between tries
_FIRST_POSTPONED = 0.02  # seconds until a model that was not available is asked again
_MOST_POSTPONED = 1.0


class Message(NamedTuple):
    """One message of a broker.

    `position` identifies it in its source, `handle` is what the broker's library needs to
    acknowledge it, `deliveries` counts how often the broker has given it to a consumer, if it does.
    """

    source: Hashable
    position: Hashable
    key: bytes | None
    headers: Mapping[str, bytes]
    body: bytes
    deliveries: int = 1
    handle: Any = None


class GivenUp(NamedTuple):
    """The reason for no answer: the error's kind and text, and how often it was tried.

    `bare` leaves the message itself out, which is refused with the reason in its headers.
    """

    kind: str
    reason: str
    tries: int
    bare: bool = False


@dataclass(slots=True, eq=False)
class Taken:
    """A message that was taken; `outcome` is a `GivenUp` or what it was answered with."""

    message: Message
    taken: float
    tries: int = 0
    postponed: int = 0
    outcome: Any = None
    ended: bool = False  # has an outcome
    delivered: bool = False
    forgotten: bool = False


@dataclass(slots=True)
class Committable:
    """Delivered messages: each, and the last of each source before which none is missing."""

    each: list[Message] = field(default_factory=list)
    upto: dict[Hashable, Message] = field(default_factory=dict)


class Ledger:
    """The messages of one inbox from their taking to their delivery."""

    def __init__(
        self, tries: int = 3, retry_secs: float = 1.0, deliveries: int = 20, whole: bool = False
    ) -> None:
        """`retry_secs` is the wait before the second try, which doubles with each further one."""
        self._tries = tries
        self._retry_secs = retry_secs
        self._deliveries = deliveries
        self._whole = whole
        self._known: dict[tuple[Hashable, Hashable], Taken] = {}
        self._sources: dict[Hashable, deque[Taken]] = {}  # from the first that is not delivered
        self._lanes: dict[Hashable, dict[bytes | None, deque[Taken]]] = {}  # by source and key
        self._due: list[tuple[float, int, Taken]] = []  # heap
        self._numbers = count()
        self._ready: list[Taken] = []

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Message]:
        return iter([entry.message for entry in self._known.values()])

    @property
    def waiting(self) -> int:
        """Messages that wait for a further try."""
        return sum(not entry.forgotten for _, _, entry in self._due)

    def oldest(self) -> float | None:
        """The time at which the first of the present messages was taken."""
        return min((entry.taken for entry in self._known.values()), default=None)

    def take(self, message: Message, now: float) -> Taken | None:
        """Take a message; returns the entry to run.

        None if nothing is to be run: it is here already, and was delivered again, which renews its
        handle; or it has been delivered too often, so that it is a failure.
        """
        identity = message.source, message.position
        if (known := self._known.get(identity)) is not None:
            known.message = message
            return None
        entry = self._known[identity] = Taken(message, now)
        self._sources.setdefault(message.source, deque()).append(entry)
        if self._whole or message.key is not None:
            self._lane(message).append(entry)
        if message.deliveries > self._deliveries:
            text = f"delivered {message.deliveries} times without an outcome: its consumers ended"
            self._end(entry, GivenUp("Undeliverable", text, message.deliveries))
            return None
        return entry

    def answered(self, entry: Taken, outcome: Any) -> None:
        """Note what a message was answered with."""
        if not (entry.forgotten or entry.ended):
            self._end(entry, outcome)

    def failed(self, entry: Taken, kind: str, reason: str, final: bool, now: float) -> bool:
        """Count a failed try; a `final` one would fail again. True if it was the last one."""
        if entry.forgotten or entry.ended:
            return False
        entry.tries += 1
        if final or entry.tries >= self._tries:
            self._end(entry, GivenUp(kind, reason, entry.tries))
            return True
        self._wait(entry, now + min(self._retry_secs * 2 ** (entry.tries - 1), _MOST_WAIT))
        return False

    def postpone(self, entry: Taken, now: float) -> None:
        """Run a message again after a while, whose model is not available; not counted as a try."""
        if not (entry.forgotten or entry.ended):
            self._wait(entry, now + min(_FIRST_POSTPONED * 2**entry.postponed, _MOST_POSTPONED))
            entry.postponed = min(entry.postponed + 1, 10)

    def due(self, now: float) -> list[Taken]:
        """The entries to run again now."""
        found = []
        while self._due and self._due[0][0] <= now:
            _, _, entry = heappop(self._due)
            if not entry.forgotten:
                found.append(entry)
        return found

    def next_due(self) -> float | None:
        """The time of the next entry to run again."""
        return self._due[0][0] if self._due else None

    def deliverable(self) -> list[Taken]:
        """Take out the entries whose outcomes are to be delivered, in this order."""
        ready, self._ready = self._ready, []
        return [entry for entry in ready if not entry.forgotten]

    def delivered(self, entries: Sequence[Taken]) -> Committable:
        """Note that outcomes have been acknowledged; returns what may be committed by that."""
        progress = Committable()
        touched: dict[Hashable, None] = {}
        for entry in entries:
            if entry.forgotten or entry.delivered:
                continue
            entry.delivered = True
            message = entry.message
            del self._known[message.source, message.position]
            progress.each.append(message)
            touched[message.source] = None
        for source in touched:
            begun = self._sources[source]
            while begun and begun[0].delivered:
                progress.upto[source] = begun.popleft().message
            if not begun:
                del self._sources[source]
        return progress

    def forget(self, source: Hashable) -> None:
        """Drop everything of a source, whose messages others get."""
        for entry in self._sources.pop(source, ()):
            if not entry.delivered:
                entry.forgotten = True
                del self._known[entry.message.source, entry.message.position]
        self._lanes.pop(source, None)

    def drop_waiting(self) -> list[Message]:
        """Drop the messages that wait for a further try, at the end; returns them.

        Those behind them, in order of their key, are dropped with them.
        """
        dropped = [entry for _, _, entry in self._due if not entry.forgotten]
        self._due.clear()
        for entry in list(dropped):
            lane = self._lanes.get(entry.message.source, {}).pop(self._key(entry.message), None)
            dropped += [later for later in lane or () if later is not entry]
        for entry in dropped:
            entry.forgotten = True
            self._known.pop((entry.message.source, entry.message.position), None)
        return [entry.message for entry in dropped]

    def _wait(self, entry: Taken, until: float) -> None:
        heappush(self._due, (until, next(self._numbers), entry))

    def _end(self, entry: Taken, outcome: Any) -> None:
        entry.outcome, entry.ended = outcome, True
        message = entry.message
        if not self._whole and message.key is None:
            self._ready.append(entry)
            return
        lane = self._lane(message)
        while lane and lane[0].ended:
            self._ready.append(lane.popleft())
        if not lane:
            lanes = self._lanes[message.source]
            del lanes[self._key(message)]
            if not lanes:
                del self._lanes[message.source]

    def _key(self, message: Message) -> bytes | None:
        return None if self._whole else message.key

    def _lane(self, message: Message) -> deque[Taken]:
        lanes = self._lanes.setdefault(message.source, {})
        return lanes.setdefault(self._key(message), deque())
