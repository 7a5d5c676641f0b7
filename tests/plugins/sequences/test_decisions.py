"""Decisions about sequences, as tables and against an obvious, slow reference."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from headrace.plugins.sequences.decisions import (
    Begin,
    Decision,
    Ends,
    Id,
    Refuse,
    SequenceSeats,
    Turn,
    Vacate,
)

IDLE = 100


class NamedTurn(Turn):
    """A turn with a name for messages."""

    def __init__(self, name: str, kind: str, expires: int) -> None:
        super().__init__("s" in kind, "e" in kind, expires)
        self.name = name


class World:
    """Seats whose decisions are told as texts: `+a` begins, `-a UNSTARTED` refuses."""

    def __init__(self, seats: int = 2, instances: str = "A") -> None:
        self.now = 0
        self.seats = SequenceSeats(seats, IDLE)
        self.turns: dict[str, NamedTurn] = {}
        for instance in instances:
            assert not self.seats.open(instance)

    def do(self, event: str) -> str:
        """Let an event happen, and return the decisions.

        `a1 7 s` is the arrival of the request a1 of sequence 7 with a start, with `<5` at the end
        it expires at 5; `a1.` its end, `a1!` its end without having been run; `@5` the time; `A+`,
        `A-` and `A0` open, lose and retire an instance.
        """
        seats, now = self.seats, self.now
        decided: list[Decision] = []
        if event.startswith("@"):
            self.now = int(event[1:])
            decided = seats.expire(self.now)
        elif event[-1] in ".!":
            decided = seats.over(self.turns[event[:-1]], now, event[-1] == ".")
        elif event[-1] in "+-0" and " " not in event:
            does = {
                "+": lambda: seats.open(event[:-1]),
                "-": lambda: seats.lose(event[:-1], now),
                "0": lambda: seats.retire(event[:-1]),
            }
            decided = does[event[-1]]()
        else:
            first, _, expires = event.partition(" <")
            name, id, kind = (first + "  ").split(" ")[:3]
            turn = self.turns[name] = NamedTurn(name, kind, int(expires or 0))
            decided = seats.arrive(int(id), turn, now)
        return " ".join(map(shown, decided))


def shown(decision: Decision) -> str:
    """A decision as text."""
    match decision:
        case Begin(turn):
            assert isinstance(turn, NamedTurn)
            assert turn.sequence.seat is not None
            return f"+{turn.name}@{turn.sequence.seat.instance}{turn.sequence.seat.number}"
        case Refuse(turn, why):
            assert isinstance(turn, NamedTurn)
            return f"-{turn.name}:{why.name}"
        case Vacate(instance):
            return f"~{instance}"


@pytest.mark.parametrize("events", [
    # One request at a time, in order, on the seat of the start.
    ["a1 1 s = +a1@A0", "a2 1 =", "a3 1 e =", "a1. = +a2@A0", "a2. = +a3@A0", "a3. ="],
    # Seats by number, then by instance; a backlog in order.
    ["B+ =", "a 1 s = +a@A0", "b 2 s = +b@B0", "c 3 s = +c@A1", "d 4 s = +d@B1", "e 5 s =",
     "f 6 s =", "c. =", "c2 3 e = +c2@A1", "c2. = +e@A1", "e. =", "a. =",
     "a2 1 e = +a2@A0", "a2. = +f@A0"],
    # Without a start.
    ["a 1 = -a:UNSTARTED", "b 1 e = -b:UNSTARTED", "c 1 se = +c@A0", "d 1 = -d:UNSTARTED",
     "c. ="],
    # A start of a known sequence begins it anew on its seat, behind its requests.
    ["a 1 s = +a@A0", "b 1 =", "c 1 s =", "a. = +b@A0", "b. = +c@A0", "c. =", "d 1 s = +d@A0"],
    # After an end, the same id is another sequence at once.
    ["a 1 se = +a@A0", "b 1 s = +b@A1", "a. =", "c 1 =", "b. = +c@A1"],
    # The backlog collects a whole sequence; after its end the id is another one.
    ["a 1 s = +a@A0", "b 2 s = +b@A1", "c 3 s =", "c2 3 e =", "d 3 s =", "a. =", "a2 1 e = +a2@A0",
     "a2. = +c@A0", "c. = +c2@A0", "c2. = +d@A0"],
    # Idle sequences end; those with a request do not.
    ["a 1 s = +a@A0", "b 2 s = +b@A1", "a. =", "@99 =", "c 3 s =", "@100 = +c@A0",
     "a2 1 = -a2:UNSTARTED", "@500 =", "b. =", "b2 2 = +b2@A1"],
    # Each request begins the idle time anew.
    ["a 1 s = +a@A0", "a. =", "@60 =", "a2 1 = +a2@A0", "a2. =", "@120 =", "a3 1 = +a3@A0"],
    # Timeouts are for the backlog, and for all of a sequence there.
    ["a 1 s <10 = +a@A0", "b 2 s = +b@A1", "c 3 s <20 =", "c2 3 <15 =", "c3 3 <90 =", "d 4 s =",
     "@14 =", "@15 = -c:EXPIRED -c2:EXPIRED -c3:EXPIRED", "c4 3 = -c4:UNSTARTED", "a. ="],
    ["a 1 s = +a@A0", "b 2 s = +b@A1", "c 3 s <20 =", "b. =", "b2 2 e = +b2@A1", "b2. = +c@A1",
     "@30 ="],
    # Cancelled requests: the others go on, but not without the start.
    ["a 1 s = +a@A0", "b 1 =", "c 1 =", "b! =", "a. = +c@A0"],
    ["a 1 s = +a@A0", "b 1 =", "c 1 =", "a! = -b:UNSTARTED -c:UNSTARTED", "d 1 = -d:UNSTARTED"],
    ["a 1 s = +a@A0", "b 1 =", "c 1 s =", "d 1 =", "a! = -b:UNSTARTED +c@A0", "c. = +d@A0"],
    ["a 1 s = +a@A0", "b 1 s =", "c 1 =", "b! = -c:UNSTARTED", "d 1 = -d:UNSTARTED", "a. =",
     "e 2 s = +e@A0"],
    ["a 1 s = +a@A0", "b 2 s = +b@A1", "c 3 s =", "c2 3 =", "c! = -c2:UNSTARTED", "d 4 s =",
     "a. =", "a2 1 e = +a2@A0", "a2! = +d@A0"],
    # A worker ends: its sequences are lost, no other one is.
    ["B+ =", "a 1 s = +a@A0", "b 2 s = +b@B0", "a2 1 =", "c 3 se = +c@A1",
     "A- = -a2:LOST", "a. =", "c. =", "b2 2 =", "b. = +b2@B0", "a3 1 = -a3:LOST",
     "c2 3 = -c2:UNSTARTED", "a4 1 s = +a4@B1", "d 4 s =", "a5 1 =", "A+ = +d@A0", "a4. = +a5@B1"],
    # The loss is known for as long as the sequence would have been.
    ["a 1 s = +a@A0", "a. =", "A- =", "b 1 = -b:LOST", "@100 =", "c 1 = -c:UNSTARTED"],
    # A retired instance keeps its sequences, and gets no others.
    ["B+ =", "a 1 s = +a@A0", "A0 =", "b 2 s = +b@B0", "c 3 s = +c@B1", "d 4 s =", "a. =",
     "a2 1 e = +a2@A0", "a2. = ~A", "b. =", "b2 2 e = +b2@B0", "b2. = +d@B0"],
    ["A0 = ~A", "a 1 s =", "B+ = +a@B0"],
    ["a 1 s = +a@A0", "A0 =", "A- = ~A", "A0 = ~A"],
    ["a 1 s = +a@A0", "a. =", "A0 =", "@100 = ~A"],
], ids=lambda events: events[0])  # fmt: skip
def test_decisions(events: Sequence[str]) -> None:
    world = World()
    for step in events:
        event, _, expected = step.partition("=")
        assert world.do(event.strip()) == expected.strip(), event


def test_idle_sequences_give_their_seats_to_the_backlog_at_the_end() -> None:
    world = World()
    for event in ("a 1 s", "b 2 s", "c 3 s", "d 4 s", "e 5 s", "a."):
        assert world.do(event) in ("", "+a@A0", "+b@A1")
    assert " ".join(map(shown, world.seats.drain())) == "+c@A0"
    assert world.do("b.") == "+d@A1"
    assert world.do("c.") == "+e@A0"
    assert (world.do("d."), world.do("e.")) == ("", "")
    assert world.do("d2 4 e") == "+d2@A1"  # that was under way
    assert world.seats.ended[Ends.IDLE] == 3


def test_the_time_of_the_next_decision() -> None:
    world = World(seats=1)
    times = []
    for event in ("A+", "a 1 s", "b 2 s <70", "a.", "@70"):
        world.do(event)
        times.append(world.seats.next_at)
    assert times == [None, None, 70, 70, IDLE]


def test_all_of_the_backlog_ends() -> None:
    world = World(seats=1)
    for event in ("a 1 s", "b 2 s <9", "b2 2", "c 3 s"):
        world.do(event)
    ended = world.seats.waiting()
    assert ended == [world.turns[name] for name in ("b", "b2", "c")]
    assert world.seats.backlog == 0
    assert world.do("d 2") == "-d:UNSTARTED"
    assert world.do("@9") == ""


@pytest.mark.parametrize("seats", [0, 1])
def test_a_cancelled_request_is_not_searched_among_the_others(seats: int) -> None:
    """Thousands may be cancelled together, with the connection of their client."""
    compared = []

    class CountedTurn(Turn):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

        __hash__ = Turn.__hash__

    table = SequenceSeats(seats, IDLE)
    table.open("A")
    turns = [CountedTurn(number == 0, False) for number in range(1000)]
    for turn in turns:
        table.arrive(1, turn, 0)
    for turn in reversed(turns[1:]):
        assert table.over(turn, 0, ran=False) == []
    assert len(compared) <= len(turns)
    assert table.over(turns[0], 0, ran=True) == []
    assert (table.seated, table.backlog, table.backlog_requests) == (seats, 0, 0)


def test_counts() -> None:
    world = World(seats=2)
    for event in ("a 1 se", "b 2 s", "c 3 s <9", "d 4 s", "b2 2 s"):
        world.do(event)
    assert (world.seats.seated, world.seats.backlog, world.seats.restarted) == (2, 2, 1)
    world.do("@9")
    world.do("a.")
    world.do("d!")
    world.do("b.")
    world.do("b2.")
    world.do("@500")
    world.do("e 5 s")
    world.do("A-")
    assert {how: count for how, count in world.seats.ended.items() if count} == {
        Ends.END: 2,  # the start of d was cancelled while it was seated
        Ends.TIMEOUT: 1, Ends.IDLE: 1, Ends.LOST: 1,
    }  # fmt: skip


# --- against a reference


@dataclass(eq=False)
class Line:
    """A sequence of the reference: its requests, the first of which runs if it is seated."""

    id: Id
    turns: list[NamedTurn] = field(default_factory=list)
    seat: tuple[int, int, str] | None = None
    running: bool = False
    closed: bool = False
    since: int = 0


class Reference:
    """The decisions as they should be, found by looking at everything after each event."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._lines: list[Line] = []  # in order of arrival
        self._ranks: dict[str, int] = {}
        self._open: set[str] = set()
        self._retired: set[str] = set()
        self._gone: set[str] = set()
        self._lost: dict[Id, int] = {}
        self._now = 0

    def event(self, world: World, event: str) -> list[str]:
        """The texts of the decisions, in any order."""
        now = world.now
        told: list[str] = []
        if event.startswith("@"):
            for time in range(self._now + 1, now + 1):
                for line in list(self._lines):
                    if line.seat is not None and not line.turns and line.since + IDLE <= time:
                        self._lines.remove(line)
                told += self._settle()
                for line in list(self._lines):
                    if line.seat is None and any(0 < t.expires <= time for t in line.turns):
                        told += [f"-{turn.name}:EXPIRED" for turn in line.turns]
                        self._lines.remove(line)
            self._now = now  # until which all has expired
        elif event[-1] in ".!":
            self._over(world.turns[event[:-1]], event[-1] == ".", now, told)
        elif event[-1] in "+-0" and " " not in event:
            self._instance(event[:-1], event[-1], now, told)
        else:
            self._arrive(world, event, now, told)
        told += self._settle()
        return told

    def _arrive(self, world: World, event: str, now: int, told: list[str]) -> None:
        turn = world.turns[event.split(" ")[0]]
        id = int(event.split(" ")[1])
        line = next((one for one in self._lines if one.id == id and not one.closed), None)
        if turn.start:
            self._lost.pop(id, None)
        if line is None and not turn.start:
            lost = id in self._lost and self._lost[id] + IDLE > now
            told.append(f"-{turn.name}:{'LOST' if lost else 'UNSTARTED'}")
            return
        if line is None:
            line = Line(id)
            self._lines.append(line)
        line.turns.append(turn)
        line.closed = turn.end

    def _over(self, turn: NamedTurn, ran: bool, now: int, told: list[str]) -> None:
        for line in self._lines:
            if turn not in line.turns:
                continue
            place = line.turns.index(turn)
            if place == 0:
                line.running = False
                line.since = now
            del line.turns[place]
            if turn.start and not ran:
                while len(line.turns) > place and not line.turns[place].start:
                    told.append(f"-{line.turns.pop(place).name}:UNSTARTED")
                if len(line.turns) == place:
                    line.closed = True

    def _instance(self, name: str, does: str, now: int, told: list[str]) -> None:
        self._ranks.setdefault(name, len(self._ranks))
        if does == "+":
            self._open.add(name)
            return
        self._open.discard(name)
        if does == "0":
            self._retired.add(name)
            if name in self._gone:
                told.append(f"~{name}")
            return
        for line in list(self._lines):
            if line.seat is not None and line.seat[2] == name:
                told += [f"-{turn.name}:LOST" for turn in line.turns[line.running :]]
                self._lines.remove(line)
                if not line.closed:
                    self._lost[line.id] = now

    def _settle(self) -> Iterator[str]:
        changed = True
        while changed:
            changed = False
            for line in list(self._lines):
                if not line.turns and (line.closed or line.seat is None):
                    self._lines.remove(line)
                    changed = True
                elif line.seat is not None and line.turns and not line.running:
                    line.running = changed = True
                    yield f"+{line.turns[0].name}@{line.seat[2]}{line.seat[0]}"
            taken = {line.seat for line in self._lines}
            free = sorted(
                {(n, self._ranks[one], one) for one in self._open for n in range(self._seats)}
                - taken
            )  # fmt: skip
            waiting = [line for line in self._lines if line.seat is None]
            if free and waiting:
                waiting[0].seat = free[0]
                changed = True
        for name in self._retired - self._gone:
            if not any(line.seat is not None and line.seat[2] == name for line in self._lines):
                self._gone.add(name)
                yield f"~{name}"


