"""Ensembles written as functions: the configuration that is made of them, and their errors."""

# mypy: disable-error-code="valid-type, no-any-return"

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from headrace import (
    Context,
    Engine,
    Ensemble,
    Float32,
    Int64,
    N,
    SignatureError,
    Strings,
    ensemble,
    model,
    step,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config


class Found(TypedDict):
    near: Float32[N, 1]
    far: Float32[N, 1]


class Pair(NamedTuple):
    near: Float32[N, 1]
    far: Float32[N, 1]


@model(max_batch_size=8)
def doubled(x: Float32[N, 1]) -> Float32[N, 1]:
    return 2 * x


@ensemble(max_batch_size=8, max_inflight_requests=3)
def pipeline(x: Float32[N, 1]) -> Found:
    """Twice and four times."""
    twice = step("doubled", x=x).output
    return {"near": twice, "far": step("doubled", x=twice)["output"]}


def config_of(made: Ensemble) -> ModelConfig:
    return parse_config(made.config, made.name).config


def test_the_configuration_of_a_function() -> None:
    assert pipeline.name == "pipeline"
    assert pipeline.__doc__ == "Twice and four times."
    config = config_of(pipeline)
    assert (config.platform, config.max_batch_size) == ("ensemble", 8)
    assert [(one.name, list(one.dims)) for one in config.input] == [("x", [1])]
    assert [one.name for one in config.output] == ["near", "far"]
    first, second = config.ensemble_scheduling.step
    assert dict(first.input_map) == {"x": "x"}
    assert dict(first.output_map) == {"output": "near"}
    assert dict(second.input_map) == {"x": "near"}
    assert dict(second.output_map) == {"output": "far"}
    assert config.ensemble_scheduling.max_inflight_requests == 3


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_names_of_any_characters(name: str) -> None:
    @ensemble
    def odd(x: Float32[1]) -> Float32[1]:
        given: dict[str, Any] = {name: x}
        return step(name, **given)[name]

    [only] = config_of(odd).ensemble_scheduling.step
    assert only.model_name == name
    assert (dict(only.input_map), dict(only.output_map)) == ({name: "x"}, {name: "output"})


def test_an_engine_serves_it_beside_its_models() -> None:
    with Engine(doubled, pipeline) as engine:
        found = engine.infer("pipeline", {"x": np.array([[1], [3]], np.float32)})
    assert found["near"].tolist() == [[2], [6]]
    assert found["far"].tolist() == [[4], [12]]


def test_forms_of_functions() -> None:
    @ensemble
    def plain(texts: Strings[N], count: Int64[1] | None = None) -> Int64[N]:
        return step("tokenizer", 3, TEXT=texts, COUNT=count).TOKENS

    config = config_of(plain)
    assert config.max_batch_size == 0
    assert [(one.name, one.optional) for one in config.input] == [("texts", False), ("count", True)]
    [only] = config.ensemble_scheduling.step
    assert (only.model_name, only.model_version) == ("tokenizer", 3)
    assert dict(only.output_map) == {"TOKENS": "output"}

    @ensemble
    def versions(x: Float32[1], version: Float32[1]) -> Float32[1]:
        first = step("m", version=version, x=x).y
        return step("n", 2, version=first, x=step("o", version=3, x=x).y).y

    steps = config_of(versions).ensemble_scheduling.step
    assert [(one.model_name, one.model_version) for one in steps] == [("m", -1), ("o", 3), ("n", 2)]
    assert [dict(one.input_map) for one in steps] == [
        {"version": "version", "x": "x"}, {"x": "x"}, {"version": "0.y", "x": "1.y"},
    ]  # fmt: skip

    @ensemble(outputs=["a", "b"])
    def several(x: Float32[1]) -> tuple[Float32[1], Float32[1]]:
        found = step("m", x=x)
        return found.y, found.z

    assert [one.name for one in config_of(several).output] == ["a", "b"]

    @ensemble(max_batch_size=4)
    def fields(x: Float32[N, 1]) -> Pair:
        return Pair(step("m", x=x).y, step("n", x=x).y)

    assert [one.name for one in config_of(fields).output] == ["near", "far"]


def nothing(x: Float32[1]) -> Float32[1]:
    return x


def values(x: Float32[1]) -> Float32[1]:
    return step("m", x=x, y=np.ones(1, np.float32)).y


def whole(x: Float32[1]) -> Float32[1]:
    return step("m", x=step("n", x=x)).y


def no_output(x: Float32[1]) -> Float32[1]:
    return step("m", x=x)  # type: ignore[return-value]


def decides(x: Float32[1]) -> Float32[1]:
    return step("m", x=x).y if x else step("n", x=x).y


def unused(x: Float32[1], z: Float32[1]) -> Float32[1]:
    return step("m", x=x).y


def idle(x: Float32[1]) -> Float32[1]:
    step("n", x=x)
    return step("m", x=x).y


def twice(x: Float32[1]) -> tuple[Float32[1], Float32[1]]:
    found = step("m", x=x).y
    return found, found


def told(x: Float32[1], context: Context) -> Float32[1]:
    return step("m", x=x).y


def misses(x: Float32[N, 1]) -> Found:
    return {"near": step("m", x=x).y}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("function", "text"), [
    (nothing, "output 'output' is input 'x', which has a name already"),
    (values, "input 'y' of the step of 'm' is no tensor of the ensemble, but array"),
    (whole, "is no tensor of the ensemble, but .*: take one of its outputs"),
    (no_output, "output 'output' is no output of a step, but"),
    (decides, "input 'x' has no value: the function is called without any"),
    (unused, "input 'z' is used by no step"),
    (idle, "no output of the step of 'n' is used"),
    (twice, "output 'output1' is output 'y' of the step of 'm', which has a name already"),
    (told, "it has no Context"),
    (misses, "it returns .* in place of near, far"),
])  # fmt: skip
def test_functions_that_are_no_graph(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(SignatureError, match=f"^ensemble {function.__name__}: .*{text}"):
        ensemble(function)
