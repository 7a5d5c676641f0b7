"""Lists from a JSON or protobuf parser to arrays and back, without a loop over elements.

The element types of a list are found by `set(map(type, values))`, which runs in C; numpy would
otherwise accept `"1"` for a number, `1.5` for an integer (truncating it) and `null` for NaN. In the
V2 protocol lists are flat with the shape beside them; elsewhere their nesting is the shape.
"""

import json
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from math import prod
from struct import error as StructError
from struct import pack
from typing import Any

import numpy as np
import orjson

from headrace.core.bytes_array import BytesArray, bytes_array
from headrace.core.datatypes import FLOATS, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.limits import Charge, uncharged
from headrace.core.tensors import MAX_RANK, Array, Tensor, TensorArray, brackets, element_count
from headrace.ipc.elements import join
from headrace.protocol.json_text import LongArray

MAX_DEPTH = 100
LENGTH_BYTES = 4  # length prefix of a BYTES element
# Memory per BYTES element as an object: its slots in lists and an array, and the object itself
# unless it is empty, of which there is only one.
_PLACE_BYTES, _OBJECT_BYTES = 24, 56
# Largest decoded size of a tensor of numbers sent as text or typed contents, where a few bytes may
# become many. Larger ones would occupy the process for too long.
MAX_DECODED = 128 << 20

_ACCEPTED: dict[Datatype, frozenset[type]] = {
    datatype: frozenset({int}) for datatype in Datatype if NUMPY[datatype].kind in "iu"
} | {
    Datatype.BOOL: frozenset({bool}),
    Datatype.FP32: frozenset({int, float}),
    Datatype.FP64: frozenset({int, float}),
    Datatype.BYTES: frozenset({str}),
}
_EXPECTED: dict[Datatype, str] = {
    Datatype.BOOL: "true or false",
    Datatype.FP32: "numbers",
    Datatype.FP64: "numbers",
    Datatype.BYTES: "strings",
}
# Triton's own words for these two, by which clients may recognise such errors.
_TRITONS_WORDS: dict[Datatype, str] = {
    Datatype.BOOL: " (attempt to access JSON non-boolean as boolean)",
    Datatype.BYTES: " (attempt to access JSON non-string as string)",
}
_JSON_NAMES: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean",
    int: "an integer", float: "a number with a fraction or exponent", type(None): "null",
    LongArray: "a long array",
}  # fmt: skip
NOT_IN_JSON = (Datatype.FP16, Datatype.BF16)  # in requests; upstreams may write them
_ELEMENTS = 64 << 10  # of an array written per step: a few milliseconds
# Lists up to this length are packed by `struct`, which has less overhead than numpy.
_SHORT = 1024
_CODES: dict[Datatype, str] = {
    Datatype.BOOL: "?", Datatype.UINT8: "B", Datatype.UINT16: "H", Datatype.UINT32: "I",
    Datatype.UINT64: "Q", Datatype.INT8: "b", Datatype.INT16: "h", Datatype.INT32: "i",
    Datatype.INT64: "q", Datatype.FP32: "f", Datatype.FP64: "d",
}  # fmt: skip

# Datatypes whose elements are numbers in JSON, by name.
FLAT = {
    datatype.value: (datatype, code, NUMPY[datatype])
    for datatype, code in _CODES.items()
    if datatype is not Datatype.BOOL
}


def decoded_size(name: str, datatype: Datatype, count: int) -> int:
    """Bytes that `count` numbers take; raises `InvalidRequest` beyond `MAX_DECODED`."""
    size = count * NUMPY[datatype].itemsize
    if size > MAX_DECODED:
        raise InvalidRequest(
            f"input '{name}' takes {size} bytes once it is decoded, at most {MAX_DECODED} are"
            " allowed: send it in binary, as raw bytes"
        )
    return size


def json_name(value_type: type) -> str:
    """JSON's name for the type of a parsed value."""
    return _JSON_NAMES.get(value_type, value_type.__name__)


def flatten(name: str, data: list[Any]) -> tuple[list[Any], set[type], int]:
    """Return the elements of a flat or nested list in order, their types, and the nesting depth.

    Raises `InvalidRequest` for lists mixed with elements, and for lists nested too deeply.
    """
    types = set(map(type, data))
    depth = 1
    while list in types:
        if len(types) > 1:
            raise _mixed(name, depth)
        depth += 1
        if depth >= MAX_DEPTH:
            raise InvalidRequest(
                f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})"
                f" in 'data' of input '{name}'"
            )
        data = list(chain.from_iterable(data))
        types = set(map(type, data))
    return data, types, depth


