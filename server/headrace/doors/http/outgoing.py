"""Bytes for one HTTP client: written in order, and passed on as the client reads.

A transport keeps all that is written, and answers may be long: beyond a few pieces, they wait here
until the transport has room. Unread bytes are charged to the connection, and a client that reads
too slowly, or leaves too many unread, is given up (`headrace.engine.entrance.Progress`). Owned by
the connection, which passes on the transport's callbacks.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from sys import maxsize

from headrace.core.tensors import Buffer
from headrace.doors.acceptor import undelivered
from headrace.engine.entrance import Progress

_AT_ONCE = 17  # pieces that are written together
_JOIN = 64 << 10  # bytes up to which pieces are sent as one buffer
_ENCRYPTED = 256 << 10  # bytes of a piece over TLS: transports encrypt at once all that they get


class Outgoing:
    """The bytes that are written to a connection, until its client has read them."""

    __slots__ = (
        "_ending", "_most", "_pieces", "_progress", "_resumed", "_transport", "_unsent",
        "_written", "paused", "stalled",
    )  # fmt: skip

    def __init__(self, transport: asyncio.Transport, progress: Progress) -> None:
        self._transport = transport
        self._progress = progress
        # The largest piece.
        self._most = maxsize if transport.get_extra_info("sslcontext") is None else _ENCRYPTED
        self.paused = False  # the transport has enough
        self.stalled = False  # bytes are unread, or were until just now
        # Most connections have none of these, and an empty deque takes 0.6 KB.
        self._pieces: deque[Buffer] | None = None  # not passed to the transport yet
        self._unsent = 0  # bytes of these
        self._written = 0  # bytes, all of them
        self._ending = False  # the connection closes when all is passed on
        self._resumed: asyncio.Event | None = None  # of those that wait in `drain`

    @property
    def empty(self) -> bool:
        """True if the transport has all that was written."""
        return not self._pieces

    @property
    def closing(self) -> bool:
        """True if nothing more can be written."""
        return self._ending or self._transport.is_closing()

    @property
    def waiting(self) -> int:
        """Bytes that were written but not read by the client."""
        if self.paused or self._transport.is_closing():
            return self._transport.get_write_buffer_size() + self._unsent
        return 0

    def write(self, pieces: Sequence[Buffer], size: int) -> None:
        """Write pieces of `size` bytes together."""
        if not self._pieces and size <= _JOIN:
            self._transport.write(b"".join(pieces))
        elif not self._pieces and len(pieces) <= _AT_ONCE and size <= self._most:
            self._transport.writelines(pieces)
        else:
            # The transport would keep all pieces until the last one is sent.
            self._pieces = self._pieces or deque()
            self._pieces += pieces
            self._unsent += size
            self._pass_on()
        self._written += size

    def end(self) -> None:
        """Close the connection when all that was written is passed on."""
        self._ending = True
        self._pass_on()

    def within(self, held: int) -> bool:
        """Charge the unread bytes, and `held` ones from the client; False beyond its share."""
        return self._progress.within(self.waiting, held)

    def reads(self, held: int, now: float) -> bool:
        """False if the client is to be given up; `held` as in `within`, `now` the loop's time.

        To be called regularly while bytes are waiting, or were until just now (`stalled`).
        """
        waiting = self.waiting
        self.stalled = waiting > 0
        moved = self._written - self._unsent - undelivered(self._transport)
        return self._progress.reads(waiting, held, moved, now)

    async def drain(self) -> None:
        """Wait until the transport has room, or the connection is lost."""
        while self.paused:
            self._resumed = self._resumed or asyncio.Event()
            await self._resumed.wait()

    def pause(self) -> None:
        """Note that the transport has enough."""
        self.paused = self.stalled = True

    def resume(self) -> None:
        """Note that the transport has room again."""
        self.paused = False
        self._pass_on()
        self._wake()

    def lose(self) -> None:
        """Drop everything: the connection is lost."""
        self._pieces, self._unsent, self.paused = None, 0, False
        self._wake()

    def _pass_on(self) -> None:
        pieces = self._pieces
        while pieces and not self.paused:
            piece = pieces.popleft()
            if len(piece) > self._most:
                whole = memoryview(piece)
                piece = whole[: self._most]
                pieces.appendleft(whole[self._most :])
            self._unsent -= len(piece)
            self._transport.write(piece)
        if self._ending and not pieces:
            self._transport.close()

    def _wake(self) -> None:
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None
