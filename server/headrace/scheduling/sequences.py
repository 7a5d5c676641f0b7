"""Sequences of a model whose state is on upstreams: the queue in front of the scheduler.

One request of a sequence is in progress at a time, and the next one follows at its end, so that
they run in order of arrival. The sender of its requests stores with each sequence where its state
is, and the next one is submitted for that upstream alone. A sequence is known from its first
request to its last one, or until it has been idle for the configured time.

An upstream may delay a first request until it has room for another sequence. So that such requests
do not take all concurrent calls, which the requests that would make room need, only some of them
are let through at a time.

Owned by the event-loop thread. Invariants: a sequence has a line exactly while it has a request
here, otherwise it rests in the table. The first of a line is with the scheduler or among the
waiting starts, or the line is failing, some requests in each turn of the event loop; all others of
the line wait.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.call import Call, Owner, Parameter, Stage
from headrace.core.errors import InvalidRequest, RemoteLost, ServerError, Unavailable
from headrace.core.turns import ENDED_AT_ONCE
from headrace.observability.statistics import SequenceSeries
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.upstreams import Holder, Pin, Way, way

MOST_SEQUENCES = 32_768  # per model, at a time

# The parameters that tell an upstream a request's sequence.
SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = "sequence_id", "sequence_start", "sequence_end"

Id = int | str


def not_named(model: str) -> InvalidRequest:
    """The error of a request without the id of a sequence, in Triton's words."""
    return InvalidRequest(
        f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
    )


def not_single(model: str) -> InvalidRequest:
    """The error of a request of several rows to a sequence, in Triton's words."""
    return InvalidRequest(
        f"inference request to model '{model}' must specify batch-size 1 due to requirements of"
        " sequence batcher"
    )


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Limits on the sequences of a model.

    Idle ones are dropped after `idle_ns`. Unless they are `named`, a request without an id is a
    sequence of its own. `most` is the maximum at a time.
    """

    idle_ns: int
    named: bool = True
    most: int = MOST_SEQUENCES


class SequenceTable:
    """The pins of known sequences by id.

    Resting ones are dropped in time; the others have requests in progress. `ended` counts sequences
    by how they ended, `restarted` the starts of known ones.
    """

    def __init__(self, idle_ns: int, now: Callable[[], int]) -> None:
        self.now = now
        self.ended = dict.fromkeys(("end", "idle", "lost"), 0)
        self.restarted = 0
        self._idle_ns = idle_ns
        self._pins: dict[Id, Pin | None] = {}
        self._idle: OrderedDict[Id, int] = OrderedDict()  # start of the rest, oldest first

    def __contains__(self, id: Id) -> bool:
        return id in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, id: Id) -> Pin | None:
        """The pin of a sequence; None if it has none yet, or is unknown."""
        return self._pins.get(id)

    def put(self, id: Id, pin: Pin | None) -> None:
        """Store the pin of a sequence, if it is known."""
        if id in self._pins:
            self.ended["lost"] += pin is not None and pin.lost and self._pins[id] != pin
            self._pins[id] = pin

    def wake(self, id: Id) -> None:
        """Keep a sequence with a new request until it rests."""
        self._pins.setdefault(id, None)
        self._idle.pop(id, None)

    def rest(self, id: Id) -> None:
        """Remember the sequence's pin until `idle_ns` have passed; drop sequences without one."""
        if self._pins[id] is None:
            del self._pins[id]
        else:
            self._idle[id] = self.now()

    def forget_idle(self) -> None:
        """Drop the sequences that have rested for too long."""
        if not self._idle:
            return
        until = self.now() - self._idle_ns
        while self._idle:
            id, since = next(iter(self._idle.items()))
            if since > until:
                return
            del self._idle[id]
            self.ended["idle"] += _holds(self._pins.pop(id))

    def lose(self, id: Id, model: str) -> RemoteLost:
        """Mark a sequence as lost, until it is started again; returns the error of its request."""
        self.put(id, Pin(lost=True))
        return RemoteLost(
            f"sequence {id} of model '{model}' is lost: its server cannot be reached, or one of its"
            " requests was cancelled or not answered; it has to be begun again"
        )

    def count(self, server: Holder) -> int:
        """The number of sequences with their state on `server`."""
        return sum(pin is not None and pin.server is server for pin in self._pins.values())

    def series(self, backlog: int) -> SequenceSeries:
        """The numbers of sequences, for a scrape; `backlog` wait for an upstream."""
        self.forget_idle()
        pinned = sum(_holds(pin) for pin in self._pins.values())
        return SequenceSeries(pinned, backlog, self.restarted, self.ended)


