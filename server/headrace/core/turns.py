"""Turns of the event loop: work that one client can cause is cut into pieces.

A client may send thousands of requests in one read. A connection processes as many of them at once
as its `share`, and puts the rest off; of everything that was put off, pieces of `PIECE_SECS` run
per turn of the loop, so that other clients are served in between, however many connections do this.
The share is small while others wait, and after connections have taken `CROWDED_SECS` of the same
turn. What was put off has a share that fits into `PIECE_SECS`, by the time that earlier pieces have
taken: a refused request may take ten times as long as another. Owned by the event-loop thread.

Thousands of clients may send a request each in the same instant, and a turn of the loop reads from
all of them: a read is put off once the turn is full. Plain requests are merely counted; others tell
what to `expect` of them, since the first steps of their tasks are taken in the next turn.

A loop does not tell where its turns end: uvloop's time goes on within one. So whoever counts what
happens in a turn has a callback at the begin of the next one.
"""

import asyncio
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Generic, TypeVar

from headrace.core.process import collect_young

SHARE = 128  # units, of some 10 us: frames, messages, requests
PACKED = 24  # units of a compressed message: 64 KiB of it may be unpacked at once
TEXT_BITS, BINARY_BITS = 8, 9  # 256 bytes of JSON, and 512 of protobuf, may take as long as a unit
SMALL = 4  # ... while other connections wait for their turn
CROWDED_SECS = 0.005
PIECE_SECS = 0.002  # after which a connection leaves the rest of its work to another turn
LONG_READ = 1 << 10  # bytes from which on a read is timed: that costs a small request 2 %
_OF_PIECE = 32  # requests of a piece, for the garbage collector
TASK_SECS = 2e-4  # of the first step of a task: all made in a turn take it in the next one
_MOST_SECS = 4 * CROWDED_SECS
_READS = 256  # short ones in a turn, of some 30 us: neither counted by turns nor timed
_RESTS = 1 << 20  # in one turn, if they fit into `PIECE_SECS`
TURN_SECS = 0.005  # of one with pieces, beyond which the next one has fewer
ENDED_AT_ONCE = 64  # connections, or requests, that end in one turn

T = TypeVar("T")


def next_turn(callback: Callable[[], None]) -> None:
    """Run `callback` in the next turn of the running event loop."""
    asyncio.get_running_loop().call_soon(callback)


def fitting(share: int, secs: float) -> int:
    """The share that takes up to `PIECE_SECS`, after a piece with `share` that took `secs`."""
    if secs > PIECE_SECS:
        return max(int(share * PIECE_SECS / secs), SMALL)
    return min(share + (share >> 2) + 1, SHARE)


class TurnQueue(Generic[T]):
    """A queue of which some items are processed in each later turn of the event loop, in order.

    They are up to `most`, as far as they fit into `PIECE_SECS`.
    """

    def __init__(
        self,
        process: Callable[[T], object],
        soon: Callable[[Callable[[], None]], object] = next_turn,
        done: Callable[[], None] = lambda: None,
        most: int = ENDED_AT_ONCE,
    ) -> None:
        """`soon` schedules a callback; `done` is called in a turn that leaves no item."""
        self._process, self._soon, self._done, self._most = process, soon, done, most
        self._waiting: deque[T] = deque()
        self._scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def process(self, items: Sequence[T]) -> None:
        """Process few items at once, unless others wait; all others in later turns."""
        if self._waiting or len(items) > self._most:
            self.extend(items)
            return
        for item in items:
            self._process(item)

    def extend(self, items: Iterable[T]) -> None:
        """Process items in later turns."""
        self._waiting.extend(items)
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._soon(self._run)

    def clear(self) -> None:
        """Forget all items."""
        self._waiting.clear()

    def _run(self) -> None:
        left, until = self._most, perf_counter() + PIECE_SECS
        try:
            while self._waiting and left and perf_counter() < until:
                left -= 1
                self._process(self._waiting.popleft())
        finally:  # even if one has failed
            self._scheduled = False
            self.extend(())
        if not self._waiting:
            self._done()


