"""Blocks through a runner that fails: bad rows isolated, absent servers asked again."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headrace.plugins.run.rows import BadRow, Position, RowBlock
from headrace.plugins.run.scoring import Fault, ModelFailed, Scoring, joined


class Refused(Exception):
    """A request that fails, with whose fault it is."""

    def __init__(self, text: str, fault: Fault) -> None:
        super().__init__(text)
        self.fault = fault


class Squares:
    """A runner that takes some tables in advance, refuses negative rows, and is away at times."""

    def __init__(
        self, ahead: int, away: int = 0, fault: Fault = Fault.ROWS, every: int = 5
    ) -> None:
        self.ahead = ahead
        self.every = every
        self.away = away
        self.fault = fault
        self.calls = 0

    def tables(self, tables: Iterable[Any]) -> Iterator[Any]:
        taken: list[Any] = []
        for table in tables:
            taken.append(table)
            if len(taken) > self.ahead:
                yield self._one(taken.pop(0))
        for table in taken:
            yield self._one(table)

    def _one(self, table: Any) -> Any:
        self.calls += 1
        if self.calls % self.every == 0 and self.away:
            self.away -= 1
            raise Refused("nobody there", Fault.AWAY)
        if (lowest := pc.min(table["x"]).as_py()) < 0:
            raise Refused(f"{lowest} is negative", self.fault)
        return pa.table({"y": pc.multiply(table["x"], table["x"])})


def judge(error: Exception) -> Fault | None:
    return error.fault if isinstance(error, Refused) else None


def blocks(numbers: list[list[int]]) -> Iterator[RowBlock]:
    row = 0
    for index, values in enumerate(numbers):
        table = pa.table({"x": pa.array(values, pa.int64())})
        row += len(values)
        yield RowBlock("f", table, np.arange(row - len(values), row) + 1, Position(0, index), None)


def scored(
    runner: Squares, numbers: list[list[int]], patience: float = 9.0
) -> tuple[list[int], list[BadRow], list[float]]:
    """Squares, bad rows and waits."""
    slept: list[float] = []
    found, bad, ends = list[int](), list[BadRow](), list[Position]()
    for block, tables in Scoring(runner.tables, judge, patience, slept.append).scored(
        blocks(numbers)
    ):
        found += joined(tables)["y"].to_pylist() if tables else []
        bad += block.bad
        ends.append(block.end)
    assert ends == [Position(0, index) for index in range(len(numbers))]
    return found, bad, slept


@pytest.mark.parametrize("ahead", [0, 1, 3, 99])
def test_order_is_kept_and_empty_blocks_pass(ahead: int) -> None:
    numbers = [[], [1, 2], [], [3], [4, 5, 6], []]
    assert scored(Squares(ahead), numbers) == ([1, 4, 9, 16, 25, 36], [], [])


@pytest.mark.parametrize("ahead", [0, 1, 3, 99])
def test_only_bad_rows_are_left_out(ahead: int) -> None:
    numbers = [[*range(10)], [1, -2, 3, -4, 5], [], [-1], [6, 7], [*range(100), -9]]
    found, bad, _ = scored(Squares(ahead), numbers)
    assert found == [n * n for block in numbers for n in block if n >= 0]
    assert [(one.row, one.reason, one.content) for one in bad] == [
        (12, "-2 is negative", {"x": -2}), (14, "-4 is negative", {"x": -4}),
        (16, "-1 is negative", {"x": -1}), (119, "-9 is negative", {"x": -9}),
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_server_that_is_away_is_asked_again(ahead: int) -> None:
    numbers = [[n, -1] for n in range(1, 30)]
    found, bad, slept = scored(Squares(ahead, away=7), numbers)
    assert found == [n * n for n in range(1, 30)]
    assert len(bad) == 29
    assert slept


def test_patience_ends() -> None:
    scoring = Scoring(Squares(0, away=10**9, every=1).tables, judge, 0.05)
    with pytest.raises(ModelFailed, match=r"nobody there; asked again for 0\.05 s"):
        list(scoring.scored(blocks([[1]])))


def test_a_failing_model_ends_the_run() -> None:
    with pytest.raises(ModelFailed, match="-1 is negative"):
        scored(Squares(1, fault=Fault.MODEL), [[1], [-1]])


def test_a_model_that_no_row_pleases_is_found_out_early() -> None:
    runner = Squares(0)
    with pytest.raises(ModelFailed, match="-1 is negative; none of 16 rows succeeds"):
        scored(runner, [[-1] * 5000])
    assert runner.calls < 20
    found, bad, _ = scored(Squares(0), [[-1] * 40 + [2] * 3, [-1] * 20])
    assert (found, len(bad)) == ([4, 4, 4], 60)


def test_an_error_of_another_kind_is_raised() -> None:
    def broken() -> Iterator[RowBlock]:
        yield from blocks([[1], [2]])
        raise OSError("disk")

    results: list[object] = []
    with pytest.raises(OSError, match="disk"):
        results.extend(Scoring(Squares(0).tables, judge, 1).scored(broken()))
