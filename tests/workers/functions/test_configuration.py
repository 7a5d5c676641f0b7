"""Configurations completed from functions, and held against them."""

# mypy: disable-error-code="empty-body"

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from headrace import Float32, N, SignatureError, Strings, model
from headrace.workers.functions.adapter import FunctionModel
from headrace.workers.functions.decorator import declared
from headrace.workers.functions.finding import adapted
from tests.workers.functions.requests import completed, started


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


def test_all_of_it() -> None:
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
def test_what_is_given_is_kept(given: dict[str, Any], kept: dict[str, Any]) -> None:
    found = completed(adapter(batched), **given)
    assert {name: found[name] for name in kept} == kept
    started(batched, **given)


def test_relabelled_dimensions() -> None:
    started(batched, input=[{**X, "dims": [-1, 2, 2], "reshape": {"shape": [-1, 4]}}])


@pytest.mark.parametrize(
    ("function", "given", "says"),
    [
        (batched, {"max_batch_size": 32}, "max_batch_size is 32, the model's 16"),
        (whole, {"max_batch_size": 8}, "has it called for each request by itself"),
        (batched, {"input": [{**X, "dims": [4, -1]}]},
         r"input 'x' is TYPE_FP32 \[4, -1\], the model's is TYPE_FP32 \[-1, 4\]"),
        (batched, {"input": [{**X, "dims": [4]}]}, r"is TYPE_FP32 \[4\], the model's"),
        (batched, {"input": [{**X, "optional": True}]}, "'x' is optional, but the model needs it"),
        (batched, {"output": [{**OUTPUT, "name": "z"}]}, "has no output 'z', it has output"),
        (whole, {"model_transaction_policy": {"decoupled": True}}, "but the model does not yield"),
    ],
)  # fmt: skip
def test_what_contradicts(function: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(SignatureError, match=f"and its configuration: .*{says}"):
        started(function, **given)


def test_another_datatype_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="expects data_type TYPE_FP64 for input 'x'"):
        completed(adapter(batched), input=[{**X, "data_type": "TYPE_FP64"}])


def test_a_configuration_that_was_not_completed() -> None:
    for config, says in (
        ("{}", "max_batch_size is 0, but the model takes rows, up to 16"),
        ('{"max_batch_size": 4}', "the model also needs the inputs x"),
    ):
        with pytest.raises(SignatureError, match=says):
            adapter(batched)().initialize({"model_config": config})
    with pytest.raises(SignatureError, match="model_transaction_policy must be decoupled"):
        adapter(streaming)().initialize({"model_config": "{}"})
