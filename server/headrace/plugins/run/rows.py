"""The rows of files, in blocks whose borders depend on the files alone.

A file is read in units: row groups of Parquet, record batches of Arrow, and of texts some MiB of
whole lines. A block is a part of a unit, of a limited number of rows; its end is a `Position`, from
where another process continues with the same blocks. Rows of texts that cannot be parsed are
isolated by halving, and stay in their block with the reason.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.core.tensors import Array
from headrace.plugins.run.sources import TableFailed, TableFile, pyarrow, spooled

BLOCK_BYTES = 4 << 20
_LONGEST = 64 << 20  # bytes of a row of text
# Without "nan" in any form, which is a number.
_NULLS = ["", "#N/A", "N/A", "NA", "NULL", "n/a", "null"]
_SHOWN = 12  # columns named in an error


class Position(NamedTuple):
    """Begin of the next block: its file and unit, and the rows before it of both."""

    file: int = 0
    unit: int = 0
    of_unit: int = 0
    of_file: int = 0


class BadRow(NamedTuple):
    """A row without a result: its file, its number there from 1, why, and what it holds."""

    file: str
    row: int
    reason: str
    content: Any


@dataclass(slots=True)
class RowBlock:
    """Good rows with their numbers in their file, and bad ones; `share` of all bytes was read."""

    file: str
    table: Any
    numbers: Array
    end: Position
    share: float | None
    bad: list[BadRow] = field(default_factory=list)


@dataclass(slots=True)
class _UnitPart:
    """Rows of a unit; `places` of the good ones among all, and places, reasons, texts of others."""

    unit: int
    table: Any
    share: float
    bad: Sequence[tuple[int, str, str]] = ()

    def places(self) -> Array:
        rows = np.arange(self.table.num_rows + len(self.bad))
        return np.delete(rows, [place for place, _, _ in self.bad]) if self.bad else rows


class _UnitReader(Protocol):
    """Reads a file's units from one on; columns by name in the given order."""

    schema: Any

    def parts(self, unit: int, columns: Sequence[str], rows: int) -> Iterator[_UnitPart]: ...


TypeOf = Callable[[str], Any]


