"""Parsing of `config.pbtxt`: fields, their lines, and error messages."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidConfig
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import ConfigFile, Problem, field_lines, parse_config, read_config

GOOD = """\
name: "m"
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 4 ] },
  {
    name: "y"
    dims: [ 0 ]
  }
]
dynamic_batching {
  preferred_batch_size: [
    4,
    9
  ]
}
parameters { key: "execution" value: { string_value: "never" } }
"""


def test_a_file_becomes_a_message_with_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(GOOD)
    file = read_config(path, "m")
    assert (file.name, file.config.max_batch_size, len(file.config.input)) == (
        "m/config.pbtxt", 8, 2,
    )  # fmt: skip
    assert file.sets("max_batch_size")
    assert not file.sets("output")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'\xef\xbb\xbfname: "m"\r\nmax_batch_size: 8\r\n')
    file = read_config(path, "m")
    assert (file.config.name, file.lines["max_batch_size"]) == ("m", 2)


def test_a_missing_file_is_an_empty_configuration() -> None:
    file = read_config(None, "m")
    assert file.config == ModelConfig()
    assert not file.sets("max_batch_size")
    assert file.explain(Problem("input", "is missing")) == "m (no config.pbtxt): input: is missing"


def test_a_field_that_is_set_to_its_default_is_set() -> None:
    assert parse_config("max_batch_size: 0", "f").sets("max_batch_size")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    says = r"^m/nothing\.pbtxt: cannot be read: No such file or directory$"
    with pytest.raises(InvalidConfig, match=says):
        read_config(tmp_path / "nothing.pbtxt", "m")
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "\xff"')
    with pytest.raises(InvalidConfig, match=r"m/config\.pbtxt: cannot be read: .*utf-8"):
        read_config(path, "m")


@pytest.mark.parametrize(("text", "line", "says"), [
    ("\nmax_batchsize: 4", 2, "no field named \"max_batchsize\".; did you mean 'max_batch_size'?"),
    ("input {\n  data_type: TYPE_FP23\n}", 2,
     "has no value named TYPE_FP23.; did you mean 'TYPE_FP32'?"),
    ("input { data_type: TYPE_FLOAT }", 1, "TYPE_FLOAT.; did you mean 'TYPE_FP32'?"),
    ("input { data_type: TYPE_DOUBLE }", 1, "TYPE_DOUBLE.; did you mean 'TYPE_FP64'?"),
    ("input { data_type: TYPE_BYTES }", 1, "TYPE_BYTES.; did you mean 'TYPE_STRING'?"),
    ("input { data_type: int64 }", 1, "int64.; did you mean 'TYPE_INT64'?"),
    ("input { data_type: TYPE_COMPLEX }", 1, "TYPE_COMPLEX.; expected one of TYPE_INVALID, "),
    ("instance_group [ {\n\n  kind: GPU } ]", 3,
     "; expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL"),
    ("dynamic_batching {\n  delay: 3 }", 2, 'ModelDynamicBatching" has no field named "delay"'),
    ("name: m", 1, "Expected string"),
    ('name: "m"\nname: "n"', 2, 'should not have multiple "name" fields'),
    ("input {\n  dims: [ 1, x ]\n}", 2, "Couldn't parse integer: x"),
    ("max_batch_size: 99999999999", 1, "Value out of range"), ("input {\n", 1, 'Expected "}"'),
])  # fmt: skip
def test_errors_name_file_line_and_the_nearest_name(text: str, line: int, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_config(text, "m/config.pbtxt")
    message = str(caught.value)
    assert message.startswith(f"m/config.pbtxt:{line}: ")
    assert says in message
    assert "inference." not in message


@pytest.mark.parametrize(("path", "line"), [
    ("max_batch_size", 2), ("input[0].dims", 4), ("input[1]", 5), ("input[1].dims", 7),
    ("input[1].data_type", 5),  # absent: the line where it would be
    ("dynamic_batching.preferred_batch_size[1]", 13), ("dynamic_batching.priority_levels", 10),
    ("parameters['execution']", 16), ("output", None), ("instance_group[0].count", None),
])  # fmt: skip
def test_a_problem_names_file_line_and_field(path: str, line: int | None) -> None:
    where = "f" if line is None else f"f:{line}"
    assert parse_config(GOOD, "f").explain(Problem(path, "no")) == f"{where}: {path}: no"


@given(st.text(max_size=60) | st.text(alphabet='{}[]<>:,;"\\#\n ainputdms019', max_size=60))
def test_any_text_is_a_configuration_or_an_error(text: str) -> None:
    try:
        file = parse_config(text, "f")
    except InvalidConfig:
        return
    assert isinstance(file, ConfigFile)


# --- the line of each field


def lines_of(text: str) -> dict[str, int]:
    """Lines of the fields of a text that protobuf's own parser accepts."""
    text_format.Parse(text, ModelConfig())
    return field_lines(text)


