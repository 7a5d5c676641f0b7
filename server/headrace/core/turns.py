"""Turns of the event loop: work that one client can cause is cut into pieces.

A client may send thousands of requests in one read. A connection processes as many of them at once
as its `share`, and puts the rest off; of everything that was put off, one piece runs per turn of
the loop, so that other clients are served in between, however many connections do this. The share
is small while others wait, and after connections with long reads have taken `CROWDED_SECS` of the
same turn. Owned by the event-loop thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable

SHARE = 128  # units, of some 10 us: frames, messages, requests
PACKED = 24  # units of a compressed message: 64 KiB of it may be unpacked at once
TEXT_BITS, BINARY_BITS = 8, 9  # 256 bytes of JSON, and 512 of protobuf, may take as long as a unit
SMALL = 4  # ... while other connections wait for their turn
CROWDED_SECS = 0.005
PIECE_SECS = 0.002  # after which a connection leaves the rest of its messages to another turn
LONG_READ = 4 << 10  # bytes from which on a read is timed: that costs a small request 2 %
_ENDS = 64  # connections that close in one turn


class Turns:
    """Pieces of work that wait for a turn of their own, first come, first served."""

    def __init__(self) -> None:
        self.share = SHARE  # units of work that a connection may do now
        self.turn = 0.0  # the loop's time of the turn in which connections have taken `taken`
        self.taken = 0.0  # seconds
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._singles: deque[Callable[[], None]] = deque()
        self._ends: deque[Callable[[], None]] = deque()
        self._ended = 0  # since `_at`, which is a turn's time by uvloop's clock
        self._at = 0.0

    def begin(self, now: float) -> int:
        """The share of a connection with a long read, at the loop's time; see `taken`."""
        if now != self.turn:
            self.turn, self.taken = now, 0.0
        return self.share if self.taken < CROWDED_SECS else SMALL

    def put_off(self, piece: Callable[[], None]) -> None:
        """Run `piece` in a later turn of the loop."""
        self._waiting.append(piece)
        self.share = SMALL
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        piece = self._waiting.popleft()
        self.share = SHARE
        if self._waiting:  # first, so that it happens even if the piece fails
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)
        try:
            piece()
        finally:
            self.share = SMALL if self._waiting else SHARE

    def one_by_one(self, piece: Callable[[], None]) -> None:
        """Run `piece` in a later turn, alone of its kind: a connection that reads on after a long
        read, or the rest of a request after its work on a thread.

        The share of other connections stays as it is: they need no more turns than before.
        """
        self._singles.append(piece)
        if len(self._singles) == 1:
            asyncio.get_running_loop().call_soon(self._run_one)

    def _run_one(self) -> None:
        piece = self._singles.popleft()
        if self._singles:
            asyncio.get_running_loop().call_soon(self._run_one)
        piece()

    def end_later(self, close: Callable[[], None]) -> bool:
        """Put off the closing of a connection whose client has hung up, if many others have, too.

        Ten thousand that end at once take a tenth of a second. False if it may be closed now.
        """
        loop = asyncio.get_running_loop()
        if (now := loop.time()) != self._at:
            self._at, self._ended = now, 0
        self._ended += 1
        if self._ended <= _ENDS and not self._ends:
            return False
        if not self._ends:
            loop.call_soon(self._end_some)
        self._ends.append(close)
        return True

    def _end_some(self) -> None:
        for _ in range(min(len(self._ends), _ENDS)):
            self._ends.popleft()()
        if self._ends:
            asyncio.get_running_loop().call_soon(self._end_some)
