"""BYTES tensors out of the requests of clients and the answers of other servers."""

from collections.abc import Sequence

from headrace.core.bytes_array import COPIED, BytesArray
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Array, Buffer, Tensor, element_count
from headrace.workers import elements as bytes_elements
from headrace.workers.elements import walk


def object_array(elements: list[bytes], shape: Sequence[int]) -> Array:
    """`elements` as an object array of `shape`, whatever their lengths are."""
    return bytes_elements.object_array([elements], shape)


def decode_bytes_tensor(name: str, shape: Sequence[int], raw: Buffer) -> Tensor:
    """The BYTES tensor in `raw`, whose elements stay there: no object is made of any.

    A pure function, for any thread. Raises `InvalidRequest` where lengths and `shape` disagree.
    """
    count = element_count(name, shape)
    size = len(raw)
    if count * 4 > size:
        raise InvalidRequest(
            f"expected {count} string elements for inference input '{name}', got fewer:"
            f" {size} bytes cannot hold {count} length indicators"
        )
    if size <= COPIED:
        raw = bytes(raw)
    whole, end = walk(raw, count)
    if whole != count or end != size:
        raise InvalidRequest(_misfit(name, count, raw, whole, end))
    return Tensor(name, Datatype.BYTES, BytesArray(raw, shape))


def _misfit(name: str, count: int, raw: Buffer, whole: int, end: int) -> str:
    """What is wrong with a tensor of which so many elements, that end there, are whole."""
    left = len(raw) - end
    if whole == count:
        return (
            f"unexpected number of string elements {count + 1} for inference input '{name}',"
            f" expecting {count}: {left} bytes follow the last"
        )
    if not left:
        return f"expected {count} string elements for inference input '{name}', got {whole}"
    if left < 4:
        return (
            f"incomplete string length indicator for inference input '{name}':"
            f" {left} bytes left where 4 are needed"
        )
    claimed = int.from_bytes(raw[end : end + 4], "little")
    return (
        f"incomplete string data for inference input '{name}': element {whole}"
        f" claims {claimed} bytes, {left - 4} are left"
    )
