"""Protobuf messages in the JSON form of Triton's HTTP endpoints.

Unlike protobuf's own JSON form, names stay in snake case, 64-bit integers are numbers, and fields
with their default value are written out.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_Convert = Callable[[Any], Any] | None  # of one value; None: as it is


def to_json(message: Message) -> dict[str, Any]:
    """`message` as a JSON object; sub-messages and oneof members only if they are set."""
    result: dict[str, Any] = {}
    for name, has_presence, convert in _fields(message.DESCRIPTOR):
        if not has_presence or message.HasField(name):
            value = getattr(message, name)
            result[name] = value if convert is None else convert(value)
    return result


@cache
def _fields(descriptor: Any) -> list[tuple[str, bool, _Convert]]:
    """Name, presence and conversion of each field: to ask descriptors takes most of the time."""
    return [(field.name, field.has_presence, _field(field)) for field in descriptor.fields]


def _field(field: Any) -> _Convert:
    if not field.is_repeated:
        return _single(field)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        convert = _single(entry.fields_by_name["value"]) or _same
        return lambda values: {str(key): convert(values[key]) for key in sorted(values)}
    each = _single(field)
    return list if each is None else lambda values: list(map(each, values))


def _single(field: Any) -> _Convert:
    # The descriptor's class is either protobuf's own or that of its C implementation.
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return to_json
    if field.type == FieldDescriptor.TYPE_ENUM:
        names = {number: known.name for number, known in field.enum_type.values_by_number.items()}
        return lambda value: names.get(value, value)
    return _text if field.type == FieldDescriptor.TYPE_BYTES else None


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _same(value: Any) -> Any:
    return value