def _mixed(name: str, depth: int) -> InvalidRequest:
    return InvalidRequest(
        f"Unable to parse 'data' of input '{name}': elements and arrays are mixed at depth {depth}"
    )


def tensor_from_json(name: str, datatype: Datatype, shape: list[int], data: list[Any]) -> Tensor:
    """Build the tensor whose elements `data` holds, flat or nested; nesting need not match `shape`.

    Raises `InvalidRequest` for FP16 and BF16 (no JSON form), for elements of a wrong type or out of
    the datatype's range, and if their number does not match `shape`.
    """
    _check_form(name, datatype)
    values, types, _ = flatten(name, data)
    _check_types(name, datatype, types)
    if len(values) != (count := element_count(name, shape)):
        raise _wrong_number(name, shape, count, len(values), "")
    if datatype is Datatype.BYTES:
        values = list(map(str.encode, values))
    return tensor_from_values(name, datatype, shape, values)


def tensor_from_long(
    name: str, datatype: Datatype, shape: list[int], data: LongArray, charge: Charge
) -> Tensor:
    """`tensor_from_json` in pieces; `charge` is called with the decoded size first."""
    _check_form(name, datatype)
    if (count := element_count(name, shape)) > len(data):
        raise _wrong_number(name, shape, count, data.elements(), "")
    bytes_tensor = datatype is Datatype.BYTES
    # No string is longer than its JSON text.
    size = count * LENGTH_BYTES + len(data) if bytes_tensor else 0
    charge(size or decoded_size(name, datatype, count))
    array: Array = np.empty(0 if bytes_tensor else count, NUMPY[datatype])
    joined: list[bytes] = []
    filled = empty_depth = depth = 0
    for piece in data.pieces():
        charge(0)  # notices a cancellation, and work that takes too long
        values, types, its_depth = flatten(name, piece)
        _check_types(name, datatype, types)
        if values:
            depth, before = its_depth, depth or its_depth
            if depth != before:
                raise _mixed(name, min(depth, before))
        else:
            empty_depth = max(empty_depth, its_depth)
        if depth and depth < empty_depth:
            raise _mixed(name, depth)
        end = filled + len(values)
        if end > count:
            raise _wrong_number(name, shape, count, end, " at least")
        if bytes_tensor:
            joined.append(join(list(map(str.encode, values))))
        else:
            array[filled:end] = tensor_from_values(name, datatype, [len(values)], values).array
        filled = end
    if filled < count:
        raise _wrong_number(name, shape, count, filled, "")
    if bytes_tensor:
        return Tensor(name, datatype, BytesArray(b"".join(joined), shape))
    return Tensor(name, datatype, array.reshape(shape))


def _check_form(name: str, datatype: Datatype) -> None:
    if datatype in NOT_IN_JSON:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported."
            f" Please use the binary data format for input '{name}'"
        )


def _check_types(name: str, datatype: Datatype, types: set[type]) -> None:
    if not types <= _ACCEPTED[datatype]:
        wrong = types - _ACCEPTED[datatype]
        raise InvalidRequest(
            f"input '{name}' of datatype {datatype} takes {_EXPECTED.get(datatype, 'integers')},"
            f" but its data holds {' and '.join(sorted(map(json_name, wrong)))}"
            f"{_TRITONS_WORDS.get(datatype, '')}"
        )


def _wrong_number(
    name: str, shape: list[int], count: int, got: int, roughly: str
) -> InvalidRequest:
    fault = (
        "Failed to parse 'data' field: shape does not match true shape"
        if got < count
        else "Unable to parse 'data': Shape does not match true shape of 'data' field"
    )
    return InvalidRequest(
        f"{fault} of input '{name}': {brackets(shape)} needs {count} elements, got{roughly} {got}"
    )


