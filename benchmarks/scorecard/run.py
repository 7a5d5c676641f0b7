"""Runs the scorecard: starts the servers of a group and measures them in turn, A B C A B C.

A server that cannot be installed or started, or that dies, is reported with the reason, and never
left out in silence.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

from benchmarks.scorecard.cell import Setting, measure, measure_alone
from benchmarks.scorecard.environments import fetch_perf_analyzer, prepare
from benchmarks.scorecard.generators import missing
from benchmarks.scorecard.peer import Peer
from benchmarks.scorecard.processes import Server, start
from benchmarks.scorecard.sample import Metric, Sample
from benchmarks.scorecard.workloads import ORT, Generator, Group, Workload
from benchmarks.server import BenchmarkError, resident

_SETTLE_SECS = 0.5  # after a start, before memory is looked at
_KEPT_UP = 0.95  # share of the rate of arrivals below which a server is overloaded

Cell = tuple[str, str]  # workload and peer
Progress = Callable[[Workload, str, Sample], None]


@dataclass(slots=True)
class Outcome:
    """All samples, and why there are none: `absent` by peer, `skipped` by workload."""

    samples: dict[Cell, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, workload: Workload, peer: str, sample: Sample) -> None:
        """Note one repetition."""
        self.samples.setdefault((workload.name, peer), []).append(sample)


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a scorecard: servers, workloads and repetitions."""

    groups: Sequence[Group]
    peers: Sequence[Peer]
    repetitions: int
    alone: bool  # also measure the model without a server


def run(plan: Plan, setting: Setting, progress: Progress) -> Outcome:
    """Measure everything in the plan; `progress` hears of each sample."""
    outcome = Outcome()
    able: list[Peer] = []
    for peer in plan.peers:
        try:
            prepare(peer)
            able.append(peer)
        except BenchmarkError as error:
            _absent(outcome, peer, str(error))
    if any(w.generator is Generator.PERF_ANALYZER for g in plan.groups for w in g.workloads):
        fetch_perf_analyzer()
    for group in plan.groups:
        for workload in group.workloads:
            if reason := missing(workload.generator):
                outcome.skipped[workload.name] = reason
        if any(workload.generator is Generator.NONE for workload in group.workloads):
            _starts(group, able, plan.repetitions, setting, outcome, progress)
        else:
            _loads(group, able, plan, setting, outcome, progress)
    return outcome


def _loads(
    group: Group,
    peers: Sequence[Peer],
    plan: Plan,
    setting: Setting,
    outcome: Outcome,
    progress: Progress,
) -> None:
    workloads = [w for w in group.workloads if w.name not in outcome.skipped]
    wanted = [p for p in peers if any(_takes_part(p, w) for w in workloads)]
    with _fleet(group, wanted, setting, outcome) as fleet:
        for _ in range(plan.repetitions):
            overloaded: set[tuple[str, str, int]] = set()
            for workload in workloads:
                for peer in wanted:
                    if _takes_part(peer, workload) and not _beyond(overloaded, peer, workload):
                        sample = _turn(fleet, peer, group, workload, setting, outcome)
                        outcome.add(workload, peer.name, sample)
                        progress(workload, peer.name, sample)
                        _note_overload(overloaded, peer, workload, sample)
                if plan.alone and ORT in workload.peers:
                    sample = measure_alone(workload, setting)
                    outcome.add(workload, ORT, sample)
                    progress(workload, ORT, sample)


def _takes_part(peer: Peer, workload: Workload) -> bool:
    chosen = peer.name in workload.peers if workload.peers else not peer.guest
    return chosen and peer.serves(workload.model, workload.protocol)


def _beyond(overloaded: set[tuple[str, str, int]], peer: Peer, workload: Workload) -> bool:
    """True if a server could not keep up with a lower rate, so that a higher one says nothing."""
    return any(
        (peer.name, workload.protocol) == (name, protocol) and workload.rate > rate
        for name, protocol, rate in overloaded
    )


def _note_overload(
    overloaded: set[tuple[str, str, int]], peer: Peer, workload: Workload, sample: Sample
) -> None:
    rate = sample.figures.get(Metric.THROUGHPUT, 0.0)
    if workload.rate and rate < _KEPT_UP * workload.rate:
        overloaded.add((peer.name, workload.protocol, workload.rate))


@contextmanager
def _fleet(
    group: Group, peers: Sequence[Peer], setting: Setting, outcome: Outcome
) -> Iterator[dict[str, Server]]:
    """The group's servers, all started and all frozen."""
    fleet: dict[str, Server] = {}
    try:
        for peer in peers:
            _start(fleet, peer, group, setting, outcome)
        yield fleet
    finally:
        for server in fleet.values():
            server.stop()


def _start(
    fleet: dict[str, Server], peer: Peer, group: Group, setting: Setting, outcome: Outcome
) -> Server | None:
    models = group.models & peer.models
    home = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=setting.folder))
    try:
        server = fleet[peer.name] = start(peer, home, models, setting.core, sorted(models))
    except BenchmarkError as error:
        _absent(outcome, peer, str(error))
        return None
    server.freeze()
    return server


def _turn(
    fleet: dict[str, Server],
    peer: Peer,
    group: Group,
    workload: Workload,
    setting: Setting,
    outcome: Outcome,
) -> Sample:
    """One measurement; a server that has died is started anew, and its sample is an error.

    One that does not run gives an error too: repetitions are compared by their number.
    """
    server = fleet.get(peer.name)
    if server is None:
        return Sample({}, {"not running": 1})
    server.thaw()
    try:
        sample = measure(workload, server, setting)
    finally:
        server.freeze()
    if not server.alive():
        server.stop()
        del fleet[peer.name]
        _start(fleet, peer, group, setting, outcome)
        errors = {**sample.errors, "the server died": 1}
        return Sample({}, errors)
    return sample


def _starts(
    group: Group,
    peers: Sequence[Peer],
    repetitions: int,
    setting: Setting,
    outcome: Outcome,
    progress: Progress,
) -> None:
    """Start each server with its models, look at it at rest, and stop it; in turn."""
    (workload,) = group.workloads
    for _ in range(repetitions):
        for peer in peers:
            fleet: dict[str, Server] = {}
            server = _start(fleet, peer, group, setting, outcome)
            if server is None:
                outcome.add(workload, peer.name, Sample({}, {"did not start": 1}))
                continue
            try:
                server.thaw()
                sleep(_SETTLE_SECS)
                rss = resident(server.target.processes())
                sample = Sample({Metric.READY: server.ready_after, Metric.RSS: rss})
            finally:
                server.stop()
            outcome.add(workload, peer.name, sample)
            progress(workload, peer.name, sample)


def _absent(outcome: Outcome, peer: Peer, reason: str) -> None:
    print(f"{peer.title}: {reason}", file=sys.stderr)
    outcome.absent[peer.name] = reason
