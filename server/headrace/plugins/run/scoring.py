"""Blocks of rows through a runner: retried when a server is away, halved around bad rows."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from headrace.core.tensors import Array
from headrace.plugins.run.rows import BadRow, RowBlock
from headrace.plugins.run.sources import pyarrow

_SAMPLED = 16  # rows of which one must succeed, before the others are looked at
_FIRST_WAIT_SECS = 0.1
_LONGEST_WAIT_SECS = 5.0


class Fault(Enum):
    """Cause of a failed request: its rows, a server that is away, or the model."""

    ROWS = "rows"
    AWAY = "away"
    MODEL = "model"


class ModelFailed(Exception):
    """The model or its server fails, whatever the rows."""


Run = Callable[[Iterable[Any]], Iterator[Any]]
Judge = Callable[[Exception], Fault | None]


class Scoring:
    """Runs blocks through a model, in order."""

    def __init__(
        self, run: Run, judge: Judge, patience: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`run` yields a table for each, in order, with several under way.

        `judge` says whose an error is, or None for one that is raised as it is. A server that is
        away is asked again for `patience` seconds.
        """
        self._run = run
        self._judge = judge
        self._patience = patience
        self._sleep = sleep
        self._some_good = False

    def scored(self, blocks: Iterator[RowBlock]) -> Iterator[tuple[RowBlock, list[Any]]]:
        """Each block, with its bad rows in it, and the tables of its good ones.

        Raises `ModelFailed`, and what `blocks` raises.
        """
        waiting: deque[RowBlock] = deque()

        def tables() -> Iterator[Any]:
            for block in blocks:
                waiting.append(block)
                if block.table.num_rows:
                    yield block.table

        while True:
            try:
                for table in self._run(tables()):
                    while not waiting[0].table.num_rows:
                        yield waiting.popleft(), []
                    self._some_good = True
                    yield waiting.popleft(), [table]
                yield from ((block, []) for block in waiting)
                return
            except Exception as error:
                if self._judge(error) is None:
                    raise
            # The block with the error is one of those that were under way.
            while waiting:
                yield self._alone(waiting.popleft())

    def _alone(self, block: RowBlock) -> tuple[RowBlock, list[Any]]:
        if not block.table.num_rows:
            return block, []
        found = self._result(block.table)
        if not isinstance(found, str):
            self._some_good = True
            return block, [found]
        if not self._some_good:
            self._sample(block.table)
        tables, bad = self._isolated(block, block.table, block.numbers)
        block.bad = sorted([*block.bad, *bad], key=lambda one: one.row)
        return block, tables

    def _sample(self, table: Any) -> None:
        """Raises `ModelFailed` if no row of a sample succeeds: halving would take very long."""
        if table.num_rows < _SAMPLED:
            return
        reason: Any = ""
        for place in np.linspace(0, table.num_rows - 1, _SAMPLED, dtype=int):
            reason = self._result(table.slice(place, 1))
            if not isinstance(reason, str):
                return
        raise ModelFailed(f"{reason}; none of {_SAMPLED} rows succeeds")

    def _isolated(
        self, block: RowBlock, table: Any, numbers: Array
    ) -> tuple[list[Any], list[BadRow]]:
        found = self._result(table)
        if not isinstance(found, str):
            self._some_good = True
            return [found], []
        if table.num_rows == 1:
            return [], [BadRow(block.file, int(numbers[0]), found, table.to_pylist()[0])]
        half = table.num_rows // 2
        tables, bad = self._isolated(block, table.slice(0, half), numbers[:half])
        others, more = self._isolated(block, table.slice(half), numbers[half:])
        return [*tables, *others], [*bad, *more]

    def _result(self, table: Any) -> Any:
        """The results for a table, or the text of an error that its rows make."""
        begin, wait = time.monotonic(), _FIRST_WAIT_SECS
        while True:
            try:
                [found] = self._run([table])
                return found
            except Exception as error:
                fault = self._judge(error)
                if fault is None:
                    raise
                if fault is Fault.ROWS:
                    return str(error)
                if fault is Fault.MODEL:
                    raise ModelFailed(str(error)) from error
                if time.monotonic() - begin > self._patience:
                    text = f"{error}; asked again for {self._patience:g} s"
                    raise ModelFailed(text) from error
            self._sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECS)


def joined(tables: list[Any]) -> Any:
    """The tables of a block as one."""
    return tables[0] if len(tables) == 1 else pyarrow().concat_tables(tables)
