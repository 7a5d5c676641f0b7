"""Traces as objects of Triton's JSON trace file, and the bytes that keep such a file an array.

Every object has the number of its trace: one with the model, one for each time, and one for each
tensor, whose elements are a text with commas between them.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import numpy as np
import orjson

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor, TensorArray
from headrace.observability.traces import Trace

EMPTY, END = b"[", b"]"
_PIECE = 1024  # elements: a thread that makes a text of them holds all others up meanwhile


def _go_on() -> None:
    """Make no pause."""


def encode_trace(trace: Trace, pause: Callable[[], object] = _go_on) -> bytes:
    """The objects of a trace, with commas between them.

    `pause` is called now and then: a text of large tensors takes seconds.
    """
    head: dict[str, object] = {
        "id": trace.number, "model_name": trace.model, "model_version": trace.version
    }  # fmt: skip
    if trace.request_id:
        head["request_id"] = _text(trace.request_id)
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
    """A file with these traces."""
    return EMPTY + b",\n".join(traces) + END


def addition(traces: Sequence[bytes]) -> bytes:
    """What takes the place of the last byte of a file that has traces already."""
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
    """The elements, some at a time: what numpy makes of a number takes 128 bytes."""
    if not array.nbytes:  # it has no elements, or they are not here
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


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()
