"""On which line of a text file a field stands."""

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import field_lines


def lines_of(text: str) -> dict[str, int]:
    """The lines of a text that protobuf's own parser takes."""
    text_format.Parse(text, ModelConfig())
    return field_lines(text)


@pytest.mark.parametrize(("text", "path", "line"), [
    ('name: "m"', "name", 1), ('# name: "no"\n\nname: "m" # name', "name", 3),
    ("input {\n  dims: -1\n}", "input[0].dims[0]", 2), ("input {\n  dims: -1\n}", "input.dims", 2),
    ("input { } input {\n dims: 3 }", "input[1].dims", 2),
    ("input { } input {\n dims: 3 }", "input.dims", 2),  # the first that there is
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


def test_what_is_not_there_has_no_line() -> None:
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
