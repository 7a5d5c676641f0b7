"""Jobs of Ray, Spark, Dask and Beam through a runner, beside ONNX Runtime: `make bench-hosts`.

A table of eight float columns goes through an MLP, in two executors of one core: by a function that
holds a session of ONNX Runtime, or Beam's own handler for it, and by a `headrace.Runner`. Times are
of whole jobs whose input is ready, with the start of Ray's actors and of the model. Both run in
turn, so that each has seen the same machine: the median of the rounds counts, in rows a second, and
on a machine that others use as well in the CPU's seconds, of all processes of the host. Those of
Ray's actors, which end with each job, are counted late, if at all.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
import psutil

import headrace
from benchmarks.models import MLP_OF_TABLES, Array
from benchmarks.report import table

_COLUMNS = [f"x{place}" for place in range(8)]
_BATCH = MLP_OF_TABLES.max_batch_size
_PARTS = 16

# Runs a job to its end.
Job = Callable[[], Any]


@cache
def session_of(path: str) -> Any:
    """One session of ONNX Runtime in each process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def output_of(path: str, columns: list[Array]) -> Array:
    """The outputs of rows by hand."""
    rows = np.stack(columns, axis=1).astype(np.float32, copy=False)
    found = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), _BATCH):
        [part] = session_of(path).run(None, {"input": rows[start : start + _BATCH]})
        found[start : start + _BATCH] = part[:, 0]
    return found


class ByHand:
    """A session of ONNX Runtime in an actor of Ray."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        return {"output": output_of(self.path, [batch[name] for name in _COLUMNS])}


@contextmanager
def ray_jobs(root: Path, path: str, rows: int) -> Iterator[Mapping[str, Job]]:
    """Ray Data, with two actors."""
    import ray

    ray.init(
        num_cpus=4, object_store_memory=400 << 20, include_dashboard=False, logging_level="error"
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    def columns(batch: dict[str, Array]) -> dict[str, Array]:
        random = np.random.default_rng(int(batch["id"][0]))
        return {name: random.random(len(batch["id"]), np.float32) for name in _COLUMNS}

    ds = ray.data.range(rows, override_num_blocks=_PARTS).map_batches(columns).materialize()

    def job(kind: type, *arguments: str) -> Job:
        return lambda: ds.map_batches(
            kind, fn_constructor_args=arguments, concurrency=2, batch_size=_BATCH
        ).materialize()

    yield {"by hand": job(ByHand, path), "Runner": job(headrace.Runner, *runner_arguments(root))}
    ray.shutdown()


@contextmanager
def spark_jobs(root: Path, path: str, rows: int) -> Iterator[Mapping[str, Job]]:
    """Spark's `mapInArrow`, with two Python processes."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", _BATCH)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    names = [f"cast(rand({place}) as float) {name}" for place, name in enumerate(_COLUMNS)]
    frame = spark.range(0, rows, 1, _PARTS).selectExpr(*names).cache()
    frame.count()

    def by_hand(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            found = output_of(path, [batch.column(name).to_numpy() for name in _COLUMNS])
            yield pa.RecordBatch.from_arrays([pa.array(found)], ["output"])

    runner = headrace.Runner(*runner_arguments(root))

    def job(way: Callable[[Iterator[Any]], Iterator[Any]]) -> Job:
        return lambda: frame.mapInArrow(way, runner.ddl).agg({"output": "sum"}).collect()

    yield {"by hand": job(by_hand), "Runner": job(runner.tables)}
    spark.stop()


@contextmanager
def dask_jobs(root: Path, path: str, rows: int) -> Iterator[Mapping[str, Job]]:
    """Dask, with two workers."""
    import dask.dataframe as dd
    import pandas as pd
    from distributed import Client, wait

    random = np.random.default_rng(0).random((rows, len(_COLUMNS)), np.float32)
    frame = pd.DataFrame(random, columns=_COLUMNS)

    def by_hand(part: Any) -> Any:
        found = output_of(path, [part[name].to_numpy() for name in _COLUMNS])
        return pd.DataFrame({"output": found}, index=part.index)

    runner = headrace.Runner(*runner_arguments(root))
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        parts = dd.from_pandas(frame, npartitions=_PARTS).persist()
        wait(parts)

        def job(way: Callable[[Any], Any]) -> Job:
            return lambda: parts.map_partitions(way, meta=runner.meta).output.sum().compute()

        yield {"by hand": job(by_hand), "Runner": job(runner)}


@contextmanager
def beam_jobs(root: Path, path: str, rows: int) -> Iterator[Mapping[str, Job]]:
    """Beam's `RunInference`, beside its own handler for ONNX Runtime; a tenth of the rows."""
    import apache_beam as beam
    from apache_beam.ml.inference.base import RunInference
    from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy

    from headrace.plugins.beam import BeamHandler

    elements = list(np.random.default_rng(0).random((rows // 10, len(_COLUMNS)), np.float32))
    sizes = {"min_batch_size": 1024, "max_batch_size": 1024}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1

    def job(handler: Callable[[], Any]) -> Job:
        def run() -> None:
            with beam.Pipeline() as pipeline:
                found = pipeline | beam.Create(elements) | RunInference(handler())
                _ = found | beam.combiners.Count.Globally()

        return run

    runner = headrace.Runner(*runner_arguments(root))
    yield {
        "by hand": job(lambda: OnnxModelHandlerNumpy(path, **sizes)),
        "Runner": job(lambda: BeamHandler(runner, **sizes)),
    }


HOSTS = {
    "ray": (ray_jobs, 1), "pyspark": (spark_jobs, 1), "distributed": (dask_jobs, 1),
    "apache_beam": (beam_jobs, 10),
}  # fmt: skip


def runner_arguments(root: Path) -> tuple[str, str]:
    """The place and the model."""
    return str(root), MLP_OF_TABLES.name


def main() -> None:
    """Measure the hosts that are installed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make bench-hosts")
    parser.add_argument("hosts", nargs="*", default=[*HOSTS], metavar="HOST")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of executors
    lines = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        MLP_OF_TABLES.write(root)
        path = str(root / MLP_OF_TABLES.name / "1" / "model.onnx")
        for host in given.hosts:
            if find_spec(host) is None:
                print(f"{host} is not installed", file=sys.stderr)
                continue
            jobs, part = HOSTS[host]
            with jobs(root, path, given.rows) as ways:
                times = _times(ways, given.rounds)
            lines += _lines(host, times, given.rows // part)
    print(
        table(
            ("host", "way", "rows", "k rows/s", "beside by hand", "in CPU seconds"), lines, left=2
        )
    )


def _times(ways: Mapping[str, Job], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of each round, after one to warm up."""
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in ways}
    for number in range(rounds + 1):
        for what in ways if number % 2 else reversed([*ways]):
            begun, used = perf_counter(), _cpu_seconds()
            ways[what]()
            times[what].append((perf_counter() - begun, _cpu_seconds() - used))
    return {what: each[1:] for what, each in times.items()}


def _cpu_seconds() -> float:
    """CPU time of this process and all below it, with the ones that have ended."""
    this = psutil.Process()
    used = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:4])
    return used


def _lines(
    host: str, times: Mapping[str, list[tuple[float, float]]], rows: int
) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for what, each in times.items():
        pairs = [*zip(times["by hand"], each, strict=True)]
        seconds, used = (median(hand[at] / own[at] for hand, own in pairs) for at in (0, 1))
        speed = rows / median(second for second, _ in each) / 1e3
        lines.append((host, what, str(rows), f"{speed:.0f}", f"{seconds:.2f}", f"{used:.2f}"))
    return lines
