"""Requests to other servers as those read them, and their answers."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.requests import InferResponse, Parameter, Timing
from headrace.core.tensors import Tensor
from headrace.wire.grpc_infer import decode_infer, encode_infer
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import RemoteInput, RemoteMessages, read_answer
from tests.support.remote import values


def read(data: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(data)


@pytest.mark.parametrize("datatype", Datatype)
def test_rows_of_several_requests_are_one_tensor(datatype: Datatype) -> None:
    messages = RemoteMessages("there", "3")
    parts = [values(datatype, (2, 3)), values(datatype, (1, 3))]
    given = [RemoteInput("IN", datatype, (3, 3), parts)]
    for _ in range(2):  # the second is written from memory
        message = read(messages.request(given, ["OUT"], {}))
        assert (message.model_name, message.model_version, message.id) == ("there", "3", "")
        assert [output.name for output in message.outputs] == ["OUT"]
        request = decode_infer(message, 0)
        assert request.inputs["IN"].array.shape == (3, 3)
        np.testing.assert_array_equal(request.inputs["IN"].array, np.concatenate(parts))


PARAMETERS = st.dictionaries(
    st.text(min_size=1),
    st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
)


@given(PARAMETERS, st.text())
def test_parameters_and_id(parameters: dict[str, Parameter], id: str) -> None:
    message = read(RemoteMessages("m", "").request([], [], parameters, id))
    assert message.id == id
    found = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "")
        for name, value in message.parameters.items()
    }
    assert found == parameters


@pytest.mark.parametrize("datatype", Datatype)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_answers(datatype: Datatype, shape: tuple[int, ...]) -> None:
    tensor = Tensor("OUT", datatype, values(datatype, shape))
    other = Tensor("B", Datatype.FP32, np.ones((1, 2), np.float32))
    parameters: dict[str, Parameter] = {"a": 1, "b": "c"}
    response = InferResponse("m", "1", "id", [tensor, other], Timing(0, 0, 1), parameters)
    answer = read_answer(encode_infer(response).SerializeToString())
    assert answer.parameters == parameters
    assert answer.outputs["OUT"].dtype == NUMPY[datatype]
    np.testing.assert_array_equal(answer.outputs["OUT"], tensor.array)
    np.testing.assert_array_equal(answer.outputs["B"], other.array)


def test_typed_contents_are_read() -> None:
    message = pb.ModelInferResponse(model_name="m")
    message.outputs.add(name="OUT", datatype="FP32", shape=[2]).contents.fp32_contents.extend(
        [1, 2]
    )
    message.outputs.add(name="T", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        b"\xff"
    )
    answer = read_answer(message.SerializeToString())
    assert answer.outputs["OUT"].tolist() == [1, 2]
    assert answer.outputs["T"].tolist() == [b"\xff"]


@given(st.binary(max_size=200))
def test_anything_else_is_refused_or_read(data: bytes) -> None:
    with suppress(InvalidRequest):
        read_answer(data)


@given(st.data())
def test_what_is_cut_short_is_refused_or_read(data: st.DataObject) -> None:
    tensors = [Tensor(n, Datatype.FP32, np.ones((2, 2), np.float32)) for n in "AB"]
    response = InferResponse("m", "1", "id", tensors, Timing(0, 0, 1))
    whole = encode_infer(response).SerializeToString()
    cut = data.draw(st.integers(0, len(whole)))
    try:
        answer = read_answer(whole[:cut])
    except InvalidRequest:
        return
    assert cut == len(whole) or set(answer.outputs) <= {"A", "B"}