def charge_objects(inputs: Iterable[Tensor], charge: Charge, most: int) -> None:
    """Charge the memory of BYTES elements as Python objects.

    Raises `InvalidRequest` beyond `most` bytes, 0: no limit, and whatever `charge` raises.
    """
    arrays = [tensor.array for tensor in inputs if tensor.datatype is Datatype.BYTES]
    count = sum(array.size for array in arrays)
    if not count:
        return
    letters = sum(array.nbytes for array in arrays) - count * LENGTH_BYTES
    size = count * _PLACE_BYTES + min(count, max(letters, 0)) * _OBJECT_BYTES
    if size > most > 0:
        raise InvalidRequest(
            f"the {count} elements of BYTES inputs take up to {size} bytes as objects,"
            f" at most {most} are allowed (--max-object-bytes)"
        )
    charge(size)


def tensor_from_flat(item: dict[str, Any]) -> Tensor | None:
    """The tensor of an input that has only a name, datatype, shape and short flat data.

    A fast path for nearly every JSON request, in a text without booleans. None means that the
    input is of another form, or invalid; the general path then decides.
    """
    if len(item) != 4:
        return None
    try:
        name, shape, data = item["name"], item["shape"], item["data"]
        datatype, code, dtype = FLAT[item["datatype"]]
        count = len(data)
        if (
            type(name) is not str
            or type(shape) is not list
            or type(data) is not list
            or len(shape) > MAX_RANK
            or not 0 < count <= _SHORT  # numpy lets shapes without elements be longer
        ):
            return None
        # `struct` refuses non-numbers. The shape is checked by numpy, which refuses anything but
        # whole numbers: a string or an array in it, multiplied, could fill all memory.
        raw = pack(f"<{count}{code}", *data)
        array = np.ndarray(shape, dtype, raw)
        if array.size != count or array.shape != tuple(shape):  # numpy takes -1 for "the rest"
            return None
        return Tensor(name, datatype, array)
    except (KeyError, TypeError, ValueError, OverflowError, StructError):
        return None


def tensor_from_values(
    name: str, datatype: Datatype, shape: list[int], values: Sequence[Any]
) -> Tensor:
    """Build a tensor from values of the right type, as many as `shape` requires.

    Raises `InvalidRequest` for numbers out of the datatype's range.
    """
    if datatype is Datatype.BYTES:
        return Tensor(name, datatype, bytes_array(values, shape))
    count = len(values)
    try:
        if count <= _SHORT and datatype in _CODES:
            raw = pack(f"<{count}{_CODES[datatype]}", *values)
            array = np.frombuffer(raw, NUMPY[datatype])
        else:
            with np.errstate(over="raise"):
                array = np.fromiter(values, NUMPY[datatype], count)
    except (OverflowError, FloatingPointError, StructError):
        raise InvalidRequest(
            f"input '{name}': a number in its data is out of the range of {datatype}"
        ) from None
    return Tensor(name, datatype, array.reshape(shape))


def json_elements(tensor: Tensor, inner: Sequence[int] = (), charge: Charge = uncharged) -> bytes:
    """`json_pieces` joined."""
    return b"".join(json_pieces(tensor, inner, charge))


def json_pieces(
    tensor: Tensor, inner: Sequence[int] = (), charge: Charge = uncharged
) -> list[bytes]:
    """The elements of `tensor` as one JSON array, in pieces.

    The array is flat, or its elements are arrays of the shape `inner`, whose sizes are above 0.
    `charge` is called with the size of each of several pieces, and may raise.

    Floats are the shortest decimals that restore the value in the tensor's own precision; NaN and
    infinities are the bare words of Python's and Triton's JSON. Raises `InvalidRequest` for FP16,
    BF16 and BYTES that are not UTF-8: the client has to request these in binary.
    """
    if tensor.datatype in NOT_IN_JSON:
        raise InvalidRequest(
            f"sending {tensor.datatype} data via JSON is not supported."
            f" Please use the binary data format for output '{tensor.name}'"
        )
    write = _strings if tensor.datatype is Datatype.BYTES else _numbers
    array = tensor.array.ravel()
    if array.size <= _ELEMENTS:
        return [write(tensor.name, array, inner)]
    return _in_pieces(write, tensor.name, array, inner, charge)


def _in_pieces(
    write: Callable[[str, TensorArray, Sequence[int]], bytes],
    name: str,
    array: TensorArray,
    inner: Sequence[int],
    charge: Charge,
) -> list[bytes]:
    """A long array in pieces, because orjson holds the interpreter lock for a whole call."""
    pieces: list[bytes] = []
    unit = prod(inner)
    long = unit > _ELEMENTS
    step = unit if long else _ELEMENTS // unit * unit
    for start in range(0, array.size, step):
        pieces.append(b"," if start else b"[")
        part = array[start : start + step]
        if long:
            pieces += _in_pieces(write, name, part, inner[1:], charge)
        else:
            piece = write(name, part, inner)
            charge(len(piece))
            pieces.append(piece[1:-1])
    return [*pieces, b"]"]


