"""Looks at how a model's versions do, as often as its rules ask for, and says who is to lose.

What is judged are the differences between now and the oldest sample that is not older than the
window: the counters themselves are those of the versions, so that requests cost nothing more.
Owned by the event-loop thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from headrace.engine.version import ModelVersion
from headrace.observability.statistics import LATENCY_BOUNDS, VersionLedger
from headrace.scheduling.rollback import Counts, verdict
from headrace.scheduling.traffic_rules import RollbackRule

_SAMPLES = 20  # in a window
_LEAST_SECS, _MOST_SECS = 0.1, 5.0  # between two of them
NOTHING = Counts(0, 0, (0,) * (len(LATENCY_BOUNDS) + 1))


def counts_of(version: ModelVersion, ledger: VersionLedger) -> Counts:
    """What a version has made of its requests so far, whoever sent them there.

    Only what no client can bring about by how it asks: failures are those of executing, latencies
    those of execution, without the time in the queue and without what clients made slow by not
    reading.
    """
    statistics = version.statistics
    failures = statistics.faults + ledger.refused
    latencies = zip(
        statistics.compute_histogram.counts, statistics.paused_histogram.counts, strict=True
    )
    return Counts(
        statistics.success_count + failures,
        failures,
        tuple([all_of_them - paused for all_of_them, paused in latencies]),
    )


class Samples:
    """The counts of one version over a window."""

    def __init__(self, window_secs: float) -> None:
        self._window = window_secs
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, counts: Counts) -> None:
        """Take a sample; one that has less than before is of a version that begins anew."""
        samples = self._samples
        if samples and counts.requests < samples[-1][1].requests:
            samples.clear()
        while len(samples) > 1 and samples[1][0] <= now - self._window:
            samples.popleft()
        samples.append((now, counts))

    @property
    def recent(self) -> Counts:
        """What was added within the window."""
        if not self._samples:
            return NOTHING
        return self._samples[-1][1].since(self._samples[0][1])


class TrafficWatch:
    """Judges the versions in `judged` by a rule, against the `baseline`, until it is stopped.

    `counts` gives those of the versions that are ready, `act` is told who is to lose, and why.
    """

    def __init__(
        self,
        rule: RollbackRule,
        baseline: int,
        judged: Callable[[], list[int]],
        counts: Callable[[], Mapping[int, Counts]],
        act: Callable[[int, str], None],
    ) -> None:
        self._rule = rule
        self._baseline = baseline
        self._judged = judged
        self._counts = counts
        self._act = act
        self._samples: dict[int, Samples] = {}
        self._interval = min(max(rule.window_secs / _SAMPLES, _LEAST_SECS), _MOST_SECS)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def recent(self, number: int) -> Counts:
        """What has become of a version's requests within the window."""
        samples = self._samples.get(number)
        return NOTHING if samples is None else samples.recent

    def look(self) -> None:
        """Take samples, judge, and look again later."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = loop.call_later(self._interval, self.look)
        counts = self._counts()
        for number, version in counts.items():
            samples = self._samples.get(number)
            if samples is None:
                samples = self._samples[number] = Samples(self._rule.window_secs)
            samples.add(now, version)
        for number in set(self._samples) - set(counts):
            del self._samples[number]
        if self._baseline not in counts:
            return  # there is nothing better
        for number in self._judged():
            if not self._stopped and number in counts:
                why = verdict(self._rule, self.recent(number), self.recent(self._baseline))
                if why:
                    self._act(number, why)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
