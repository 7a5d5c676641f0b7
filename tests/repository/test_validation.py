"""Problems of a configuration, alone and beside the loaded model, and ineffective fields."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace.core.datatypes import Datatype
from headrace.core.model_spec import TensorInfo
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.repository.validation import (
    EFFECTIVE,
    OWN_PARAMETERS,
    model_problems,
    problems,
    tensor_problems,
    without_effect,
)
from tests.repository.files import config_of

FP32, INT64 = Datatype.FP32, Datatype.INT64


@pytest.mark.parametrize("text", [
    "", 'name: "m"', "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 1, 8 ] }",
    'input { name: "x" dims: [ -1, 3 ] } output { name: "x" dims: 1 }',
    'input { name: "x" dims: [ 2, 6 ] reshape { shape: [ 3, 4 ] } }',
    'input { name: "x" dims: 1 reshape { } }',
    'input { name: "x" dims: [ 2, -1 ] reshape { shape: [ -1, 2 ] } }',
    'metric_tags { key: "1_a" value: "c-\\"d" }',
    "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 2000 }",
    "dynamic_batching { priority_levels: 3 default_priority_level: 3"
     " priority_queue_policy { key: 1 value { } } }",
    "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 }",
    "dynamic_batching { preserve_ordering: true default_queue_policy { max_queue_size: 1 } }",
    "instance_group [ { count: 1000 kind: KIND_GPU gpus: [ 0, 1 ] }, { kind: KIND_CPU } ]",
    'parameters { key: "execution" value { string_value: "inline" } }',
    'parameters { key: "batching" value { string_value: "off" } }',
    'parameters { key: "anything" value { string_value: "goes" } }',
    'default_model_filename: "sub/model.onnx"', 'default_model_filename: "..model.onnx"',
])  # fmt: skip
def test_good_configurations(text: str) -> None:
    assert list(problems(config_of(text), "m")) == []


@pytest.mark.parametrize(("text", "path", "says"), [
    ('name: "n"', "name", "unexpected directory name 'm' for model 'n', directory name must"),
    ("max_batch_size: -1", "max_batch_size", "must not be negative, got -1"),
    ("ensemble_scheduling { }", "ensemble_scheduling", "needs the platform 'ensemble', got ''"),
    ("input { }", "input[0].name", "every input must have a name"),
    ('output { name: "y" } output { }', "output[1].name", "every output must have a name"),
    ('input { name: "x" } input { name: "x" }', "input[1].name", "'x' is given twice"),
    ('input { name: "x" dims: [ 1, 0 ] }', "input[0].dims", "must be positive"),
    ('output { name: "y" dims: -2 }', "output[0].dims", r"got \[-2\]"),
    ('input { name: "x" dims: 6 reshape { shape: 4 } }', "input[0].reshape", "as many"),
    ('input { name: "x" dims: -1 reshape { shape: 1 } }', "input[0].reshape", "as many"),
    ('input { name: "x" dims: [ -1, 2 ] reshape { shape: [ -1, 3 ] } }', "input[0].reshape",
     r"\[-1,3\] must have as many elements and variable dimensions as dims \[-1,2\]"),
    ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 4, 5 ] }",
     "dynamic_batching.preferred_batch_size[1]", r"between 1 and max_batch_size \(4\), got 5"),
    ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
     "dynamic_batching.preferred_batch_size[0]", "got 0"),
    ('metric_tags { key: "a-b" value: "c" }', "metric_tags['a-b']", "letters, digits and '_'"),
    ("dynamic_batching { priority_levels: 2 }", "dynamic_batching.default_priority_level",
     r"between 1 and priority_levels \(2\), got 0"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
     "dynamic_batching.default_priority_level", "got 3"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 1"
     " priority_queue_policy { key: 3 value { } } }", "dynamic_batching.priority_queue_policy",
     "level 3 is not between 1 and priority_levels"),
    ("dynamic_batching { priority_queue_policy { key: 1 value { } } }",
     "dynamic_batching.priority_queue_policy", "level 1 is not between"),
    ("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
     "dynamic_batching.preserve_ordering", "several priority levels"),
    ("dynamic_batching { preserve_ordering: true"
     " default_queue_policy { timeout_action: DELAY } }", "dynamic_batching.preserve_ordering",
     "timeout_action DELAY"),
    ("dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1"
     " priority_queue_policy { key: 1 value { timeout_action: DELAY } } }",
     "dynamic_batching.preserve_ordering", "timeout_action DELAY"),
    ("instance_group { count: -1 }", "instance_group[0].count", "got -1"),
    ("instance_group { } instance_group { count: 1001 }", "instance_group[1].count", "1000"),
    ("instance_group { kind: KIND_CPU gpus: 0 }", "instance_group[0].gpus", "of KIND_CPU"),
    ("instance_group { kind: KIND_MODEL gpus: 0 }", "instance_group[0].gpus", "of KIND_MODEL"),
    ('parameters { key: "execution" value { string_value: "fork" } }', "parameters['execution']",
     r"must be one of \['auto','inline','thread','process'\], got 'fork'"),
    ('parameters { key: "batching" value { } }', "parameters['batching']",
     r"must be one of \['on','off'\], got ''"),
    ('parameters { key: "split_requests" value { string_value: "yes" } }',
     "parameters['split_requests']", r"must be one of \['on','off'\], got 'yes'"),
    ('input { name: "x" data_type: 99 }', "input[0].data_type", "one of TYPE_INVALID, .*got 99"),
    ('output { name: "y" data_type: -1 }', "output[0].data_type", "got -1"),
    ("instance_group { } instance_group { kind: 9 }", "instance_group[1].kind", "KIND_AUTO"),
    ("optimization { priority: 3 }", "optimization.priority", "one of PRIORITY_DEFAULT, "),
    ("dynamic_batching { default_queue_policy { timeout_action: 7 } }",
     "dynamic_batching.default_queue_policy.timeout_action", "must be one of REJECT, DELAY, got 7"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 1"
     " priority_queue_policy { key: 2 value { timeout_action: 7 } } }",
     "dynamic_batching.priority_queue_policy['2'].value.timeout_action", "got 7"),
    ('model_warmup { inputs { key: "x" value { data_type: 77 } } }',
     "model_warmup[0].inputs['x'].value.data_type", "got 77"),
    ('default_model_filename: "/etc/m.onnx"', "default_model_filename", "must lie within"),
    ('default_model_filename: "../2/m.onnx"', "default_model_filename", "must lie within"),
    ('default_model_filename: "a/../../x"', "default_model_filename", "must lie within"),
])  # fmt: skip
def test_errors_name_their_field(text: str, path: str, says: str) -> None:
    (problem,) = problems(config_of(text), "m")
    assert problem.path == path
    assert re.search(says, problem.text), problem.text


def test_all_errors_are_reported_at_once() -> None:
    text = 'name: "n" max_batch_size: -1 input { } instance_group { count: -1 }'
    paths = [problem.path for problem in problems(config_of(text), "m")]
    assert paths == ["name", "max_batch_size", "input[0].name", "instance_group[0].count"]


@pytest.mark.parametrize(("text", "paths"), [
    ("", ["input", "output"]), ('input { name: "x" data_type: TYPE_FP32 }', ["output"]),
    ('input { name: "x" data_type: TYPE_FP32 } input { name: "z" } output { name: "y" }',
     ["input[1].data_type", "output[0].data_type"]),
    ('input { name: "x" data_type: TYPE_FP32 } output { name: "y" data_type: TYPE_BF16 }', []),
])  # fmt: skip
def test_complete_tensors(text: str, paths: list[str]) -> None:
    found = tensor_problems(config_of(text), [TensorInfo("x", FP32, ())], [Y])
    assert [problem.path for problem in found] == paths
    assert list(tensor_problems(config_of(""))) == []  # a model may have none


@pytest.mark.parametrize(("columns", "backend", "says"), [
    ('{"x": ["a", "b"]}', "", ""), ('{"x": ["a", "b"]}', "python", ""),
    ("a,b", "python", ""), ("a,b", "", 'such as {"INPUT": ["a", "b"]}'),
    ('["a", "b"]', "", "must be JSON of names by input"), ('{"x": "ab"}', "", "must be JSON"),
    ('{"y": ["a", "b"]}', "python", ""), ('{"y": ["a", "b"]}', "", "there is no input 'y'"),
    ('{"x": ["a", "a"]}', "", "the columns of 'x' have a name twice"),
    ('{"x": ["a"]}', "", "'x' has 2 columns, and 1 names are given"),
])  # fmt: skip
def test_names_of_columns(columns: str, backend: str, says: str) -> None:
    config = config_of('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 2 }')
    config.backend = backend
    config.parameters["columns"].string_value = columns
    found = [str(problem) for problem in tensor_problems(config)]
    assert len(found) == bool(says)
    assert says in "".join(found)


@pytest.mark.parametrize(("text", "refused"), [
    ("max_batch_size: 4", False), ("", True), ("max_batch_size: 4 sequence_batching { }", True),
    ("max_batch_size: 4 model_transaction_policy { decoupled: true }", True),
    ("max_batch_size: 4 dynamic_batching { preserve_ordering: true }", True),
    ('max_batch_size: 4 parameters { key: "batching" value { string_value: "off" } }', True),
])  # fmt: skip
def test_requests_that_cannot_be_divided(text: str, refused: bool) -> None:
    given = text + ' parameters { key: "split_requests" value { string_value: "%s" } }'
    declared = 'input { name: "x" data_type: TYPE_FP32 } output { name: "y" data_type: TYPE_FP32 }'
    for value, paths in (("on", ["parameters['split_requests']"] * refused), ("off", [])):
        config = config_of(given % value + declared)
        assert [problem.path for problem in tensor_problems(config)] == paths


X = TensorInfo("x", FP32, (-1, 3))
Y = TensorInfo("y", INT64, (-1, -1))
GOOD = """
    max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 3 }
    output { name: "y" data_type: TYPE_INT64 dims: -1 }
