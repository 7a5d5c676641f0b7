"""How long a peer's progress is waited for: one rule for every door and for both directions.

Bytes earn time. A peer has `secs` seconds to begin with, earns a second with every `SLOWEST` bytes,
and never has more than `secs`: what came at once long ago buys nothing now.
"""

import fcntl
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_LONGEST_SECS = 2.0  # between two looks, of which one follows the other
SLOWEST = 1024  # bytes a second below which a message, or the reading of an answer, is given up


class Patience:
    """The time that is left for one message after the other, or for what waits to be read.

    Times are in seconds of one clock that does not go back.
    """

    __slots__ = ("_left", "_looked", "_seen", "_subject", "secs")

    def __init__(self, secs: float) -> None:
        self.secs = secs
        self._subject: object = None
        self._left = secs
        self._looked = 0.0
        self._seen = 0

    def look(self, subject: object, nbytes: int, now: float, pressed: bool = False) -> bool:
        """Whether to go on waiting for `subject`, of which `nbytes` have moved so far.

        To be called about once a second, while the peer may make progress: time in which nobody
        looked is not held against it. Another subject than last time begins anew. When the server
        is `pressed` for room, a peer may have little time in stock.
        """
        if subject != self._subject:
            self._subject = subject
            self._left = self.secs
        else:
            earned = max(nbytes - self._seen, 0) / SLOWEST
            passed = min(now - self._looked, _LONGEST_SECS)
            self._left = min(self._left - passed + earned, self.secs)
        self._looked, self._seen = now, nbytes
        if pressed:
            self._left = min(self._left, PRESSED_SECS)
        return self._left > 0


PRESSED_SECS = 5.0


def undelivered(transport: "asyncio.WriteTransport") -> int:
    """Bytes that were written and that the peer has not acknowledged.

    A slow reader empties the system's own buffer for a long time before that takes any more from
    the transport's, so that the latter alone would show no progress.
    """
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return waiting
    (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    return waiting + int(queued)
