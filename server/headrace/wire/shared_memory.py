"""What a request says of tensors in shared memory, the same for JSON and protobuf.

Whether there is such a region, and whether a stretch lies within it, is not known here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.datatypes import ITEM_SIZES, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.requests import SharedInput, Stretch
from headrace.core.tensors import byte_size_mismatch, element_count

REGION = "shared_memory_region"
_OFFSET, _SIZE = "shared_memory_offset", "shared_memory_byte_size"
PARAMETERS = (REGION, _OFFSET, _SIZE)
_MOST = 2**63 - 1


def read_stretch(what: str, parameters: Mapping[str, Any]) -> Stretch:
    """The place that a tensor's parameters name; `what` is the tensor, for messages.

    Raises `InvalidRequest`.
    """
    region = parameters[REGION]
    if type(region) is not str or not region:
        raise InvalidRequest(f"'{REGION}' of {what} must be a region's name")
    offset, size = parameters.get(_OFFSET), parameters.get(_SIZE)
    if offset is None:
        offset = 0
    if size is None:
        raise InvalidRequest(f"{what} has a '{REGION}' and no '{_SIZE}'")
    for name, value in ((_OFFSET, offset), (_SIZE, size)):
        if type(value) is not int:  # a bool is none here
            raise InvalidRequest(f"'{name}' of {what} must be a non-negative integer")
    if not 0 <= offset <= _MOST:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{region}'."
            f" {what[:1].upper()}{what[1:]} asks for {offset}"
        )
    if not 0 <= size <= _MOST - offset:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{region}'."
            f" {what[:1].upper()}{what[1:]} asks for {offset} + {size}"
        )
    return Stretch(region, offset, size)


def shared_input(
    name: str,
    datatype: Datatype,
    shape: Sequence[int],
    parameters: Mapping[str, Any],
    model: str,
    request_id: str,
) -> SharedInput:
    """An input in shared memory, whose size must be what its shape needs.

    Raises `InvalidRequest`.
    """
    place = read_stretch(f"input '{name}'", parameters)
    count = element_count(name, shape)
    if datatype is Datatype.BYTES:
        if count * 4 > place.byte_size:
            raise InvalidRequest(
                f"expected {count} string elements for inference input '{name}', got fewer:"
                f" {place.byte_size} bytes cannot hold {count} length indicators"
            )
    elif place.byte_size != count * ITEM_SIZES[datatype]:
        raise byte_size_mismatch(name, datatype, shape, place.byte_size, model, request_id)
    return SharedInput(datatype, tuple(shape), place)


def shared_output(name: str, parameters: Mapping[str, Any]) -> Stretch:
    """The room for an output in shared memory; raises `InvalidRequest`."""
    if parameters.get("classification", 0) != 0:
        raise InvalidRequest(
            f"output '{name}': 'classification' can not be had in shared memory,"
            f" set it or '{REGION}'"
        )
    return read_stretch(f"output '{name}'", parameters)
