"""Protobuf messages in the JSON form of Triton's HTTP endpoints.

Unlike protobuf's own JSON form, names stay in snake case, 64-bit integers are numbers, and fields
with their default value are written out.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_ENUM = FieldDescriptor.TYPE_ENUM
_MESSAGE = FieldDescriptor.TYPE_MESSAGE
_BYTES = FieldDescriptor.TYPE_BYTES


def to_json(message: Message) -> dict[str, Any]:
    """`message` as a JSON object; sub-messages and oneof members only if they are set."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            entry = field.message_type
            if entry is not None and entry.GetOptions().map_entry:
                kind = entry.fields_by_name["value"]
                result[field.name] = {str(key): _value(kind, value[key]) for key in sorted(value)}
            else:
                result[field.name] = [_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            result[field.name] = _value(field, value)
    return result


def _value(field: Any, value: Any) -> Any:
    # The descriptor's class is either protobuf's own or that of its C implementation.
    if field.type == _MESSAGE:
        return to_json(value)
    if field.type == _ENUM:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.decode("latin-1") if field.type == _BYTES else value
