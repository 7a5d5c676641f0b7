"""The search for a model's best settings: what to measure next, and which of the measured is best.

A pure state machine. Each trial measures one set of settings with requests that arrive at more and
less of them per second, to find the highest rate that the settings carry; or with growing numbers
of clients, each of which waits for an answer before it sends again; or with requests that arrive at
fixed moments, the same in all trials. The batches of a trial teach the cost of a batch for its
instances and threads; a replay of that load through the scheduler's policy, corrected by the
trials, then says what the settings that have not been tried would do. Instances and threads without
a trial are taken to cost nothing more, so that they are tried if that would help.

The best settings carry the highest rate, or answer the most requests per second, while the 99th
percentile of their latency is within the target; if the load is fixed, they have the lowest
percentile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, product
from math import ceil, sqrt
from operator import attrgetter
from random import Random
from statistics import median
from typing import NamedTuple

from headrace.plugins.explain.replay import BatchCost, SeenRequest, learn_cost, percentile, replay
from headrace.scheduling.batch_log import LoggedRequest
from headrace.scheduling.policy import BatchPolicy

LEAST = 200  # requests of a measured load, unless that takes
LONGEST = 5  # times as long as it should
_SIMULATED = 300  # requests, beside one of each client
_BATCHES = 8  # of the largest size, in a simulation: with fewer, the last one's wait counts
_ARRIVED = 4000  # requests of a fixed load, at most
_MARGIN = 1.05  # of requests per second: less is noise, and no reason to change a setting
_LEAST_GAIN = 1.02  # by twice the clients: with less, the model is saturated
_FINE = 1.05  # between the highest rate that is carried, and the lowest that is not
_HIGHEST_RATE, _LOWEST_PART = 1 << 20, 1 / 32  # of the rates tried; the latter of the first one
_KEPT_UP = 0.85  # of the requests due are answered as fast as they come


class TunedSettings(NamedTuple):
    """The settings of a model that are searched, named as in its configuration.

    `intra_op_thread_count` is 0 where the server chooses it, `max_batch_size` for a model that does
    not batch, `preferred_batch_size` for the sizes of the configuration, of which the largest
    follows `max_batch_size`; else it is the only one.
    """

    max_batch_size: int
    max_queue_delay_microseconds: int
    instances: int
    intra_op_thread_count: int = 0
    preferred_batch_size: int = 0

    def changes(self, present: "TunedSettings") -> dict[str, int]:
        """The settings that differ from the present ones, by name."""
        pairs = zip(self._asdict().items(), present, strict=True)
        return {name: value for (name, value), other in pairs if value != other}


class ClientLevel(NamedTuple):
    """Latencies, in nanoseconds, and requests per second with a number of clients.

    `clients` is 0 where requests have arrived whether or not others were answered, and `rate` how
    many per second, if other rates are tried, too. `busy` is the share of a core that the clients
    have used themselves.
    """

    clients: int
    requests: int
    per_second: float
    mean_ns: int
    p50_ns: int
    p99_ns: int
    busy: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class SettingsTrial:
    """Settings, and how the model has answered with them; `error` says why it could not.

    `batches` are the rows and nanoseconds of some of its batches, `pause_ns` the part of the first
    level's mean latency that the server has not seen.
    """

    settings: TunedSettings
    levels: Sequence[ClientLevel]
    batches: Sequence[tuple[int, int]] = ()
    pause_ns: int = 0
    error: str = ""


def poisson(rate: float, seconds: float, seed: int) -> tuple[int, ...]:
    """The moments in nanoseconds at which `rate` requests per second arrive, on average exactly.

    They go on for so many seconds, or longer for `LEAST` of them.
    """
    random, most = Random(seed), LONGEST * rate * seconds
    count = ceil(max(rate * seconds, min(LEAST, most)))
    moments = [*accumulate(random.expovariate(1.0) for _ in range(count))]
    return tuple(round(each / moments[-1] * count / rate * 1e9) for each in moments)


def keeps(level: ClientLevel, target_ns: int) -> bool:
    """True if latencies were within the target, and requests answered as fast as they came."""
    return level.p99_ns <= target_ns and level.per_second >= _KEPT_UP * level.rate


def next_rate(levels: Sequence[ClientLevel], target_ns: int, first: float) -> float | None:
    """The rate to measure after those of `levels`; None when the highest that keeps is known.

    It is doubled from the `first` one until it misses the target, or halved until it keeps it, to a
    small part of that one; then the middle is taken until the two are near.
    """
    kept = max((one.rate for one in levels if keeps(one, target_ns)), default=0.0)
    missed = min((one.rate for one in levels if one.rate > kept), default=0.0)
    if not levels:
        found, wanted = first, True
    elif not missed:
        found, wanted = kept * 2, kept < _HIGHEST_RATE
    elif not kept:
        found, wanted = missed / 2, missed > first * _LOWEST_PART
    else:
        found, wanted = sqrt(kept * missed), missed > kept * _FINE
    return float(f"{found:.3g}") if wanted else None


def best_level(levels: Sequence[ClientLevel], target_ns: int) -> ClientLevel:
    """The most requests per second within the target; without any, the level nearest to it."""
    return max(levels, key=lambda level: _worth(level, target_ns))


def saturated(levels: Sequence[ClientLevel], target_ns: int) -> bool:
    """True if more clients would only wait longer: if half of the last ones' requests have not kept
    the target, or both of the last two levels have not kept it or not brought more requests.
    """
    if levels and levels[-1].p50_ns > target_ns:
        return True
    if len(levels) < 3:
        return False
    most = max(level.per_second for level in levels[:-2]) * _LEAST_GAIN
    return all(level.p99_ns > target_ns or level.per_second < most for level in levels[-2:])


def _worth(level: ClientLevel, target_ns: int) -> tuple[bool, float]:
    kept = keeps(level, target_ns)
    most = level.rate or (level.per_second if level.clients else 0.0)
    return kept, most if kept and most else -level.p99_ns


def candidates(
    present: TunedSettings, rows: int, target_ns: int, instances: int, threads: int
) -> Iterator[TunedSettings]:
    """The present settings, and others for requests of so many rows.

    Batches smaller than the largest are preferred, at a size that such requests can reach, only
    where a delay ends at it: without one, a smaller largest batch does the same.

    At most so many `instances` and `threads` of one instance are tried, 0 if they are not to be
    changed; all threads together are no more than the present ones or `instances`.
    """
    size, delay = present.max_batch_size, present.max_queue_delay_microseconds
    sizes = {each for each in (size // 4, size // 2, size * 2, size * 4) if each >= max(rows, 1)}
    delays = {0, target_ns // 20_000, target_ns // 5_000} if size else set()
    counts = {2**power for power in range(instances.bit_length()) if 2**power <= instances}
    of_one = {2**power for power in range(threads.bit_length()) if 2**power <= threads}
    for each in sorted(sizes | {size}):
        for us in sorted(delays | {delay}):
            smaller = (each // 4, each // 2) if us else ()
            preferred = [0, *(n for n in (*smaller, each) if n and not n % max(rows, 1))]
            for count, number, chosen in product(
                sorted(counts | {present.instances}),
                sorted(of_one | {present.intra_op_thread_count}), preferred,
            ):  # fmt: skip
                found = TunedSettings(each, us, count, number, chosen)
                if found == present or count * number <= max(instances, count):
                    yield found


@lru_cache(1 << 12)
def simulate(
    policy: BatchPolicy,
    instances: int,
    cost: BatchCost,
    rows: int,
    clients: int,
    pause: int,
    arrivals: tuple[int, ...] = (),
) -> ClientLevel:
    """Replay clients that send each request `pause` nanoseconds after an answer, or `arrivals`."""
    moments = arrivals[:_ARRIVED] or range(clients)
    first = [SeenRequest(at, LoggedRequest(at, rows, None)) for at in moments]
    found = replay(first, policy, instances, cost.of, pause, 0 if arrivals else _SIMULATED)
    latencies = [taken + pause for taken in found.latencies_ns]
    lasted = found.lasted_ns + pause - (min(latencies) if arrivals else 0)
    return ClientLevel(
        clients, len(latencies), len(latencies) / max(lasted, 1) * 1e9,
        sum(latencies) // len(latencies), percentile(latencies, 0.5), percentile(latencies, 0.99),
    )  # fmt: skip


@dataclass(slots=True)
class SettingsSearch:
    """The trials so far; `left` are the settings without one, and the first trial is the present's.

    `policy_of` is the rule by which a scheduler with some settings forms batches, `rows` are those
    of a request, `levels` the numbers of clients of a trial: a single 0 for a load of `arrivals`,
    and none where a trial searches the highest rate. Of settings that do the same, the first are
    searched.
    """

    target_ns: int
    policy_of: Callable[[TunedSettings], BatchPolicy]
    rows: int
    levels: Sequence[int]
    left: list[TunedSettings]
    trials: list[SettingsTrial] = field(default_factory=list)
    arrivals: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        same = {(self.policy_of(each), *_placed(each)): each for each in reversed(self.left)}
        self.left = [*reversed(same.values())]

    def add(self, trial: SettingsTrial) -> None:
        """Add a trial, and take its settings from those left.

        The client that has told where rates begin is left out, unless the target was out of reach.
        """
        rated = sorted((each for each in trial.levels if each.rate), key=attrgetter("rate"))
        self.trials.append(replace(trial, levels=rated or trial.levels))
        self.left = [each for each in self.left if each != trial.settings]

    def next_load(self, levels: Sequence[ClientLevel]) -> tuple[int, float] | None:
        """The clients, or the rate, of a trial after these levels; None at its end."""
        if self.levels:
            ended = len(levels) == len(self.levels) or saturated(levels, self.target_ns)
            return None if ended else (self.levels[len(levels)], 0.0)
        if not levels:
            return 1, 0.0
        if levels[0].p99_ns > self.target_ns:
            return None
        known = [best_level(each.levels, self.target_ns) for each in self.trials if each.levels]
        begin = max((each.rate for each in known), default=0.0) or levels[0].per_second
        rate = next_rate(levels[1:], self.target_ns, begin)
        return None if rate is None else (0, rate)

    def next(self) -> TunedSettings | None:
        """The most promising settings; None if none promises more than the best trial.

        Of settings that promise nearly the same, those with the fewest changes are taken.
        """
        best = self.best()
        if best is None or not self.left:
            return None
        promised = [(self._promised(each), each) for each in self.left]
        kept, most = max(worth for worth, _ in promised)
        if (kept, most) < self._worth_of(best):
            return None
        least = (kept, most / _MARGIN if most > 0 else most * _MARGIN)
        present = self.trials[0].settings
        near = [each for worth, each in promised if worth >= least]
        return min(near, key=lambda each: len(each.changes(present)))

    def best(self) -> SettingsTrial | None:
        """The first trial that is as good as the best of all; None if all have failed."""
        done = [trial for trial in self.trials if trial.levels]
        if not done:
            return None
        worth = [self._worth_of(trial) for trial in done]
        kept, most = max(worth)
        least = (kept, most / _MARGIN if most > 0 else most * _MARGIN)
        return next(trial for trial, each in zip(done, worth, strict=True) if each >= least)

    def _worth_of(self, trial: SettingsTrial) -> tuple[bool, float]:
        return _worth(best_level(trial.levels, self.target_ns), self.target_ns)

    def _promised(self, settings: TunedSettings) -> tuple[bool, float]:
        """The worth of settings by the replay, corrected by the first trial that is like them.

        Of a fixed load it is the best one: those that cannot keep up say little of others.
        """
        known = [trial for trial in self.trials if trial.batches]
        alike = [trial for trial in known if _placed(trial.settings) == _placed(settings)]
        alike = alike or known[:1]
        trial = max(alike, key=self._worth_of) if self.arrivals else alike[0]
        cost = learn_cost([each for one in alike for each in one.batches])
        assert cost is not None, "a trial without batches. This is a bug."
        if not self.levels:
            seen = best_level(trial.levels, self.target_ns)
            begin = seen.rate or seen.per_second
            by = seen.rate / self._highest(trial.settings, cost, begin).rate if seen.rate else 1.0
            most = self._highest(settings, cost, begin)
            most = most._replace(rate=most.rate * by, per_second=most.per_second * by)
            return _worth(most, self.target_ns)
        pairs = [
            (level, self._simulated(trial.settings, cost, level.clients)) for level in trial.levels
        ]
        faster = median(level.per_second / other.per_second for level, other in pairs)
        later = int(median(level.p99_ns - other.p99_ns for level, other in pairs))
        found = (self._simulated(settings, cost, clients) for clients in self.levels)
        corrected = [
            level._replace(
                per_second=level.per_second * faster, p99_ns=max(level.p99_ns + later, 0)
            )
            for level in found
        ]
        return _worth(best_level(corrected, self.target_ns), self.target_ns)

    def _highest(self, settings: TunedSettings, cost: BatchCost, begin: float) -> ClientLevel:
        """The highest rate that settings carry by the replay."""
        levels = list[ClientLevel]()
        while (rate := next_rate(levels, self.target_ns, begin)) is not None:
            levels.append(self._simulated(settings, cost, 0, rate))
        return best_level(levels, self.target_ns)

    def _simulated(
        self, settings: TunedSettings, cost: BatchCost, clients: int, rate: float = 0.0
    ) -> ClientLevel:
        policy, arrivals = self.policy_of(settings), self.arrivals
        if rate:
            requests = max(_SIMULATED, _BATCHES * policy.max_rows // self.rows)
            arrivals = poisson(rate, requests / rate, 0)
        found = simulate(
            policy, settings.instances, cost, self.rows, clients, self.trials[0].pause_ns, arrivals
        )
        return found._replace(rate=rate)


def _placed(settings: TunedSettings) -> tuple[int, int]:
    """The settings on which the cost of a batch depends."""
    return settings.instances, settings.intra_op_thread_count
