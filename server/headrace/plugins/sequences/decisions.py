"""Decisions about sequences: which request runs next, and on which instance.

A sequence is the requests with one id from a start to an end. It has a seat on an instance, where
its state is, or waits for one in the backlog, first come, first served. One of its requests is
current at a time; the others wait in order of arrival. After its last request, or when it has been
idle for too long, its seat goes to the first of the backlog. Seats are taken by their number, then
by instance, so that sequences are spread over the instances, as in Triton.

A start for a known sequence begins it anew, on the same seat, behind its earlier requests. A later
start with the same id after an end is another sequence, whatever the first one still does.

Events are method calls with the time in nanoseconds; each returns the decisions in the order in
which they are to be carried out. Nothing here calls anything else.

Invariants: a sequence has a seat or is in the backlog, and one in the backlog has a request. No
seat is free while the backlog has a sequence. A sequence on a seat has a current request, or is
idle, and then no request waits.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import dropwhile
from typing import NamedTuple, TypeAlias

Id: TypeAlias = int | str
MOST_LOST = 32_768  # remembered ids of lost sequences


class Why(Enum):
    """The reason why a request ends without having been run."""

    UNSTARTED = "its sequence has no start"
    EXPIRED = "its sequence has waited for a seat for too long"
    LOST = "the state of its sequence is gone"


class Seat(NamedTuple):
    """A place for one sequence at a time; the lowest is taken first."""

    number: int
    rank: int  # of its instance
    instance: object


class Turn:
    """A request, as far as decisions depend on it; `expires` is 0 if it may wait for any time."""

    __slots__ = ("end", "expires", "sequence", "start")

    sequence: "LiveSequence"

    def __init__(self, start: bool, end: bool, expires: int = 0) -> None:
        self.start = start
        self.end = end
        self.expires = expires


class LiveSequence:
    """A sequence with a seat, or in the backlog while `seat` is None.

    It is `closed` once its end has arrived: its id means another sequence from then on. `expires`
    is the earliest of its requests', 0 for none. `state` belongs to the caller.
    """

    __slots__ = ("closed", "current", "expires", "gone", "id", "seat", "state", "turns")

    def __init__(self, id: Id) -> None:
        self.id = id
        self.seat: Seat | None = None
        self.current: Turn | None = None
        self.turns: OrderedDict[Turn, None] = OrderedDict()
        self.closed = False
        self.gone = False
        self.expires = 0
        self.state: object = None


class Begin(NamedTuple):
    """Run a request on the seat of its sequence."""

    turn: Turn


class Refuse(NamedTuple):
    """End a request that was not run."""

    turn: Turn
    why: Why


class Vacate(NamedTuple):
    """Remove a retired instance: it has no sequence any more."""

    instance: object


Decision: TypeAlias = Begin | Refuse | Vacate


@dataclass(eq=False, slots=True)
class _Room:
    """An instance, and the sequences on it; new ones come while it is `open`."""

    instance: object
    rank: int
    open: bool = False
    retired: bool = False
    sequences: dict[int, LiveSequence] = field(default_factory=dict)  # by the number of their seat


class Ends(Enum):
    """The ways in which sequences end."""

    END = "end"
    IDLE = "idle"
    LOST = "lost"
    TIMEOUT = "timeout"
    UNSTARTED = "unstarted"  # the request of its start was cancelled, or refused


class SequenceSeats:
    """The seats of a version's instances, and its sequences.

    `ended` counts the sequences that have ended, `restarted` the starts of known ones.
    """

    def __init__(self, seats: int, idle_ns: int) -> None:
        """Each instance has so many seats; idle sequences end after `idle_ns`."""
        self._seats = seats
        self._idle_ns = idle_ns
        self._ranks = 0
        self._rooms: dict[object, _Room] = {}
        self._free: list[Seat] = []  # a heap
        self._by_id: dict[Id, LiveSequence] = {}  # those whose end has not arrived
        self._backlog: OrderedDict[LiveSequence, None] = OrderedDict()
        self._idle: OrderedDict[LiveSequence, int] = OrderedDict()  # since when, oldest first
        self._lost: OrderedDict[Id, int] = OrderedDict()  # since when, oldest first
        self._deadlines: list[tuple[int, int, LiveSequence]] = []  # of the backlog, a heap
        self._count = 0
        self._draining = False
        self.restarted = 0
        self.ended = dict.fromkeys(Ends, 0)

    @property
    def seated(self) -> int:
        """The number of sequences with a seat."""
        return sum(len(room.sequences) for room in self._rooms.values())

    @property
    def backlog(self) -> int:
        """The number of sequences that wait for a seat."""
        return len(self._backlog)

    @property
    def backlog_requests(self) -> int:
        """The number of requests of sequences that wait for a seat."""
        return sum(len(sequence.turns) for sequence in self._backlog)

    @property
    def next_at(self) -> int | None:
        """The time at which `expire` has something to decide, or earlier; None for never."""
        times = [when for when, _, _ in self._deadlines[:1]]
        if self._idle:
            times.append(next(iter(self._idle.values())) + self._idle_ns)
        return min(times, default=None)

    # --- events of instances

    def open(self, instance: object) -> list[Decision]:
        """Offer the seats of an instance that is new, or that has come back without states."""
        room = self._rooms.get(instance)
        if room is None:
            room = self._rooms[instance] = _Room(instance, self._ranks)
            self._ranks += 1
        if room.open or room.retired:
            return []
        room.open = True
        for number in range(self._seats):
            heapq.heappush(self._free, Seat(number, room.rank, instance))
        return self._fill()

    def lose(self, instance: object, now: int) -> list[Decision]:
        """Forget the states on an instance, which takes no sequences until it is opened again.

        Current requests are not refused: whoever runs them ends them.
        """
        if (room := self._rooms.get(instance)) is None:
            return []
        self._close(room)
        decided: list[Decision] = []
        sequences, room.sequences = room.sequences, {}
        for sequence in sequences.values():
            decided += [Refuse(turn, Why.LOST) for turn in sequence.turns]
            self._drop(sequence, Ends.LOST)
            if not sequence.closed:
                self._lost[sequence.id] = now
        while len(self._lost) > MOST_LOST:
            self._lost.popitem(last=False)
        return decided + self._vacated(room)

    def retire(self, instance: object) -> list[Decision]:
        """Let an instance take no more sequences; it is vacated after its last one."""
        if (room := self._rooms.get(instance)) is None:
            return [Vacate(instance)]
        self._close(room)
        room.retired = True
        return self._vacated(room)

    # --- events of requests

    def arrive(self, id: Id, turn: Turn, now: int) -> list[Decision]:
        """Take a request: it runs now, waits, or is refused."""
        sequence = self._by_id.get(id)
        if sequence is None:
            if not turn.start:
                return [Refuse(turn, Why.LOST if self._is_lost(id, now) else Why.UNSTARTED)]
            sequence = self._new(id)
        elif turn.start:
            self.restarted += 1
        turn.sequence = sequence
        if turn.end:
            del self._by_id[id]
            sequence.closed = True
        if sequence.seat is None:
            sequence.turns[turn] = None
            self._bound(sequence, turn.expires)
            return []
        if sequence.current is not None:
            sequence.turns[turn] = None
            return []
        self._idle.pop(sequence, None)
        sequence.current = turn
        return [Begin(turn)]

    def over(self, turn: Turn, now: int, ran: bool) -> list[Decision]:
        """Go on after the end of a request, which the model has seen if it `ran`."""
        sequence = turn.sequence
        if sequence.gone:
            return []
        decided: list[Decision] = []
        behind: Iterable[Turn] = sequence.turns
        # Thousands may be cancelled together: only the end of a start looks at the others.
        if turn is sequence.current:
            sequence.current = None
        elif turn in sequence.turns:
            if turn.start:
                behind = list(dropwhile(lambda one: one is not turn, sequence.turns))[1:]
            del sequence.turns[turn]
        else:
            return []  # refused by this
        if turn.start and not ran:
            decided += self._orphans(sequence, behind)
        return decided + self._go_on(sequence, turn, now)

    def expire(self, now: int) -> list[Decision]:
        """End the sequences that have been idle, or have waited for a seat, for too long."""
        decided: list[Decision] = []
        while (when := self.next_at) is not None and when <= now:
            idle = next(iter(self._idle.items()), None)
            if idle is not None and idle[1] + self._idle_ns == when:
                decided += self._leave(idle[0], Ends.IDLE)
                continue
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence in self._backlog and sequence.expires == when:
                decided += [Refuse(turn, Why.EXPIRED) for turn in sequence.turns]
                del self._backlog[sequence]
                self._drop(sequence, Ends.TIMEOUT)
        return decided

    def drain(self) -> list[Decision]:
        """Let idle sequences leave their seats to the backlog: no request will come any more."""
        self._draining = True
        return self._yielded()

    def waiting(self) -> list[Turn]:
        """End all sequences of the backlog; returns their requests, which the caller ends."""
        turns = [turn for sequence in self._backlog for turn in sequence.turns]
        for sequence in self._backlog:
            self._drop(sequence, Ends.UNSTARTED)
        self._backlog.clear()
        self._deadlines.clear()
        return turns

    # --- sequences

    def _new(self, id: Id) -> LiveSequence:
        """A sequence on a free seat, or in the backlog."""
        self._lost.pop(id, None)
        sequence = self._by_id[id] = LiveSequence(id)
        if self._free:
            self._sit(sequence, heapq.heappop(self._free))
        else:
            self._backlog[sequence] = None
        return sequence

    def _sit(self, sequence: LiveSequence, seat: Seat) -> None:
        sequence.seat = seat
        self._rooms[seat.instance].sequences[seat.number] = sequence

    def _bound(self, sequence: LiveSequence, expires: int) -> None:
        """Bound the time of a sequence in the backlog by that of a further request."""
        if expires and not 0 < sequence.expires <= expires:
            sequence.expires = expires
            self._count += 1  # breaks ties
            heapq.heappush(self._deadlines, (expires, self._count, sequence))

    def _orphans(self, sequence: LiveSequence, behind: Iterable[Turn]) -> Iterator[Decision]:
        """Refuse the requests behind a start that was not run, up to the next start."""
        orphans: list[Turn] = []
        started = False
        for turn in behind:
            if turn.start:
                started = True
                break
            orphans.append(turn)
        for turn in orphans:
            del sequence.turns[turn]
        if not (started or sequence.closed):
            del self._by_id[sequence.id]
            sequence.closed = True
        return (Refuse(turn, Why.UNSTARTED) for turn in orphans)

    def _go_on(self, sequence: LiveSequence, last: Turn, now: int) -> list[Decision]:
        """Begin the next request after the `last`, or let the sequence be idle, or end it."""
        if sequence.seat is None:
            if not sequence.turns:
                del self._backlog[sequence]
                self._drop(sequence, Ends.UNSTARTED)
            if sequence.expires and (last.start or last.expires == sequence.expires):
                sequence.expires = 0
                for turn in sequence.turns:
                    self._bound(sequence, turn.expires)
            return []
        if sequence.current is not None:
            return []
        if sequence.turns:
            sequence.current = sequence.turns.popitem(last=False)[0]
            return [Begin(sequence.current)]
        if sequence.closed:
            return self._leave(sequence, Ends.END)
        self._idle[sequence] = now
        return self._yielded() if self._draining else []

    def _yielded(self) -> list[Decision]:
        """End as many idle sequences as the backlog needs seats."""
        decided: list[Decision] = []
        while self._backlog and self._idle:
            decided += self._leave(next(iter(self._idle)), Ends.IDLE)
        return decided

    def _leave(self, sequence: LiveSequence, how: Ends) -> list[Decision]:
        """End a sequence, and give its seat to the next one."""
        seat = sequence.seat
        assert seat is not None
        self._drop(sequence, how)
        room = self._rooms[seat.instance]
        del room.sequences[seat.number]
        if room.open:
            heapq.heappush(self._free, seat)
            return self._fill()
        return self._vacated(room)

    def _drop(self, sequence: LiveSequence, how: Ends) -> None:
        """Forget a sequence."""
        self.ended[how] += 1
        sequence.gone = True
        sequence.seat = None
        sequence.turns = OrderedDict()
        self._idle.pop(sequence, None)
        if self._by_id.get(sequence.id) is sequence:
            del self._by_id[sequence.id]

    def _fill(self) -> list[Decision]:
        """Give free seats to the backlog."""
        decided: list[Decision] = []
        while self._free and self._backlog:
            sequence, _ = self._backlog.popitem(last=False)
            self._sit(sequence, heapq.heappop(self._free))
            sequence.current = sequence.turns.popitem(last=False)[0]
            decided.append(Begin(sequence.current))
        return decided

    def _close(self, room: _Room) -> None:
        """Let no more sequences sit down on an instance."""
        room.open = False
        self._free = [seat for seat in self._free if seat.instance is not room.instance]
        heapq.heapify(self._free)

    def _vacated(self, room: _Room) -> list[Decision]:
        if not room.retired or room.sequences:
            return []
        del self._rooms[room.instance]
        return [Vacate(room.instance)]

    def _is_lost(self, id: Id, now: int) -> bool:
        """True if the sequence of an id was lost within the idle time."""
        while self._lost and next(iter(self._lost.values())) + self._idle_ns <= now:
            self._lost.popitem(last=False)
        return id in self._lost
