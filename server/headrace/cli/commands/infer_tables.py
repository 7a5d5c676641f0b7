"""Tables of `headrace infer`: CSV, Parquet and other files, as columns of a library's.

pyarrow reads them; without it, only CSV is read, by Python's own module, which takes many times as
long. Functions raise `CommandFailed` that names the source and the problem.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from headrace.cli.remote import CommandFailed
from headrace.client.values import Declared
from headrace.core.datatypes import Datatype

_SEPARATORS = {"csv": ",", "tsv": "\t"}
_BLOCK = 8 << 20  # bytes of CSV whose columns have one type


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table; without `names` if there is no header."""

    names: Sequence[str] | None
    columns: Sequence[Any]
    rows: int


def read_columns(data: bytes, kind: str, where: str, inputs: Sequence[Declared]) -> Columns:
    """The columns in the content of a file; `inputs` are those that it may be for.

    `where` names the source in messages.
    """
    if kind in _SEPARATORS:
        try:
            return _read_separated(data, _SEPARATORS[kind], where, inputs)
        except csv.Error as error:
            raise CommandFailed(f"{where}: {error}") from None
    reader = _READERS[kind]
    try:
        arrow = import_module("pyarrow")
        table = reader(arrow.BufferReader(data))
    except ImportError:
        text = f"reading {where} needs pyarrow: pip install 'headrace[tables]'"
        raise CommandFailed(text) from None
    except (ValueError, OSError) as error:  # whose subclasses are pyarrow's
        raise CommandFailed(f"{where}: not a table that can be read: {_line(error)}") from None
    return Columns(table.column_names, table.columns, table.num_rows)


def _read_separated(data: bytes, separator: str, where: str, inputs: Sequence[Declared]) -> Columns:
    """Cells of BYTES inputs are texts; others have the type that their column appears to have."""
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", "replace", newline="")
    reader = csv.reader(text, delimiter=separator)
    first = next((row for row in reader if row), None)
    if first is None:
        raise CommandFailed(f"{where}: it is empty")
    names = _header(first, inputs)
    by_name = {declared.name: declared for declared in inputs}
    datatypes = [(by_name.get(name) or inputs[0]).datatype for name in names or [""] * len(first)]
    try:
        arrow = import_module("pyarrow.csv")
    except ImportError:
        words = [datatype is Datatype.BYTES for datatype in datatypes]
        return _read_slowly(data, separator, where, names, words)
    kinds = import_module("pyarrow")
    places = [str(place) for place in range(len(first))]
    # Integers beyond INT64 would be taken for doubles, which lose digits.
    declared = {Datatype.BYTES: kinds.string(), Datatype.UINT64: kinds.uint64()}
    types = {
        place: declared[datatype]
        for place, datatype in zip(places, datatypes, strict=True)
        if datatype in declared
    }

    def read(types: Mapping[str, Any]) -> Any:
        return arrow.read_csv(
            kinds.BufferReader(data),
            arrow.ReadOptions(
                column_names=places,
                skip_rows=0 if names is None else reader.line_num,
                block_size=_BLOCK,
            ),
            arrow.ParseOptions(delimiter=separator, newlines_in_values=True),
            arrow.ConvertOptions(column_types=types),
        )

    try:
        try:
            table = read(types)
        except ValueError:  # "1.0" as UINT64, perhaps
            table = read({place: kind for place, kind in types.items() if kind == kinds.string()})
    except ValueError as error:
        raise CommandFailed(f"{where}: {_line(error)}") from None
    return Columns(names, table.columns, table.num_rows)


def _read_slowly(
    data: bytes, separator: str, where: str, names: Sequence[str] | None, words: Sequence[bool]
) -> Columns:
    """The cells of CSV by Python's own reader."""
    lines = io.StringIO(data.decode("utf-8-sig", "replace"), newline="")
    rows = [row for row in csv.reader(lines, delimiter=separator) if row]
    for number, row in enumerate(rows, 1):
        if len(row) != len(words):
            raise CommandFailed(f"{where}: row {number} has {len(row)} cells, not {len(words)}")
    del rows[: 0 if names is None else 1]
    columns = [
        [row[place] for row in rows] if is_word else _numbers([row[place] for row in rows], where)
        for place, is_word in enumerate(words)
    ]
    return Columns(names, columns, len(rows))


def _numbers(cells: list[str], where: str) -> Any:
    """Cells as numbers, None for empty ones."""
    try:
        numbers = [_number(cell) if cell else None for cell in cells]
    except ValueError as error:
        raise CommandFailed(f"{where}: {error}") from None
    return numbers if None in numbers else np.array(numbers)


def _number(cell: str) -> int | float:
    try:
        return int(cell)  # a float would lose digits of a large one
    except ValueError:
        return float(cell)


def _header(first: Sequence[str], inputs: Sequence[Declared]) -> list[str] | None:
    """The names in the first row; None if it is a row of values.

    A table for several inputs has names.
    """
    cells = [cell.strip() for cell in first]
    if len(inputs) > 1:
        return cells
    [declared] = inputs
    if set(cells) in ({declared.name}, {*declared.columns}):
        return cells
    # Names that are numbers, such as the positions of columns, may be values here.
    if any(cell in declared.columns and not _is_number(cell) for cell in cells):
        return cells
    if declared.datatype is Datatype.BYTES or any(map(_is_number, cells)):
        return None
    return cells


def _is_number(cell: str) -> bool:
    try:
        float(cell or "nan")
    except ValueError:
        return False
    return True


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _reader(module: str, name: str) -> Callable[[Any], Any]:
    def read(source: Any) -> Any:
        return vars(import_module(f"pyarrow.{module}"))[name](source)

    return read


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "parquet": _reader("parquet", "read_table"),
    "feather": _reader("feather", "read_table"),
    "arrow": _reader("feather", "read_table"),
    "orc": _reader("orc", "read_table"),
    "jsonl": _reader("json", "read_json"),
}
KINDS = (*_SEPARATORS, *_READERS)


def kind_of(data: bytes) -> str:
    """The kind of a file by its first bytes; "" for text."""
    magic = {b"PAR1": "parquet", b"ARRO": "arrow", b"FEA1": "feather", b"ORC": "orc"}
    return next((kind for start, kind in magic.items() if data.startswith(start)), "")
