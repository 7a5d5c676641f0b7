"""Limits as values: a peer's patience, shares of the server's limits, the time of executions.

Patience is one rule for every door and for both directions: bytes earn time. A peer has `secs`
seconds to begin with, earns a second with every `SLOWEST` bytes, and never has more than `secs`:
what came at once long ago buys nothing now. Limits of executions are the server's settings; a
model's configuration overrides them by parameters of the same names.
"""

import fcntl
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from sys import maxsize
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidOption

if TYPE_CHECKING:
    import asyncio

LOOK_SECS = 1.0  # between two looks
ABANDONED_SECS = 5.0  # that an execution nobody waits for may go on where ending it costs nothing
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
        """True if the peer may take longer over `subject`, of which `nbytes` have moved so far.

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


@dataclass(frozen=True, slots=True)
class Shares:
    """Percent of the server's limits for a connection, all those of an address, and a model.

    The first two may have 64 requests and 64 MiB in any case, a model 64 requests and 8 MiB.
    `connections` may be open at once; 0: no limit.
    """

    connection: int = 50
    address: int = 100
    connections: int = 0
    model: int = 80


class ModelLoad:
    """Requests of one model that are under way, of all its versions, and their bytes.

    Without a limit; `headrace.engine.admission` has one that holds models to their share. Nobody
    has to ask it below `free_requests` and `free_bytes`.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.free_requests = self.free_bytes = maxsize

    def check(self) -> None:
        """Raise `Overloaded` if there must be no request more."""


_MOST_SECS = 1e6


@dataclass(frozen=True, slots=True)
class ExecutionLimits:
    """Seconds without progress; 0 switches a limit off.

    Progress is the end of a batch, a response within it, or a call of another model. After
    `execution_secs` the execution is ended, if it can be. After `stall_secs` its instance counts as
    stalled; and an execution in a worker that nobody has waited for in so long is ended.
    """

    execution_secs: float = 0.0
    stall_secs: float = 0.0

    def of(self, parameters: Mapping[str, str]) -> "ExecutionLimits":
        """A model's own, with these as defaults; raises `InvalidOption` naming the wrong one."""
        return ExecutionLimits(
            seconds(parameters, "execution_limit_secs", self.execution_secs),
            seconds(parameters, "stall_secs", self.stall_secs),
        )


def seconds(parameters: Mapping[str, str], name: str, default: float) -> float:
    """A time among a configuration's parameters; raises `InvalidOption`."""
    text = parameters.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < _MOST_SECS:
        expected = "a number of seconds, 0 for no limit"
        raise InvalidOption(f"parameters['{name}']", f"expected {expected}, got {text!r}")
    return value


class Pulse:
    """For how long something has given no sign, by looks at what changes with each sign."""

    def __init__(self) -> None:
        self.silent = 0.0
        self._last: object = None

    def look(self, sign: object, elapsed: float) -> float:
        """Seconds of silence, after `elapsed` since the last look; None is no silence.

        A look stands for two intervals at most: if the server itself was stopped, so may all that
        it looks at have been.
        """
        if sign is not None and sign == self._last:
            self.silent += min(elapsed, 2 * LOOK_SECS)
        else:
            self._last = sign
            self.silent = 0.0
        return self.silent
