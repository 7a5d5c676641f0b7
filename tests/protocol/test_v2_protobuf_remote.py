"""Requests to upstreams as those decode them, and their answers."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Parameter, RegionSlice
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor
from headrace.protocol.parameters import read_region_slice
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_protobuf import (
    AnswerReader,
    RemoteInput,
    RemoteMessages,
    StreamError,
    decode_infer,
    parameter_values,
    shared_request,
    streamed_answer,
)
from tests.protocol.reference import encode_infer
from tests.protocol.strategies import response
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
def test_answers(datatype: Datatype) -> None:
    other = Tensor("B", Datatype.FP32, np.ones((1, 2), np.float32))
    parameters: dict[str, Parameter] = {"a": 1, "b": "c"}
    reader = AnswerReader()
    for shape, id in product([(2, 3), (0, 3), ()], ["id", "", "another"]):  # most from memory
        tensor = Tensor("OUT", datatype, values(datatype, shape))
        given = response(tensor, other, id=id, parameters=parameters)
        answer = reader.read(encode_infer(given).SerializeToString())
        assert answer.parameters == parameters
        assert answer.id == id
        assert answer.outputs["OUT"].dtype == NUMPY[datatype]
        np.testing.assert_array_equal(answer.outputs["OUT"], tensor.array)
        np.testing.assert_array_equal(answer.outputs["B"], other.array)


def test_an_answer_with_sizes_that_contradict_its_outputs_is_refused() -> None:
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


def test_an_answer_of_a_datatype_with_raw_contents_only() -> None:
    message = pb.ModelInferResponse()
    output = message.outputs.add(name="OUT", datatype="FP16", shape=[0])
    assert AnswerReader().read(message.SerializeToString()).outputs["OUT"].shape == (0,)
    output.shape[0] = 1
    output.contents.bytes_contents.append(b"ab")
    with pytest.raises(InvalidRequest, match="has 0 values"):
        AnswerReader().read(message.SerializeToString())


@given(st.binary(max_size=200))
def test_any_answer_is_read_or_refused(data: bytes) -> None:
    with suppress(InvalidRequest):
        AnswerReader().read(data)


@given(st.data())
def test_a_cut_answer_is_read_or_refused(data: st.DataObject) -> None:
    tensors = [Tensor(n, Datatype.FP32, np.ones((2, 2), np.float32)) for n in "AB"]
    whole = encode_infer(response(*tensors, id="id")).SerializeToString()
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
def test_a_stream_message_holds_a_response(raw: bytes, id: str) -> None:
    message = pb.ModelStreamInferResponse()
    message.infer_response.id = id
    message.infer_response.raw_output_contents.append(raw)
    found = streamed_answer(message.SerializeToString())
    assert not isinstance(found, StreamError)
    assert pb.ModelInferResponse.FromString(bytes(found)) == message.infer_response
    message.error_message = "not this one"
    assert streamed_answer(message.SerializeToString()) == ("not this one", None)
    message.infer_response.parameters["headrace_begun"].bool_param = False
    assert streamed_answer(message.SerializeToString()) == ("not this one", False)


@given(st.binary(max_size=20))
def test_invalid_stream_messages(data: bytes) -> None:
    with suppress(InvalidRequest, DecodeError):
        found = streamed_answer(data)
        expected = pb.ModelStreamInferResponse.FromString(data)
        if isinstance(found, StreamError):
            assert found.text == expected.error_message
        else:
            assert pb.ModelInferResponse.FromString(bytes(found)) == expected.infer_response


# --- tensors in shared memory


ROW = np.arange(4, dtype=np.float32)
WORDS = np.array([b"ab", b""], object)
INPUTS = [
    RemoteInput("A", Datatype.FP32, (2, 4), [ROW, ROW]),
    RemoteInput("W", Datatype.BYTES, (2,), [WORDS]),
    RemoteInput("B", Datatype.FP32, (4,), [ROW]),
]
SEQUENCE: dict[str, Parameter] = {"sequence_id": 2**64 - 1, "x": "y"}


def test_a_request_without_regions_is_unchanged() -> None:
    plain = RemoteMessages("m", "3").request(INPUTS, ["Y"], SEQUENCE, "7")
    shared = shared_request("m", "3", INPUTS, ["Y"], SEQUENCE, "7", {}, {})
    assert pb.ModelInferRequest.FromString(b"".join(shared)) == pb.ModelInferRequest.FromString(
        b"".join(plain)
    )


def test_tensors_in_regions_are_not_in_the_message() -> None:
    places, rooms = {"A": RegionSlice("in", 64, 32)}, {"Y": RegionSlice("out", 0, 16)}
    pieces = shared_request("m", "", INPUTS, ["Y", "Z"], {}, "", places, rooms)
    message = pb.ModelInferRequest.FromString(b"".join(pieces))
    first, *others = message.inputs
    assert read_region_slice("input 'A'", parameter_values(first.parameters)) == RegionSlice(
        "in", 64, 32
    )
    assert not any(item.parameters for item in others)
    assert len(message.raw_input_contents) == 2
    assert message.raw_input_contents[1] == ROW.tobytes()
    room, wire = message.outputs
    assert read_region_slice("output 'Y'", parameter_values(room.parameters)) == RegionSlice(
        "out", 0, 16
    )
    assert not wire.parameters


def answer(shape: list[int], raw: bytes, datatype: str = "FP32") -> bytes:
    """A response with the output Y."""
    message = pb.ModelInferResponse(raw_output_contents=[raw])
    message.outputs.add(name="Y", datatype=datatype, shape=shape)
    return message.SerializeToString()


def test_an_output_is_in_its_region_or_in_the_answer() -> None:
    reader, memory = AnswerReader(), bytearray(ROW.tobytes() + bytes(16))
    shared = {"Y": memoryview(memory)}
    found = reader.read(answer([4], b""), shared).outputs["Y"]
    np.testing.assert_array_equal(found, ROW)
    memory[:4] = bytes(4)
    memory[3] = 64
    assert np.asarray(found)[0] == 2.0  # it is a view
    np.testing.assert_array_equal(
        reader.read(answer([4], ROW[::-1].tobytes()), shared).outputs["Y"], ROW[::-1]
    )
    assert reader.read(answer([0], b""), shared).outputs["Y"].shape == (0,)


@pytest.mark.parametrize("data", [
    answer([9], b""), answer([4], b"abc"), answer([1], b"", "BYTES"),
], ids=["too large", "neither", "of no fixed size"])  # fmt: skip
def test_invalid_answers_in_regions(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        AnswerReader().read(data, {"Y": memoryview(bytearray(32))})
