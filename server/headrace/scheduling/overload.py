"""Bound on the delay in a model's queue while its model is overloaded.

A queue absorbs bursts. One that stays long absorbs nothing: it only makes each request wait until
its client has given up. As in CoDel, the two are told apart by the time for which the delay stands:
requests that start late, one after the other, for as long as the patience, while the queue grows,
mean overload. A queue that shrinks is what a burst has left; one that stays as it is has as many
clients as places, each of which waits for its answer. It varies if these clients pause, and gets
longer at once if there are more of them. So growth is judged by windows of time: an overloaded
queue is longer than before in one after the other. Windows get longer with their number, up to a
limit, so that slow growth is seen, and random variation is not taken for it.

From then on requests that have waited for too long are refused instead of started, so that the
others are in time, and the model is as busy as before. That ends when the queue has been short
again.

Late is relative to the model: a run of 30 seconds makes its queue wait for minutes without any
overload. A pure decision over times in nanoseconds of one monotonic clock, which come from the
caller; judged at the start of requests, so that a time without any (no upstream, no worker) is none
of overload.
"""

from dataclasses import dataclass
from sys import maxsize

_RUNS = 8  # runs that a request may wait for in any case
_LEARN = 8  # share of a run in the usual duration
_WINDOWS = 4  # of one length, after which they become twice as long
_LONGEST = 5  # bounds on the delay in the longest window
_RISES = 3  # windows in which the queue has to have grown
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

    __slots__ = (
        "_base", "_bound", "_closed", "_high", "_last", "_low", "_opened", "_recent", "_record",
        "_rises", "_span", "_usual", "brief", "late", "refusing", "since",
    )  # fmt: skip

    def __init__(self, bound: DelayBound | None) -> None:
        self.refusing = False
        self.since = 0  # the first late start of the current series
        self._bound = bound
        self._last = 0  # the last late start
        # The current window: its start, its length, and the bounds of the queue's length in it.
        self._opened = self._span = self._low = self._high = 0
        self._closed = 0  # windows of the current series
        # The greatest middle of such bounds, and that of the windows since the last longer one.
        self._record = self._recent = 0
        self._rises = self._base = 0  # windows with a new record, and the record before them
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
        if not self.since or now - self._last > patience:
            self.since = now
            self._span = patience // _WINDOWS
            self._closed = self._recent = self._rises = 0
            self._open(now, waiting)
        elif now - self._opened >= self._span:
            self.refusing = self._close()
            self._open(now, waiting)
        else:
            self._low, self._high = min(self._low, waiting), max(self._high, waiting)
        self._last = now
        return self.refusing

    def _open(self, now: int, waiting: int) -> None:
        self._opened, self._low, self._high = now, waiting, waiting

    def _close(self) -> bool:
        """Judge a complete window; True if the queue has grown for long enough."""
        low, middle = self._low, (self._low + self._high) // 2
        if not self._closed:
            self._record = middle
        elif low > self._record:
            if not self._rises:
                self._base = self._record
            self._rises += 1
        elif self._rises:
            self._rises -= 1
        self._record = max(self._record, middle)
        self._recent = max(self._recent, middle)
        self._closed += 1
        if self._closed % _WINDOWS == 0:
            self._span = min(self._span * 2, _LONGEST * self.late)
            if not self._rises:
                self._record = self._recent
            self._recent = 0
        return self._rises >= _RISES and low > self._base + self._base // _GROWTH

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