class Turns:
    """Pieces of work that wait for a turn of their own, first come, first served."""

    def __init__(self) -> None:
        self.share = SHARE  # units of work that a connection may do now
        self.taken = 0.0  # seconds of this turn that are known to be taken
        self.room = _READS  # reads that may be processed before one asks if this turn is full
        self._full = False  # it is, once there is no room
        self._counting = False  # a callback for the next turn is scheduled
        self._piece = SHARE  # units of work of a piece that was put off
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False  # a piece is
        self._last = 0.0  # time of the turn before, if pieces ran in it and others were left
        self._budget = CROWDED_SECS  # seconds to `expect` of the pieces of one turn
        self._reads: TurnQueue[Callable[[], None]] = TurnQueue(operator.call, most=1)
        self._rests: TurnQueue[Callable[[], None]] = TurnQueue(operator.call, most=_RESTS)
        self._ends: TurnQueue[Callable[[], None]] = TurnQueue(self._end)
        self._ended = 0  # connections and calls, in this turn

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._counting = False
        self._ended = 0
        self.taken = 0.0
        self._open()

    def _open(self) -> None:
        self.room = _READS
        self._full = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> int:
        """The share of a connection with a long read, which will `spend` its time."""
        self._count(loop)
        return min(self.share, self._piece) if self.taken < CROWDED_SECS else SMALL

    def spend(self, secs: float) -> None:
        """Count a long read: reads of other connections are put off once they have taken long."""
        self.taken += secs
        if self.taken >= _MOST_SECS:
            self.room = 0

    def expect(self, loop: asyncio.AbstractEventLoop, secs: float) -> None:
        """Count work that costs more than a plain request, here or in the next turn."""
        self._count(loop)
        self.taken += secs
        if self.taken >= CROWDED_SECS:
            self.room = 0

    def full(self, loop: asyncio.AbstractEventLoop, urgent: bool = False) -> bool:
        """True if a read should be put off, for want of `room` in this turn.

        What is `urgent` has room for longer.
        """
        if urgent:
            return self.taken >= _MOST_SECS
        if not self._full and self.taken < CROWDED_SECS:
            self._open()  # only counted so far: these may have been reads of many turns
            self._count(loop)
        self._full = True
        return self.room <= 0

    @property
    def behind(self) -> bool:
        """True if others wait for their turn, and this is not one of them."""
        return bool(self._waiting) and not self._running

    def put_off(self, piece: Callable[[], None]) -> None:
        """Run `piece` in a later turn of the loop."""
        self._waiting.append(piece)
        self.share = SMALL
        if len(self._waiting) == 1 and not self._running:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        begun = perf_counter()
        if self._last:  # there was one in the turn before: what it took is no guess
            long = begun - self._last > TURN_SECS
            self._budget = min(max(self._budget * (0.5 if long else 1.25), TASK_SECS), CROWDED_SECS)
        self.taken = 0.0  # what has waited comes before new reads
        try:
            self._run_one()
            until = begun + PIECE_SECS
            while self._waiting and self.taken < self._budget and perf_counter() < until:
                self._run_one()
        finally:  # even if a piece has failed
            self.share, self._last = SHARE, 0.0
            if self._waiting:
                self.share, self._last = SMALL, begun
                asyncio.get_running_loop().call_soon(self._run)

    def _run_one(self) -> None:
        piece = self._waiting.popleft()
        self.share, self._running = self._piece, True
        self._open()
        begun = perf_counter()
        try:
            piece()
        finally:
            self._running = False
            collect_young(_OF_PIECE)
            self._piece = fitting(self._piece, perf_counter() - begun)

    def read_later(self, read_on: Callable[[], None]) -> None:
        """Let a connection read on, after a long read: one of them in a turn.

        The share of other connections stays as it is: they need no more turns than before.
        """
        self._reads.extend((read_on,))

    def go_on_later(self, rest: Callable[[], None]) -> None:
        """Go on with a request after its work on a thread: some `PIECE_SECS` of these in a turn."""
        self._rests.extend((rest,))

    def end_later(self, close: Callable[[], None]) -> bool:
        """Put off the closing of a connection whose client has hung up, if many others have, too.

        Also the end of a call whose time is over. Ten thousand that end at once take a tenth of a
        second. False if it may be closed now.
        """
        loop = asyncio.get_running_loop()
        self._count(loop)
        self._ended += 1
        if self._ended <= ENDED_AT_ONCE and not self._ends:
            return False
        self._ends.extend((close,))
        return True

    def _end(self, close: Callable[[], None]) -> None:
        self._count(asyncio.get_running_loop())
        self._ended += 1  # fewer others may end at once in the same turn
        close()