def _strings(name: str, array: TensorArray, inner: Sequence[int]) -> bytes:
    try:
        texts: list[Any] = list(map(bytes.decode, array.tolist()))
        for size in reversed(inner):
            texts = [texts[start : start + size] for start in range(0, len(texts), size)]
        return orjson.dumps(texts)
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output '{name}' holds bytes that are not UTF-8 and cannot be sent as JSON."
            " Please use the binary data format for this output"
        ) from None


def _numbers(name: str, array: TensorArray, inner: Sequence[int]) -> bytes:
    assert not isinstance(array, BytesArray), "texts for numbers. This is a bug."
    if inner:
        array = array.reshape(-1, *inner)
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return text if b"n" not in text else _with_words(text, array)


def _with_words(text: bytes, array: Array) -> bytes:
    # orjson writes NaN and infinities as null; the standard library writes the bare words.
    words = json.dumps(array[~np.isfinite(array)].tolist())[1:-1].encode().split(b", ")
    return b"".join(chain.from_iterable(zip_longest(text.split(b"null"), words, fillvalue=b"")))


def array_of_json(name: str, datatype: Datatype, shape: list[int], data: list[Any]) -> TensorArray:
    """Convert the JSON of an upstream, flat or nested, to an array; raises `InvalidRequest`.

    More lenient than for clients: null is accepted for non-finite numbers.
    """
    values, types, _ = flatten(name, data)
    if datatype not in FLOATS:
        return tensor_from_json(name, datatype, shape, values).array
    if type(None) in types:
        values = [np.nan if value is None else value for value in values]
    wide = Datatype.FP32 if datatype in NOT_IN_JSON else datatype
    array = np.asarray(tensor_from_json(name, wide, shape, values).array)
    with np.errstate(over="ignore"):  # too large values become infinite
        return array.astype(NUMPY[datatype], copy=False)


def nested_json(datatype: Datatype, array: Array) -> bytes:
    """A tensor as nested JSON arrays; a single value if it has no dimensions.

    BYTES are strings, or `{"b64": …}` if they are not UTF-8. NaN and infinities are the bare words
    that most parsers accept.
    """
    if datatype is Datatype.BYTES:
        texts = np.empty(array.shape, object)
        texts.ravel()[:] = [_text(element) for element in array.ravel().tolist()]
        return orjson.dumps(texts.tolist())
    if datatype in NOT_IN_JSON:
        array = array.astype(np.float32)
    if not array.ndim or not array.size:
        text = orjson.dumps(array.tolist())
    else:
        text = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
    return text if b"n" not in text else _with_words(text, array)


def array_of_nested(name: str, datatype: Datatype, value: Any, noun: str = "output") -> TensorArray:
    """Build a tensor, which is a `noun` in errors, from nested arrays; raises `InvalidRequest`."""
    shape, values = _unnested(f"{noun} '{name}'", value)
    if datatype is Datatype.BYTES:
        return bytes_array([_bytes(f"{noun} '{name}'", element) for element in values], shape)
    return array_of_json(name, datatype, shape, values)


def _text(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": b2a_base64(element, newline=False).decode()}


def _bytes(what: str, element: Any) -> bytes:
    if type(element) is str:
        return element.encode()
    if type(element) is dict and element.keys() == {"b64"} and type(element["b64"]) is str:
        try:
            return a2b_base64(element["b64"], strict_mode=True)
        except (Error, ValueError):
            pass
    raise InvalidRequest(f"{what} holds something that is no string")


def _unnested(what: str, value: Any) -> tuple[list[int], list[Any]]:
    """The shape of nested arrays, and their elements in order."""
    shape: list[int] = []
    level = [value]
    while level and list in (types := set(map(type, level))):
        lengths = set(map(len, level)) if len(types) == 1 else set()
        if len(lengths) != 1 or len(shape) == MAX_RANK:
            raise InvalidRequest(f"{what} holds arrays of several lengths or depths")
        shape.append(lengths.pop())
        level = list(chain.from_iterable(level))
    return shape, level