@pytest.mark.parametrize(("text", "path", "line"), [
    ('name: "m"', "name", 1), ('# name: "no"\n\nname: "m" # name', "name", 3),
    ("input {\n  dims: -1\n}", "input[0].dims[0]", 2), ("input {\n  dims: -1\n}", "input.dims", 2),
    ("input { } input {\n dims: 3 }", "input[1].dims", 2),
    ("input { } input {\n dims: 3 }", "input.dims", 2),  # the first existing one
    ("input [ { },\n { dims: [ 1,\n2 ] } ]", "input[1].dims[1]", 3),
    ("input: [\n{name:'a'},\n{name:'b'}\n]", "input[1].name", 3),
    ("input { dims: [] }\nname: 'm'", "name", 2), ("input [ ]\nname: 'm'", "name", 2),
    ("input <\n dims: 3 >", "input[0].dims", 2),
    ("input: {\n reshape: {\n shape: [ ] } }", "input[0].reshape.shape", 3),
    ("dynamic_batching {\n priority_levels: 2 }", "dynamic_batching.priority_levels", 2),
    ("dynamic_batching { },\nname: 'm'", "name", 2), ("max_batch_size: 1;\nname: 'm'", "name", 2),
    ("name: 'a' 'b'\n'c'\nbackend: 'x'", "backend", 3),
    ("name: 'a\\'{'\nbackend: \"}\\\"[\"\nplatform: '#'", "platform", 3),
    ("parameters { key: 'a' }\nparameters { key: 'b' }", "parameters['b']", 2),
    ("dynamic_batching { priority_queue_policy { key: 1 }\npriority_queue_policy { key: 2"
     " value {\n timeout_action: 7 } } }",
     "dynamic_batching.priority_queue_policy['2'].value.timeout_action", 3),
    ('parameters {\n key: "a"\n value {\n string_value: "}" } }', "parameters['a']", 1),
    ('parameters {\n key: "a"\n value {\n string_value: "}" } }',
     "parameters['a'].value.string_value", 4),
    ("dynamic_batching { priority_queue_policy {\nkey: 1 value {\nmax_queue_size: 2 } } }",
     "dynamic_batching.priority_queue_policy.value.max_queue_size", 3),
])  # fmt: skip
def test_lines(text: str, path: str, line: int) -> None:
    assert lines_of(text)[path] == line


def test_absent_fields_have_no_line() -> None:
    lines = lines_of('# dims\ninput { name: "dims: 3" }')
    assert "input[0].dims" not in lines
    assert "dims" not in lines
    assert "input[1]" not in lines


@given(
    st.lists(st.tuples(st.text(max_size=5), st.lists(st.integers(-1, 9), max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_every_printed_field_is_found_where_it_was_printed(
    inputs: list[tuple[str, list[int]]], parameters: dict[str, str]
) -> None:
    config = ModelConfig(name="m")
    for name, dims in inputs:
        config.input.add(name=name, dims=dims)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    config.dynamic_batching.preserve_ordering = True
    text = text_format.MessageToString(config)
    printed, lines = text.split("\n"), lines_of(text)
    assert printed[lines["dynamic_batching.preserve_ordering"] - 1].strip() == (
        "preserve_ordering: true"
    )
    for index, (name, dims) in enumerate(inputs):
        if name:
            assert printed[lines[f"input[{index}].name"] - 1].strip().startswith("name: ")
        for n, size in enumerate(dims):
            line = lines[f"input[{index}].dims[{n}]"]
            assert printed[line - 1].strip() == f"dims: {size}"
    assert ("parameters" in lines) == bool(parameters)