class Schedule:
    """A random schedule: keeps the requests that run, or wait, and the states of instances."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._ids = self._random.choice([2, 4, 9])
        self._running: list[str] = []  # also those whose sequence was lost
        self._waiting: list[str] = []
        self._states = {"A": "+", "B": "+"}

    def event(self, number: int, now: int) -> str:
        """The next event, as `World.do` reads it; "" for none."""
        pick = self._random
        match pick.choices(["arrive", "over", "cancel", "time", "instance"], [9, 8, 2, 2, 1])[0]:
            case "arrive":
                kind = pick.choice(["", "", "", "s", "s", "e", "se"])
                patience = pick.choice([0, 0, 0, 30])
                self._waiting.append(f"t{number}")
                expires = f" <{now + patience}" if patience else ""
                return f"t{number} {pick.randint(1, self._ids)} {kind}{expires}"
            case "over" if self._running:
                place = pick.randrange(len(self._running))
                return self._running.pop(place) + pick.choice("....!")
            case "cancel" if self._waiting:
                return self._waiting.pop(pick.randrange(len(self._waiting))) + "!"
            case "time":
                return f"@{now + pick.choice([1, 20, 50, 100])}"
            case "instance":
                name, does = pick.choice("ABCDE"), pick.choice("+++--0")
                before = self._states.get(name, "")
                if does != before and before != "0" and (before or does == "+"):
                    self._states[name] = does
                    return name + does
        return ""

    def decided(self, told: Iterable[str]) -> None:
        """Note the decisions about requests."""
        for text in told:
            name = text[1:].partition("@")[0].partition(":")[0]
            if name in self._waiting:
                self._waiting.remove(name)
                if text[0] == "+":
                    self._running.append(name)


@pytest.mark.parametrize("seed", range(60))
def test_against_a_reference(seed: int) -> None:
    seats = 1 + seed % 3
    world, reference, schedule = World(seats, "AB"), Reference(seats), Schedule(seed)
    for instance in "AB":
        assert not reference.event(world, f"{instance}+")
    for number in range(400):
        world.now += 1  # no two seats become free at the same time
        if event := schedule.event(number, world.now):
            found = world.do(event).split()
            assert sorted(found) == sorted(reference.event(world, event)), event
            schedule.decided(found)