"""


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        (GOOD, [X], [Y]),
        (GOOD, [X, TensorInfo("w", FP32, (1,), optional=True)], [Y]),  # need not be declared
        (GOOD, [X], [Y, TensorInfo("z", FP32, (1,))]),  # outputs may be left out
        (GOOD.replace("dims: 3", "dims: 3 optional: true"),
         [TensorInfo("x", FP32, (-1, 3), optional=True)], [Y]),
        (GOOD, [X], [TensorInfo("y", INT64, ())]),  # of unknown rank
        (GOOD.replace("max_batch_size: 4", "").replace("dims: 3", "dims: [ -1, 3 ]"), [X],
         [TensorInfo("y", INT64, (-1,))]),
        (GOOD.replace("dims: -1", "dims: 5"), [X], [Y]),  # narrower than the model
        (GOOD.replace("dims: 3", "dims: [ 3, 1 ] reshape { shape: 3 }"), [X], [Y]),
        (GOOD.replace("dims: -1", "dims: 1 reshape { }"), [X], [TensorInfo("y", INT64, (-1,))]),
    ],
)  # fmt: skip
def test_a_configuration_that_fits_the_model(
    text: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> None:
    assert list(model_problems(config_of(text), inputs, outputs)) == []


@pytest.mark.parametrize(("text", "inputs", "outputs", "path", "says"), [
    (GOOD, [X], [TensorInfo("z", INT64, (-1, -1))], "output[0].name",
     r"the model has no output 'y', it has \['z'\]"),
    (GOOD, [X], [TensorInfo("y", None, (), "seq(tensor(float))")], "output[0].name",
     r"'y' is a seq\(tensor\(float\)\), which is not a tensor of the protocol"),
    (GOOD.replace("dims: 3", "dims: 3 optional: true"), [X], [Y], "input[0].optional",
     "the model needs 'x', for which it has no value of its own"),
    (GOOD, [TensorInfo("x", INT64, (-1, 3))], [Y], "input[0].data_type",
     "the model's input 'x' is INT64, not FP32"),
    (GOOD, [TensorInfo("x", FP32, (-1, 4))], [Y], "input[0].dims",
     r"shape \[-1,4\], the configuration means \[-1,3\]$"),
    (GOOD, [TensorInfo("x", FP32, (2, 3))], [Y], "input[0].dims",
     r"shape \[2,3\], the configuration means \[-1,3\] \(max_batch_size is not 0"),
    (GOOD, [X], [TensorInfo("y", INT64, (-1,))], "output[0].dims",
     r"shape \[-1\], the configuration means \[-1,-1\]$"),
    (GOOD.replace("max_batch_size: 4", ""), [X], [TensorInfo("y", INT64, (-1,))], "input[0].dims",
     r"shape \[-1,3\], the configuration means \[3\]$"),
    (GOOD, [X], [TensorInfo("y", INT64, (-1, 7))], "output[0].dims",
     r"shape \[-1,7\], the configuration means \[-1,-1\]$"),
    (GOOD, [X, TensorInfo("b", FP32, (-1, 1)), TensorInfo("a", FP32, (-1, 1))], [Y], "input",
     r"the model also needs the inputs \['a','b'\]"),
])  # fmt: skip
def test_a_configuration_that_contradicts_the_model(
    text: str, inputs: list[TensorInfo], outputs: list[TensorInfo], path: str, says: str
) -> None:
    (problem,) = model_problems(config_of(text), inputs, outputs)
    assert problem.path == path
    assert re.search(says, problem.text), problem.text


# --- ineffective fields


def nothing(name: str) -> bool:
    """A backend that reads no parameter."""
    return False


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """Paths of all leaf fields; also maps and empty messages."""
    for field in descriptor.fields:
        path = prefix + field.name
        nested = field.message_type
        if nested is None or nested.GetOptions().map_entry or not nested.fields:
            yield path
        else:
            yield from leaves(nested, path + ".")


def put(message: Message, path: str) -> None:
    """Set the field `path` to a value that is not its default."""
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
    """True if the table lists `path` or a parent of it as effective."""
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
        model_operations { }
        input { name: "x" is_shape_tensor: true }
        optimization { cuda { graphs: true } graph { level: 1 } }
    """
    assert without_effect(parse_config(text, "f").config, nothing) == [
        "input.is_shape_tensor", "instance_group.passive", "instance_group.host_policy",
        "optimization.cuda", "model_operations",
    ]  # fmt: skip


def test_unread_parameters_are_named() -> None:
    config = ModelConfig()
    for name in ("zzz", "session.x", "aaa", *OWN_PARAMETERS):
        config.parameters[name].string_value = "1"
    unread = without_effect(config, lambda name: name.startswith("session."))
    assert unread == ["parameters['aaa']", "parameters['zzz']"]


def test_the_path_of_a_field_leads_to_its_line() -> None:
    file = parse_config('input {\n name: "x"\n} input {\n is_shape_tensor: true }', "f")
    (path,) = without_effect(file.config, nothing)
    assert file.lines[path] == 4
