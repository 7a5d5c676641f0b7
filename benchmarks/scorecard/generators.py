"""The load generators of others: how each is called, and what its output says."""

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.messages import Exchange
from benchmarks.scorecard.environments import BUILD
from benchmarks.scorecard.peer import GRPC
from benchmarks.scorecard.sample import Metric, Sample
from benchmarks.scorecard.workloads import Generator, Workload
from benchmarks.server import BenchmarkError
from benchmarks.summary import percentile

_SCRIPT = Path(__file__).with_name("wrk.lua")
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_PATIENCE = 60.0  # seconds that a generator may take beyond the measured time
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Shot:
    """One call of a generator; `folder` is for its files, `cores` those that it may use."""

    workload: Workload
    host: str
    exchanges: Sequence[Exchange]
    seconds: float
    folder: Path
    cores: Sequence[int]


def missing(generator: Generator) -> str:
    """The reason why a generator cannot be used; "" if it can."""
    if generator is Generator.WRK and not shutil.which("wrk"):
        return "wrk is not installed (Debian: wrk)"
    if generator is Generator.H2LOAD and not shutil.which("h2load"):
        return "h2load is not installed (Debian: nghttp2-client)"
    if generator is Generator.PERF_ANALYZER and not _perf_analyzer().exists():
        return "perf_analyzer is not there (scripts/bench_tools)"
    return ""


def fire(shot: Shot) -> Sample:
    """Put the load on the server; raises `BenchmarkError` if the generator gives up."""
    if shot.workload.generator is Generator.WRK:
        return _wrk(shot)
    if shot.workload.generator is Generator.H2LOAD:
        return _h2load(shot)
    return _perf(shot)


def _wrk(shot: Shot) -> Sample:
    paths = []
    for number, exchange in enumerate(shot.exchanges):
        path = shot.folder / f"request-{number}"
        path.write_bytes(exchange.message)
        paths.append(str(path))
    output = _run(shot, [
        "wrk", "--threads=1", f"--connections={shot.workload.concurrency}",
        f"--duration={max(round(shot.seconds), 1)}s", "--timeout=30s", f"--script={_SCRIPT}",
        f"http://{shot.host}", "--", *paths,
    ])  # fmt: skip
    return read_wrk(output)


def read_wrk(output: str) -> Sample:
    """The output of `wrk.lua`."""
    found = json.loads(output.strip().splitlines()[-1])
    kinds = ("connect", "read", "write", "status", "timeout")
    errors = {f"wrk: {kind}": int(found[kind]) for kind in kinds if found[kind]}
    # wrk counts answers with a bad status among all answers.
    answers = found["answers"] - found["status"]
    figures = {
        Metric.ANSWERS: answers,
        Metric.THROUGHPUT: answers / (found["micros"] * _MICRO),
        Metric.P50: found["p50"] * _MICRO,
        Metric.P99: found["p99"] * _MICRO,
        Metric.P999: found["p999"] * _MICRO,
    }
    return Sample(figures, errors)


def _h2load(shot: Shot) -> Sample:
    body, log = shot.folder / "body", shot.folder / "h2load.log"
    body.write_bytes(shot.exchanges[0].message)
    log.unlink(missing_ok=True)
    output = _run(shot, [
        "h2load", "--threads=1", f"--clients={shot.workload.concurrency}",
        "--max-concurrent-streams=1", f"--duration={max(round(shot.seconds), 1)}s",
        "--window-bits=30", "--connection-window-bits=30",
        f"--data={body}", f"--log-file={log}", "--header=te: trailers",
        "--header=content-type: application/grpc", f"http://{shot.host}{_METHOD}",
    ])  # fmt: skip
    return read_h2load(output, log.read_text(), shot.seconds, shot.exchanges[0].smallest)


def read_h2load(output: str, log: str, seconds: float, smallest: int) -> Sample:
    """The output of h2load, and its log: start, status and microseconds of each request.

    h2load does not know of gRPC's status, which is in the trailers; an answer without a message is
    seen by the amount of data.
    """
    counts = re.search(
        r"requests: \d+ total, \d+ started, (\d+) done, (\d+) succeeded, (\d+) failed, "
        r"(\d+) errored, (\d+) timeout", output
    )  # fmt: skip
    traffic = re.search(r"\((\d+)\) data", output)
    if counts is None or traffic is None:
        raise BenchmarkError(f"h2load said: {output[-500:]}")
    succeeded, failed, errored, timeout = map(int, counts.groups()[1:])
    # At the end of the measured time h2load counts what is under way as neither.
    errors = {
        f"h2load: {kind}": count
        for kind, count in (("failed", failed), ("errored", errored), ("timeout", timeout))
        if count
    }
    if succeeded and int(traffic[1]) < succeeded * smallest:
        errors["h2load: answers without a message"] = succeeded
        succeeded = 0
    micros = sorted(int(line.split("\t")[2]) for line in log.splitlines())
    figures = {
        Metric.ANSWERS: succeeded,
        Metric.THROUGHPUT: succeeded / max(round(seconds), 1),
        Metric.P50: percentile(micros, 0.5) * _MICRO,
        Metric.P99: percentile(micros, 0.99) * _MICRO,
        Metric.P999: percentile(micros, 0.999) * _MICRO,
    }
    return Sample(figures, errors)


def _perf(shot: Shot) -> Sample:
    workload = shot.workload
    table = shot.folder / "perf.csv"
    table.unlink(missing_ok=True)
    window = max(round(shot.seconds * 1000), 500)
    output = _run(shot, [
        str(_perf_analyzer()), "-m", workload.model, "-u", shot.host, "-b", str(workload.rows),
        "-i", "grpc" if workload.protocol == GRPC else "http", "--async", "--max-threads=1",
        f"--concurrency-range={workload.concurrency}", f"--measurement-interval={window}",
        "--max-trials=3", "--stability-percentage=1000", "-f", str(table),
    ])  # fmt: skip
    if not table.exists():
        raise BenchmarkError(f"perf_analyzer said: {output[-500:]}")
    return read_perf(table.read_text(), workload.rows)


def read_perf(table: str, rows: int) -> Sample:
    """The table that perf_analyzer wrote; it has no p99.9, and counts rows."""
    (row,) = csv.DictReader(io.StringIO(table))
    figures = {
        Metric.THROUGHPUT: float(row["Inferences/Second"]) / rows,
        Metric.P50: float(row["p50 latency"]) * _MICRO,
        Metric.P99: float(row["p99 latency"]) * _MICRO,
    }
    return Sample(figures)


def _perf_analyzer() -> Path:
    return BUILD / "perf_analyzer"


def _run(shot: Shot, command: list[str]) -> str:
    pinned = ["taskset", "-c", ",".join(map(str, shot.cores)), *command]
    try:
        done = subprocess.run(
            pinned if shutil.which("taskset") else command,
            capture_output=True, text=True, timeout=4 * shot.seconds + _PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{shot.workload.generator} did not come to an end") from None
    if done.returncode and shot.workload.generator is not Generator.PERF_ANALYZER:
        raise BenchmarkError(f"{shot.workload.generator}: {(done.stderr + done.stdout)[-500:]}")
    return done.stdout + done.stderr
