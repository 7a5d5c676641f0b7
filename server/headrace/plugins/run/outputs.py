"""Files of results, encoded block by block, and put in place when they are complete."""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, Protocol

import numpy as np
import orjson

from headrace.plugins.run.journal import Finished
from headrace.plugins.run.sources import STANDARD, TableFailed, is_url, pyarrow, upload

_GROUP_ROWS = 1 << 20  # of a row group of Parquet
_GROUP_BYTES = 64 << 20
_JSON = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class _Encoder(Protocol):
    def write(self, table: Any, size: int) -> None: ...

    def close(self) -> None: ...


def is_direct(path: str) -> bool:
    """True for standard output, pipes and devices, which are written at once and never replaced."""
    if path == STANDARD:
        return True
    try:
        return not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def beside(path: str, suffix: str) -> str:
    """A name beside a file; for the address of an object store, in the current directory."""
    return (path.rstrip("/").rpartition("/")[2] if is_url(path) else path) + suffix


class Output:
    """The results and the bad rows of a run, on their way to their files."""

    def __init__(self, path: str, form: str, codec: str, schema: Any, bad: str) -> None:
        """Begin both files; `bad` is "" for none. Raises `TableFailed`."""
        self._path = path
        self._bad_path = bad
        self._direct = is_direct(path)
        self._partial = beside(path, ".partial")
        with _told(path):
            self._raw = self._opened()
            self._sink = pyarrow().CompressedOutputStream(self._raw, codec) if codec else self._raw
            form = "stream" if form == "arrow" and self._direct else form
            self._encoder = _ENCODERS[form](self._sink, schema)
        self._bad: IO[bytes] | None = None
        if bad:
            try:
                with _told(bad):
                    name = bad if is_direct(bad) else beside(bad, ".partial")
                    self._bad = open(name, "wb")  # noqa: SIM115  # until `finish`
            except TableFailed:
                self.discard()
                raise

    def write(self, done: Finished) -> None:
        """Encode a finished block; raises `TableFailed`."""
        if done.table:
            with _told(self._path):
                table = pyarrow().ipc.open_stream(done.table).read_all()
                self._encoder.write(table, len(done.table))
        if self._bad is not None:
            with _told(self._bad_path):
                self._bad.write(done.bad)

    def finish(self) -> None:
        """Complete both files, and put them in place of what was there; raises `TableFailed`."""
        if self._bad is not None:
            with _told(self._bad_path):
                self._bad.close()
                if not is_direct(self._bad_path):
                    _place(beside(self._bad_path, ".partial"), self._bad_path)
        with _told(self._path):
            self._encoder.close()
            if self._sink is not self._raw:
                self._sink.close()
            if self._path == STANDARD:
                sys.stdout.buffer.flush()
                return
            self._raw.close()
            if not self._direct:
                _place(self._partial, self._path)

    def discard(self) -> None:
        """Remove the incomplete files; a run that continues makes them again from its log."""
        for path in (self._path, self._bad_path):
            if path and not is_direct(path):
                with _told(path):
                    if os.path.exists(beside(path, ".partial")):
                        os.unlink(beside(path, ".partial"))

    def _opened(self) -> Any:
        arrow = pyarrow()
        if self._path == STANDARD:
            return arrow.PythonFile(sys.stdout.buffer, mode="w")
        if self._direct:
            return arrow.PythonFile(open(self._path, "wb"), mode="w")
        return arrow.OSFile(self._partial, "wb")


def finished_table(table: Any, schema: Any) -> memoryview:
    """A block's table as a stream of one batch; raises `TableFailed`."""
    arrow = pyarrow()
    try:
        whole = table.cast(schema).combine_chunks()
    except arrow.ArrowException as error:
        raise TableFailed(f"the results are no {schema}: {error}") from error
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, schema) as writer:
        writer.write_table(whole)
    return memoryview(sink.getvalue())


def _place(partial: str, path: str) -> None:
    with open(partial, "rb") as file:
        os.fsync(file.fileno())  # otherwise a loss of power may leave an empty file of this name
    if is_url(path):
        upload(partial, path)
        os.unlink(partial)
        return
    os.replace(partial, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, pyarrow().ArrowException) as error:
        raise TableFailed(f"{path}: cannot be written: {error}") from error


class _Parquet:
    def __init__(self, sink: Any, schema: Any) -> None:
        from pyarrow.parquet import ParquetWriter

        self._writer = ParquetWriter(sink, schema)
        self._group: list[Any] = []
        self._rows = self._bytes = 0

    def write(self, table: Any, size: int) -> None:
        self._group.append(table)
        self._rows += table.num_rows
        self._bytes += size
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        if self._group:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(pyarrow().concat_tables(self._group), self._rows)
        self._group, self._rows, self._bytes = [], 0, 0


class _Written:
    """A writer of pyarrow's, which takes tables as they come."""

    def __init__(self, writer: Any, converted: Callable[[Any], Any] = lambda table: table) -> None:
        self._writer = writer
        self._converted = converted

    def write(self, table: Any, size: int) -> None:
        self._writer.write_table(self._converted(table))

    def close(self) -> None:
        self._writer.close()


class _JsonLines:
    def __init__(self, sink: Any, schema: Any) -> None:
        self._sink = sink

    def write(self, table: Any, size: int) -> None:
        names = table.column_names
        rows = zip(*map(_cells, table.columns), strict=True)
        self._sink.write(b"".join(json_line(dict(zip(names, r, strict=True))) for r in rows))

    def close(self) -> None:
        pass


def _csv(sink: Any, schema: Any, separator: str = ",") -> _Written:
    from pyarrow.csv import CSVWriter, WriteOptions

    nested = {one.name for one in schema if pyarrow().types.is_nested(one.type)}
    text = pyarrow().string()
    fields = [(one.name, text if one.name in nested else one.type) for one in schema]
    flat = pyarrow().schema(fields)

    def flattened(table: Any) -> Any:
        """The table with lists as texts of JSON."""
        columns = [
            [orjson.dumps(cell, str, _JSON).decode().rstrip() for cell in _cells(column)]
            if name in nested else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]  # fmt: skip
        return pyarrow().table(columns, schema=flat)

    options = WriteOptions(delimiter=separator)
    return _Written(CSVWriter(sink, flat, write_options=options), flattened)


_ENCODERS: dict[str, Callable[[Any, Any], _Encoder]] = {
    "parquet": _Parquet,
    "csv": _csv,
    "tsv": partial(_csv, separator="\t"),
    "jsonl": _JsonLines,
    "arrow": lambda sink, schema: _Written(pyarrow().ipc.new_file(sink, schema)),
    "stream": lambda sink, schema: _Written(pyarrow().ipc.new_stream(sink, schema)),
}


def json_line(document: Any) -> bytes:
    """A line of JSON; what JSON has not becomes text."""
    return orjson.dumps(document, str, _JSON)


def _cells(column: Any) -> Any:
    """Values for orjson: floats as those of NumPy, whose digits are the fewest that are exact."""
    types = pyarrow().types
    kind, shape = column.type, [len(column)]
    whole = column.combine_chunks()
    while types.is_list(kind) and not whole.null_count and shape[0]:
        lengths = np.unique(whole.value_lengths().to_numpy())
        if len(lengths) != 1:
            break
        shape.append(int(lengths[0]))
        whole, kind = whole.flatten(), kind.value_type
    if types.is_floating(kind) and not whole.null_count:
        return np.ascontiguousarray(whole.to_numpy(zero_copy_only=False)).reshape(shape)
    return column.to_pylist()
