"""Protobuf messages in the JSON form of Triton's HTTP endpoints, and its JSON Schema.

Unlike protobuf's own JSON form, names stay in snake case, 64-bit integers are numbers, and fields
with their default value are written out.
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
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


_SCALARS = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
}


def message_schemas(descriptors: Iterable[Descriptor]) -> dict[str, dict[str, Any]]:
    """Schemas of messages and of all messages in them, by `schema_name`."""
    schemas: dict[str, dict[str, Any]] = {}
    waiting = list(descriptors)
    while waiting:
        descriptor = waiting.pop()
        name = schema_name(descriptor)
        if name not in schemas:
            schemas[name] = _schema(descriptor)
            waiting += [found for f in descriptor.fields if (found := _message(f)) is not None]
    return dict(sorted(schemas.items()))


def schema_name(descriptor: Descriptor) -> str:
    """The name of a message without its package."""
    return descriptor.full_name.removeprefix(f"{descriptor.file.package}.")


def reference(descriptor: Descriptor) -> dict[str, str]:
    """The `$ref` to the schema of a message."""
    return {"$ref": f"#/components/schemas/{schema_name(descriptor)}"}


def _schema(descriptor: Descriptor) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _field(field) for field in descriptor.fields},
    }
    always = [f.name for f in descriptor.fields if f.is_repeated or not f.has_presence]
    return schema | {"required": always} if always else schema


def _message(field: FieldDescriptor) -> Descriptor | None:
    """The message type of a field, or of a map's values."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        found: Descriptor | None = entry.fields_by_name["value"].message_type
        return found
    return entry


def _field(field: FieldDescriptor) -> dict[str, Any]:
    if not field.is_repeated:
        return _json_schema_value(field)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        values = _json_schema_value(entry.fields_by_name["value"])
        return {"type": "object", "additionalProperties": values}
    return {"type": "array", "items": _json_schema_value(field)}


def _json_schema_value(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        return reference(field.message_type)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    return {"type": _SCALARS.get(field.cpp_type, "integer")}
