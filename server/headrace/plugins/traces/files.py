"""Triton's trace file.

The file is an array of JSON objects, each with the number of its trace: one with the model, one for
each timestamp, and one for each tensor, with its elements as comma-separated text. As in Triton, by
default all traces are in one file; with a log frequency, every so many traces are in a numbered
file, `FILE.0`, `FILE.1` and so on; and traces limited by a count are in a numbered file once the
count is reached. Unlike in Triton, the single file grows while the server runs, and is always
complete JSON: an addition replaces the final bracket in one write.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import sleep

import numpy as np
import orjson

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor, TensorArray
from headrace.core.texts import encodable
from headrace.engine.tracing import Item
from headrace.observability.trace_settings import Sampler
from headrace.observability.traces import Trace

log = logging.getLogger(__name__)

EMPTY, END = b"[", b"]"
_PIECE = 1024  # elements per step: formatting them blocks all other threads
_HELD_BYTES = 64 << 20  # bytes of traces held for a numbered file; more are written early
_AT_ONCE_BYTES = 8 << 20  # bytes of traces written together
_turn = partial(sleep, 0)  # yields to the event loop


def _go_on() -> None:
    """Make no pause."""


def encode_trace(trace: Trace, pause: Callable[[], object] = _go_on) -> bytes:
    """The objects of a trace, separated by commas.

    `pause` is called periodically: formatting large tensors takes seconds.
    """
    head: dict[str, object] = {
        "id": trace.number, "model_name": trace.model, "model_version": trace.version
    }  # fmt: skip
    if trace.request_id:
        head["request_id"] = encodable(trace.request_id)
    if trace.backend:
        head["backend"] = trace.backend
    if trace.parent:
        head["parent_id"] = trace.parent
    objects = [head]
    if trace.sampler.settings.timestamps:
        objects += [
            {"id": trace.number, "timestamps": [{"name": name, "ns": ns}]}
            for name, ns in sorted(trace.times, key=itemgetter(1))
        ]
    objects += [_tensor(trace.number, name, tensor, pause) for name, tensor in trace.tensors]
    return b",".join(map(orjson.dumps, objects))


def whole_file(traces: Sequence[bytes]) -> bytes:
    """The content of a file with these traces."""
    return EMPTY + b",\n".join(traces) + END


def addition(traces: Sequence[bytes]) -> bytes:
    """The bytes that replace the last byte of a file with traces."""
    return b"".join(b",\n" + trace for trace in traces) + END


def _tensor(
    number: int, activity: str, tensor: Tensor, pause: Callable[[], object]
) -> dict[str, object]:
    pieces: list[str] = []
    for piece in _pieces(tensor.datatype, tensor.array):
        pieces.append(piece)
        pause()
    return {
        "id": number,
        "activity": activity,
        "tensor": {
            "name": tensor.name, "data": ",".join(pieces),
            "shape": ",".join(map(str, tensor.array.shape)), "dtype": tensor.datatype.value,
        },
    }  # fmt: skip


def _pieces(datatype: Datatype, array: TensorArray) -> Iterator[str]:
    """The elements in small lists: numpy takes 128 bytes for each number's text."""
    if not array.nbytes:  # no elements, or the data is in shared memory
        return
    flat = array.ravel()
    for start in range(0, flat.size, _PIECE):
        yield _elements(datatype, np.asarray(flat[start : start + _PIECE]))


def _elements(datatype: Datatype, flat: Array) -> str:
    if datatype is Datatype.BYTES:
        return ",".join(f'"{_printable(element)}"' for element in flat.tolist())
    if datatype is Datatype.BOOL:
        flat = flat.astype("uint8")
    elif datatype is Datatype.BF16:
        flat = flat.astype("float32")
    return ",".join(flat.astype(str).tolist())


def _printable(element: object) -> str:
    return element.decode(errors="replace") if isinstance(element, bytes) else str(element)


class _Held:
    """Traces of one sampler that are held for their file."""

    __slots__ = ("nbytes", "texts")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.nbytes = 0

    def add(self, text: bytes) -> None:
        self.texts.append(text)
        self.nbytes += len(text)


class TraceFiles:
    """An `ItemWriter` to a file; traces that cannot be written are lost, with a log message."""

    def __init__(self, path: Path, held_bytes: int = _HELD_BYTES) -> None:
        """At most `held_bytes` of a sampler's traces are held for their numbered file."""
        self._path = path
        self._held_bytes = held_bytes
        self._size = 0  # size of the single file
        self._next = 0  # number of the next numbered file
        self._held: dict[Sampler, _Held] = {}
        self._failed = False

    def write(self, items: Sequence[Item]) -> None:
        """Implements `ItemWriter.write`."""
        now: list[bytes] = []
        nbytes = 0
        for item in items:
            try:
                texts = self._take(item)
            except Exception:
                log.exception("bug while writing a trace")
                continue
            now += texts
            nbytes += sum(map(len, texts))
            if nbytes > _AT_ONCE_BYTES:
                self._add(now)
                now, nbytes = [], 0
        self._add(now)

    def close(self) -> None:
        """Implements `ItemWriter.close`."""
        for sampler in list(self._held):
            self._add(self._end(sampler))

    def _take(self, item: Item) -> list[bytes]:
        """Store an item; returns the encoded traces that belong in the single file now."""
        if isinstance(item, Sampler):
            return self._end(item)
        sampler = item.sampler
        held = self._held.setdefault(sampler, _Held())
        held.add(encode_trace(item, _turn))
        frequency = sampler.settings.log_frequency
        full = held.nbytes > self._held_bytes
        if item.last or (frequency and (len(held.texts) >= frequency or full)):
            self._write_numbered(self._held.pop(sampler).texts)
        elif not frequency and (sampler.settings.count < 0 or full):
            return self._held.pop(sampler).texts
        return []

    def _end(self, sampler: Sampler) -> list[bytes]:
        """Finish a sampler; returns its traces for the single file."""
        held = self._held.pop(sampler, None)
        if held is None:
            return []
        if not sampler.settings.log_frequency:
            return held.texts
        self._write_numbered(held.texts)
        return []

    def _write_numbered(self, traces: Sequence[bytes]) -> None:
        path = f"{self._path}.{self._next}"
        self._next += 1
        self._put(path, whole_file(traces), 0)

    def _add(self, traces: Sequence[bytes]) -> None:
        if not traces:
            return
        if not self._size:
            data = whole_file(traces)
            if self._put(str(self._path), data, 0):
                self._size = len(data)
            return
        data = addition(traces)
        if self._put(str(self._path), data, self._size - 1):
            self._size += len(data) - 1

    def _put(self, path: str, data: bytes, position: int) -> bool:
        """Write to a file, a new one at position 0; returns False on failure.

        After a failure the file is unchanged, or does not exist if it was new.
        """
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if position else os.O_TRUNC)
            descriptor = os.open(path, flags, 0o666)
            try:
                _write(descriptor, data, position)
            except OSError:
                _undo(descriptor, path, position)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failed:
                log.error("cannot write traces to %s: %s", path, error.strerror)
            self._failed = True
            return False
        self._failed = False
        return True


def _write(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _undo(descriptor: int, path: str, position: int) -> None:
    """Undo a write at `position`, where the array ended before."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    if not position:
        os.unlink(path)
        return
    _write(descriptor, END, position)
    os.ftruncate(descriptor, position + len(END))