class TableReader:
    """The blocks of several files as tables of one schema, which is that of the first."""

    def __init__(self, files: Sequence[TableFile], type_of: TypeOf) -> None:
        """`type_of` a column of text is a type of Arrow, or None for what the column looks like.

        Raises `TableFailed`.
        """
        self._files = files
        self._type_of = type_of
        self.types: dict[str, Any] = {}
        self._first: _UnitReader | None = self._opened(files[0])
        self.types = {one.name: _plain(one.type) for one in self._first.schema}
        for key in files[0].partition:
            values = [file.partition.get(key, "") for file in files]
            whole = all(value.removeprefix("-").isdecimal() for value in values)
            self.types.setdefault(key, pyarrow().int64() if whole else pyarrow().string())
        self._total = sum(file.size for file in files) if all(f.size >= 0 for f in files) else 0

    def require(self, columns: Sequence[str]) -> None:
        """Raises `TableFailed` for a column that the first file has not."""
        self._require(self._files[0], self.types, columns)

    def blocks(self, start: Position, columns: Sequence[str], rows: int) -> Iterator[RowBlock]:
        """Blocks of at most `rows` rows with these columns, from a position on.

        Raises `TableFailed`.
        """
        for index in range(start.file, len(self._files)):
            begin = start if index == start.file else Position(index)
            with _told(self._files[index]):
                yield from self._of_file(begin, columns, rows)

    def _of_file(self, begin: Position, columns: Sequence[str], rows: int) -> Iterator[RowBlock]:
        file = self._files[begin.file]
        reader = self._opened(file) if begin.file or self._first is None else self._first
        self._first = None
        names = reader.schema.names
        self._require(file, [*names, *file.partition], columns)
        before = sum(one.size for one in self._files[: begin.file])
        unit, of_unit, of_file = -1, 0, begin.of_file
        for part in reader.parts(begin.unit, [n for n in columns if n in names], rows):
            of_unit = of_unit if part.unit == unit else 0
            unit = part.unit
            table = self._uniform(file, part.table, columns)
            places = part.places()
            total = len(places) + len(part.bad)
            most = max(min(rows, BLOCK_BYTES * table.num_rows // max(table.nbytes, 1)), 1)
            for start in range(0, total, most):
                end = min(start + most, total)
                if unit == begin.unit and of_unit + end <= begin.of_unit:
                    continue
                low, high = np.searchsorted(places, (start, end))
                first = of_file + 1 - start
                done = before + part.share * file.size
                of_file += end - start
                yield RowBlock(
                    file.path, table.slice(low, high - low), places[low:high] + first,
                    Position(begin.file, unit, of_unit + end, of_file),
                    done / self._total if self._total else None,
                    [BadRow(file.path, first + place, reason, text)
                     for place, reason, text in part.bad if start <= place < end],
                )  # fmt: skip
            of_unit += total

    def _uniform(self, file: TableFile, table: Any, columns: Sequence[str]) -> Any:
        arrow = pyarrow()
        found = []
        for name in columns:
            if name in table.column_names:
                column = table.column(name)
            else:
                value = arrow.scalar(file.partition[name]).cast(self.types[name])
                column = arrow.chunked_array([arrow.repeat(value, table.num_rows)])
            try:
                found.append(column.cast(self.types[name]))
            except arrow.ArrowException as error:
                text = f"{file.path}: column '{name}' of {column.type} is no {self.types[name]}"
                raise TableFailed(f"{text}, as in {self._files[0].path}: {error}") from error
        return arrow.table(found, names=list(columns))

    def _require(self, file: TableFile, known: Any, columns: Sequence[str]) -> None:
        for name in columns:
            if name not in known:
                shown = ", ".join([*known][:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
                raise TableFailed(f"{file.path}: it lacks the column '{name}'; it has {shown}")

    def _opened(self, file: TableFile) -> _UnitReader:
        with _told(file):
            opened = file.open()
            if file.format == "parquet":
                return _ParquetRows(opened if file.size >= 0 else spooled(opened))
            if file.format in ("arrow", "stream"):
                return _ArrowRows(file, opened)
            return _TextRows(file, opened, self.types.get if self.types else self._type_of)


@contextmanager
def _told(file: TableFile) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow().ArrowException) as error:
        raise TableFailed(f"{file.path}: cannot be read: {error}") from error


def _plain(kind: Any) -> Any:
    return kind.value_type if pyarrow().types.is_dictionary(kind) else kind


class _ParquetRows:
    def __init__(self, opened: Any) -> None:
        from pyarrow.parquet import ParquetFile

        # Otherwise whole columns of a row group are read at once.
        self._file = ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)
        self.schema = self._file.schema_arrow

    def parts(self, unit: int, columns: Sequence[str], rows: int) -> Iterator[_UnitPart]:
        about = self._file.metadata
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        done = sum(group.num_rows for group in groups[:unit])
        for index in range(unit, len(groups)):
            group = groups[index]
            fitting = BLOCK_BYTES * group.num_rows // max(group.total_byte_size, 1)
            each = max(min(rows, fitting), 1)
            for batch in self._file.iter_batches(each, [index], list(columns)):
                done += batch.num_rows
                share = done / max(about.num_rows, 1)
                yield _UnitPart(index, pyarrow().Table.from_batches([batch]), share)


class _ArrowRows:
    def __init__(self, file: TableFile, opened: Any) -> None:
        ipc = pyarrow().ipc
        self._size = file.size
        self._raw = opened
        self._is_file = file.format == "arrow"
        if self._is_file:
            self._raw = opened if file.size >= 0 else spooled(opened)
            self._is_file = self._raw.read(6) == b"ARROW1"
            self._raw.seek(0)
        if self._is_file:
            self._reader = ipc.open_file(self._raw)
        else:
            self._reader = ipc.open_stream(file.decompressed(self._raw))
        self.schema = self._reader.schema

    def parts(self, unit: int, columns: Sequence[str], rows: int) -> Iterator[_UnitPart]:
        count = self._reader.num_record_batches if self._is_file else 0
        of_file = (self._reader.get_batch(index) for index in range(unit, count))
        for index, batch in enumerate(of_file if self._is_file else self._reader):
            number = index + unit if self._is_file else index
            share = (number + 1) / count if count else _share(self._raw, self._size)
            if number >= unit:
                table = pyarrow().Table.from_batches([batch]).select(columns)
                yield _UnitPart(number, table, share)


class _TextRows:
    """CSV or JSON lines; a unit begins at a row, and its number is its position in bytes."""

    def __init__(self, file: TableFile, opened: Any, type_of: TypeOf) -> None:
        self._path = file.path
        self._size = file.size
        self._raw = opened
        self._stream = file.decompressed(opened)
        self._seeks = not file.codec and file.size >= 0
        self._is_csv = file.format != "jsonl"
        self._separator = "\t" if file.format == "tsv" else ","
        after = re.escape(self._separator.encode()) + rb"\n"
        # A quoted value, which may have lines in it, or the end of a line.
        quoted = rb"(?:(?<=[" + after + rb'])|\A)"[^"]*(?:""[^"]*)*(?:"|\Z)'
        self._ending = re.compile(quoted + rb"|\n" if self._is_csv else rb"\n")
        self._ended = False
        self._head = self._filled(b"", BLOCK_BYTES)
        self._begin = 3 if self._head.startswith(b"\xef\xbb\xbf") else 0
        self._names: list[str] = []
        if self._is_csv:
            self._names, length = self._header(self._head[self._begin :])
            self._begin += length
        sample = self._head[self._begin :]
        if not self._ended:
            sample = sample[: self._cut(sample)]
        kinds = self._kinds(sample, type_of)
        self.schema = pyarrow().schema([*kinds.items()])

    def parts(self, unit: int, columns: Sequence[str], rows: int) -> Iterator[_UnitPart]:
        at = unit or self._begin
        data = self._head[at:]
        if at > len(self._head):
            self._skip(at - len(self._head))
        self._head = b""
        while data := self._filled(data, BLOCK_BYTES):
            cut = self._whole(data)
            while not cut:
                if len(data) >= _LONGEST:
                    raise TableFailed(
                        f"{self._path}: no row ends in {_LONGEST >> 20} MiB"
                        f" from byte {at}; is there a quote without its end?"
                    )
                data = self._filled(data, len(data) + BLOCK_BYTES)
                cut = self._whole(data)
            tables, bad = self._isolated(data[:cut], columns, 0)
            share = _share(self._raw, self._size)
            empty = self.schema.empty_table().select(columns)
            yield _UnitPart(at, pyarrow().concat_tables([empty, *tables]), share, bad)
            at, data = at + cut, data[cut:]

    def _filled(self, data: bytes, size: int) -> bytes:
        parts = [data]
        missing = size - len(data)
        while missing > 0 and not self._ended:
            parts.append(self._stream.read(missing))
            missing -= len(parts[-1])
            self._ended = not parts[-1]
        return b"".join(parts)

    def _skip(self, count: int) -> None:
        if self._seeks:
            self._stream.seek(self._stream.tell() + count)
        while count > 0 and not self._seeks and (read := self._stream.read(min(count, 1 << 20))):
            count -= len(read)

    def _whole(self, data: bytes) -> int:
        return len(data) if self._ended else self._cut(data)

    def _cut(self, data: bytes) -> int:
        """The length of the whole rows in `data`."""
        if not self._is_csv or b'"' not in data:
            return data.rfind(b"\n") + 1
        return [0, *self._ends(data)][-1]

    def _ends(self, data: bytes) -> list[int]:
        return [found.end() for found in self._ending.finditer(data) if found[0] == b"\n"]

    def _header(self, data: bytes) -> tuple[list[str], int]:
        length = (self._ends(data) or [len(data)])[0]
        text = data[:length].decode("utf-8", "replace")
        cells = next(csv.reader(text.splitlines(keepends=True), delimiter=self._separator), [])
        names = [cell.strip() for cell in cells]
        if twice := {name for name in names if names.count(name) > 1}:
            raise TableFailed(f"{self._path}: its first line has column '{min(twice)}' twice")
        if not names:
            raise TableFailed(f"{self._path}: it has no first line with the names of columns")
        return names, length

    def _kinds(self, sample: bytes, type_of: TypeOf) -> Mapping[str, Any]:
        """Types by column: as told, or as the first rows look."""
        arrow = pyarrow()
        if self._is_csv:
            kinds = {name: type_of(name) for name in self._names}
            rest = [name for name, kind in kinds.items() if kind is None]
            seen = self._csv(sample, rest, {}, skip=True) if rest and sample.strip() else None
        else:
            seen = self._seen(sample)
            kinds = {} if seen is None else {name: type_of(name) for name in seen.column_names}
        for name, kind in kinds.items():
            looks = arrow.null() if seen is None or name not in seen.column_names else (
                seen.schema.field(name).type
            )  # fmt: skip
            kinds[name] = _leaf(looks, kind)
        return kinds

    def _seen(self, sample: bytes) -> Any:
        """The rows of JSON of the first part of the sample that is valid."""
        try:
            return self._json(sample, None)
        except pyarrow().ArrowInvalid:
            ends = self._ends(sample)
            if len(ends) < 2:
                return None
            half = ends[(len(ends) - 1) // 2]
            found = self._seen(sample[:half])
            return self._seen(sample[half:]) if found is None else found

    def _isolated(
        self, data: bytes, columns: Sequence[str], first: int
    ) -> tuple[list[Any], list[tuple[int, str, str]]]:
        """Tables of the good rows, and places from `first`, reasons and texts of the bad ones."""
        if not data.strip():
            return [], []
        kinds = {one.name: one.type for one in self.schema}
        try:
            if self._is_csv:
                return [self._csv(data, columns, kinds)], []
            return [self._json(data, self.schema).select(columns)], []
        except pyarrow().ArrowInvalid as error:
            ends = self._ends(data)
            if len(ends) < 2 and (not ends or ends[0] == len(data)):
                text = data.decode("utf-8", "replace").strip("\r\n")
                return [], [(first, self._reason(str(error)), text)]
        half = ends[(len(ends) - 1) // 2]
        tables, bad = self._isolated(data[:half], columns, first)
        first += sum(table.num_rows for table in tables) + len(bad)
        others, more = self._isolated(data[half:], columns, first)
        return [*tables, *others], [*bad, *more]

    def _csv(
        self, data: bytes, columns: Sequence[str], kinds: Mapping[str, Any], skip: bool = False
    ) -> Any:
        from pyarrow import csv as arrow_csv

        return arrow_csv.read_csv(
            pyarrow().BufferReader(data),
            arrow_csv.ReadOptions(column_names=self._names, block_size=len(data) + 1),
            arrow_csv.ParseOptions(
                delimiter=self._separator, newlines_in_values=True,
                invalid_row_handler=(lambda _row: "skip") if skip else None,
            ),
            arrow_csv.ConvertOptions(
                include_columns=list(columns), column_types=kinds, null_values=_NULLS
            ),
        )  # fmt: skip

    def _json(self, data: bytes, schema: Any) -> Any:
        from pyarrow import json as arrow_json

        return arrow_json.read_json(
            pyarrow().BufferReader(data),
            arrow_json.ReadOptions(block_size=len(data) + 1),
            arrow_json.ParseOptions(
                explicit_schema=schema,
                unexpected_field_behavior="infer" if schema is None else "ignore",
            ),
        )

    def _reason(self, text: str) -> str:
        names = self._names
        text = re.sub(r"column #(\d+)", lambda found: f"column '{names[int(found[1])]}'", text)
        return re.sub(r" in row \d+$", "", text)


def _share(opened: Any, size: int) -> float:
    return opened.tell() / size if size > 0 else 0.0


def _leaf(looks: Any, kind: Any) -> Any:
    """The type for a column: lists as they look, of elements as told; texts for nothing else."""
    types = pyarrow().types
    if kind is not None and types.is_list(kind):
        return kind
    if types.is_list(looks):
        return pyarrow().list_(_leaf(looks.value_type, kind))
    if kind is not None:
        return kind
    return pyarrow().string() if types.is_null(looks) else looks
