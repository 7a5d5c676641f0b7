"""The list of backends in a configuration."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.repository.fail_over import (
    FurtherBackend,
    InvalidOrder,
    entry_config,
    groups_here,
    needs_files,
    problems,
    queue_size,
    read_order,
    with_own_fields,
    without_execution,
)

BACKENDS = ["onnxruntime", "python", "triton"]


def config(backend: str = "triton", more: str = "", **parameters: str) -> ModelConfig:
    given = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: {text!r} }} }}'
        for name, text in parameters.items()
    )
    return parse_config(f'name: "m" backend: "{backend}" {given} {more}', "m").config


def order(text: str, backend: str = "triton") -> list[FurtherBackend]:
    return read_order(config(backend, fail_over=text), BACKENDS, ["triton"])


URL = "grpc://a:1,grpcs://b:2"


@pytest.mark.parametrize(
    ("backend", "text", "entries"),
    [
        ("triton", "onnxruntime", [FurtherBackend("onnxruntime", "onnxruntime")]),
        (
            "triton", f" {URL} ; onnxruntime;python;",
            [
                FurtherBackend("triton-2", "triton", URL),
                FurtherBackend("onnxruntime", "onnxruntime"), FurtherBackend("python", "python"),
            ],
        ),
        (
            "onnxruntime", f"{URL};grpc://c",
            [FurtherBackend("triton", "triton", URL), FurtherBackend("triton-2", "triton", "grpc://c")],
        ),
    ],
)  # fmt: skip
def test_entries(backend: str, text: str, entries: list[FurtherBackend]) -> None:
    assert order(text, backend) == entries
    assert needs_files(config(fail_over=text)) == any(not entry.endpoints for entry in entries)


def test_models_without_fail_over() -> None:
    assert read_order(config(), BACKENDS, ["triton"]) == []
    assert not needs_files(config())
    assert queue_size(config()) == 0


@pytest.mark.parametrize(("text", "told"), [
    ("", "expected between 1 and 7 entries"), (" ; ", "expected between 1 and 7 entries"),
    ("triton", "expected backends of this server ('onnxruntime', 'python'), or endpoints such"),
    ("onnx", "with ';' between them, got 'onnx'"),
    ("onnxruntime, python", "got 'onnxruntime, python'"),
    ("onnxruntime;onnxruntime", "'onnxruntime' is there twice"),
    (";".join(["grpc://a"] * 8), "expected between 1 and 7 entries"),
])  # fmt: skip
def test_invalid_entries_are_explained(text: str, told: str) -> None:
    with pytest.raises(InvalidOrder, match=re.escape(told)):
        order(text)


@given(st.text(max_size=40))
def test_any_text_is_entries_or_an_error(text: str) -> None:
    wanted = ModelConfig(backend="triton")
    wanted.parameters["fail_over"].string_value = text
    try:
        assert read_order(wanted, BACKENDS, ["triton"])
    except InvalidOrder:
        return


@pytest.mark.parametrize(("given", "told"), [
    (config(more="sequence_batching { }", fail_over="python"), "has sequences"),
    (config(fail_over="python", fail_over_queue_size="0"), "from 1 to 1000000, got '0'"),
    (config(fail_over="python", fail_over_instances="many"), "from 1 to 64, got 'many'"),
    (config(fail_over="python", fail_over_instances="00000000199"), "from 1 to 64, got '000"),
    (config(fail_over="python", fail_over_queue_size="000000001" + "0" * 5000),
     "got '000000001000"),
])  # fmt: skip
def test_entries_that_cannot_be_combined(given: ModelConfig, told: str) -> None:
    [problem] = problems(given)
    assert told in problem.text


def test_each_entry_has_a_configuration_of_its_own() -> None:
    given = config(
        more='max_batch_size: 4 default_model_filename: "model.plan" platform: "p"'
        " instance_group { count: 3 }",
        endpoints="grpc://a", fail_over=f"onnxruntime;{URL}", fail_over_instances="2",
        execution="thread",
    )  # fmt: skip
    here, there = (entry_config(given, entry) for entry in order(f"onnxruntime;{URL}"))
    assert (here.backend, here.platform, here.default_model_filename) == ("onnxruntime", "", "")
    assert [(g.name, g.count) for g in here.instance_group] == [("m_onnxruntime", 2)]
    assert here.parameters["execution"].string_value == "thread"
    assert there.parameters["endpoints"].string_value == URL
    assert "execution" not in there.parameters
    assert not there.instance_group  # its servers have the instances
    own = without_execution(given)
    assert "execution" not in own.parameters
    complete = ModelConfig()
    complete.CopyFrom(here)
    complete.input.add(name="x")
    joined = with_own_fields(complete, own)
    own.input.add(name="x")
    assert joined == own
    assert given.parameters["execution"].string_value == "thread"


@pytest.mark.parametrize(("group", "count"), [
    ('instance_group { rate_limiter { resources { name: "R" count: 3 } priority: 2 } }', 3),
    ("instance_group { count: 2 }", 0), ("", 0),
])  # fmt: skip
def test_further_backends_here_share_resources_as_the_first_group(group: str, count: int) -> None:
    given = config(more=group, fail_over=f"{URL}; onnxruntime; python")
    found = groups_here(given)
    assert [one.name for one in found] == ["m_onnxruntime", "m_python"]
    for one in found:
        assert [resource.count for resource in one.rate_limiter.resources] == [count] * bool(count)
        assert one.HasField("rate_limiter") == bool(count)
    assert [entry_config(given, entry).instance_group[:] for entry in order("onnxruntime")] == [
        found[:1]
    ]
