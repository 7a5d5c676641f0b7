"""Bound on the delay in a model's queue while its model is overloaded.

A queue absorbs bursts. One that stays long absorbs nothing: it only makes each request wait until
its client has given up. As in CoDel, the two are told apart by the time for which the delay stands:
requests that start late, one after the other, for as long as the patience, while the queue grows,
mean overload. A queue that shrinks is what a burst has left; one that stays as it is has as many
clients as places, each of which waits for its answer. From then on requests that have waited for
too long are refused instead of started, so that the others are in time, and the model is as busy as
before. That ends when the queue has been short again.

Late is relative to the model: a run of 30 seconds makes its queue wait for minutes without any
overload. A pure decision over times in nanoseconds of one monotonic clock, which come from the
caller; judged at the start of requests, so that a time without any (no upstream, no worker) is none
of overload.
"""

from dataclasses import dataclass
from sys import maxsize

_RUNS = 8  # runs that a request may wait for in any case
_LEARN = 8  # share of a run in the usual duration
_GROWTH = 10  # share of the queue by which it grows in an overload
_SHORT = 4  # share of the bound below which a delay ends an overload


@dataclass(frozen=True, slots=True)
class DelayBound:
    """The delay from which on a request is late: `delay`, or eight runs, and `gathering` more.

    `gathering` is the time for which a batch may wait for requests.
    """

    delay: int
    gathering: int = 0


class Overload:
    """The state of a queue as to overload; without a bound it never is overloaded.

    `late` is the delay beyond which a request is late. While `since` is 0, requests start in time,
    and `timely` need not be called; runs of at most `brief` need no `ran`.
    """

    __slots__ = ("_bound", "_last", "_length", "_usual", "brief", "late", "refusing", "since")

    def __init__(self, bound: DelayBound | None) -> None:
        self.refusing = False
        self.since = 0  # the first late start of the current series
        self._bound = bound
        self._last = 0  # the last late start
        self._length = 0  # of the queue, the least in the current series
        self._usual = 0  # the usual duration of a run, if that matters
        self.late = self.brief = maxsize
        if bound is not None:
            self._adapt(bound)

    def ran(self, duration: int) -> None:
        """Learn from the duration of a run."""
        if self._bound is None:
            return
        usual = self._usual
        self._usual = usual + (duration - usual) // _LEARN if usual else duration
        self._adapt(self._bound)

    def late_start(self, now: int, waiting: int) -> bool:
        """A request would start late, `waiting` ones behind it; True if it is to be refused."""
        if self.refusing:
            return True
        patience = self.late * 2 // 3
        if not self.since or now - self._last > patience or waiting < self._length:
            self.since, self._length = now, waiting
        self._last = now
        grows = waiting > self._length + self._length // _GROWTH
        self.refusing = grows and now - self.since >= patience
        return self.refusing

    def timely(self, waited: int, waiting: int) -> bool:
        """A request starts in time, `waiting` ones behind it; True if an overload has ended."""
        if self.refusing and waiting and waited > self.late // _SHORT:
            return False  # kept short by refusals
        ended = self.refusing
        self.since, self.refusing = 0, False
        return ended

    def _adapt(self, bound: DelayBound) -> None:
        brief = bound.delay // _RUNS
        if self._usual <= brief:
            self._usual, self.brief = 0, brief
        else:
            self.brief = -1  # until runs are brief again, all of them count
        self.late = max(bound.delay, _RUNS * self._usual) + bound.gathering
