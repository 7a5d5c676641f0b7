"""Messages of TensorFlow Serving."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.plugins.dialects.tfserving import (
    available,
    metadata_of,
    model_spec,
    predict_request,
    read_predictions,
    signatures_of,
)
from headrace.protocol.pb import tfserving_pb2 as tf
from headrace.protocol.v2_protobuf import RemoteInput
from tests.support.remote import values


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("datatype", Datatype)
def test_requests_and_answers(datatype: Datatype, count: int) -> None:
    part = values(datatype, (2, 3))
    item = RemoteInput("A", datatype, (2 * count, 3), [part] * count)
    message = predict_request(model_spec("m", "7", "", "s"), [item], ["Y"])
    request = tf.PredictRequest.FromString(b"".join(message))
    assert list(request.output_filter) == ["Y"]
    spec = request.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("m", 7, "s")
    answer = tf.PredictResponse(outputs=request.inputs)
    found = read_predictions(answer.SerializeToString()).outputs["A"]
    assert (found.shape, found.dtype) == ((2 * count, 3), part.dtype)
    assert found.tolist() == np.concatenate([part] * count).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_shapes_without_rows(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    item = RemoteInput("A", Datatype.FP32, shape, [array])
    message = predict_request(model_spec("m", "", "l"), [item], [])
    request = tf.PredictRequest.FromString(b"".join(message))
    assert request.model_spec.version_label == "l"
    answer = tf.PredictResponse(outputs=request.inputs).SerializeToString()
    assert read_predictions(answer).outputs["A"].shape == shape


@pytest.mark.parametrize(
    ("kind", "field", "given", "datatype", "expected"),
    [
        (tf.DT_FLOAT, "float_val", [1.5, 2.5], Datatype.FP32, [1.5, 2.5, 2.5]),
        (tf.DT_DOUBLE, "double_val", [1, 2, 3], Datatype.FP64, [1, 2, 3]),
        (tf.DT_INT8, "int_val", [-1], Datatype.INT8, [-1, -1, -1]),
        (tf.DT_UINT16, "int_val", [1, 2, 65535], Datatype.UINT16, [1, 2, 65535]),
        (tf.DT_INT64, "int64_val", [], Datatype.INT64, [0, 0, 0]),
        (tf.DT_UINT64, "uint64_val", [2**63], Datatype.UINT64, [2**63] * 3),
        (tf.DT_BOOL, "bool_val", [True, False], Datatype.BOOL, [True, False, False]),
        (tf.DT_HALF, "half_val", [0x3C00], Datatype.FP16, [1, 1, 1]),
        (tf.DT_BFLOAT16, "half_val", [0x3F80], Datatype.BF16, [1, 1, 1]),
        (tf.DT_STRING, "string_val", [b"a"], Datatype.BYTES, [b"a"] * 3),
    ],
)
def test_values_in_the_field_of_their_type(
    kind: int, field: str, given: list[object], datatype: Datatype, expected: list[object]
) -> None:
    answer = tf.PredictResponse()
    tensor = answer.outputs["A"]
    tensor.dtype = tf.DataType.ValueType(kind)
    tensor.tensor_shape.dim.add(size=3)
    getattr(tensor, field).extend(given)
    found = read_predictions(answer.SerializeToString()).outputs["A"]
    assert found.dtype == NUMPY[datatype]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (tf.Tensor(dtype=tf.DT_COMPLEX64), "the datatype 8"),
        (tf.Tensor(dtype=tf.DT_FLOAT, float_val=[1, 2]), "2 values, not 1"),
        (tf.Tensor(dtype=tf.DT_FLOAT, tensor_content=b"abc"), "has 3 bytes"),
        (tf.Tensor(dtype=tf.DT_INT8, int_val=[300]), "out of its range"),
        (
            tf.Tensor(
                dtype=tf.DT_INT8,
                tensor_shape=tf.TensorShape(dim=[tf.TensorShape.Dim(size=1 << 40)]),
            ),
            "0 values",
        ),
        (
            tf.Tensor(
                dtype=tf.DT_INT8, tensor_shape=tf.TensorShape(dim=[tf.TensorShape.Dim(size=-1)])
            ),
            "not negative",
        ),
    ],
)
def test_invalid_tensors(tensor: tf.Tensor, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_predictions(tf.PredictResponse(outputs={"A": tensor}).SerializeToString())


@given(st.binary())
def test_any_bytes_are_an_answer_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        read_predictions(data)
    with contextlib.suppress(InvalidRequest):
        signatures_of({"signature_def": tf.Any(value=data)})


def test_signatures() -> None:
    found = tf.SignatureDefMap()
    definition = found.signature_def["s"]
    for name, kind in (("b", tf.DT_FLOAT), ("a", tf.DT_RESOURCE), ("c", 99)):
        definition.inputs[name].dtype = tf.DataType.ValueType(kind)
        definition.inputs[name].tensor_shape.dim.add(size=-1)
    definition.outputs["y"].tensor_shape.unknown_rank = True
    said = metadata_of(found, "s")
    assert [(t.name, t.datatype, list(t.shape)) for t in said.inputs] == [
        ("a", "DT_RESOURCE", [-1]), ("b", "FP32", [-1]), ("c", "DataType 99", [-1]),
    ]  # fmt: skip
    assert not said.outputs
    with pytest.raises(InvalidRequest, match="no signature 'x', it has 's'"):
        metadata_of(found, "x")
    with pytest.raises(InvalidRequest, match="without signatures"):
        signatures_of({})


def test_states() -> None:
    status = tf.GetModelStatusResponse()
    assert not available(status)
    status.model_version_status.add(version=1, state=tf.ModelVersionStatus.END)
    assert not available(status)
    status.model_version_status.add(version=2, state=tf.ModelVersionStatus.AVAILABLE)
    assert available(status)
