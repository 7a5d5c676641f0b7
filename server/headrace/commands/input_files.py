"""Files and texts as arrays, in the form of the input that they are for.

Every function raises `CommandFailed` that says what is wrong with which file.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headrace.client.inference import elements
from headrace.client.signature import Declared
from headrace.commands.images import SUFFIXES, ImageOptions, read_image
from headrace.commands.remote import CommandFailed
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array

KNOWN_SUFFIXES = (".csv", ".json", ".npy", ".npz", *SUFFIXES)


def file_of(text: str) -> Path | None:
    """The file that `text` means: after an @, or by its suffix."""
    if text.startswith("@"):
        return Path(text[1:])
    if "\n" in text or len(text) > 4096 or text.lstrip()[:1] in ("{", "[", '"'):
        return None
    path = Path(text)
    return path if path.suffix.lower() in KNOWN_SUFFIXES else None


def read_file(path: Path, declared: Declared, images: ImageOptions) -> Array:
    """What a file holds for one input, by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _array(path)
    if suffix == ".npz":
        with open_archive(path) as arrays:
            return read_member(path, arrays, declared.name)
    if suffix == ".json":
        return to_array(parse_json(read_text(path), str(path)), declared)
    if suffix == ".csv":
        rows = read_rows(path)
        named = {cell.strip() for cell in rows[0]} == {declared.name}
        return read_cells(path, rows[1:] if named and len(rows) > 1 else rows, declared)
    if declared.datatype is Datatype.BYTES:
        return np.array(_bytes(path), object)
    if suffix in SUFFIXES:
        _bytes(path)  # says why if it cannot be read
        return read_image(path, declared, images)
    raise CommandFailed(
        f"{path}: what it holds is told by its suffix; known are {' '.join(KNOWN_SUFFIXES)}"
    )


def read_standard_input() -> str:
    """All of it, without the line feed at its end."""
    return sys.stdin.read().removesuffix("\n")


def parse_json(text: str, where: str) -> Any:
    """A JSON text; `where` is what messages call it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{where}: not JSON: {error}") from None


def to_array(value: Any, declared: Declared) -> Array:
    """JSON values as an array of the datatype that is declared."""
    try:
        return elements(value, declared.datatype)
    except ValueError as error:
        raise CommandFailed(f"input {declared.name!r}: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}") from None


def read_text(path: Path) -> str:
    """A text file."""
    return _bytes(path).decode("utf-8-sig", "replace")


def _array(path: Path) -> Array:
    _bytes(path)
    try:
        found: Array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise CommandFailed(f"{path}: not an array that can be read: {error}") from None
    return _texts(found)


def open_archive(path: Path) -> Any:
    """The arrays in an .npz, a context manager."""
    _bytes(path)
    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # of zipfile's and zlib's, too
        raise CommandFailed(f"{path}: not an archive that can be read: {error}") from None


def read_member(path: Path, arrays: Any, name: str) -> Array:
    """The array called `name`."""
    try:
        return _texts(arrays[name])
    except KeyError:
        raise CommandFailed(f"{path}: has no array {name!r}, only {arrays.files}") from None
    except ValueError as error:
        raise CommandFailed(f"{path}: array {name!r} cannot be read: {error}") from None


def _texts(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind in "SU" else array


def read_rows(path: Path) -> list[list[str]]:
    """The cells of a CSV file, as many in each row."""
    rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    if not rows:
        raise CommandFailed(f"{path}: it is empty")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise CommandFailed(f"{path}: row {number} has {len(row)} cells, not {len(rows[0])}")
    return rows


def read_cells(path: Path, rows: list[list[str]], declared: Declared) -> Array:
    """A table as an array; a first row without numbers names the columns of others."""
    if declared.datatype is Datatype.BYTES:
        return np.array(rows, object)
    if len(rows) > 1 and not any(map(_is_number, rows[0])):
        rows = rows[1:]
    try:
        values = [[_number(cell) for cell in row] for row in rows]
    except ValueError as error:
        raise CommandFailed(f"{path}: input {declared.name!r}: {error}") from None
    return np.array(values)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str) -> int | float:
    try:
        return int(cell)  # a float has not all digits of a large one
    except ValueError:
        return float(cell)
