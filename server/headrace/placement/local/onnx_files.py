"""The files an ONNX model refers to, read from the model file without its weights.

ONNX stores large tensors in files beside the model and names them in the model file. A malicious
model can name any path, so the names are read here, before ONNX Runtime opens anything, and refused
outside the directory of the model file, the limit of recent versions of ONNX Runtime. Of the file's
protobuf encoding only the fields leading to the names are parsed: graphs, nodes and their
operators, attributes and functions down to `TensorProto.external_data`. Encodings that other
parsers could interpret differently are refused. The file is not mapped: if it were truncated
meanwhile, the process would crash.

A file of fields of two bytes each takes minutes to walk. The walk leaves the interpreter to other
threads often, so that nobody else waits for it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import LoadFailed

# The fields of each message of onnx.proto that lead to external data, and their message types.
_PATHS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Node": {4: "Operator", 5: "Attribute"},
    "Attribute": {
        5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor",
    },
    "Tensor": {13: "Entry"},
}  # fmt: skip
_LOOPS = (b"Loop", b"Scan")  # operators whose inputs determine the number of iterations
_LENGTH_DELIMITED = 2
_MAX_DEPTH = 64  # of graphs within attributes within graphs
# ONNX Runtime's mark for "at this address in memory", which not every version refuses in a file.
_IN_MEMORY = "*/_ORT_MEM_ADDR_/*"


_AT_ONCE = 512  # fields walked between pauses: about a millisecond
_PAUSE_SECS = 50e-6  # long enough for a waiting thread to take the interpreter
_CHUNK = 4096  # bytes per read: skipped weights are mostly longer
_LFS = b"version https://git-lfs"


class _Damaged(Exception):
    """Not a protobuf encoding."""


class _FileView:
    """The bytes of an open file, read on access."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._start = self._stop = 0  # the part of the file in the buffer
        self._here = b""
        self._walked = 0

    def pause(self) -> None:
        """Let other threads run, once per `_AT_ONCE` fields."""
        self._walked += 1
        if self._walked % _AT_ONCE == 0:
            time.sleep(_PAUSE_SECS)

    def __getitem__(self, position: int) -> int:
        if not self._start <= position < self._stop:
            self._here = self._read(position, _CHUNK)
            self._start, self._stop = position, position + len(self._here)
        return self._here[position - self._start]

    def copy(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        data = self._read(start, stop - start)
        if len(data) < stop - start:
            raise _Damaged("the file is being cut short")
        return data

    def _read(self, position: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, position) if size else b""
        if size and not data:
            raise _Damaged("the file is being cut short")
        return data


class OnnxContents(NamedTuple):
    """File `locations` named by the tensors of a model file, sorted, and whether it has `loops`.

    With `loops`, input values may determine how long the graph runs.
    """

    locations: list[str]
    loops: bool


def read_contents(model_file: Path) -> OnnxContents:
    """Read a model file; raises `LoadFailed` if it is not an ONNX model."""
    with model_file.open("rb", buffering=0) as file:
        view = _FileView(file.fileno())
        if not view.size:
            raise LoadFailed(f"{model_file.name} is empty")
        locations, operators = set[str](), set[bytes]()
        try:
            _walk(view, 0, view.size, "Model", 0, locations, operators)
        except _Damaged as error:
            is_pointer = os.pread(file.fileno(), len(_LFS), 0) == _LFS
            what = "it is a pointer of Git LFS; fetch the file itself" if is_pointer else error
            raise LoadFailed(f"{model_file.name} is not a valid ONNX model: {what}") from None
        return OnnxContents(sorted(locations), not operators.isdisjoint(_LOOPS))


def check_locations(locations: Sequence[str], model_file: Path, root: Path) -> list[Path]:
    """The files at these `locations`, which contain tensors of `model_file`.

    Raises `LoadFailed` for a location outside of the model's directory `root`, or, within it,
    outside of the directory of the model file, or of the file that it links to.
    """
    for location in locations:
        if not _may_be_read(location, model_file, root):
            raise LoadFailed(
                f"{model_file.name} keeps a tensor in the file {location!r}, which is outside of"
                " the directory of the model file; external data must lie beside the model"
            )
    return [model_file.parent / location for location in locations]


def _may_be_read(location: str, model_file: Path, root: Path) -> bool:
    if Path(location).is_absolute() or location.startswith(_IN_MEMORY):
        return False
    try:
        file = (model_file.parent / location).resolve()
        beside = (model_file.parent.resolve(), model_file.resolve().parent)
        return file.is_relative_to(root.resolve()) and any(map(file.is_relative_to, beside))
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
        return False


def _walk(
    view: _FileView, start: int, end: int, message: str, depth: int, found: set[str],
    operators: set[bytes],
) -> None:  # fmt: skip
    if depth > _MAX_DEPTH:
        raise _Damaged("graphs are nested too deeply")
    children = _PATHS[message]
    for number, begin, stop in _fields(view, start, end):
        child = children.get(number)
        if child == "Entry":
            key, value = _entry(view, begin, stop)
            if key == b"location":
                found.add(value.decode("utf-8", "surrogateescape"))
        elif child == "Operator":
            if stop - begin == len(_LOOPS[0]):
                operators.add(view.copy(begin, stop))
        elif child is not None:
            _walk(view, begin, stop, child, depth + 1, found, operators)


def _entry(view: _FileView, start: int, end: int) -> tuple[bytes, bytes]:
    texts = {number: view.copy(begin, stop) for number, begin, stop in _fields(view, start, end)}
    return texts.get(1, b""), texts.get(2, b"")


def _fields(view: _FileView, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The length-delimited fields of a message: number, start and end of the content."""
    while position < end:
        tag, position = _varint(view, position, end)
        if tag >> 32:
            raise _Damaged("a field number is too large")  # other parsers cut it to 32 bits
        if not tag >> 3:
            raise _Damaged("a field has the number 0")  # other parsers refuse it, too
        view.pause()
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, position = _varint(view, position, end)
            if position + size > end:
                raise _Damaged("a field is longer than its message")
            yield tag >> 3, position, position + size
            position += size
        elif kind == 0:
            _, position = _varint(view, position, end)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise _Damaged(f"unknown wire type {kind}")


def _varint(view: _FileView, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _Damaged("a number is cut off")
