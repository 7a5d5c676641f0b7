"""Infer messages read without copies: the same result as protobuf's parser."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Call
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor, elsewhere, raw_bytes
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import varint
from headrace.protocol.v2_protobuf import (
    InferReader,
    InferWriter,
    PlainWriter,
    decode_infer,
    parse_infer,
    stream_message,
    stream_response,
    walk,
)
from headrace.scheduling.batch import Batch, Outcome
from tests.protocol.reference import encode_infer
from tests.protocol.strategies import (
    PROPERTY,
    assert_same,
    fp32,
    mutations,
    outcome,
    response,
    tensors,
)
from tests.scheduling.fakes import Bench, entered

Input = pb.ModelInferRequest.InferInputTensor


def message(*tensors: Tensor, **fields: Any) -> pb.ModelInferRequest:
    """A request with raw tensors."""
    answer = encode_infer(response(*tensors))
    inputs = [Input(name=o.name, datatype=o.datatype, shape=o.shape) for o in answer.outputs]
    fields = {"model_name": "m"} | fields
    return pb.ModelInferRequest(
        inputs=inputs, raw_input_contents=list(answer.raw_output_contents), **fields
    )


def by_protobuf(data: bytes) -> Call | ServerError:
    return outcome(lambda: decode_infer(parse_infer(data), len(data)))


def by_reader(reader: InferReader, data: bytes | memoryview) -> Call | ServerError:
    return outcome(lambda: reader.read(data).request(len(data)))


def assert_alike(one: Call | ServerError, other: Call | ServerError) -> None:
    """Assert the same request or the same error."""
    if isinstance(one, ServerError) or isinstance(other, ServerError):
        assert (type(one), str(one)) == (type(other), str(other))
        return
    assert list(one.inputs) == list(other.inputs)
    for name in one.inputs:
        assert_same(one.inputs[name], other.inputs[name])
    for attribute in Call.__slots__:
        if attribute != "inputs":
            found, expected = (getattr(call, attribute, "unset") for call in (one, other))
            assert found == expected, attribute


def check(data: bytes, reader: InferReader | None = None) -> None:
    """Compare the first reading, the reading by a remembered layout, and that of a view."""
    reader = reader or InferReader()
    expected = by_protobuf(data)
    check_known(reader, data, expected)
    for form in (data, data, memoryview(data), memoryview(bytearray(data))):
        assert_alike(by_reader(reader, form), expected)
        check_known(reader, form, expected)


def check_known(reader: InferReader, data: bytes | memoryview, expected: object) -> None:
    """Compare another reading, if the layout of the message is remembered."""
    call = asked_nothing(len(data))
    if reader.fill(call, data) is not None:
        assert isinstance(expected, Call), expected
        assert_alike(call, expected)


def asked_nothing(nbytes: int) -> Call:
    """An unread call of a message of `nbytes`: whoever fills it sets everything else."""
    call = Call.__new__(Call)
    call.nbytes = nbytes
    return call


@PROPERTY
@given(st.lists(tensors(), max_size=3), st.text(max_size=3), st.text(max_size=3))
def test_any_message(given: list[Tensor], id: str, version: str) -> None:
    renamed = [Tensor(f"x{n}", t.datatype, t.array) for n, t in enumerate(given)]
    try:
        whole = message(*renamed, id=id, model_version=version)
    except UnicodeEncodeError:
        return
    check(whole.SerializeToString())


@PROPERTY
@given(tensors(), tensors(), st.data())
def test_damaged_messages(one: Tensor, other: Tensor, data: st.DataObject) -> None:
    """One reader for all, which remembers similar messages."""
    reader = InferReader()
    good = message(one, Tensor("y", other.datatype, other.array), id="42")
    good.parameters["priority"].int64_param = 1
    body = good.SerializeToString()
    check(body, reader)
    for _ in range(5):
        check(data.draw(mutations(body)), reader)


@PROPERTY
@given(st.binary(max_size=40))
def test_random_bytes(data: bytes) -> None:
    check(data)


def test_every_cut() -> None:
    reader = InferReader()
    body = message(fp32(1, 2, name="x"), fp32(3, name="y"), id="42").SerializeToString()
    for size in range(len(body) + 1):
        check(body[:size], reader)


def test_messages_that_differ_only_in_id_and_tensors() -> None:
    reader = InferReader()
    for id, value in (("1", 0.5), ("2", 1.5), ("", 2.5), ("a longer one", 3.5), ("ü", 4.5)):
        data = message(fp32(value, name="x"), id=id).SerializeToString()
        check(data, reader)
        request = reader.read(data).request(len(data))
        assert (request.id, request.inputs["x"].array.tolist()) == (id, [value])


@pytest.mark.parametrize(
    "extra",
    [
        b"\x1a\x01z", b"\x1a\x00", b"\x0a\x05other", b"\x12\x012", b"\x3a\x04\0\0\0\0",
        b"\x2a\x03\x0a\x01q", b"\x32\x03\x0a\x01o", b"\x1a\x01\xff", b"\x0a\x01\xff",
        b"\x18\x05", b"\x1a\x81\x00z", b"\x9a\x00\x01z", b"\x3a\x80\x00", b"\x40\x05", b"\x00",
        b"\x1b\x1c", b"\x3a\xff\xff\xff\xff\x0f", b"\x3a", b"\x7a\x01x", b"\x22\x02\x0a\x00",
    ],
)  # fmt: skip
def test_fields_in_any_order_and_repeated(extra: bytes) -> None:
    """Repeated fields accumulate; of others the last one counts; unknown ones are skipped."""
    reader = InferReader()
    body = message(fp32(1, name="x"), id="42").SerializeToString()
    check(body, reader)
    check(body + extra, reader)
    check(extra + body, reader)


def test_tensors_are_views() -> None:
    reader = InferReader()
    large = Tensor("x", Datatype.UINT8, np.arange(100_000, dtype=np.uint8))
    data = message(large).SerializeToString()
    for _ in range(2):
        array = reader.read(data).request(len(data)).inputs["x"].array
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))


def test_a_request_is_not_shared() -> None:
    reader = InferReader()
    given = message(fp32(1, name="x"))
    given.parameters["custom"].string_param = "x"
    data = given.SerializeToString()
    for _ in range(3):
        request = reader.read(data).request(len(data))
        assert request.parameters.pop("custom") == "x"
        del request.inputs["x"]


def test_remembered_layouts_are_bounded() -> None:
    """Thousands of different heads and sizes."""
    reader = InferReader()
    for n in range(2000):
        check(
            message(fp32(*range(n % 700), name="x"), model_version=str(n)).SerializeToString(),
            reader,
        )


def test_the_model_is_read_before_the_tensors() -> None:
    given = message(fp32(1, name="x"), model_version="7", id="42")
    given.inputs[0].datatype = "FP33"
    found = InferReader().read(given.SerializeToString())
    assert (found.model_name, found.model_version, found.id) == ("m", "7", "42")
    with pytest.raises(InvalidRequest, match="unknown datatype 'FP33'"):
        found.request(0)


NUMBERS = [d for d in Datatype if d is not Datatype.BYTES]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_messages_known_by_their_layout(datatype: Datatype) -> None:
    reader = InferReader()
    pair: Array = np.zeros((1, 2), NUMPY[datatype])
    given = message(Tensor("x", datatype, pair), Tensor("y", datatype, pair[0]), id="42")
    given.outputs.add(name="o")
    assert reader.fill(asked_nothing(0), given.SerializeToString()) is None
    check(given.SerializeToString(), reader)
    kinds = {reader.read(given.SerializeToString()).alike}
    for id, byte in (("43", b"\1"), ("44", b"\0")):
        given.id = id
        given.raw_input_contents[1] = byte * pair.nbytes
        call = asked_nothing(7)
        kind = reader.fill(call, given.SerializeToString())
        assert kind is not None
        kinds.add(kind)
        assert (call.model_name, call.outputs, call.id, call.nbytes) == ("m", ("o",), id, 7)
        assert call.inputs["x"].array.shape == (1, 2)
        assert raw_bytes(call.inputs["y"].array) == byte * pair.nbytes
    assert len(kinds) == 1  # equal requests
    assert None not in kinds


@pytest.mark.parametrize("sizes", [(4, 12), (12, 4), (0, 16), (8, 4), (8, 12), (4, 8), (12, 8)])
def test_known_layouts_with_tensors_of_wrong_sizes(sizes: tuple[int, int]) -> None:
    reader = InferReader()
    given = message(fp32(1, 2, name="x"), fp32(3, 4, name="y"))
    check(given.SerializeToString(), reader)
    given.raw_input_contents[:] = [bytes(size) for size in sizes]
    data = given.SerializeToString()
    for _ in range(2):
        check(data, reader)
        assert reader.fill(asked_nothing(0), data) is None


def test_messages_that_ask_for_more_than_output_names_are_not_plain() -> None:
    reader = InferReader()
    given = message(fp32(1, 2, name="x"))
    given.parameters["headrace_timing"].bool_param = True
    data = given.SerializeToString()
    for _ in range(3):
        check(data, reader)
        assert reader.fill(asked_nothing(0), data) is None
        assert reader.read(data).alike is None


@pytest.mark.parametrize(("data", "head", "raw"), [
    (b"\x0a\x01m\x3a\x02ab\x3a\x00", b"\x0a\x01m", [b"ab", b""]),
    (b"\x3a\x02ab\x0a\x01m\x1a\x01i", b"\x0a\x01m", [b"ab"]), (b"\x3a\x82\x80\x00ab", b"", [b"ab"]),
])  # fmt: skip
def test_walk(data: bytes, head: bytes, raw: Sequence[bytes]) -> None:
    fields = walk(data)
    assert fields is not None
    assert fields.head == head
    assert [data[start:stop] for start, stop in fields.raw] == raw


# --- responses


@PROPERTY
@given(st.lists(tensors(), max_size=3), st.text(max_size=200), st.booleans())
def test_any_response(outputs: list[Tensor], id: str, marked: bool) -> None:
    writer = InferWriter()
    parameters = {"final": True, "n": 1, "x": 0.5, "s": "t"} if marked else {}
    answer = response(*outputs, id=id, parameters=parameters)
    for _ in range(2):
        data = b"".join(writer.pieces(answer))
        assert pb.ModelInferResponse.FromString(data) == encode_infer(answer)
        wrapped = b"".join(stream_response(writer.pieces(answer)))
        found = pb.ModelStreamInferResponse.FromString(wrapped).infer_response
        assert found == encode_infer(answer)


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("id", ["", "42", "\u00e4" * 100])
def test_plain_answers_equal_complete_ones(datatype: Datatype, id: str) -> None:
    specs = TensorSpec("y", datatype, (2,)), TensorSpec("z", Datatype.FP32, (-1, 3))
    signature = Signature("m", 8, (), specs)
    writer = PlainWriter(signature, "m", "7")
    for width in (1, 5000):
        for sizes in ((1, 2), (2, 1), (3,), (2,)):
            total = sum(sizes)
            numbers: Array = np.frombuffer(bytes(range(64)), NUMPY[datatype])[: 2 * total]
            wide = np.arange(3 * total * width, dtype=np.float32).reshape(total, width, 3)
            batch = computed(signature, sizes, [numbers.reshape(total, 2), wide], id)
            for call in batch.calls:
                pieces = writer.pieces(batch, call)
                assert pieces is not None
                answer = InferWriter().pieces(batch.response(call))
                assert b"".join(pieces) == b"".join(answer)


@pytest.mark.parametrize("first", [(), ("y",), ("z",)])
def test_plain_answers_of_a_batch_have_the_outputs_that_each_call_wants(
    first: tuple[str, ...],
) -> None:
    specs = TensorSpec("y", Datatype.FP32, (2,)), TensorSpec("z", Datatype.INT32, (1,))
    signature = Signature("m", 8, (), specs)
    writer = PlainWriter(signature, "m", "7")
    for wanted in ([first, ()], [(), first], [("z",), ("y",), ()], [("z", "y"), ("y", "z")]):
        rows = len(wanted)
        arrays = [np.arange(2 * rows, dtype="<f4").reshape(rows, 2), np.ones((rows, 1), "<i4")]
        batch = computed(signature, [1] * rows, arrays, wanted=wanted)
        for call in batch.calls:
            answer = InferWriter().pieces(batch.response(call))
            assert b"".join(writer.pieces(batch, call) or answer) == b"".join(answer)


def computed(
    signature: Signature,
    sizes: Sequence[int],
    arrays: list[Any],
    id: str = "",
    wanted: Sequence[tuple[str, ...]] = (),
) -> Batch:
    """An executed batch of calls of the given rows, and wanted outputs."""
    bench = Bench()
    calls = [
        entered(Call("m", "", id, {}, outputs), rows, None, 0, bench.batcher)
        for rows, outputs in zip(sizes, wanted or [()] * len(sizes), strict=True)
    ]
    batch = Batch(signature, calls)
    batch.take("7", Outcome(arrays, None, 0, 0, 0))
    return batch


def test_answers_that_are_not_plain_are_left_to_the_complete_encoder() -> None:
    numbers, text = TensorSpec("y", Datatype.FP32, (2,)), TensorSpec("t", Datatype.BYTES, (1,))
    plain = Signature("m", 8, (), (numbers,), strict_outputs=False)
    words = Signature("m", 8, (), (text,))
    for signature, sizes, array in (
        (plain, (1,), np.zeros((1, 2))),
        (plain, (1, 1), np.zeros((2, 2))),
        (words, (1,), np.full((1, 1), b"a", object)),
    ):
        batch = computed(signature, sizes, [array])
        writer = PlainWriter(signature, "m", "7")
        assert [writer.pieces(batch, call) for call in batch.calls] == [None] * len(sizes)


def test_shapes_are_distinguished() -> None:
    writer = InferWriter()
    for array in (np.zeros((2, 3)), np.zeros((3, 2)), np.zeros(6), np.zeros((2, 3), np.int64)):
        datatype = Datatype.FP64 if array.dtype == np.float64 else Datatype.INT64
        answer = response(Tensor("y", datatype, array))
        data = b"".join(writer.pieces(answer))
        assert pb.ModelInferResponse.FromString(data) == encode_infer(answer)


def test_empty_outputs() -> None:
    """Empty outputs share names, datatypes and shapes with outputs that have data."""
    writer = InferWriter()
    there = [elsewhere("x", Datatype.FP32, (2,)), elsewhere("y", Datatype.BYTES, (1,))]
    text = Tensor("y", Datatype.BYTES, np.array([b"abc"], object))
    for outputs, raw in (
        ([fp32(1, 2, name="x")], [fp32(1, 2, name="x").array.tobytes()]),
        (there[:1], [b""]),
        ([fp32(1, 2, name="x")], [fp32(1, 2, name="x").array.tobytes()]),
        ([*there, fp32(3, name="z")], [b"", b"", fp32(3, name="x").array.tobytes()]),
        ([fp32(1, 2, name="x"), text, fp32(3, name="z")], None),
        ([*there, fp32(3, name="z")], [b"", b"", fp32(3, name="x").array.tobytes()]),
    ):
        found = pb.ModelInferResponse.FromString(b"".join(writer.pieces(response(*outputs))))
        assert [(o.name, list(o.shape)) for o in found.outputs] == [
            (tensor.name, list(tensor.array.shape)) for tensor in outputs
        ]
        assert [o.datatype for o in found.outputs] == [t.datatype.value for t in outputs]
        if raw is not None:
            assert list(found.raw_output_contents) == raw


def test_layouts_of_shared_memory_requests_are_distinct() -> None:
    """Their heads differ only by the region in place of tensors."""
    reader = InferReader()
    plain = message(fp32(1, 2, name="x"))
    shared = message(fp32(1, 2, name="x"))
    shared.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    shared.outputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    for _ in range(2):
        for sent in (plain, shared):
            found = by_reader(reader, sent.SerializeToString())
            assert isinstance(found, Call)
            assert (found.options.shared is not None) is (sent is shared)


def test_large_outputs_are_not_copied() -> None:
    array = np.arange(50_000, dtype=np.float32).reshape(100, 500)
    pieces = InferWriter().pieces(response(Tensor("y", Datatype.FP32, array)))
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces)


def test_raw_bytes() -> None:
    for array in (np.zeros((3, 0)), np.zeros((100, 100)).T[5:], np.asarray(np.float32(1))):
        assert bytes(raw_bytes(array)) == array.tobytes()


def test_varint() -> None:
    for value in (0, 1, 127, 128, 300, 2**20, 2**31):
        data = varint(value)
        assert sum((byte & 127) << (7 * n) for n, byte in enumerate(data)) == value
        assert all(byte & 128 for byte in data[:-1])


def test_stream_message() -> None:
    data = stream_message("it failed", "42", "m", "1", {"triton_final_response": True})
    found = pb.ModelStreamInferResponse.FromString(data)
    assert found.error_message == "it failed"
    assert (found.infer_response.id, found.infer_response.model_name) == ("42", "m")
    assert found.infer_response.parameters["triton_final_response"].bool_param is True


def test_a_message_of_another_model_is_no_message_like_an_earlier_one() -> None:
    """Of the first bytes of a message, the model's name may be missing."""
    reader = InferReader()
    message = pb.ModelInferRequest(model_name="one")
    message.inputs.add(name="X", datatype=Datatype.UINT8, shape=[1, 9000])
    message.raw_input_contents.append(bytes(9000))
    data = message.SerializeToString()
    reader.read(data).request(len(data))
    begin = data.index(bytes(9000))
    assert reader.like(len(data), data[:begin]) == (("one", ""), begin)
    for size in (0, 3, begin - 1):
        assert reader.like(len(data), data[:size]) is None
    message.model_name = "two"
    assert reader.like(len(data), message.SerializeToString()[:begin]) is None
