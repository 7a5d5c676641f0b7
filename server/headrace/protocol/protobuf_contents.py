"""Fast decoding of large `ModelInferRequest` messages with typed contents, without protobuf.

Protobuf would build such a message as a whole, in one call that holds the interpreter lock, and
convert every number to a Python object. Here the fields of a message and of its inputs and outputs
are walked, whose number is bounded; protobuf parses everything except the contents, and numpy makes
arrays of the contents in place, piece by piece.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace.core.bytes_array import BytesArray
from headrace.core.call import MAX_TENSORS
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.limits import Charge
from headrace.core.tensors import Array, Buffer, Tensor, byte_size_mismatch, element_count
from headrace.ipc.elements import join
from headrace.protocol.elements import LENGTH_BYTES, decoded_size

# Fields of a message with all its inputs and outputs: two bytes make an empty one, which takes a
# hundred times as much memory once it is parsed.
MAX_FIELDS = 4 * MAX_TENSORS
_MOST_FIELDS = (
    f"a request may have {MAX_FIELDS} fields (inputs, raw_input_contents, outputs, parameters, and"
    " what inputs and outputs have of their own), got more"
)
_MAX_SHAPE = 1 << 10  # bytes; arrays have at most 64 dimensions, a dimension at most 10 bytes
MAX_HEAD = 4 << 20  # bytes of a large message that are not the data of tensors
MAX_TEXT = 8 << 20  # bytes of strings; protobuf checks their characters while it holds the lock
# The field of typed contents for each datatype.
CONTENTS: dict[Datatype, str] = {
    Datatype.BOOL: "bool_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
_FIELDS = (
    "", "bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents",
    "fp32_contents", "fp64_contents", "bytes_contents",
)  # fmt: skip
_INPUT, _OUTPUT, _RAW = 5, 6, 7  # field numbers of a message
_SHAPE, _CONTENTS = 3, 5  # field numbers of an input
_BYTES = 2  # wire type: length-delimited
_ELEMENTS = 10_000  # BYTES elements that are objects at a time
_PIECE = 1 << 20  # bytes of packed numbers read per step
_LONGEST = 10  # bytes of a number

Span = tuple[int, int]


class Outline(NamedTuple):
    """A message without contents, and the positions of each input's contents and raw contents."""

    head: bytes
    contents: list[list[Span]]
    raw: list[Span]


class Contents(NamedTuple):
    """The contents of each input of a message; `charge` is called before one is decoded."""

    data: Buffer
    spans: list[list[Span]]
    charge: Charge


def outline(data: Buffer) -> Outline:
    """Walk a message and its inputs; raises `InvalidRequest`."""
    head: list[Buffer] = []
    contents: list[list[Span]] = []
    raw: list[Span] = []
    left = [MAX_FIELDS]
    for number, start, begin, stop in fields(data, 0, len(data), left):
        if number == _INPUT and begin:
            spans: list[Span] = []
            pieces: list[Buffer] = []
            for inner, inner_start, inner_begin, inner_stop in fields(data, begin, stop, left):
                if inner == _CONTENTS and inner_begin:
                    spans.append((inner_begin, inner_stop))
                else:
                    _check_shape(inner, inner_stop - inner_start)
                    pieces.append(data[inner_start:inner_stop])
            size = sum(map(len, pieces))
            head += (b"\x2a", varint(size), *pieces)
            contents.append(spans)
        elif number == _RAW and begin:
            raw.append((begin, stop))
        else:
            if number == _OUTPUT and begin:
                for _ in fields(data, begin, stop, left):
                    pass
            head.append(data[start:stop])
    if (size := sum(map(len, head))) > MAX_HEAD:
        raise _too_long(size)
    return Outline(b"".join(head), contents, raw)


def check_fields(data: Buffer) -> None:
    """Raises `InvalidRequest` if a message without contents has too many fields or bytes."""
    if len(data) > MAX_HEAD:
        raise _too_long(len(data))
    left = [MAX_FIELDS]
    for number, _, begin, stop in fields(data, 0, len(data), left):
        if begin and number in (_INPUT, _OUTPUT):
            for inner, start, _, end in fields(data, begin, stop, left):
                if number == _INPUT:
                    _check_shape(inner, end - start)


def _check_shape(number: int, size: int) -> None:
    """Raise `InvalidRequest` for a field of an input that is a shape with too many dimensions."""
    if number == _SHAPE and size > _MAX_SHAPE:
        raise InvalidRequest(
            f"the shape of an input takes {size} bytes, at most {_MAX_SHAPE} are expected"
        )


