"""The binary form of BYTES tensors: per element a 4-byte little-endian length and that many bytes.

A length says where the next one lies, so decoding is a walk; each element is copied once, out of
the received buffer. Encoding builds all lengths in numpy and joins once.
"""

from itertools import chain
from struct import Struct

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Array, Tensor, element_count

_unpack_length = Struct("<I").unpack_from


def object_array(elements: list[bytes], shape: tuple[int, ...] | list[int]) -> Array:
    """`elements` as an object array of `shape`, whatever their lengths are."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def decode_bytes_tensor(
    name: str, shape: tuple[int, ...] | list[int], raw: bytes | memoryview
) -> Tensor:
    """The BYTES tensor in `raw`; raises `InvalidRequest` where lengths and `shape` disagree."""
    count = element_count(name, shape)
    view = memoryview(raw)
    size = len(view)
    if count * 4 > size:
        raise InvalidRequest(
            f"expected {count} string elements for inference input '{name}', got fewer:"
            f" {size} bytes cannot hold {count} length indicators"
        )
    elements: list[bytes] = []
    append = elements.append
    position = 0
    for index in range(count):
        start = position + 4
        if start > size:
            if position == size:
                raise InvalidRequest(
                    f"expected {count} string elements for inference input '{name}', got {index}"
                )
            raise InvalidRequest(
                f"incomplete string length indicator for inference input '{name}':"
                f" {size - position} bytes left where 4 are needed"
            )
        position = start + _unpack_length(view, position)[0]
        if position > size:
            raise InvalidRequest(
                f"incomplete string data for inference input '{name}': element {index}"
                f" claims {position - start} bytes, {size - start} are left"
            )
        append(view[start:position].tobytes())
    if position != size:
        raise InvalidRequest(
            f"unexpected number of string elements {count + 1} for inference input '{name}',"
            f" expecting {count}: {size - position} bytes follow the last"
        )
    return Tensor(name, Datatype.BYTES, object_array(elements, shape))


def encode_bytes_tensor(array: Array) -> bytes:
    """The elements of an object array of `bytes`, row-major, each with its length before it."""
    elements: list[bytes] = array.ravel().tolist()
    lengths = np.fromiter(map(len, elements), "<u4", len(elements))
    # A void scalar of four bytes becomes a `bytes` object that keeps its trailing zeros.
    prefixes: list[bytes] = lengths.view("V4").tolist()
    return b"".join(chain.from_iterable(zip(prefixes, elements, strict=True)))
