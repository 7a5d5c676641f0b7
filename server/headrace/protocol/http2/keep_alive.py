"""Keep-alive of a connection: its age, PINGs to a silent peer, and limits on the peer's PINGs.

Decisions over times, as in gRPC's own servers: when to PING a silent peer, when to give it up, when
it sends too many PINGs itself, and when a connection is old enough to be replaced. All times are in
seconds of one monotonic clock.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

_IDLE_SECS = 7200.0  # least time between a peer's PINGs without calls, if not permitted
_BEYOND_SECS = 60.0  # between PINGs after too many without data
_FINISH_SECS = 20.0  # for the peer to answer the PING of a graceful GOAWAY
_READING_SECS = 5.0  # for the peer to read data that is still buffered in between
JITTER = 0.1  # random share of the age, so that clients do not all reconnect at once


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Keep-alive settings of all connections; the defaults are gRPC's.

    A peer that has been silent for `interval` is sent a PING, and given up if nothing arrives for
    `timeout` after it; without calls in flight only if permitted. After `pings_without_data` such
    PINGs, further ones are delayed. A peer may PING once per `least_interval`, more often if data
    was sent to it since; after more than `strikes` early PINGs it is disconnected. After `age` a
    connection accepts no more calls; those in flight have `grace`. 0 is no limit, except for the
    first two.
    """

    interval: float = 7200.0
    timeout: float = 20.0
    without_calls: bool = False
    pings_without_data: int = 2
    least_interval: float = 300.0
    strikes: int = 2
    age: float = 0.0
    grace: float = 0.0


class KeepAliveAction(Enum):
    """Actions of `KeepAliveWatch`."""

    NOTHING = auto()
    PING = auto()
    GIVE_UP = auto()  # the peer does not answer
    RETIRE = auto()  # send GOAWAY: no more calls on this connection
    FINISH = auto()  # finish GOAWAY, whether or not the peer has answered
    CUT = auto()  # cancel the calls still in flight


class KeepAliveWatch:
    """The keep-alive state of one connection; the next `look` is due `at`."""

    __slots__ = (
        "_age_at", "_finished", "_marker", "_pinged_at", "_pings", "_retired_at", "_rules",
        "_waits", "at",
    )  # fmt: skip

    def __init__(self, rules: KeepAlive, now: float, jitter: float) -> None:
        """`jitter` is from -1 to 1."""
        self._rules = rules
        self._age_at = now + rules.age * (1 + JITTER * jitter) if rules.age else inf
        self._retired_at = inf
        self._finished = False
        self._pinged_at = -inf  # time of the last PING
        self._waits = False  # waiting for anything after the PING
        self._pings = 0  # PINGs since the last data
        self._marker = 0
        self.at = min(self._age_at, now + rules.interval)

    def look(self, now: float, heard: float, calls: bool, sent: int) -> KeepAliveAction:
        """The action due; `heard` is the time of the last bytes, `sent` grows with frames."""
        due = self._end(now)
        if due is KeepAliveAction.NOTHING:
            due = self._keep(now, heard, calls, sent)
        self.at = min(self._next_end(), self._next_ping(now, heard))
        return due

    def _end(self, now: float) -> KeepAliveAction:
        grace = self._rules.grace
        if self._retired_at == inf:
            if now < self._age_at:
                return KeepAliveAction.NOTHING
            self._retired_at = now
            return KeepAliveAction.RETIRE
        if grace and now >= self._retired_at + grace:
            return KeepAliveAction.CUT
        if not self._finished and now >= self._retired_at + _FINISH_SECS:
            self._finished = True
            return KeepAliveAction.FINISH
        return KeepAliveAction.NOTHING

    def _next_end(self) -> float:
        if self._retired_at == inf:
            return self._age_at
        cut = self._retired_at + self._rules.grace if self._rules.grace else inf
        return cut if self._finished else min(cut, self._retired_at + _FINISH_SECS)

    def _keep(self, now: float, heard: float, calls: bool, sent: int) -> KeepAliveAction:
        rules = self._rules
        if self._waits:
            if heard < self._pinged_at:
                late = now >= self._pinged_at + rules.timeout
                return KeepAliveAction.GIVE_UP if late else KeepAliveAction.NOTHING
            self._waits = False
        if now < heard + rules.interval or not (calls or rules.without_calls):
            return KeepAliveAction.NOTHING
        if sent != self._marker:
            self._marker = sent
            self._pings = 0
        most = rules.pings_without_data
        if most and self._pings >= most and now < self._pinged_at + _BEYOND_SECS:
            return KeepAliveAction.NOTHING
        self._pings += 1
        self._pinged_at = now
        self._waits = True
        return KeepAliveAction.PING

    def _next_ping(self, now: float, heard: float) -> float:
        rules = self._rules
        if self._waits:
            return self._pinged_at + rules.timeout
        at = heard + rules.interval
        return at if at > now else now + rules.interval


class Strikes:
    """Counts PINGs of one peer that came too soon."""

    __slots__ = ("_at", "_count", "_forgiven", "_marker", "_rules")

    def __init__(self, rules: KeepAlive) -> None:
        self._rules = rules
        self._at = -inf
        self._forgiven = -inf  # early PINGs until then do not count
        self._count = 0
        self._marker = -1

    def ping(self, now: float, calls: bool, sent: int) -> bool:
        """True if a PING was one too many; `sent` grows with frames sent to the peer."""
        rules = self._rules
        if sent != self._marker:
            if self._marker >= 0:
                self._forgiven = now + _READING_SECS
            self._marker = sent
            self._count = 0
            self._at = -inf
        idle = not (calls or rules.without_calls)
        least = max(_IDLE_SECS, rules.least_interval) if idle else rules.least_interval
        soon = self._forgiven <= now < self._at + least
        self._at = now
        if soon:
            self._count += 1
        return bool(rules.strikes) and self._count > rules.strikes
