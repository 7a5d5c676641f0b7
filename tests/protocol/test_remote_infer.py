"""Requests to other servers as those read them, and their answers."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import InferResponse, Parameter, Timing
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_protobuf import (
    AnswerReader,
    RemoteInput,
    RemoteMessages,
    decode_infer,
    response_in,
)
from tests.protocol.reference import encode_infer
from tests.support.remote import values


def read(data: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(data)


@pytest.mark.parametrize("datatype", Datatype)
def test_rows_of_several_requests_are_one_tensor(datatype: Datatype) -> None:
    messages = RemoteMessages("there", "3")
    parts = [values(datatype, (2, 3)), values(datatype, (1, 3))]
    given = [RemoteInput("IN", datatype, (3, 3), parts)]
    for _ in range(2):  # the second is written from memory
        message = read(b"".join(messages.request(given, ["OUT"], {})))
        assert (message.model_name, message.model_version, message.id) == ("there", "3", "")
        assert [output.name for output in message.outputs] == ["OUT"]
        request = decode_infer(message, 0)
        assert request.inputs["IN"].array.shape == (3, 3)
        np.testing.assert_array_equal(request.inputs["IN"].array, np.concatenate(parts))


PARAMETERS = st.dictionaries(
    st.text(min_size=1),
    st.text() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False),
)


@given(PARAMETERS, st.text())
def test_parameters_and_id(parameters: dict[str, Parameter], id: str) -> None:
    message = read(b"".join(RemoteMessages("m", "").request([], [], parameters, id)))
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
    reader = AnswerReader()
    for id in ("id", "", "another"):  # the second is read from memory
        response.id = id
        answer = reader.read(encode_infer(response).SerializeToString())
        assert answer.parameters == parameters
        assert answer.id == id
        assert answer.outputs["OUT"].dtype == NUMPY[datatype]
        np.testing.assert_array_equal(answer.outputs["OUT"], tensor.array)
        np.testing.assert_array_equal(answer.outputs["B"], other.array)


def test_an_answer_whose_sizes_do_not_fit_its_head_is_refused() -> None:
    reader = AnswerReader()
    message = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"1234"])
    message.outputs.add(name="OUT", datatype="FP32", shape=[1])
    assert reader.read(message.SerializeToString()).outputs["OUT"].shape == (1,)
    for wrong in ([b"12345678"], [b"1234", b"1234"], []):
        del message.raw_output_contents[:]
        message.raw_output_contents.extend(wrong)
        with pytest.raises(InvalidRequest):
            reader.read(message.SerializeToString())


def test_typed_contents_are_read() -> None:
    message = pb.ModelInferResponse(model_name="m")
    message.outputs.add(name="OUT", datatype="FP32", shape=[2]).contents.fp32_contents.extend(
        [1, 2]
    )
    message.outputs.add(name="T", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        b"\xff"
    )
    reader = AnswerReader()
    reader.read(message.SerializeToString())
    answer = reader.read(message.SerializeToString())
    assert answer.outputs["OUT"].tolist() == [1, 2]
    assert answer.outputs["T"].tolist() == [b"\xff"]


def test_an_answer_whose_datatype_has_raw_contents_only() -> None:
    message = pb.ModelInferResponse()
    output = message.outputs.add(name="OUT", datatype="FP16", shape=[0])
    assert AnswerReader().read(message.SerializeToString()).outputs["OUT"].shape == (0,)
    output.shape[0] = 1
    output.contents.bytes_contents.append(b"ab")
    with pytest.raises(InvalidRequest, match="has 0 values"):
        AnswerReader().read(message.SerializeToString())


@given(st.binary(max_size=200))
def test_anything_else_is_refused_or_read(data: bytes) -> None:
    with suppress(InvalidRequest):
        AnswerReader().read(data)


@given(st.data())
def test_what_is_cut_short_is_refused_or_read(data: st.DataObject) -> None:
    tensors = [Tensor(n, Datatype.FP32, np.ones((2, 2), np.float32)) for n in "AB"]
    response = InferResponse("m", "1", "id", tensors, Timing(0, 0, 1))
    whole = encode_infer(response).SerializeToString()
    cut = data.draw(st.integers(0, len(whole)))
    try:
        answer = AnswerReader().read(whole[:cut])
    except InvalidRequest:
        return
    assert cut == len(whole) or set(answer.outputs) <= {"A", "B"}


@pytest.mark.parametrize("id", [0, 7, 2**63 - 1, 2**63, 2**64 - 1])
def test_sequence_ids_have_64_bits(id: int) -> None:
    messages = RemoteMessages("m", "")
    message = pb.ModelInferRequest.FromString(
        b"".join(messages.request([], [], {"sequence_id": id}))
    )
    assert message.parameters["sequence_id"].int64_param % 2**64 == id


@given(st.binary(max_size=300), st.text())
def test_the_response_in_a_message_of_a_stream(raw: bytes, id: str) -> None:
    message = pb.ModelStreamInferResponse()
    message.infer_response.id = id
    message.infer_response.raw_output_contents.append(raw)
    data = message.SerializeToString()
    found = response_in(data)
    assert found is not None
    assert pb.ModelInferResponse.FromString(bytes(found)) == message.infer_response
    message.error_message = "not this one"
    assert response_in(message.SerializeToString()) is None


@given(st.binary(max_size=20))
def test_what_is_no_message_of_a_stream(data: bytes) -> None:
    found = response_in(data)
    assert found is None or data.endswith(bytes(found))
