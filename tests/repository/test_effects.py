"""Every field of a configuration is accepted, and those that change nothing are named."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.repository.validation import EFFECTIVE, OWN_PARAMETERS, without_effect


def nothing(name: str) -> bool:
    """A backend that reads no parameter."""
    return False


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that have none of their own; also maps and empty messages."""
    for field in descriptor.fields:
        path = prefix + field.name
        nested = field.message_type
        if nested is None or nested.GetOptions().map_entry or not nested.fields:
            yield path
        else:
            yield from leaves(nested, path + ".")


def put(message: Message, path: str) -> None:
    """Set the field `path` to something that is not its default."""
    name, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    nested = field.message_type
    value = getattr(message, name)
    if nested is not None and nested.GetOptions().map_entry:
        inner = nested.fields_by_name["value"].message_type
        key = "key" if nested.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 1
        if inner is None:
            value[key] = "value"
        else:
            value[key].SetInParent()
    elif nested is not None:
        target = value.add() if hasattr(value, "add") else value
        target.SetInParent()
        if rest:
            put(target, rest)
    elif hasattr(value, "append"):
        value.append(_value(field))
    else:
        setattr(message, name, _value(field))


def _value(field: Any) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return "text" if field.type == FieldDescriptor.TYPE_STRING else b"bytes"
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        numbers = [value.number for value in field.enum_type.values]
        return numbers[-1]
    return True if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else 1


LEAVES = sorted(leaves(ModelConfig.DESCRIPTOR))


def effective(path: str) -> bool:
    """Whether the table lists `path` or something that it lies in as having an effect."""
    parts = path.split(".")
    return any(
        ".".join(parts[:n]) in EFFECTIVE
        and not any(known.startswith(".".join(parts[:n]) + ".") for known in EFFECTIVE)
        for n in range(1, len(parts) + 1)
    )


@pytest.mark.parametrize("path", LEAVES)
def test_every_field_is_accepted_and_has_an_effect_or_is_reported(path: str) -> None:
    config = ModelConfig()
    put(config, path)
    assert parse_config(text_format.MessageToString(config), "f").config == config
    reported = without_effect(config, nothing)
    if path == "parameters":
        assert reported == ["parameters['key']"]
    elif effective(path):
        assert reported == []
    else:
        (named,) = reported
        assert path == named or path.startswith(named + ".")


def test_the_table_names_fields_that_exist() -> None:
    paths = {".".join(p.split(".")[:n]) for p in LEAVES for n in range(1, p.count(".") + 2)}
    assert paths >= EFFECTIVE


def test_fields_are_named_once_in_order() -> None:
    text = """
        name: "m"
        instance_group [ { passive: true }, { passive: true, host_policy: "x" } ]
        response_cache { }
        input { name: "x" allow_ragged_batch: true }
        optimization { cuda { graphs: true } graph { level: 1 } }
    """
    assert without_effect(parse_config(text, "f").config, nothing) == [
        "input.allow_ragged_batch",
        "instance_group.passive",
        "instance_group.host_policy",
        "optimization.cuda",
        "response_cache",
    ]


def test_parameters_are_named_unless_somebody_reads_them() -> None:
    config = ModelConfig()
    for name in ("zzz", "session.x", "aaa", *OWN_PARAMETERS):
        config.parameters[name].string_value = "1"
    unread = without_effect(config, lambda name: name.startswith("session."))
    assert unread == ["parameters['aaa']", "parameters['zzz']"]


def test_the_path_of_a_field_leads_to_its_line() -> None:
    file = parse_config('input {\n name: "x"\n} input {\n allow_ragged_batch: true }', "f")
    (path,) = without_effect(file.config, nothing)
    assert file.lines[path] == 4
