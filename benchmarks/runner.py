"""Tables through a `headrace.Runner` beside loops by hand: `scripts/bench --runner`.

A pandas frame of eight float columns in, a frame out, through boosted trees of LightGBM and through
an MLP as ONNX: by a loop over the library in batches of the model's size, by a runner in this
process, and by one that asks a server of this machine over gRPC. All of a round run one after the
other, so that each has seen the same machine; what counts is the median of the rounds.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightgbm
import numpy as np
import onnxruntime
import pandas

import headrace
from benchmarks.models import MLP_OF_TABLES, Array
from benchmarks.report import table
from benchmarks.server import started

_COLUMNS = [f"x{place}" for place in range(8)]
_TREES, _TRAINED_ROWS = 100, 50_000
_BATCH = MLP_OF_TABLES.max_batch_size

# Runs a model with a frame.
Way = Callable[[pandas.DataFrame], pandas.DataFrame]


def main(rounds: int = 7, rows: int = 1_000_000) -> None:
    """Measure, and print a table."""
    frame = pandas.DataFrame({
        # Of float64, but so that the models' float32 rounds nothing: a split would tell.
        name: np.random.default_rng(place).standard_normal(rows, np.float32).astype(np.float64)
        for place, name in enumerate(_COLUMNS)
    })  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        by_hand = {"LightGBM": _trees(root), "ONNX": _mlp(root)}
        with started(root, None) as server:
            lines = []
            for library, (model, way) in by_hand.items():
                ways: dict[str, Way] = {
                    "by hand": way,
                    "Runner, in process": headrace.Runner(root, model),
                    "Runner, gRPC": headrace.Runner(f"grpc://{server.grpc}", model),
                }
                lines += _lines(library, _times(ways, frame, rounds), rows)
    print(f"{rows} rows of {len(_COLUMNS)} columns\n")
    print(table(("model", "way", "M rows/s", "beside by hand"), lines, left=2))


def _times(ways: Mapping[str, Way], frame: pandas.DataFrame, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, after one to warm up, which checks the results."""
    first, *others = [way(frame) for way in ways.values()]
    for other in others:
        pandas.testing.assert_frame_equal(other, first, check_exact=False, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {what: [] for what in ways}
    for _ in range(rounds):
        for what, way in ways.items():
            begun = perf_counter()
            way(frame)
            times[what].append(perf_counter() - begun)
    return times


def _lines(library: str, times: Mapping[str, list[float]], rows: int) -> list[tuple[str, ...]]:
    alone = times["by hand"]
    return [
        (
            library, what, f"{rows / median(each) / 1e6:.2f}",
            f"{median(hand / own for hand, own in zip(alone, each, strict=True)):.2f}",
        )
        for what, each in times.items()
    ]  # fmt: skip


def _trees(root: Path) -> tuple[str, Way]:
    """The name of a classifier in the repository, and the loop over its library."""
    rows = np.random.default_rng(99).standard_normal((_TRAINED_ROWS, len(_COLUMNS)))
    labels = (rows.sum(axis=1) + rows[:, 0] * rows[:, 1] > 0).astype(int)
    data = lightgbm.Dataset(pandas.DataFrame(rows, columns=_COLUMNS), labels)
    booster = lightgbm.train({"objective": "binary", "verbosity": -1}, data, _TREES)
    (root / "trees" / "1").mkdir(parents=True)
    booster.save_model(root / "trees" / "1" / "model.txt")
    (root / "trees" / "config.pbtxt").write_text(f"max_batch_size: {_BATCH}\n")
    loaded: Any = lightgbm.Booster(model_file=root / "trees" / "1" / "model.txt")
    return "trees", _loop("predict", np.float64, loaded.predict)


def _mlp(root: Path) -> tuple[str, Way]:
    """The same of an MLP."""
    MLP_OF_TABLES.write(root)
    path = root / MLP_OF_TABLES.name / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(part: pandas.DataFrame) -> Array:
        [found] = session.run(None, {"input": part.to_numpy(np.float32)})
        return np.asarray(found)[:, 0]

    return MLP_OF_TABLES.name, _loop("output", np.float32, run)


def _loop(name: str, dtype: type, run: Callable[[pandas.DataFrame], Array]) -> Way:
    def way(frame: pandas.DataFrame) -> pandas.DataFrame:
        found: Array = np.empty(len(frame), dtype)
        for start in range(0, len(frame), _BATCH):
            found[start : start + _BATCH] = run(frame.iloc[start : start + _BATCH])
        return pandas.DataFrame({name: found}, index=frame.index)

    return way
