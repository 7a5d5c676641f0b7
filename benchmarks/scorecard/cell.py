"""Measures one cell once: one workload against one server."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time

import uvloop

from benchmarks.load import Load, Observed, drive
from benchmarks.measure import mean_batch
from benchmarks.messages import PROTOCOLS, Exchange
from benchmarks.models import ALL_MODELS
from benchmarks.open_loop import Schedule, arrive
from benchmarks.scorecard.environments import ROOT
from benchmarks.scorecard.generators import Shot, fire
from benchmarks.scorecard.processes import Server
from benchmarks.scorecard.sample import Metric, Sample
from benchmarks.scorecard.workloads import Generator, Workload
from benchmarks.server import BenchmarkError, cpu_times, resident, split_address
from benchmarks.summary import percentile

_PATIENCE = 2.0  # seconds that answers are awaited after the last arrival


@dataclass(frozen=True, slots=True)
class Setting:
    """Cores and durations: those of the server and of the generator, times in seconds."""

    core: int | None
    client_cores: Sequence[int]
    seconds: float
    warm_up: float
    folder: Path


def measure(workload: Workload, server: Server, setting: Setting) -> Sample:
    """Put the workload's load on a server; an error of the whole cell is a result too."""
    protocol = PROTOCOLS[workload.protocol]
    host = server.target.address(protocol.transport)
    setting = replace(setting, seconds=setting.seconds * workload.stretch)
    exchanges = protocol.exchanges(host, ALL_MODELS[workload.model].widened(workload.rows))
    shoot: Callable[[], Sample]
    try:
        if workload.generator is Generator.ARRIVALS:
            shoot = partial(_arrivals, workload, host, exchanges, setting)
            return _with_costs(server, workload, shoot)
        # This checks the answers; the generators of others do not.
        warm = _drive(workload, host, exchanges, setting, 0.0, setting.warm_up)
        shoot = partial(_closed, workload, host, exchanges, setting)
        if workload.generator is not Generator.LOAD:
            shot = Shot(
                workload, host, exchanges, setting.seconds, setting.folder, setting.client_cores
            )
            shoot = partial(fire, shot)
        sample = _with_costs(server, workload, shoot)
        return Sample(sample.figures, {**warm.errors, **sample.errors})
    except (BenchmarkError, OSError, TimeoutError) as error:
        return Sample({}, {f"{type(error).__name__}: {error}": 1})


def measure_alone(workload: Workload, setting: Setting) -> Sample:
    """Run the model without a server, on the server's core; as many rows as would come at once."""
    rows = workload.rows if workload.rows > 1 else workload.concurrency
    command = [
        sys.executable, "-m", "benchmarks.scorecard.ort_alone",
        workload.model, str(rows), str(setting.seconds * workload.stretch),
    ]  # fmt: skip
    if setting.core is not None:
        command = ["taskset", "-c", str(setting.core), *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    if done.returncode:
        return Sample({}, {f"ONNX Runtime alone: {done.stderr[-500:]}": 1})
    return Sample({Metric.ROWS: float(done.stdout) * rows})


def _with_costs(server: Server, workload: Workload, shoot: Callable[[], Sample]) -> Sample:
    """Result of a load, with its cost to the server."""
    target, counts = server.target, server.peer.statistics
    processes = target.processes()
    counted = target.counts(workload.model) if counts else None
    (user, system), sample = cpu_times(processes), shoot()
    processes = target.processes()
    figures = dict(sample.figures)
    user_after, system_after = cpu_times(processes)
    user, system = user_after - user, system_after - system
    after = target.counts(workload.model) if counts else None
    rate = figures.get(Metric.THROUGHPUT)
    if rate:
        figures[Metric.ROWS] = rate * workload.rows
    answers = figures.pop(Metric.ANSWERS, None)
    if answers and user + system > 0:
        figures[Metric.CPU_PER_1000] = (user + system) / answers * 1_000
        figures[Metric.USER_PER_1000] = user / answers * 1_000
    figures[Metric.RSS] = resident(processes)
    batch = mean_batch(counted, after)
    if batch is not None:
        figures[Metric.MEAN_BATCH] = batch
    return Sample(figures, sample.errors)


def _closed(
    workload: Workload, host: str, exchanges: Sequence[Exchange], setting: Setting
) -> Sample:
    observed = _drive(workload, host, exchanges, setting, 0.0, setting.seconds)
    return _sample(observed.latencies, len(observed.latencies) / observed.seconds, observed.errors)


def _arrivals(
    workload: Workload, host: str, exchanges: Sequence[Exchange], setting: Setting
) -> Sample:
    schedule = Schedule(workload.rate, setting.warm_up, setting.seconds)
    arrived = uvloop.run(
        arrive(
            split_address(host),
            lambda calls: PROTOCOLS[workload.protocol].wire(host, calls),
            exchanges,
            schedule,
            workload.concurrency,
            _PATIENCE,
        )
    )
    sample = _sample(arrived.latencies, arrived.answers_per_second, arrived.errors)
    figures = {
        **sample.figures,
        Metric.ANSWERS: arrived.answers,
        Metric.LATE: percentile(arrived.late, 0.99),
    }
    return Sample(figures, sample.errors)


def _sample(latencies: Sequence[float], rate: float, errors: dict[str, int]) -> Sample:
    figures = {
        Metric.THROUGHPUT: rate,
        Metric.ANSWERS: len(latencies),
        Metric.P50: percentile(latencies, 0.5),
        Metric.P99: percentile(latencies, 0.99),
        Metric.P999: percentile(latencies, 0.999),
    }
    return Sample(figures, dict(errors))


def _drive(
    workload: Workload,
    host: str,
    exchanges: Sequence[Exchange],
    setting: Setting,
    warm_up: float,
    seconds: float,
) -> Observed:
    return uvloop.run(
        drive(
            split_address(host),
            lambda calls: PROTOCOLS[workload.protocol].wire(host, calls),
            exchanges,
            Load(workload.concurrency, 1, warm_up, seconds),
            lambda: (process_time(),),
        )
    )
