"""gRPC infer messages: tables of the protocol's rules, then properties of any message."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import (
    MAX_TENSORS,
    Call,
    RegionSlice,
    SharedInput,
)
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.tensors import Tensor
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import check_fields
from headrace.protocol.v2_protobuf import (
    decode_infer,
    parse_infer,
    set_parameter,
)
from tests.protocol.reference import encode_infer
from tests.protocol.strategies import (
    PROPERTY,
    any_text,
    assert_same,
    memory_within,
    mutations,
    object_array,
    outcome,
    refused,
    response,
    tensors,
)

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor

_TYPED = {
    "bool": "BOOL", "uint": "UINT8 UINT16 UINT32", "uint64": "UINT64", "int": "INT8 INT16 INT32",
    "int64": "INT64", "fp32": "FP32", "fp64": "FP64", "bytes": "BYTES",
}  # fmt: skip
CONTENTS = {  # the field that holds the values of each datatype
    Datatype(datatype): f"{kind}_contents"
    for kind, datatypes in _TYPED.items()
    for datatype in datatypes.split()
}


def an_input(name: str = "x", datatype: str = "FP32", *shape: int, **contents: list[Any]) -> Input:
    item = Input(name=name, datatype=datatype, shape=shape)
    if contents:
        item.contents.MergeFrom(pb.InferTensorContents(**contents))
    return item


def message(*inputs: Input, raw: list[bytes] | None = None, **fields: Any) -> pb.ModelInferRequest:
    fields = {"model_name": "m"} | fields
    return pb.ModelInferRequest(inputs=inputs, raw_input_contents=raw or [], **fields)


def with_parameter(name: str, **choice: Any) -> pb.ModelInferRequest:
    given = message()
    given.parameters[name].MergeFrom(pb.InferParameter(**choice))
    return given


def over_the_wire(given: pb.ModelInferRequest) -> Call:
    data = given.SerializeToString()
    return decode_infer(parse_infer(data), len(data))


# Requests


def test_the_smallest_request() -> None:
    request = over_the_wire(message())
    assert (request.model_name, request.model_version, request.id) == ("m", "", "")
    assert (request.inputs, request.outputs, request.parameters) == ({}, (), {})
    assert request.options.classes is None


def test_a_request_with_every_field() -> None:
    given = message(
        an_input("x", "FP32", 2),
        an_input("s", "BYTES", 1, 1),
        raw=[np.array([1, 2], "<f4").tobytes(), b"\x01\0\0\0\xff", b"surplus, which is ignored"],
        model_version="3",
        id="42",
        outputs=[Output(name="y"), Output(name="z")],
    )
    given.outputs[1].parameters["binary_data"].bool_param = True  # no effect here
    given.outputs[1].parameters["classification"].int64_param = 5
    given.parameters["sequence_id"].string_param = "a sequence"
    given.parameters["sequence_start"].bool_param = True
    given.parameters["sequence_end"].bool_param = True
    given.parameters["priority"].uint64_param = 2
    given.parameters["timeout"].int64_param = 1000
    given.parameters["binary_data_output"].string_param = "means nothing here"
    given.parameters["triton_enable_empty_final_response"].bool_param = True
    given.parameters["temperature"].double_param = 0.5
    given.parameters["mode"].string_param = "fast"
    request = over_the_wire(given)
    assert (request.model_version, request.id) == ("3", "42")
    assert request.inputs["x"].array.tolist() == [1.0, 2.0]
    assert request.inputs["s"].array.tolist() == [[b"\xff"]]
    assert request.outputs == ("y", "z")
    assert request.options.classes == {"z": 5}
    assert (request.options.priority, request.options.timeout) == (2, 1000)
    assert request.options.sequence_id == "a sequence"
    assert (request.options.sequence_start, request.options.sequence_end) == (True, True)
    assert request.parameters == {"temperature": 0.5, "mode": "fast"}
    assert request.nbytes == len(given.SerializeToString())


def test_ids_of_sequences_are_unsigned() -> None:
    for sent, id in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)):
        given = with_parameter("sequence_id", int64_param=sent)
        assert over_the_wire(given).options.sequence_id == id


@pytest.mark.parametrize(("item", "values"), [
    (an_input("x", "FP32", 2, 1, fp32_contents=[1, 2]), [[1.0], [2.0]]),
    (an_input("x", "FP32", fp32_contents=[1]), 1.0), (an_input("x", "FP32", 0), []),
    (an_input("x", "BYTES", 0), []),
])  # fmt: skip
def test_typed_contents(item: Input, values: Any) -> None:
    tensor = over_the_wire(message(item)).inputs["x"]
    assert str(tensor.datatype) == item.datatype
    assert tensor.array.tolist() == values


@pytest.mark.parametrize(("given", "part"), [
    (message(an_input(), an_input(), raw=[bytes(4)] * 2), "input 'x' already exists in request"),
    (message(outputs=[Output(name="y")] * 2), "output 'y' already exists in request"),
    (message(an_input("x", "FLOAT", 1)), "unknown datatype 'FLOAT'"),
    (message(an_input("x", "", 1)), "unknown datatype ''"),
    # raw_input_contents
    (message(an_input("x", "FP32", 1, fp32_contents=[1]), raw=[bytes(4)]),
     "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"),
    (message(an_input("x", "FP32", 1), an_input("y", "FP32", 1), raw=[bytes(4)]),
     "unable to find data for input tensor 'y' for model 'm' in request."),
    (message(an_input("x", "FP32", 2), raw=[bytes(7)]), "input byte size mismatch for input 'x'"),
    (message(an_input("x", "FP32", 2), raw=[bytes(9)]), "Expected 8, got 9"),
    (message(an_input("x", "FP32", -1), raw=[bytes(4)]), "every dimension must be given"),
    (message(an_input("x", "FP32", -1, -4), raw=[bytes(16)]), "every dimension must be given"),
    (message(an_input("x", "FP32", 2**62, 4), raw=[b""]), "exceed maximum size of"),
    (message(an_input("x", "FP32", 0, 2**62), raw=[b""]), "byte size overflow for input"),
    (message(an_input("x", "FP32", 2**40), raw=[b""]), "Expected 4398046511104, got 0"),
    (message(an_input("x", "FP32", *[1] * 33), raw=[bytes(4)]), "33 dimensions"),
    (message(an_input("x", "BYTES", 2), raw=[bytes(4)]),
     "[request id: <id_unknown>] expected 2 string elements for inference input 'x' for model 'm',"
     " got 1"),
    (message(an_input("x", "BYTES", 1), raw=[bytes(8)]),
     "unexpected number of string elements 2 for inference input 'x' for model 'm', expecting 1"),
    # typed contents
    (message(an_input("x", "FP32", 1, int_contents=[1])),
     "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'FP32',"
     " expected fp32_contents, got int_contents"),
    (message(an_input("x", "FP32", 1, fp32_contents=[1], int_contents=[1])),
     "unexpected explicit tensor data for input tensor 'x' for model 'm'"),
    (message(an_input("x", "FP16", 1, fp32_contents=[1])), "FP16 data has no typed contents"),
    (message(an_input("x", "BF16", 0)), "BF16 data has no typed contents"),
    (message(an_input("x", "INT16", 3, int_contents=[1])),
     "input byte size mismatch for input 'x' for model 'm'. Expected 6, got 2"),
    (message(an_input("x", "FP32", 1)), "Expected 4, got 0"),
    (message(an_input("x", "FP32", fp32_contents=[1, 2])), "Expected 4, got 8"),
    (message(an_input("x", "FP32", 2**40, fp32_contents=[1])), "Expected 4398046511104, got 4"),
    (message(an_input("x", "FP32", 2**62, 4, fp32_contents=[1])), "exceed maximum size of"),
    (message(an_input("x", "FP32", -1, fp32_contents=[1])), "every dimension must be given"),
    (message(an_input("x", "BYTES", 2, bytes_contents=[b"a"])),
     "expected 2 string elements for inference input 'x' for model 'm', got 1"),
    (message(an_input("x", "UINT8", 1, uint_contents=[256])), "out of the range of UINT8"),
    (message(an_input("x", "INT8", 1, int_contents=[-129])), "out of the range of INT8"),
    # parameters
    (with_parameter("mine", uint64_param=1),
     "invalid value type for 'mine' parameter, expected int64_param"),
    (with_parameter("mine"), "invalid value type for 'mine' parameter"),
    (with_parameter("triton_x", int64_param=1), "keys starting with 'triton_' are reserved"),
    (with_parameter("triton_enable_empty_final_response", int64_param=1),
     "invalid value type for 'triton_enable_empty_final_response' parameter"),
    (with_parameter("sequence_id", bool_param=True), "invalid value type for 'sequence_id'"),
    (with_parameter("sequence_id", uint64_param=1), "invalid value type for 'sequence_id'"),
    # more than any model has
    (message(*[an_input(str(n)) for n in range(MAX_TENSORS + 1)]),
     f"a request may have {MAX_TENSORS} inputs, got {MAX_TENSORS + 1}"),
    (message(outputs=[Output(name=str(n)) for n in range(MAX_TENSORS + 1)]),
     f"a request may name {MAX_TENSORS} outputs, got {MAX_TENSORS + 1}"),
])  # fmt: skip
def test_requests_that_break_the_protocol(given: pb.ModelInferRequest, part: str) -> None:
    with memory_within(1_000_000), refused(part):
        decode_infer(given, 0)


def test_invalid_classification_counts() -> None:
    for choice in (pb.InferParameter(int64_param=0), pb.InferParameter(string_param="1")):
        wrong = message(outputs=[Output(name="y")])
        wrong.outputs[0].parameters["classification"].MergeFrom(choice)
        with refused("'classification' of output 'y' must be a positive"):
            over_the_wire(wrong)


def put_in_region(item: Any, offset: int = 0, size: int = 8, **more: Any) -> Any:
    """Reference a tensor in shared memory."""
    item.parameters["shared_memory_region"].string_param = "r"
    item.parameters["shared_memory_offset"].int64_param = offset
    item.parameters["shared_memory_byte_size"].int64_param = size
    for name, choice in more.items():
        item.parameters[name].CopyFrom(pb.InferParameter(**choice))
    return item


def test_named_outputs_beside_all_others() -> None:
    given = with_parameter("headrace_all_outputs", bool_param=True)
    put_in_region(given.outputs.add(name="y"), 8, 0)
    request = over_the_wire(given)
    assert (request.outputs, request.parameters) == ((), {})
    assert request.options.shared is not None
    assert list(request.options.shared.outputs) == ["y"]


def test_tensors_in_shared_memory() -> None:
    given = message(id="7")
    put_in_region(given.inputs.add(name="a", datatype="FP32", shape=[2]), 16)
    given.inputs.add(name="b", datatype="INT8", shape=[1])
    put_in_region(given.inputs.add(name="c", datatype="BYTES", shape=[1]), 0, 99)
    given.inputs.add(name="d", datatype="INT8", shape=[1])
    given.raw_input_contents.extend([b"\1", b"\2"])  # those in shared memory have none
    put_in_region(given.outputs.add(name="y"), 8, 0)
    given.outputs.add(name="z").parameters["classification"].int64_param = 2
    request = over_the_wire(given)
    assert request.options.shared is not None
    assert {name: tensor.array.tolist() for name, tensor in request.inputs.items()} == {
        "b": [1], "d": [2]
    }  # fmt: skip
    assert request.options.shared.inputs == {
        "a": SharedInput(Datatype.FP32, (2,), RegionSlice("r", 16, 8)),
        "c": SharedInput(Datatype.BYTES, (1,), RegionSlice("r", 0, 99)),
    }
    assert (request.outputs, request.options.classes) == (("y", "z"), {"z": 2})
    assert request.options.shared.outputs == {"y": RegionSlice("r", 8, 0)}


def test_typed_contents_beside_shared_memory() -> None:
    place = put_in_region(Input(name="a", datatype="FP32", shape=[2]))
    request = over_the_wire(message(place, an_input("b", "FP32", 1, fp32_contents=[3])))
    assert request.options.shared is not None
    assert list(request.inputs) == ["b"]
    assert list(request.options.shared.inputs) == ["a"]


@pytest.mark.parametrize(("name", "choice", "part"), [
    ("shared_memory_region", {"int64_param": 1}, "of input 'x' must be a region's name"),
    ("shared_memory_offset", {"uint64_param": 0}, "invalid value type for 'shared_memory_off"),
    ("shared_memory_byte_size", {"int64_param": 12}, "input byte size mismatch for input 'x'"),
])  # fmt: skip
def test_inputs_without_a_place_in_shared_memory(
    name: str, choice: dict[str, Any], part: str
) -> None:
    item = put_in_region(Input(name="x", datatype="FP32", shape=[2]))
    item.parameters[name].CopyFrom(pb.InferParameter(**choice))
    with refused(part):
        over_the_wire(message(item))


def test_options_that_shared_memory_excludes() -> None:
    contents = put_in_region(an_input("x", "FP32", 2, fp32_contents=[1, 2]))
    with refused("unexpected 'content' provided when using shared"):
        over_the_wire(message(contents))
    item = put_in_region(Input(name="x", datatype="FP32", shape=[2]))
    with refused("input 'x' already exists in request"):
        over_the_wire(message(item, item))
    wanted = put_in_region(Output(name="y"), classification={"int64_param": 2})
    with refused("'classification' can not be had in shared memory"):
        over_the_wire(message(outputs=[wanted]))


def test_bytes_that_are_not_a_message() -> None:
    for data in (b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff", b"\x2b" * 200):
        with refused("not a valid ModelInferRequest message"):
            parse_infer(data)


# Responses


def test_a_response() -> None:
    parameters = {"final": True, "n": 3, "score": 0.5, "text": "é"}
    empty = Tensor("e", Datatype.INT64, np.zeros((0, 3), np.int64))
    text = Tensor("s", Datatype.BYTES, object_array([b"\xff", b""], [2]))
    one = Tensor("y", Datatype.FP32, np.array([[1, 2]], np.float32))
    answer = encode_infer(response(one, empty, text, id="42", parameters=parameters))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "42")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("y", "FP32", [1, 2]), ("e", "INT64", [0, 3]), ("s", "BYTES", [2]),
    ]  # fmt: skip
    # One entry for each output, empty ones included; never typed contents.
    assert list(answer.raw_output_contents) == [
        np.array([1, 2], "<f4").tobytes(), b"", b"\1\0\0\0\xff\0\0\0\0",
    ]  # fmt: skip
    assert not any(output.HasField("contents") for output in answer.outputs)
    choices = {n: p.WhichOneof("parameter_choice") for n, p in answer.parameters.items()}
    kinds = {"final": "bool", "n": "int64", "score": "double", "text": "string"}
    assert choices == {name: f"{kind}_param" for name, kind in kinds.items()}


def test_set_parameter() -> None:
    for value in (True, False, 0, -(2**63), 2**63 - 1, 0.5, "", "é"):
        answer = pb.ModelInferResponse()
        set_parameter(answer, "p", value)
        choice = answer.parameters["p"].WhichOneof("parameter_choice")
        assert choice is not None
        assert getattr(answer.parameters["p"], choice) == value


# Properties of any message


@PROPERTY
@given(tensors(), tensors(name="y"))
def test_raw_tensors_round_trip(one: Tensor, other: Tensor) -> None:
    answer = pb.ModelInferResponse.FromString(
        encode_infer(response(one, other)).SerializeToString()
    )
    inputs = [Input(name=o.name, datatype=o.datatype, shape=o.shape) for o in answer.outputs]
    request = over_the_wire(message(*inputs, raw=list(answer.raw_output_contents)))
    assert_same(request.inputs["x"], one)
    assert_same(request.inputs["y"], other)


@PROPERTY
@given(tensors(tuple(CONTENTS)))
def test_typed_tensors_round_trip(tensor: Tensor) -> None:
    values = tensor.array.ravel().tolist()
    item = Input(name="x", datatype=tensor.datatype.value, shape=tensor.array.shape)
    getattr(item.contents, CONTENTS[tensor.datatype]).extend(values)
    assert_same(over_the_wire(message(item)).inputs["x"], tensor, bits=False)


def decode_bytes(data: bytes) -> Call:
    return decode_infer(parse_infer(data), len(data))


def assert_served_or_refused(data: bytes) -> None:
    """Assert a client error, or a request whose inputs can be encoded as a response."""
    request = outcome(decode_bytes, data)
    if isinstance(request, ServerError):
        return
    echo = response(*request.inputs.values(), id=request.id, parameters=request.parameters)
    assert encode_infer(echo).SerializeToString()


@PROPERTY
@given(tensors(), st.data())
def test_a_damaged_message(tensor: Tensor, data: st.DataObject) -> None:
    answer = encode_infer(response(tensor))
    item = Input(name="x", datatype=tensor.datatype.value, shape=tensor.array.shape)
    given = message(item, raw=list(answer.raw_output_contents), outputs=[Output(name="y")])
    assert_served_or_refused(data.draw(mutations(given.SerializeToString())))


def test_a_cut_message() -> None:
    """A message may end between two fields, so not every cut is an error."""
    given = message(an_input("x", "FP32", 2, fp32_contents=[1, 2]), id="42")
    given.parameters["priority"].uint64_param = 2
    data = given.SerializeToString()
    for size in range(len(data)):
        assert_served_or_refused(data[:size])


@PROPERTY
@given(st.binary())
def test_random_bytes(data: bytes) -> None:
    assert_served_or_refused(data)


# Almost valid messages.
text = any_text.filter(lambda t: t.isprintable() and t.encode(errors="ignore").decode() == t)
int64 = st.integers(-(2**63), 2**63 - 1)
_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "int64_param": int64, "uint64_param": st.integers(0, 2**64 - 1), "string_param": text,
    "bool_param": st.booleans(), "double_param": st.floats(),
}  # fmt: skip
choices = st.one_of(
    st.just({}), *[st.fixed_dictionaries({name: value}) for name, value in _CHOICES.items()]
).map(lambda choice: pb.InferParameter(**choice))
keys = text | st.sampled_from([
    "priority", "timeout", "sequence_id", "classification", "shared_memory_region",
    "shared_memory_offset", "shared_memory_byte_size",
])  # fmt: skip
parameters = st.dictionaries(keys, choices, max_size=2)


def contents_of(fields: dict[str, Any]) -> pb.InferTensorContents:
    return pb.InferTensorContents(**fields)


contents = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(values, max_size=2)
        for name, values in {
            "bool_contents": st.booleans(), "int_contents": st.integers(-(2**31), 2**31 - 1),
            "uint64_contents": st.integers(0, 2**64 - 1), "fp32_contents": st.floats(width=32),
            "fp64_contents": st.floats(), "bytes_contents": st.binary(max_size=2),
        }.items()
    },
).map(contents_of)  # fmt: skip
inputs = st.builds(
    Input,
    name=st.sampled_from("ab") | text,
    datatype=st.sampled_from([str(datatype) for datatype in Datatype]) | text,
    shape=st.lists(st.integers(-1, 3) | int64, max_size=3),
    parameters=parameters,
    contents=st.none() | contents,
)
requests = st.builds(
    pb.ModelInferRequest,
    inputs=st.lists(inputs, max_size=2),
    outputs=st.lists(
        st.builds(Output, name=st.sampled_from("ab") | text, parameters=parameters), max_size=2
    ),
    parameters=parameters,
    raw_input_contents=st.lists(st.binary(max_size=12), max_size=2),
)


@PROPERTY
@given(requests)
def test_almost_valid_messages(request_: pb.ModelInferRequest) -> None:
    assert_served_or_refused(request_.SerializeToString())


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x22\x00", b"\x78\x01"])
def test_too_many_fields(field: bytes) -> None:
    """Inputs, outputs, raw contents, parameters and unknown fields: none is parsed."""
    with memory_within(10 << 20), refused("may have 16384 fields"):
        parse_infer(field * 1_000_000)


@PROPERTY
@given(st.binary(max_size=2000))
def test_counting_fields_accepts_any_bytes(noise: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        check_fields(noise)
    with contextlib.suppress(InvalidRequest):
        check_fields(noise * 200)
