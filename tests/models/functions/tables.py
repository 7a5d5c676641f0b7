"""A pyarrow table in and out."""

from typing import TypedDict

from headrace import Table, model


class Row(TypedDict):
    word: str | None
    weight: float | None


@model
def tables(table: Table[Row]) -> Table[Row]:
    return table.take([*reversed(range(table.num_rows))])
