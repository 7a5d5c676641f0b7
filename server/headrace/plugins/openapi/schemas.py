"""JSON schemas of the documents that messages become, see `headrace.protocol.documents`."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_ENUM = FieldDescriptor.TYPE_ENUM
_MESSAGE = FieldDescriptor.TYPE_MESSAGE
_BYTES = FieldDescriptor.TYPE_BYTES


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