def check_elements(data: Buffer, kind: Any, most: int) -> None:
    """Refuse a message with more than `most` fields, with those within them, or too much text.

    `kind` is its descriptor. Raises `InvalidRequest`.
    """
    left, name, text = [most], kind.name, 0
    refusal = f"a {name} may have at most {most} elements, got more"
    inner = [(0, len(data), kind)]
    while inner:
        start, end, kind = inner.pop()
        known = kind.fields_by_number
        for number, _, begin, stop in fields(data, start, end, left, refusal, name):
            if not begin or number not in known:
                continue
            field = known[number]
            if field.message_type is not None:
                inner.append((begin, stop, field.message_type))
            elif field.type == field.TYPE_STRING:
                text += stop - begin
                if text > MAX_TEXT:
                    raise InvalidRequest(f"a {name} may have {MAX_TEXT} bytes of text, got more")


def tensor_from_contents(
    name: str,
    datatype: Datatype,
    shape: list[int],
    data: Buffer,
    spans: list[Span],
    model: str,
    request_id: str,
    charge: Charge,
) -> Tensor:
    """Build an input's tensor from the spans of its contents, which protobuf would concatenate.

    `charge` is called with the decoded size before memory is allocated. Raises `InvalidRequest`.
    """
    expected = contents_field(name, datatype, model)
    count = element_count(name, shape)
    number = _FIELDS.index(expected)
    if datatype is Datatype.BYTES:
        joined = _strings(name, data, spans, count, model, charge)
        return Tensor(name, datatype, BytesArray(joined, shape))
    packed = [span for start, stop in spans for span in _packed(data, start, stop, number, name)]
    codes = memoryview(data)
    if datatype in (Datatype.FP32, Datatype.FP64):
        unit = ITEM_SIZES[datatype]
        if any((stop - start) % unit for start, stop in packed):
            raise _not_valid("packed numbers of a wrong size")
        got = sum(stop - start for start, stop in packed) // unit
    else:
        got = sum(
            int(np.count_nonzero(np.frombuffer(codes, np.uint8, to - at, at) < 128))
            for start, stop in packed
            for at, to in _pieces(start, stop)
        )
    if got != count:
        got *= ITEM_SIZES[datatype]
        raise byte_size_mismatch(name, datatype, shape, got, model, request_id)
    charge(decoded_size(name, datatype, count))
    array: Array = np.empty(count, NUMPY[datatype])
    filled = 0
    for start, stop in packed:
        for values in _numbers(codes, start, stop, datatype):
            array[filled : filled + len(values)] = _fitted(name, datatype, values)
            filled += len(values)
    return Tensor(name, datatype, array.reshape(shape))


def contents_field(name: str, datatype: Datatype, model: str) -> str:
    """The field of typed contents for an input's datatype; raises `InvalidRequest`."""
    expected = CONTENTS.get(datatype)
    if expected is None:
        raise InvalidRequest(
            f"{datatype} data has no typed contents; use raw_input_contents for input '{name}'"
            f" for model '{model}'"
        )
    return expected


def varint(value: int) -> bytes:
    """Encode a length as a protobuf varint."""
    if value < 128:
        return bytes((value,))
    out = []
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def read_varint(data: Buffer, position: int, most: int = _LONGEST) -> tuple[int, int]:
    """Decode a varint of at most `most` bytes; returns it and the position after it, 0 if none."""
    value = shift = 0
    for index in range(position, min(position + most, len(data))):
        byte = data[index]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, index + 1
        shift += 7
    return 0, 0


def fields(
    data: Buffer,
    position: int,
    end: int,
    left: list[int],
    most: str = _MOST_FIELDS,
    kind: str = "ModelInferRequest",
) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over fields: number, start, start of the content (0 if it has no length), end.

    `left` counts down the fields still allowed, `most` is the text of the error of one more; `kind`
    names the message. Raises `InvalidRequest`.
    """
    while position < end:
        left[0] -= 1
        if left[0] < 0:
            raise InvalidRequest(most)
        start = position
        tag = data[position]  # mostly of one byte, as is a length: a third of the time of calls
        if tag < 128:
            position += 1
        else:
            tag, position = read_varint(data, position)
        wire, begin = tag & 7, 0
        if position and wire == _BYTES:
            length = data[position] if position < end else 128
            if length < 128:
                position += 1
            else:
                length, position = read_varint(data, position)
            begin = position
            position += length if position else 0
        elif position and wire == 0:
            _, position = read_varint(data, position)
        elif position and wire in (1, 5):
            position += 8 if wire == 1 else 4
        else:
            raise _not_valid("a field of an unknown kind, or none", kind)
        if not start < position <= end or tag < 8:
            raise _not_valid("a field without its end", kind)
        yield tag >> 3, start, begin, position


def _packed(data: Buffer, start: int, stop: int, number: int, name: str) -> list[Span]:
    """Spans of the packed numbers of one field; raises `InvalidRequest` for any other field."""
    spans: list[Span] = []
    for field, _, begin, end in fields(data, start, stop, [MAX_FIELDS]):
        if field != number and field < len(_FIELDS):
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{name}', expected"
                f" {_FIELDS[number]}, got {_FIELDS[field]}"
            )
        if not begin:
            raise InvalidRequest(
                f"input '{name}' has {_FIELDS[number]} that are not packed, which is for small"
                " requests; use packed contents or raw_input_contents"
            )
        spans.append((begin, end))
    return spans


def _strings(
    name: str, data: Buffer, spans: list[Span], count: int, model: str, charge: Charge
) -> memoryview:
    """The elements of `bytes_contents` in the protocol's binary form."""
    size = sum(stop - start for start, stop in spans)
    if count * 2 > size:
        raise InvalidRequest(
            f"expected {count} string elements for inference input '{name}' for model '{model}',"
            f" got fewer: {size} bytes cannot hold them"
        )
    charge(count * LENGTH_BYTES + size)
    whole = np.empty(count * LENGTH_BYTES + size, np.uint8).data
    got = filled = 0
    for elements in _elements(name, data, spans, model):
        got += len(elements)
        if got > count:
            raise _wrong_number(name, model, count, "more")
        joined = join(elements)
        whole[filled : filled + len(joined)] = joined
        filled += len(joined)
    if got != count:
        raise _wrong_number(name, model, count, str(got))
    return whole[:filled]