class SequenceQueue:
    """Passes requests to a scheduler in the order of their sequences."""

    def __init__(
        self,
        model: str,
        table: SequenceTable,
        rules: SequenceRules,
        most_starts: int,
        scheduler: Scheduler,
        failed: Callable[[str, int], None],
        soon: Callable[..., object],
    ) -> None:
        """`failed` is `VersionStatistics.request_failed`, for requests that waited here in vain.

        `soon` runs a callback in the next turn of the event loop. The number of first requests at
        the scheduler is limited.
        """
        self.waiting = 0
        self._model = model
        self._table = table
        self._rules = rules
        self._most_starts = most_starts
        self._scheduler = scheduler
        self._failed = failed
        self._soon = soon
        self._lines: dict[Id, OrderedDict[_Turn, None]] = {}
        self._failing: set[Id] = set()  # of lines whose next turn is scheduled
        self._starts = 0  # first requests at the scheduler
        self._waiting_starts: OrderedDict[_Turn, None] = OrderedDict()

    @property
    def series(self) -> SequenceSeries:
        """Implements `SequenceStage.series`."""
        return self._table.series(len(self._waiting_starts))

    def submit(self, request: Call) -> None:
        """Queue a checked request; raises `InvalidRequest`, `Unavailable` or `RemoteLost`."""
        self._table.forget_idle()
        id = request.options.sequence_id
        if not id and not self._rules.named:
            self._scheduler.submit(request)
            return
        if not id:
            raise not_named(self._model)
        if request.rows > 1:
            raise not_single(self._model)
        _tell(request)
        turn = _Turn(self, request, self._table.now())
        line = self._lines.get(id)
        if line is not None:
            line[turn] = None
            self._wait(turn)
            request.enter(turn, turn.keep)
            return
        if id not in self._table and len(self._table) >= self._rules.most:
            raise Unavailable(
                f"this server is at its limit of {self._rules.most} sequences of model"
                f" '{self._model}'",
                retry_after=1,
            )
        self._table.wake(id)
        self._lines[id] = OrderedDict([(turn, None)])
        request.enter(turn, lambda request: self._begin(turn))

    def ended(self, turn: "_Turn") -> None:
        """Continue after a request has ended, in whatever way."""
        if turn.done:
            return
        turn.done = True
        if turn.waits:
            self._go_on(turn)
        if turn.counted:
            self._starts -= 1
        self._waiting_starts.pop(turn, None)
        id = turn.request.options.sequence_id
        line = self._lines[id]
        was_first = next(iter(line)) is turn
        del line[turn]
        if was_first and id not in self._failing:
            self._advance(id, line)
        while self._waiting_starts and self._starts < self._most_starts:
            start, _ = self._waiting_starts.popitem(last=False)
            id = start.request.options.sequence_id
            self._advance(id, self._lines[id])

    def in_vain(self, turn: "_Turn", reason: str) -> None:
        """Count a request that never reaches the scheduler."""
        self._failed(reason, self._table.now() - turn.arrived)

    def _advance(self, id: Id, line: "OrderedDict[_Turn, None]") -> None:
        """Begin the first request of a line, or end the line if none can begin."""
        self._failing.discard(id)
        left = ENDED_AT_ONCE
        while line and left:
            left -= 1
            turn = next(iter(line))
            try:
                self._begin(turn)
            except ServerError as error:
                turn.done = True
                self.in_vain(turn, "OTHER")
                self._go_on(turn)
                turn.request.pass_end(error)  # this may submit another request of the sequence
                del line[turn]
            else:
                return
        if line:
            self._failing.add(id)
            self._soon(self._advance, id, line)
            return
        del self._lines[id]
        self._table.rest(id)

    def _begin(self, turn: "_Turn") -> None:
        """Submit the first of its line, or queue it behind other starts; raises `ServerError`."""
        request, id = turn.request, turn.request.options.sequence_id
        pin = self._table.pin(id)
        if request.options.sequence_start:
            if self._starts >= self._most_starts:
                self._waiting_starts[turn] = None
                self._wait(turn)
                turn.keep(request)
                return
        elif pin is None:
            raise InvalidRequest(
                f"inference request for sequence {id} to model '{self._model}' must specify the"
                " START flag on the first request of the sequence"
            )
        self._table.restarted += request.options.sequence_start and _holds(pin)
        chosen = way(pin, request.options.sequence_start)
        if chosen is Way.NOWHERE:
            raise self._table.lose(id, self._model)
        server = pin.server if pin is not None and chosen is Way.PINNED else None
        self._scheduler.submit(request, server)
        if request.options.sequence_start:
            turn.counted = True
            self._starts += 1
        if turn.waits:
            self._go_on(turn)

    def _wait(self, turn: "_Turn") -> None:
        if not turn.waits:
            turn.waits = True
            self.waiting += 1
            self._scheduler.expect(1)

    def _go_on(self, turn: "_Turn") -> None:
        turn.waits = False
        self.waiting -= 1
        self._scheduler.expect(-1)


class _Turn(Stage, Owner):
    """A request's place in its line, and its owner while it `waits` there.

    It is `counted` among the scheduler's starts until it is `done`.
    """

    __slots__ = ("_queue", "arrived", "counted", "done", "request", "waits")

    def __init__(self, queue: SequenceQueue, request: Call, arrived: int) -> None:
        self._queue = queue
        self.arrived = arrived
        self.request = request
        self.waits = False
        self.done = False
        self.counted = False

    def keep(self, call: Call) -> None:
        """Own the request while it waits."""
        call.owner = self

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        if not self.done:
            self._queue.in_vain(self, "CANCELED")

    def over(self, call: Call) -> None:
        """Begin the next request of the sequence."""
        self._queue.ended(self)


def _holds(pin: Pin | None) -> bool:
    return pin is not None and not pin.lost


def _tell(request: Call) -> None:
    """Add the parameters that tell an upstream the request's sequence."""
    told: dict[str, Parameter] = {**request.parameters, SEQUENCE_ID: request.options.sequence_id}
    if request.options.sequence_start:
        told[SEQUENCE_START] = True
    if request.options.sequence_end:
        told[SEQUENCE_END] = True
    request.parameters = told
