"""Limits as values: a peer's patience, shares of the server's limits, execution times, memory.

Patience is one rule for every door and both directions: bytes earn time. A peer starts with `secs`
seconds, earns one more with every `SLOWEST` bytes, and never has more than `secs`, so that an early
burst buys no later silence. Execution limits are server settings; a model's configuration
overrides them by parameters of the same names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sys import maxsize
from time import time
from typing import Protocol

from headrace.core.texts import seconds

LOOK_SECS = 1.0  # interval between two looks
ABANDONED_SECS = 5.0  # an abandoned execution may go on where ending it costs nothing
_LONGEST_SECS = 2.0  # the longest interval that a look may stand for
_LEAST_PACE_SECS = 0.05
SLOWEST = 1024  # bytes per second; slower messages and readers are given up


class Patience:
    """The remaining time of a peer, for one message or unread answer after the other.

    Times are in seconds of one monotonic clock.
    """

    __slots__ = ("_left", "_longest", "_looked", "_seen", "_subject", "secs")

    def __init__(self, secs: float, longest: float = _LONGEST_SECS) -> None:
        """An interval between two looks counts as `longest` seconds at most."""
        self.secs = secs
        self._longest = longest
        self._subject: object = None
        self._left = secs
        self._looked = 0.0
        self._seen = 0

    def look(self, subject: object, nbytes: int, now: float, pressed: bool = False) -> bool:
        """True if the peer may take longer over `subject`, of which `nbytes` have moved so far.

        Call regularly while the peer can make progress: time between calls beyond the longest
        interval is not held against it. A new `subject` starts anew. While the server is `pressed`
        for memory, a peer has less time in reserve.
        """
        if subject != self._subject:
            self._subject = subject
            self._left = self.secs
        else:
            earned = max(nbytes - self._seen, 0) / SLOWEST
            passed = min(now - self._looked, self._longest)
            self._left = min(self._left - passed + earned, self.secs)
        self._looked, self._seen = now, nbytes
        if pressed:
            self._left = min(self._left, PRESSED_SECS)
        return self._left > 0


PRESSED_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Percentages of the server's limits for a connection, a client address, and a model.

    The first two get at least 64 requests and 64 MiB, a model 64 requests and 8 MiB.
    `connections` is the maximum of connections, `streams` of open gRPC calls, besides the first few
    of each connection; 0: no limit.
    """

    connection: int = 50
    address: int = 100
    connections: int = 0
    model: int = 80
    streams: int = 0


class Payer(Protocol):
    """The client in whose name work is done: a connection with its `requests` under way.

    `origin` is the client's address, "" if unknown; `weight` its share of a queue, relative to
    other clients'.
    """

    @property
    def requests(self) -> int: ...

    @property
    def origin(self) -> str: ...

    @property
    def weight(self) -> float: ...

    def take_rows(self, rows: int) -> None:
        """Count the rows of a decoded request against the client's quotas."""


FEW = 4  # requests of a connection, to all models, which is not what overloads one


Charge = Callable[[int], object]  # counts bytes before they are taken, and may raise


def uncharged(nbytes: int) -> None:
    """A `Charge` that counts nothing."""


class ModelLoad:
    """Requests in flight of one model, all versions together, and their bytes.

    Unlimited here; `headrace.engine.admission` derives one that enforces the model's share. Below
    `free_requests` and `free_bytes`, `check` need not be called. The batcher does by itself what
    `admit` and `release` do, since each Python call counts there.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.free_requests = self.free_bytes = maxsize

    def check(self, payer: Payer | None) -> None:
        """Raise `Overloaded` if no further request of a client is admitted."""

    def admit(self, nbytes: int, payer: Payer | None) -> None:
        """Count a request; raises `Overloaded`."""
        if self.requests >= self.free_requests or self.bytes >= self.free_bytes:
            self.check(payer)
        self.requests += 1
        self.bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count a request no more."""
        self.requests -= 1
        self.bytes -= nbytes


@dataclass(frozen=True, slots=True)
class ExecutionLimits:
    """Seconds without progress until an execution is acted on; 0 switches a limit off.

    Progress is the end of a batch, a response within it, or a call of another model. After
    `execution_secs` the execution is ended, if possible. After `stall_secs` its instance counts
    as stalled, and an abandoned execution in a worker is ended.
    """

    execution_secs: float = 0.0
    stall_secs: float = 0.0

    def of(self, parameters: Mapping[str, str]) -> "ExecutionLimits":
        """A model's limits, with these as defaults; raises `InvalidOption`."""
        return ExecutionLimits(
            seconds(parameters, "execution_limit_secs", self.execution_secs),
            seconds(parameters, "stall_secs", self.stall_secs),
        )

    @property
    def pace(self) -> float:
        """Seconds from one look at executions to the next, to notice these limits in time."""
        limits = filter(None, (self.execution_secs, self.stall_secs))
        return min(map(pace_for, limits), default=LOOK_SECS)


def pace_for(limit: float) -> float:
    """Seconds from one look to the next, to notice in time that `limit` seconds have passed."""
    return min(LOOK_SECS, max(limit / 2, _LEAST_PACE_SECS))


class Pulse:
    """Seconds since the last sign of life, measured by polling a value that each sign changes."""

    def __init__(self) -> None:
        self.silent = 0.0
        self._last: object = None

    def look(self, sign: object, elapsed: float) -> float:
        """Seconds of silence, `elapsed` after the last look; a `sign` of None means not silent.

        A look stands for two intervals at most: if the server itself was suspended, so may
        everything that it polls have been.
        """
        if sign is not None and sign == self._last:
            self.silent += min(elapsed, 2 * LOOK_SECS)
        else:
            self._last = sign
            self.silent = 0.0
        return self.silent


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """Settings for models in memory.

    All models together may take `budget` bytes, 0: unlimited. A request waits for `wait_secs` at
    most. A model stays for `minimum_secs` after its load, and is evicted after `idle_secs` without
    requests, 0: never. `pinned` models always stay; they and the `first` ones are loaded at start.
    `clock` returns seconds since the epoch.
    """

    budget: int = 0
    wait_secs: float = 30.0
    minimum_secs: float = 60.0
    idle_secs: float = 0.0
    pinned: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    clock: Callable[[], float] = time
