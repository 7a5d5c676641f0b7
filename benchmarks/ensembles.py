"""The cost of a step of an ensemble beside a call of its model: `scripts/bench --ensembles`.

One row a call of a model that returns it, in an engine on the caller's loop, by one caller and by
many; an ensemble has that model several times in a row. What counts is processor time, the least of
the rounds, since the machine does other things too.
"""

import asyncio
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import uvloop

import headrace
from benchmarks.models import ALL_MODELS, Array
from benchmarks.report import table

_MODEL = "echo_4k"
_CALLS = 800  # of a round
_STEPS = (1, 2, 4, 8)
_CALLERS = (1, 16)


def main(rounds: int = 12) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        ALL_MODELS[_MODEL].write(Path(folder))
        [(name, row)] = ALL_MODELS[_MODEL].cases()[0].inputs.items()
        made = {f"of_{count}": of_steps(count, name, row) for count in _STEPS}
        for each in made.values():
            each.save(folder)
        times = uvloop.run(_measure(folder, [_MODEL, *made], name, row, rounds))
    lines = []
    for callers in _CALLERS:
        alone = times[callers, _MODEL]
        lines.append((f"the model, {_callers(callers)}", f"{alone:.1f}", ""))
        for count, ensemble in zip(_STEPS, made, strict=True):
            whole = times[callers, ensemble]
            more = (whole - count * alone) / count
            what = f"{count} steps" if count > 1 else "1 step"
            lines.append((f"{what}, {_callers(callers)}", f"{whole:.1f}", f"{more:+.1f}"))
    print(table(("one row a call", "us a call", "us a step beside the model"), lines, left=1))


def of_steps(count: int, name: str, row: Array) -> headrace.Ensemble:
    """An ensemble of the model so many times in a row."""
    width = row.shape[1]

    def repeated(x):  # type: ignore[no-untyped-def]
        for _ in range(count):
            x = headrace.step(_MODEL, **{name: x})["output"]
        return x

    repeated.__name__ = f"of_{count}"
    rows = headrace.Float32[headrace.N, width]  # type: ignore[valid-type]
    repeated.__annotations__ = {"x": rows, "return": rows}
    return headrace.ensemble(max_batch_size=ALL_MODELS[_MODEL].max_batch_size)(repeated)


def _callers(count: int) -> str:
    return f"{count} callers" if count > 1 else "1 caller"


async def _measure(
    folder: str, models: list[str], name: str, row: Array, rounds: int
) -> dict[tuple[int, str], float]:
    """Microseconds of processor time a call, by the number of callers and the model."""
    found: dict[tuple[int, str], float] = {}
    async with headrace.AsyncEngine(folder) as engine:
        for _ in range(rounds):
            for callers in _CALLERS:
                for each in models:
                    given = {name if each == _MODEL else "x": np.asarray(row)}
                    spent = await _round(engine.model(each), given, callers)
                    found[callers, each] = min(spent, found.get((callers, each), spent))
    return found


async def _round(model: Any, given: dict[str, Array], callers: int) -> float:
    async def ask() -> None:
        for _ in range(_CALLS // callers):
            await model(**given)

    begun = process_time()
    await asyncio.gather(*(ask() for _ in range(callers)))
    return (process_time() - begun) / _CALLS * 1e6
