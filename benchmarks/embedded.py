"""An engine in the program beside ONNX Runtime called by hand: `scripts/bench --embedded`.

One row a call of the small MLP, by one caller and by many, and a table. All of a round run one
after the other, so that each has seen the same machine; what counts is the median of the rounds.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
import uvloop

import headrace
from benchmarks.models import ALL_MODELS, MLP, Array
from benchmarks.report import table

_CALLS = 4_000  # of a round
_MANY = 64
_ROWS = 50_000  # of the table
_MODELS = ("mlp", "mlp_unbatched", "mlp_wide")
_START = """
import sys, time
begun = time.perf_counter()
import headrace
with headrace.Engine(sys.argv[1]) as engine:
    started = time.perf_counter()
    import numpy
    engine.model("mlp")(input=numpy.zeros((1, 64), numpy.float32))
    print(started - begun, time.perf_counter() - started)
"""

# Seconds of so many calls.
Measure = Callable[[int], float]


def main(rounds: int = 7) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder, "models")
        for name in _MODELS:
            ALL_MODELS[name].write(root)
        starts = [_start(root) for _ in range(rounds + 1)][1:]  # the first compiles
        [(name, row)] = ALL_MODELS[MLP].cases()[0].inputs.items()
        session = _session(root)
        with _engines(root) as (engine, run):
            calls = _calls(session, engine, run, name, row)
            for measure in calls.values():
                measure(_CALLS // 4)
            times = {what: [0.0] * rounds for what in calls}
            for number in range(rounds):
                for what, measure in calls.items():
                    times[what][number] = measure(_CALLS) / _CALLS * 1e6
            rows = _table_rows(session, engine, name, row, rounds)
    print(_report(times, rows, starts))


def _report(
    times: dict[str, list[float]],
    rows: tuple[list[float], list[float]],
    starts: list[tuple[float, float]],
) -> str:
    alone = times["ONNX Runtime, called by hand"]
    lines = []
    for what, each in times.items():
        more = [one - other for one, other in zip(each, alone, strict=True)]
        ratio = [other / one for one, other in zip(each, alone, strict=True)]
        lines.append((what, f"{median(each):.1f}", f"{median(more):+.1f}", f"{median(ratio):.2f}"))
    by_hand, engine = map(median, rows)
    titles = ("one row a call", "us a call", "beside it", "calls/s")
    return "\n".join([
        table(titles, lines, left=1), "",
        f"a table of {_ROWS} rows: {engine / 1e6:.2f} M rows/s, by hand {by_hand / 1e6:.2f}"
        f" ({engine / by_hand:.2f})",
        f"import and Engine with {len(_MODELS)} models: {median(s for s, _ in starts):.2f} s,"
        f" its first call {median(call for _, call in starts) * 1e3:.0f} ms",
    ])  # fmt: skip


def _session(root: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = root / MLP / "1" / "model.onnx"
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@contextmanager
def _engines(root: Path) -> Iterator[tuple[headrace.Engine, Callable[..., Any]]]:
    """An engine for threads, and a function that runs a coroutine with one on its own loop."""
    with headrace.Engine(root) as engine, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        asynchronous = headrace.AsyncEngine(root)
        run.run(asynchronous.open())
        try:
            yield engine, lambda work, *given: run.run(work(asynchronous, *given))
        finally:
            run.run(asynchronous.aclose())


def _calls(
    session: Any, engine: headrace.Engine, run: Callable[..., Any], name: str, row: Array
) -> dict[str, Measure]:
    given = {name: row}

    def by_hand(count: int) -> float:
        begun = perf_counter()
        for _ in range(count):
            session.run(None, given)
        return perf_counter() - begun

    async def tasks(engine: headrace.AsyncEngine, count: int, tasks: int) -> float:
        model = engine.model(MLP)

        async def ask() -> None:
            for _ in range(count // tasks):
                await model(**given)

        begun = perf_counter()
        await asyncio.gather(*(ask() for _ in range(tasks)))
        return perf_counter() - begun

    def threads(count: int, threads: int) -> float:
        model = engine.model(MLP)

        def ask(_: int) -> None:
            for _ in range(count // threads):
                model(**given)

        if threads == 1:
            begun = perf_counter()
            ask(0)
            return perf_counter() - begun
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(ask, [0]))  # starts a thread
            begun = perf_counter()
            list(pool.map(ask, range(threads)))
            return perf_counter() - begun

    return {
        "ONNX Runtime, called by hand": by_hand,
        "engine, on the caller's loop": lambda count: run(tasks, count, 1),
        "engine, from a thread": lambda count: threads(count, 1),
        f"engine, {_MANY} coroutines": lambda count: run(tasks, count, _MANY),
        f"engine, {_MANY} threads": lambda count: threads(count, _MANY),
    }


def _table_rows(
    session: Any, engine: headrace.Engine, name: str, row: Array, rounds: int
) -> tuple[list[float], list[float]]:
    """Rows/s of a table: by a loop over ONNX Runtime in the model's batches, and by an engine."""
    values = np.repeat(row, _ROWS, 0)
    most = ALL_MODELS[MLP].max_batch_size
    by_hand, by_engine = [], []
    for _ in range(rounds):
        begun = perf_counter()
        parts = [
            session.run(None, {name: values[start : start + most]})[0]
            for start in range(0, _ROWS, most)
        ]
        expected = np.concatenate(parts)
        by_hand.append(_ROWS / (perf_counter() - begun))
        begun = perf_counter()
        found = engine.infer(MLP, {name: values}).array
        by_engine.append(_ROWS / (perf_counter() - begun))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return by_hand, by_engine


def _start(root: Path) -> tuple[float, float]:
    """Seconds from importing the package to an engine with models, and of its first call.

    In a process of its own, with compiled modules, as an installation has them.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", _START, str(root)], capture_output=True, text=True, check=True,
        env=env,
    )  # fmt: skip
    started, called = map(float, done.stdout.split())
    return started, called
