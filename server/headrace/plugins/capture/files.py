"""Files of captured calls: JSON lines, or parts in Parquet. Both belong to the writing thread."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time_ns
from typing import Any, Protocol

import orjson

from headrace.observability.rotating_file import RotatingFile
from headrace.plugins.capture.records import CapturedCall, document_of, json_of

log = logging.getLogger(__name__)

_AT_ONCE_BYTES = 4 << 20  # of lines
_PART_BYTES = 32 << 20  # of a Parquet part's documents
_PART_SECS = 60.0
_NESTED = ("parameters", "inputs", "responses")  # columns with JSON
_COLUMNS = (
    "time", "model", "version", "id", "door", "key", "duration_ms", "status", "error", *_NESTED,
)  # fmt: skip


class RecordWriter(Protocol):
    """An `ItemWriter` of calls that counts those it could not write."""

    unwritten: int

    def write(self, items: Sequence[CapturedCall]) -> None:
        """Implements `ItemWriter.write`."""

    def close(self) -> None:
        """Implements `ItemWriter.close`."""


class _LossCounter:
    """The count of calls that could not be written; the log has the first of equal failures."""

    def __init__(self) -> None:
        self.unwritten = 0
        self._failing = False

    @contextmanager
    def _writing(self, path: str | Path, calls: int) -> Iterator[None]:
        """Count `calls` as lost if the body raises `OSError`."""
        try:
            yield
        except OSError as error:
            self.unwritten += calls
            if not self._failing:
                log.error("cannot write the capture %s: %s", path, error.strerror or error)
            self._failing = True
        else:
            self._failing = False


class JsonLines(_LossCounter):
    """A document per line, in a file that is rotated."""

    def __init__(self, path: str, max_bytes: int, files: int) -> None:
        """Raises `OSError` if the file cannot be opened."""
        super().__init__()
        self._path = path
        self._file = RotatingFile(path, max_bytes, files, "the capture")

    def write(self, items: Sequence[CapturedCall]) -> None:
        """Write calls; those that cannot be written are counted, and the first one is told."""
        lines: list[bytes] = []
        nbytes = 0
        for item in items:
            lines.append(json_of(document_of(item)) + b"\n")
            nbytes += len(lines[-1])
            if nbytes > _AT_ONCE_BYTES:
                self._write(lines)
                lines, nbytes = [], 0
        self._write(lines)

    def close(self) -> None:
        """Do nothing: lines are written at once."""

    def _write(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        with self._writing(self._path, len(lines)):
            self._file.write(b"".join(lines))


class ParquetParts(_LossCounter):
    """Parquet files beside a path: a part is written whole, under a name of its own, when its
    documents have enough bytes or the first has waited for a minute.

    `capture.parquet` becomes `capture-00000001764326400123.parquet`: milliseconds since the epoch.
    """

    def __init__(
        self, path: str, max_bytes: int, files: int, now: Callable[[], float] = monotonic
    ) -> None:
        """A part has about `max_bytes`, 0: 32 MiB; `files` parts are kept beside the last, 0: all.

        Raises `OSError` if there can be no files.
        """
        super().__init__()
        self._path = Path(path)
        self._most = max_bytes or _PART_BYTES
        self._files = files
        self._now = now
        self._waiting: list[dict[str, Any]] = []
        self._nbytes = 0
        self._since = 0.0
        self._last = 0
        self._stuck = False  # the last removal of older parts failed
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "its directory is missing, or cannot be written")

    def write(self, items: Sequence[CapturedCall]) -> None:
        """Collect calls, and write a part if it is due."""
        for item in items:
            row = dict(document_of(item))
            for name in _NESTED:
                if name in row:
                    row[name] = json_of(row[name]).decode()
                    self._nbytes += len(row[name])
            if not self._waiting:
                self._since = self._now()
            self._waiting.append(row)
            if self._nbytes >= self._most:
                self._write()
        if self._waiting and self._now() - self._since >= _PART_SECS:
            self._write()

    def close(self) -> None:
        """Write what is left."""
        if self._waiting:
            self._write()

    def _write(self) -> None:
        # Imported when capture begins: see `open_capture`.
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows, self._waiting, self._nbytes = self._waiting, [], 0
        kinds = {"duration_ms": pa.float64(), "status": pa.int32()}
        schema = pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])
        self._last = max(self._last + 1, time_ns() // 1_000_000)
        whole = self._path.with_name(f"{self._path.stem}-{self._last:020d}{self._path.suffix}")
        partial = whole.with_suffix(".partial")
        with self._writing(whole, len(rows)):
            partial.touch(0o600)  # first: payloads are never readable by others
            pq.write_table(pa.Table.from_pylist(rows, schema), partial, compression="zstd")
            partial.replace(whole)
        try:
            self._remove_old()
        except OSError as error:  # older parts stay: no call is lost
            if not self._stuck:
                log.error("cannot remove old parts of the capture: %s", error)
            self._stuck = True
        else:
            self._stuck = False

    def _remove_old(self) -> None:
        if not self._files:
            return
        own = re.compile(rf"{re.escape(self._path.stem)}-\d{{20}}{re.escape(self._path.suffix)}")
        parts = sorted(one for one in self._path.parent.iterdir() if own.fullmatch(one.name))
        for part in parts[: -self._files - 1]:
            part.unlink(missing_ok=True)


def read_documents(path: str) -> Any:
    """The documents of a file of either kind; raises `OSError` or `ValueError`."""
    if path.endswith(".parquet"):
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    found = {name: value for name, value in row.items() if value is not None}
                    yield found | {n: orjson.loads(found[n]) for n in _NESTED if n in found}
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield orjson.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
