"""Cost and gain of calling a real Triton through this server: `scripts/bench --remote`.

The benchmark's MLP in numpy is run by Triton's Python backend, once with dynamic batching there and
once without. One-row requests over gRPC, 16 at once, go to Triton directly, and through this server
with and without batching here; the ways are measured in turn, several times over.

With two cores or more Triton has the first one, this server and the load generator the others.
"""

import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP, mlp_weights
from benchmarks.peers.triton.peer import CONFIG
from benchmarks.report import table
from benchmarks.scorecard.generators import Shot, fire
from benchmarks.scorecard.sample import Metric
from benchmarks.scorecard.workloads import Generator, Workload
from benchmarks.server import BenchmarkError, Target, cpu_secs, split_cores, started

_TRITON = Path(__file__).resolve().parents[1] / "build" / "bench" / "triton" / "tritonserver"
_MODEL = Path(__file__).parent / "peers" / "triton" / "mlp.py"
_START_SECS = 60
_METRICS = (Metric.THROUGHPUT, Metric.P50, Metric.P99)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to a model: its name where it is asked for, and whether that is this server."""

    title: str
    model: str
    through: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """One repetition. CPU times are in microseconds a request; `batch` is Triton's."""

    throughput: float
    p50: float
    p99: float
    own_cpu: float
    triton_cpu: float
    batch: float


# What is on Triton, and the name of the same without batching here.
_MODELS = {"mlp": "Triton batches", "mlp_plain": "Triton does not batch"}
_BATCHING = {"mlp": "dynamic_batching { }\n", "mlp_plain": ""}


def ways(model: str) -> list[Way]:
    """All ways to one of Triton's models; the first is the one that others are compared with."""
    return [
        Way("Triton directly", model, False),
        Way("through, batching off", f"{model}_off", True),
        Way("through, batched here", model, True),
    ]


def main(seconds: float, repetitions: int, concurrency: int = 16) -> None:
    """Measure and print."""
    if not _TRITON.exists():
        raise BenchmarkError("Triton is not there (scripts/bench_triton)")
    core, others = split_cores()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        root = Path(directory)
        _write_triton(root / "triton")
        with _triton(root, core) as triton:
            _write_own(root / "own", triton.grpc)
            own_core = min(others) if core is not None else None
            with started(root / "own", own_core) as own:
                for model, title in _MODELS.items():
                    load = Load(concurrency, seconds, root, sorted(others))
                    results = _measure(model, own, triton, load, repetitions)
                    print(f"{title}:\n\n{as_table(results)}\n", flush=True)


@dataclass(frozen=True, slots=True)
class Load:
    """The generator's: so many requests at once for so many seconds, on these cores."""

    concurrency: int
    seconds: float
    folder: Path
    cores: Sequence[int]


def _measure(
    model: str, own: Target, triton: Target, load: Load, repetitions: int
) -> dict[Way, list[Measured]]:
    results: dict[Way, list[Measured]] = {way: [] for way in ways(model)}
    for number in range(repetitions + 1):
        for way, found in results.items():
            measured = _shoot(way, model, own, triton, load)
            if number:  # the first is to warm up
                found.append(measured)
    return results


def _shoot(way: Way, model: str, own: Target, triton: Target, load: Load) -> Measured:
    target = own if way.through else triton
    workload = Workload("remote", "remote", way.model, "grpc", Generator.H2LOAD, load.concurrency)
    grpc = PROTOCOLS["grpc"]
    cases = ALL_MODELS[MLP].cases()
    exchanges = [grpc.exchange(target.grpc, way.model, case) for case in cases]
    before = [cpu_secs(t.processes()) for t in (own, triton)]
    counted = triton.counts(model)
    sample = fire(Shot(workload, target.grpc, exchanges, load.seconds, load.folder, load.cores))
    if sample.errors:
        raise BenchmarkError(f"{way.title}: {dict(sample.errors)}")
    after = [cpu_secs(t.processes()) for t in (own, triton)]
    answers = sample.figures[Metric.ANSWERS]
    own_cpu, triton_cpu = [(b - a) / answers * 1e6 for a, b in zip(before, after, strict=True)]
    now = triton.counts(model)
    assert counted is not None
    assert now is not None
    batch = (now[0] - counted[0]) / max(now[1] - counted[1], 1)
    throughput, p50, p99 = [sample.figures[metric] for metric in _METRICS]
    return Measured(throughput, p50, p99, own_cpu, triton_cpu, batch)


def as_table(results: dict[Way, list[Measured]]) -> str:
    """Medians; ratios are medians of those of each repetition."""
    first = next(iter(results.values()))
    rows = []
    for way, found in results.items():
        pairs = zip(found, first, strict=True)
        ratio = median(one.throughput / other.throughput for one, other in pairs)
        rows.append((
            way.title,
            f"{median(m.throughput for m in found):.0f}",
            f"{ratio:.2f}",
            f"{median(m.p50 for m in found) * 1e3:.2f}",
            f"{median(m.p99 for m in found) * 1e3:.2f}",
            f"{median(m.own_cpu for m in found):.0f}",
            f"{median(m.triton_cpu for m in found):.0f}",
            f"{median(m.batch for m in found):.1f}",
        ))  # fmt: skip
    titles = (
        "way", "requests/s", "ratio", "p50 ms", "p99 ms", "CPU here, µs", "CPU of Triton, µs",
        "batch in Triton",
    )  # fmt: skip
    return table(titles, rows, left=1)


def _write_triton(root: Path) -> None:
    for name in _MODELS:
        folder = root / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL.read_text())
        np.savez(folder / "weights.npz", allow_pickle=False, **mlp_weights())
        config = CONFIG.format(rows=64, width=64, answer=10, more=_BATCHING[name])
        (root / name / "config.pbtxt").write_text(config)


def _write_own(root: Path, address: str) -> None:
    for model in _MODELS:
        for name, more in ((model, {}), (f"{model}_off", {"batching": "off"})):
            folder = root / name
            folder.mkdir(parents=True)
            parameters = {"endpoints": f"grpc://{address}", "remote_model": model, **more}
            lines = [f'name: "{name}" backend: "triton"']
            lines += [
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ]
            (folder / "config.pbtxt").write_text("\n".join(lines))


@contextmanager
def _triton(root: Path, core: int | None) -> Iterator[Target]:
    ports = _ports(2)
    pinned = ["taskset", "-c", str(core)] if core is not None else []
    with (root / "triton.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *pinned, str(_TRITON), f"--model-repository={root / 'triton'}",
                f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1", "--allow-metrics=false", "--log-info=false",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    target = Target("triton", f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", process.pid)
    try:
        deadline = time.monotonic() + _START_SECS
        while not _ready(target.http):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (root / "triton.log").read_text(errors="replace")[-2000:]
                raise BenchmarkError(f"Triton did not start:\n{said}")
            time.sleep(0.1)
        yield target
    finally:
        for each in target.processes()[::-1]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _ready(host: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}/v2/health/ready", timeout=1):
            return True
    except OSError:
        return False


def _ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
