"""Messages about tensors that lie in shared memory."""

import numpy as np
import pytest

from headrace.core.call import Parameter, RegionSlice
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.protocol.parameters import read_region_slice
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_protobuf import (
    AnswerReader,
    Place,
    RemoteInput,
    RemoteMessages,
    parameter_values,
    shared_request,
)

ROW = np.arange(4, dtype=np.float32)
WORDS = np.array([b"ab", b""], object)
INPUTS = [
    RemoteInput("A", Datatype.FP32, (2, 4), [ROW, ROW]),
    RemoteInput("W", Datatype.BYTES, (2,), [WORDS]),
    RemoteInput("B", Datatype.FP32, (4,), [ROW]),
]
PARAMETERS: dict[str, Parameter] = {"sequence_id": 2**64 - 1, "x": "y"}


def test_without_places_it_is_the_same_request() -> None:
    plain = RemoteMessages("m", "3").request(INPUTS, ["Y"], PARAMETERS, "7")
    shared = shared_request("m", "3", INPUTS, ["Y"], PARAMETERS, "7", {}, {})
    assert pb.ModelInferRequest.FromString(b"".join(shared)) == pb.ModelInferRequest.FromString(
        b"".join(plain)
    )


def test_what_has_a_place_is_not_in_the_message() -> None:
    places, rooms = {"A": Place("in", 64, 32)}, {"Y": Place("out", 0, 16)}
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
    """A response with an output Y."""
    message = pb.ModelInferResponse(raw_output_contents=[raw])
    message.outputs.add(name="Y", datatype=datatype, shape=shape)
    return message.SerializeToString()


def test_an_output_is_where_it_was_to_be_put_or_in_the_answer() -> None:
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
def test_an_answer_that_cannot_be(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        AnswerReader().read(data, {"Y": memoryview(bytearray(32))})
