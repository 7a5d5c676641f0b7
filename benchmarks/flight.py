"""Arrow Flight beside the gRPC door: `scripts/bench --flight`.

A table of a million rows and eight columns of floats goes through two models, in batches, with as
many in flight on either side. Both begin with a table of pyarrow; `matrix` is gRPC for a program
that has a matrix instead, which no column has to be copied into. All of a round run one after the
other, so that each has seen the same machine; what counts is the median of the rounds.
"""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
from onnx import TensorProto, helper
from pyarrow import flight

import headrace
from benchmarks.models import Graph, onnx_bytes
from benchmarks.report import table
from benchmarks.server import split_cores, started

_ROWS = 1_000_000
_COLUMNS = 8
_BATCH = 16_384
_IN_FLIGHT = 8  # of gRPC's requests; a Flight stream has as many

# Seconds of a whole table.
Measure = Callable[[], float]


def main(rounds: int = 5) -> None:
    """Measure, and print a table."""
    matrix = np.random.default_rng(3).random((_ROWS, _COLUMNS), np.float32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        _write(root, matrix)
        core, _ = split_cores()
        lines = []
        with started(root, core, [f"--door=flight={port}"]) as server:
            for model in ("linear", "trees"):
                rows = _table(matrix, model)
                pieces = [rows.slice(at, _BATCH) for at in range(0, _ROWS, _BATCH)]
                arrays = [matrix[at : at + _BATCH] for at in range(0, _ROWS, _BATCH)]
                measures: dict[str, Measure] = {
                    "gRPC": partial(_by_grpc, server.grpc, model, pieces),
                    "matrix": partial(_by_grpc, server.grpc, model, arrays),
                    "Flight": partial(_by_flight, port, model, rows),
                }
                for measure in measures.values():
                    measure()
                times: dict[str, list[float]] = {what: [] for what in measures}
                for _ in range(rounds):
                    for what, measure in measures.items():
                        times[what].append(measure())
                ratio = median(g / f for g, f in zip(times["gRPC"], times["Flight"], strict=True))
                speeds = [f"{_ROWS / median(each) / 1e6:.2f}" for each in times.values()]
                lines.append((model, *speeds, f"{ratio:.2f}"))
    titles = (f"{_ROWS} rows of {_COLUMNS} floats", "gRPC, M rows/s", "matrix", "Flight", "/ gRPC")
    print(table(titles, lines, left=1))


def _write(root: Path, matrix: Any) -> None:
    """A linear ONNX model, and LightGBM's trees."""
    weights = {"weights": np.ones((_COLUMNS, 1), np.float32)}
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    graph = Graph([node], TensorProto.FLOAT, {"x": (_COLUMNS,)}, {"y": (1,)}, weights)
    for name, write in (
        (
            "linear",
            lambda path: (path / "model.onnx").write_bytes(onnx_bytes("linear", lambda: graph)),
        ),
        ("trees", lambda path: _trees(matrix[:5_000]).save_model(path / "model.txt")),
    ):
        folder = root / name / "1"
        folder.mkdir(parents=True)
        write(folder)
        (root / name / "config.pbtxt").write_text(f"max_batch_size: {_BATCH}")


def _trees(matrix: Any) -> lightgbm.Booster:
    data = lightgbm.Dataset(matrix, matrix.sum(axis=1))
    return lightgbm.train({"verbose": -1, "num_threads": 1, "num_leaves": 15}, data, 5)


def _table(matrix: Any, model: str) -> Any:
    name = "Column_" if model == "trees" else "c"  # LightGBM knows the names of its columns
    return pa.table({f"{name}{at}": matrix[:, at].copy() for at in range(_COLUMNS)})


def _by_grpc(address: str, name: str, batches: Sequence[Any]) -> float:
    async def run() -> float:
        async with headrace.AsyncClient(f"grpc://{address}") as client:
            model, free = client.model(name), asyncio.Semaphore(_IN_FLIGHT)
            [given] = (await model.signature()).inputs

            async def one(batch: Any) -> Any:
                async with free:
                    return await model(**{given: batch})

            begun = perf_counter()
            answers = await asyncio.gather(*map(one, batches))
            elapsed = perf_counter() - begun
            [output] = answers[0]
            assert sum(len(answer[output]) for answer in answers) == _ROWS
            return elapsed

    return asyncio.run(run())


def _by_flight(port: int, name: str, rows: Any) -> float:
    with flight.connect(f"grpc://127.0.0.1:{port}") as client:
        begun = perf_counter()
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(name))

        def write() -> None:
            writer.begin(rows.schema)
            writer.write_table(rows, _BATCH)
            writer.done_writing()

        thread = threading.Thread(target=write)
        thread.start()
        answer = reader.read_all()
        thread.join()
        elapsed = perf_counter() - begun
        writer.close()
        assert answer.num_rows == _ROWS
        return elapsed
