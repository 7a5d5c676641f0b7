"""Tensors as other servers have them in JSON: nested arrays, whose nesting is the shape."""

from binascii import Error, a2b_base64, b2a_base64
from itertools import chain
from typing import Any

import numpy as np
import orjson

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import MAX_RANK, Array, TensorArray
from headrace.wire.remote_rest import array_of_json

_HALF = (Datatype.FP16, Datatype.BF16)


def nested_json(datatype: Datatype, array: Array) -> bytes:
    """A tensor as nested arrays, a single value if it has no dimensions.

    BYTES are strings, or `{"b64": …}` where they are no UTF-8. NaN and infinities are the bare
    words that most parsers know.
    """
    if datatype is Datatype.BYTES:
        texts = np.empty(array.shape, object)
        texts.ravel()[:] = [_text(element) for element in array.ravel().tolist()]
        return orjson.dumps(texts.tolist())
    if datatype in _HALF:
        array = array.astype(np.float32)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _with_words(array)
    if not array.ndim or not array.size:
        return orjson.dumps(array.tolist())
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)


def array_of_nested(name: str, datatype: Datatype, value: Any) -> TensorArray:
    """The tensor that nested arrays are; raises `InvalidRequest`."""
    shape, values = _unnested(name, value)
    if datatype is Datatype.BYTES:
        return bytes_array([_bytes(name, element) for element in values], shape)
    return array_of_json(name, datatype, shape, values)


def _with_words(array: Array) -> bytes:
    """Rows that JSON has no form for, number by number."""
    if not array.ndim:
        return str(array[()]).replace("nan", "NaN").replace("inf", "Infinity").encode()
    return b"[" + b",".join(_with_words(row) for row in array) + b"]"


def _text(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": b2a_base64(element, newline=False).decode()}


def _bytes(name: str, element: Any) -> bytes:
    if type(element) is str:
        return element.encode()
    if type(element) is dict and element.keys() == {"b64"} and type(element["b64"]) is str:
        try:
            return a2b_base64(element["b64"], strict_mode=True)
        except (Error, ValueError):
            pass
    raise InvalidRequest(f"output '{name}' holds something that is no string")


def _unnested(name: str, value: Any) -> tuple[list[int], list[Any]]:
    """The shape of nested arrays, and their elements in order."""
    shape: list[int] = []
    level = [value]
    while level and list in (types := set(map(type, level))):
        lengths = set(map(len, level)) if len(types) == 1 else set()
        if len(lengths) != 1 or len(shape) == MAX_RANK:
            raise InvalidRequest(f"output '{name}' holds arrays of several lengths or depths")
        shape.append(lengths.pop())
        level = list(chain.from_iterable(level))
    return shape, level
