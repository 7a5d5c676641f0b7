"""Files to read, found from paths, patterns, directories and URLs, in an order that is kept."""

import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

STANDARD = "-"
_FORMATS = {
    "parquet": "parquet", "pq": "parquet", "csv": "csv", "tsv": "tsv", "jsonl": "jsonl",
    "ndjson": "jsonl", "arrow": "arrow", "feather": "arrow", "ipc": "arrow", "arrows": "stream",
}  # fmt: skip
FORMATS = tuple(dict.fromkeys(_FORMATS.values()))
CODECS = {"gz": "gzip", "zst": "zstd", "bz2": "bz2", "lz4": "lz4"}
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


class TableFailed(Exception):
    """A table that cannot be read or written; the text begins with its name."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with a table: its format, codec, and what changes when its content does.

    `size` is in bytes, -1 if unknown. `partition` has the values of its directories that are named
    `key=value`.
    """

    path: str
    format: str
    codec: str = ""
    size: int = -1
    changed: str = ""
    partition: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> Sequence[Any]:
        """Path, size, and time of change or checksum, which a run that continues compares."""
        return [self.path, self.size, self.changed]

    def open(self) -> Any:
        """The content as a `pyarrow.NativeFile`, decompressed; raises `OSError`."""
        arrow = pyarrow()
        if self.path == STANDARD:
            return arrow.PythonFile(sys.stdin.buffer, mode="r")
        if is_url(self.path):
            system, place = _remote(self.path)
            return arrow.PythonFile(system.open(place, "rb"), mode="r")
        if self.size < 0:  # a pipe, which has no positions
            return arrow.PythonFile(open(self.path, "rb"), mode="r")
        return arrow.OSFile(self.path)

    def decompressed(self, opened: Any) -> Any:
        """The stream itself, or what it decompresses to."""
        return pyarrow().CompressedInputStream(opened, self.codec) if self.codec else opened


def find(given: Sequence[str], form: str = "") -> list[TableFile]:
    """The files of paths, glob patterns, directories and URLs, each's in the order of names.

    `form` is the format of files whose names have no known suffix. Raises `TableFailed`.
    """
    found = [_file(path, form) for one in given for path in _paths(one)]
    if not found:
        raise TableFailed(f"{', '.join(given)}: no files there")
    return found


def format_of(path: str, form: str = "") -> tuple[str, str]:
    """Format and codec by a name's suffixes, or `form`; raises `TableFailed`."""
    name, _, last = path.rpartition(".")
    codec = CODECS.get(last.lower(), "")
    suffix = (name.rpartition(".")[2] if codec else last).lower()
    found = form or _FORMATS.get(suffix, "")
    if not found:
        what = "standard input and output have" if path == STANDARD else f"{path}: its name tells"
        raise TableFailed(f"{what} no format: --format or --output-format names one of {_known()}")
    if codec and found in ("parquet", "arrow"):
        raise TableFailed(f"{path}: {found} compresses by itself, and is not read within .{last}")
    return found, codec


def is_url(path: str) -> bool:
    """True for the address of an object store."""
    return _URL.match(path) is not None


def upload(local: str, url: str) -> None:
    """Copy a finished file to an object store; raises `TableFailed`."""
    system, place = _remote(url)
    try:
        system.put_file(local, place)
    except Exception as error:  # of any store's library
        raise TableFailed(f"{url}: cannot be written: {error}") from error


def spooled(opened: Any) -> Any:
    """A stream's content as a file without a name, for formats that are read from their end."""
    arrow = pyarrow()
    file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with what reads it
    while block := opened.read(1 << 20):
        file.write(block)
    file.seek(0)
    return arrow.PythonFile(file, mode="r")


def pyarrow() -> Any:
    """The module pyarrow; raises `TableFailed` without it."""
    return _needed("pyarrow", "tables", "tables are read by pyarrow")


def _needed(module: str, extra: str, text: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise TableFailed(f"{text}: pip install 'headrace[{extra}]' ({error})") from error


def _remote(url: str) -> tuple[Any, str]:
    fsspec = _needed("fsspec.core", "stores", f"{url}: object stores are read by fsspec")
    try:
        system, place = fsspec.url_to_fs(url)
        return system, str(place)
    except (ImportError, ValueError) as error:  # its package for that store is missing
        raise TableFailed(f"{url}: {error}") from error


def _paths(given: str) -> Iterator[str]:
    if given == STANDARD:
        yield given
    elif is_url(given):
        yield from _remote_paths(given)
    else:
        yield from _local_paths(given)


def _local_paths(given: str) -> Iterator[str]:
    if has_magic(given) and not os.path.exists(given):
        for path in sorted(glob(given, recursive=True)):
            if not _is_hidden(os.path.basename(path)):
                yield from _local_paths(path) if os.path.isdir(path) else [path]
    elif os.path.isdir(given):
        paths = [path for path in sorted(Path(given).rglob("*")) if path.is_file()]
        yield from (str(one) for one in paths if not _is_hidden(str(one.relative_to(given))))
    else:
        yield given


def _remote_paths(given: str) -> Iterator[str]:
    system, place = _remote(given)
    try:
        if has_magic(place):
            found = [file for one in sorted(system.glob(place)) for file in system.find(one)]
        else:
            found = [one for one in sorted(system.find(place)) if not _is_hidden(one[len(place) :])]
    except Exception as error:  # of any store's library
        raise TableFailed(f"{given}: cannot be listed: {error}") from error
    yield from (str(system.unstrip_protocol(one)) for one in found)


def _is_hidden(path: str) -> bool:
    """True for files that writers of partitions leave beside the data, such as `_SUCCESS`."""
    return any(part[0] in "._" for part in PurePath(path).parts)


def _file(path: str, form: str) -> TableFile:
    known, codec = format_of(path, form)
    if path == STANDARD:
        return TableFile(path, known, codec)
    try:
        if is_url(path):
            system, place = _remote(path)
            size, changed = int(system.info(place)["size"] or -1), str(system.checksum(place))
        else:
            status = os.stat(path)
            regular = stat.S_ISREG(status.st_mode)
            size, changed = status.st_size if regular else -1, str(status.st_mtime_ns)
    except Exception as error:  # of the operating system or a store's library
        raise TableFailed(f"{path}: cannot be read: {error}") from error
    parts = (part.partition("=") for part in PurePath(path).parts[:-1])
    partition = {unquote(key): unquote(value) for key, equals, value in parts if equals and key}
    return TableFile(path, known, codec, size, changed, partition)


def _known() -> str:
    return ", ".join(FORMATS)