def _elements(name: str, data: Buffer, spans: list[Span], model: str) -> Iterator[list[bytes]]:
    """Iterate over the elements of `bytes_contents` in small lists."""
    elements = list[bytes]()
    tag = _FIELDS.index("bytes_contents") << 3 | _BYTES
    for position, stop in spans:
        while position < stop:
            length = data[position + 1] if position + 1 < stop else 128
            begin = position + 2
            if length > 127:
                length, begin = read_varint(data, position + 1)
            position, is_string = begin + length, data[position] == tag
            if not is_string or not begin or position > stop:
                raise InvalidRequest(
                    f"unexpected explicit tensor data for input tensor '{name}' for model"
                    f" '{model}' of type 'BYTES', expected bytes_contents, got something else"
                )
            elements.append(bytes(data[begin:position]))
            if len(elements) == _ELEMENTS:
                yield elements
                elements = []
    yield elements


def _wrong_number(name: str, model: str, count: int, got: str) -> InvalidRequest:
    return InvalidRequest(
        f"expected {count} string elements for inference input '{name}' for model '{model}',"
        f" got {got}"
    )


def _pieces(start: int, stop: int) -> Iterator[Span]:
    for at in range(start, stop, _PIECE):
        yield at, min(at + _PIECE, stop)


def _numbers(data: memoryview, start: int, stop: int, datatype: Datatype) -> Iterator[Array]:
    """Decode a packed field: floats as they are, others as unsigned 64-bit integers."""
    if datatype in (Datatype.FP32, Datatype.FP64):
        for at, to in _pieces(start, stop):
            yield np.frombuffer(data[at:to], NUMPY[datatype])
        return
    while start < stop:
        end = min(start + _PIECE, stop)
        while end < stop and end - start < _PIECE + _LONGEST and data[end - 1] > 127:
            end += 1
        codes: Array = np.frombuffer(data, np.uint8, end - start, start)
        if not (codes > 127).any():
            yield codes.astype(np.uint64)
            start = end
            continue
        lasts = np.flatnonzero(codes < 128)
        if not len(lasts) or lasts[-1] != len(codes) - 1:
            raise _not_valid("a number without its end")
        firsts = np.concatenate([[0], lasts[:-1] + 1])
        sizes = lasts - firsts + 1
        longest = int(sizes.max())
        if longest > _LONGEST:
            raise _not_valid("a number of too many bytes")
        values = np.zeros(len(lasts), np.uint64)
        for index in range(longest):
            there = sizes > index
            parts = codes[firsts[there] + index].astype(np.uint64) & np.uint64(127)
            values[there] |= parts << np.uint64(7 * index)
        yield values
        start = end


def _fitted(name: str, datatype: Datatype, values: Array) -> Array:
    """Convert decoded numbers to a datatype; checks ranges like protobuf and the datatype."""
    dtype = NUMPY[datatype]
    if dtype.kind == "f":
        return values
    if datatype is Datatype.BOOL:
        values = values != 0
    elif dtype.itemsize < 8:
        values = values.astype(np.uint32)  # the field has 32 bits, however long the varint
        values = values.view(np.int32) if dtype.kind == "i" else values
        limits = np.iinfo(dtype)
        if len(values) and not limits.min <= values.min() <= values.max() <= limits.max:
            raise InvalidRequest(
                f"input '{name}': a number in its data is out of the range of {datatype}"
            )
    fitted: Array = values.astype(dtype)
    return fitted


def _too_long(size: int) -> InvalidRequest:
    return InvalidRequest(
        f"a request may have {MAX_HEAD} bytes that are not the data of tensors, got {size}"
    )


def _not_valid(what: str, kind: str = "ModelInferRequest") -> InvalidRequest:
    return InvalidRequest(f"not a valid {kind} message: {what}")
