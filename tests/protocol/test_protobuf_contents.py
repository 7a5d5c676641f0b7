"""Large messages with typed contents: numpy reads what protobuf reads, or refuses it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.limits import uncharged
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.protocol.elements import MAX_DECODED
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import (
    CONTENTS,
    MAX_FIELDS,
    MAX_HEAD,
    Contents,
    check_fields,
    outline,
    tensor_from_contents,
    varint,
)
from headrace.protocol.v2_protobuf import LONG, InferReader, decode_infer, parse_infer
from tests.protocol.strategies import PROPERTY, assert_same, mutations, outcome

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1) | st.integers(-130, 130),
    "int64_contents": st.integers(-(2**63), 2**63 - 1) | st.integers(-130, 130),
    "uint_contents": st.integers(0, 2**32 - 1) | st.integers(0, 260),
    "uint64_contents": st.integers(0, 2**64 - 1) | st.integers(0, 260),
    "fp32_contents": st.floats(width=32, allow_nan=False),
    "fp64_contents": st.floats(allow_nan=False),
    "bytes_contents": st.binary(max_size=300),
}


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", id=draw(st.text(max_size=3)))
    for name in draw(st.lists(st.sampled_from("xyz"), max_size=3)):
        datatype = draw(st.sampled_from(list(CONTENTS)))
        values = draw(st.lists(_VALUES[CONTENTS[datatype]], max_size=20))
        item = message.inputs.add(name=name, datatype=datatype.value, shape=[len(values)])
        getattr(item.contents, CONTENTS[datatype]).extend(values)
    if draw(st.booleans()):
        message.outputs.add(name="o").parameters["classification"].int64_param = 3
        message.parameters["p"].string_param = "v"
    return message


def by_hand(data: bytes) -> Any:
    outlined = outline(data)
    contents = Contents(data, outlined.contents, uncharged)
    raw = [data[start:stop] for start, stop in outlined.raw]
    return decode_infer(parse_infer(outlined.head), len(data), raw, None, contents)


def by_protobuf(data: bytes) -> Any:
    return decode_infer(parse_infer(data), len(data))


def same(one: Any, other: Any) -> None:
    assert (one.id, one.outputs, one.parameters, one.options.classes) == (
        other.id, other.outputs, other.parameters, other.options.classes,
    )  # fmt: skip
    assert list(one.inputs) == list(other.inputs)
    for name, tensor in one.inputs.items():
        assert_same(tensor, other.inputs[name], bits=False)


@PROPERTY
@given(messages())
def test_contents_read_by_numpy_equal_protobufs(message: pb.ModelInferRequest) -> None:
    data = message.SerializeToString()
    expected, found = outcome(by_protobuf, data), outcome(by_hand, data)
    if isinstance(expected, InvalidRequest):
        assert isinstance(found, InvalidRequest)
    else:
        same(found, expected)


@PROPERTY
@given(st.data(), messages())
def test_contents_that_protobuf_refuses_are_refused(data: st.DataObject, message: Any) -> None:
    body = data.draw(mutations(message.SerializeToString()))
    expected, found = outcome(by_protobuf, body), outcome(by_hand, body)
    if isinstance(expected, InvalidRequest):
        assert isinstance(found, InvalidRequest)
    elif not isinstance(found, InvalidRequest):
        same(found, expected)


def contents(field: int, packed: bytes) -> bytes:
    return bytes([field << 3 | 2]) + varint(len(packed)) + packed


def read(datatype: Datatype, shape: list[int], data: bytes, charge: Any = uncharged) -> Tensor:
    return tensor_from_contents("x", datatype, shape, data, [(0, len(data))], "m", "", charge)


@pytest.mark.parametrize(("datatype", "field", "packed", "values"), [
    ("INT64", 3, b"\x01" * 3, [1, 1, 1]), ("INT64", 3, b"\xff" * 9 + b"\x01", [-1]),
    ("INT32", 2, b"\xff" * 9 + b"\x01\x00", [-1, 0]),
    ("INT32", 2, b"\x80\x80\x80\x80\x10\x05", [0, 5]),  # of 64 bits, truncated to 32
    ("UINT64", 5, b"\xff" * 9 + b"\x01", [2**64 - 1]),
    ("BOOL", 1, b"\x00\x01\x02\x80\x01", [False, True, True, True]),
    ("UINT8", 4, b"\xff\x01\x00", [255, 0]),
])  # fmt: skip
def test_packed_numbers(datatype: str, field: int, packed: bytes, values: list[Any]) -> None:
    found = read(Datatype(datatype), [len(values)], contents(field, packed))
    assert found.array.tolist() == values


@pytest.mark.parametrize(("datatype", "data", "text"), [
    ("INT64", contents(3, b"\x01\x80"), "a number without its end"),
    ("INT64", contents(3, b"\x80" * 10 + b"\x01"), "a number of too many bytes"),
    ("INT64", b"\x18\x01", "not packed"),
    ("FP32", contents(6, b"\x00" * 5), "packed numbers of a wrong size"),
    ("FP32", contents(3, b"\x00" * 4), "expected fp32_contents, got int64_contents"),
    ("INT8", contents(2, b"\x80\x01"), "out of the range of INT8"),
    ("INT64", contents(3, b"\x01\x01"), "Expected 8, got 16"),
    ("FP32", contents(6, b"\x00" * 8), "Expected 4, got 8"),
    ("BYTES", b"\x42\x00\x42\x00", "expected 1 string elements .* got more"),
    ("BYTES", b"\x42\x05a", "expected bytes_contents"), ("BYTES", b"", "cannot hold them"),
    ("FP16", b"", "no typed contents"),
])  # fmt: skip
def test_wrong_contents(datatype: str, data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read(Datatype(datatype), [1], data)


def test_varints_across_pieces() -> None:
    values = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 300_000)
    packed = pb.InferTensorContents(int64_contents=values.tolist()).SerializeToString()
    assert len(packed) > 2 << 20
    assert np.array_equal(read(Datatype.INT64, [len(values)], packed).array, values)


def test_decoded_contents_are_charged_first() -> None:
    charged: list[int] = []

    def charge(nbytes: int) -> None:
        charged.append(nbytes)
        raise Overloaded("as asked")

    data = contents(3, b"\x01" * 1000)
    with pytest.raises(Overloaded):
        read(Datatype.INT64, [1000], data, charge)
    with pytest.raises(Overloaded):
        read(Datatype.BYTES, [4], b"\x42\x01a" * 4, charge)
    assert charged[0] == 8000
    assert charged[1] > 12


def test_decoded_contents_are_bounded() -> None:
    count = MAX_DECODED // 8 + 1
    with pytest.raises(InvalidRequest, match=f"at most {MAX_DECODED} are allowed"):
        read(Datatype.INT64, [count], contents(3, bytes(count)))


@pytest.mark.parametrize("field", [4, 100], ids=["parameters", "unknown"])
@pytest.mark.parametrize("part", [5, 6], ids=["inputs", "outputs"])
def test_fields_within_inputs_and_outputs_are_counted(field: int, part: int) -> None:
    inner = (varint(field << 3 | 2) + b"\x00") * (MAX_FIELDS + 1)
    data = b"\x0a\x01m" + bytes([part << 3 | 2]) + varint(len(inner)) + inner
    for look in (outline, check_fields, InferReader().read):
        if look != InferReader().read or len(data) > LONG:
            with pytest.raises(InvalidRequest, match=f"may have {MAX_FIELDS} fields"):
                look(data + bytes([0x1A]) + varint(LONG) + b"i" * LONG)


def test_fields_other_than_data_are_bounded() -> None:
    data = pb.ModelInferRequest(model_name="m", id="i" * (MAX_HEAD + 1)).SerializeToString()
    with pytest.raises(InvalidRequest, match=f"may have {MAX_HEAD} bytes that are not the data"):
        outline(data)


@pytest.mark.parametrize("raw", [False, True])
def test_long_data_is_checked_against_the_signature_first(raw: bool) -> None:
    """A wrong signature is reported before errors of the data."""
    signature = Signature("m", 0, (TensorSpec("x", Datatype.FP32, (-1,)),), ())
    message = pb.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype="BYTES", shape=[LONG])
    if raw:
        message.raw_input_contents.append(b"\xff" * 4 * LONG)
    else:
        item.contents.bytes_contents.extend([b"ab"] * (LONG - 1))
    found = InferReader().read(message.SerializeToString())
    assert found.long
    with pytest.raises(InvalidRequest, match="data-type is 'BYTES', but model 'm' expects 'FP32'"):
        found.request_long(0, signature, uncharged, 0)
    with pytest.raises(InvalidRequest, match="string"):
        found.request_long(0, None, uncharged, 0)


def test_a_shape_has_a_bounded_size() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[2**40] * 64)
    outline(message.SerializeToString())
    check_fields(message.SerializeToString())
    message.inputs.add(name="y", datatype="FP32", shape=[32] * 1_000_000)
    for look in (outline, check_fields, InferReader().read):
        with pytest.raises(InvalidRequest, match="the shape of an input takes 1000004 bytes"):
            look(message.SerializeToString())
