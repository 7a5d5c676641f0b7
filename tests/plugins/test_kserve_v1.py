"""Rows of version 1 of KServe's protocol as tensors, and outputs as predictions."""

import json
from typing import Any

import numpy as np
import pytest

from headrace.core.bytes_array import bytes_array
from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.plugins.kserve_v1 import decode_predict, encode_predictions

FP32 = Datatype.FP32
TIMING = Timing(0, 0, 0, 0)


def spec(name: str, *dims: int, datatype: Datatype = FP32) -> TensorSpec:
    return TensorSpec(name, datatype, dims)


@pytest.mark.parametrize(("dims", "rows", "shape"), [
    ((), [1, 2], (2,)),
    ((1,), [1, 2], (2, 1)),
    ((-1,), [1, 2], (2, 1)),
    ((1, 1), [1, 2], (2, 1, 1)),
    ((2,), [[1, 2]], (1, 2)),
    ((2, 1), [[1, 2]], (1, 2, 1)),
    ((3,), [1, 2], (2,)),  # refused when the call is checked
])  # fmt: skip
def test_missing_dimensions_of_one_element(
    dims: tuple[int, ...], rows: list[Any], shape: tuple[int, ...]
) -> None:
    signature = Signature("m", 8, (spec("x", *dims),), (spec("y", 1),))
    call = decode_predict(signature, "m", json.dumps({"instances": rows}).encode())
    assert call.inputs["x"].array.shape == shape


def test_rows_are_of_the_only_input_even_if_it_is_optional() -> None:
    only, other = (TensorSpec(name, FP32, (1,), optional=True) for name in "xz")
    body = json.dumps({"instances": [1, 2]}).encode()
    call = decode_predict(Signature("m", 8, (only,), (spec("y", 1),)), "m", body)
    assert call.inputs["x"].array.tolist() == [[1], [2]]
    both = Signature("m", 8, (only, other), (spec("y", 1),))
    with pytest.raises(InvalidRequest, match=r"with values for the inputs \['x','z'\]"):
        decode_predict(both, "m", body)


def predictions(*outputs: Tensor) -> Any:
    return json.loads(encode_predictions(InferResponse("m", "1", "", list(outputs), TIMING)))


def test_predictions_of_several_outputs() -> None:
    labels = Tensor("label", Datatype.BYTES, bytes_array([b"cat", b"\xff"], [2]))
    scores = Tensor("score", FP32, np.array([[0.5, 0.5], [1, 0]], np.float32))
    assert predictions(labels, scores) == {
        "predictions": [
            {"label": "cat", "score": [0.5, 0.5]},
            {"label": {"b64": "/w=="}, "score": [1, 0]},
        ]
    }


def test_outputs_without_common_rows_are_one_object() -> None:
    one, two = (Tensor(str(n), FP32, np.ones(n, np.float32)) for n in (1, 2))
    assert predictions(one, two) == {"predictions": {"1": [1], "2": [1, 1]}}
    scalar = Tensor("s", FP32, np.full((), 3, np.float32))
    assert predictions(scalar, scalar._replace(name="t")) == {"predictions": {"s": 3, "t": 3}}
    assert predictions(scalar) == {"predictions": 3}
