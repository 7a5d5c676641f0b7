"""Configurations completed from functions, and checked against them."""

# mypy: disable-error-code="empty-body"

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from headrace import Float32, N, Strings, model
from headrace.plugins.functions.adapter import FunctionModel, adapted
from headrace.plugins.functions.decorator import declared
from headrace.workers.triton_config import Contradicted
from tests.plugins.functions.requests import completed, started


class Width: ...


@model(max_batch_size=16)
def batched(x: Float32[N, Width, Literal[4]], y: Strings[N] | None = None) -> Strings[N]: ...


@model
def whole(x: Float32[N]) -> float: ...


@model
def streaming(text: str) -> Iterator[str]:
    yield text


def adapter(function: object) -> type[FunctionModel]:
    declaration = declared(function)
    assert declaration is not None
    return adapted(declaration)


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}
Y = {"name": "y", "data_type": "TYPE_STRING", "dims": [], "optional": True}
OUTPUT = {"name": "output", "data_type": "TYPE_STRING", "dims": []}


def test_a_complete_configuration() -> None:
    assert completed(adapter(batched)) == {
        "max_batch_size": 16, "input": [X, Y], "output": [OUTPUT]
    }  # fmt: skip
    assert completed(adapter(whole)) == {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "output", "data_type": "TYPE_FP64", "dims": [1]}],
    }
    assert completed(adapter(streaming))["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"max_batch_size": 4}, {"max_batch_size": 4}),
        ({"input": [{**X, "dims": [7, 4]}]}, {"input": [{**X, "dims": [7, 4]}, Y]}),
        ({"input": [{"name": "y"}]}, {"input": [Y, X]}),
        ({"output": [{**OUTPUT, "data_type": "TYPE_INVALID"}]}, {"output": [OUTPUT]}),
        ({"output": [{**OUTPUT, "label_filename": "l"}]},
         {"output": [{**OUTPUT, "label_filename": "l"}]}),
    ],
)  # fmt: skip
def test_declared_fields_are_kept(given: dict[str, Any], kept: dict[str, Any]) -> None:
    found = completed(adapter(batched), **given)
    assert {name: found[name] for name in kept} == kept
    started(batched, **given)


def test_relabelled_dimensions() -> None:
    started(batched, input=[{**X, "dims": [-1, 2, 2], "reshape": {"shape": [-1, 4]}}])


@pytest.mark.parametrize(
    ("function", "given", "path", "says"),
    [
        (batched, {"max_batch_size": 32}, "max_batch_size", "it is 32 here, and 16 in the model"),
        (whole, {"max_batch_size": 8}, "max_batch_size", "has it called for each request by its"),
        (batched, {"input": [Y, {**X, "dims": [4, -1]}]}, "input[1].dims",
         r"'x' has \[4, -1\] here, and \[-1, 4\] in the model"),
        (batched, {"input": [{**X, "dims": [4]}]}, "input[0].dims", r"has \[4\] here"),
        (batched, {"input": [{**X, "reshape": {"shape": [4]}}]}, "input[0].reshape", "has"),
        (batched, {"input": [{**X, "data_type": "TYPE_FP64"}]}, "input[0].data_type",
         "'x' is TYPE_FP64 here, and TYPE_FP32 in the model"),
        (batched, {"input": [{**X, "optional": True}]}, "input[0].optional", "model needs 'x'"),
        (batched, {"output": [{**OUTPUT, "name": "z"}]}, "output[0].name",
         "has no output 'z', it has output"),
        (whole, {"model_transaction_policy": {"decoupled": True}},
         "model_transaction_policy.decoupled", "must be false"),
        (streaming, {"model_transaction_policy": {"decoupled": False}},
         "model_transaction_policy.decoupled", "must be true"),
    ],
)  # fmt: skip
def test_contradictions(function: Any, given: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(Contradicted, match=says) as found:
        started(function, **given)
    assert [field for field, _ in found.value.problems] == [path]


def test_a_configuration_that_was_not_completed() -> None:
    for config, says in (
        ("{}", "it is 0, but the model takes rows, up to 16"),
        ('{"max_batch_size": 4}', "the model also needs the inputs x"),
    ):
        with pytest.raises(Contradicted, match=says):
            adapter(batched)().initialize({"model_config": config})
    with pytest.raises(Contradicted, match="must be true"):
        adapter(streaming)().initialize({"model_config": "{}"})
