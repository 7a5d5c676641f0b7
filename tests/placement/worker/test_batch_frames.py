"""BYTES in worker frames: unchanged, and without an object per element."""

import json
import sys
from collections.abc import Sequence
from socket import socketpair

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Call, Timing
from headrace.core.datatypes import Datatype
from headrace.core.ragged import Ragged
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.ipc.elements import Buffer, join
from headrace.ipc.frames import BrokenFrame, FrameKind, Header, result_struct
from headrace.placement.worker.batch_frames import BatchFrames, one_answer
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_json import decode_infer
from headrace.protocol.v2_protobuf import InferReader, InferWriter
from headrace.scheduling.batch import Batch, Part
from headrace.workers.batches import Batches
from headrace.workers.channel import WorkerChannel
from headrace.workers.session import Session
from tests.scheduling.fakes import Bench, entered

COUNT = 100_000
RAW = join([b"", b"a", b"bcd", b"e"] * (COUNT // 4))
TEXTS = Signature(
    "m",
    8,
    (TensorSpec("X", Datatype.BYTES, (-1,)),),
    (TensorSpec("Y", Datatype.BYTES, (-1,)),),
)


def grpc_message() -> bytes:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[RAW])
    message.inputs.add(name="X", datatype="BYTES", shape=[1, COUNT])
    return message.SerializeToString()


def http_body() -> tuple[bytes, int]:
    head = (
        b'{"inputs":[{"name":"X","datatype":"BYTES","shape":[1,%d],'
        b'"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
        % (COUNT, len(RAW))
    )
    return head + RAW, len(head)


def test_bytes_of_both_doors_pass_without_objects() -> None:
    message, (body, json_size) = grpc_message(), http_body()
    told: list[bytes] = []
    frames = BatchFrames(TEXTS, told.append)
    frames.learn({"number": 1, "outputs": [["Y", "BYTES", [COUNT]]]})
    bench, reader, writer = Bench(), InferReader(), InferWriter()
    before = sys.getallocatedblocks()

    first = reader.read(message).request(0)
    second, form = decode_infer("m", "", body, json_size, TEXTS)
    calls = [
        entered(each, TEXTS.check(each), TEXTS.batch_key(each), 0, bench.batcher)
        for each in (first, second)
    ]
    batch = Batch(TEXTS, calls)
    _, pieces, size = frames.pack(batch, 1)
    data = b"".join(pieces)
    outcome = frames.result(0, batch, result_struct(1).pack(0, 0, 1, size), data, size)
    batch.take("1", outcome)
    answers = [batch.response(call) for call in calls]
    over_grpc = writer.pieces(answers[0])
    over_http, _ = form.encode(answers[1])

    assert sys.getallocatedblocks() - before < 2000
    assert data == RAW + RAW
    assert over_grpc[-1] == over_http[-1] == RAW
    assert json.loads(told[0])["inputs"] == [["X", "BYTES", [COUNT]]]


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (join([b"a", b"b"]), [3]), (join([b"a", b"b"]), [1]), (join([b"a", b"b"])[:-1], [2]),
        (RAW[:-1], [COUNT]), (RAW + b"\0", [COUNT]), (b"\xff" * 8, [1]),
    ],
)  # fmt: skip
def test_garbled_results_are_refused(raw: Buffer, shape: list[int]) -> None:
    told = {"outputs": [["Y", "BYTES", shape]], "parameters": {}}
    with pytest.raises(ValueError, match="bytes for BYTES of shape"):
        one_answer({"response": told, "sizes": [len(raw)]}, raw, len(raw))


def test_garbled_parts_of_a_large_result_fail_where_used() -> None:
    raw = join([b"abc"] * 400_000)[:-1]
    frames = BatchFrames(TEXTS, lambda told: None)
    frames.learn({"number": 1, "outputs": [["Y", "BYTES", [200_000]]]})
    asked = InferReader().read(grpc_message()).request(0)
    calls = [entered(asked, 1, None, 0, Bench().batcher) for _ in range(2)]
    batch = Batch(TEXTS, calls)
    outcome = frames.result(0, batch, result_struct(1).pack(0, 0, 1, len(raw)), raw, len(raw))
    with pytest.raises(ValueError, match="are not 400000 elements with their lengths"):
        batch.take("1", outcome)
    with pytest.raises(ValueError, match="1599999 bytes for BYTES of shape"):
        frames.result(
            0,
            batch,
            result_struct(1).pack(0, 0, 1, 1_600_000 - 1),
            raw[: 1_600_000 - 1],
            1_600_000 - 1,
        )


def test_a_single_answer() -> None:
    told = {"outputs": [["Y", "BYTES", [COUNT]]], "parameters": {}}
    part = one_answer({"response": told, "sizes": [len(RAW)]}, RAW, len(RAW))
    assert isinstance(part, Part)
    asked = InferReader().read(grpc_message()).request(0)
    call = entered(asked, 1, None, 0, Bench().batcher)
    single = Signature("m", 0, (), (TensorSpec("Y", Datatype.BYTES, (-1,)),))
    response = part.response_to(single, "1", call, Timing(0, 0, 1))
    assert InferWriter().pieces(response)[-1] == RAW


def test_a_result_of_a_known_layout_is_checked_against_its_own_data() -> None:
    signature = Signature("m", 8, (), (TensorSpec("Y", Datatype.FP32, (2,)),))
    frames = BatchFrames(signature, lambda told: None)
    frames.learn({"number": 1, "outputs": [["Y", "FP32", [2]]]})
    asked = InferReader().read(grpc_message()).request(0)
    batch = Batch(signature, [entered(asked, 1, None, 0, Bench().batcher)])
    meta = result_struct(1).pack(0, 0, 1, 8)
    for _ in range(2):
        [array] = frames.result(0, batch, meta, bytes(8), 8).arrays
        assert array.shape == (1, 2)
    with pytest.raises(BrokenFrame, match="7 bytes for blocks of 8"):
        frames.result(0, batch, meta, bytes(7), 7)
    with pytest.raises(TypeError, match="too small"):
        frames.result(0, batch, meta, bytes(7), 8)
    batch.rows = 2
    with pytest.raises(ValueError, match="8 bytes for FP32"):
        frames.result(0, batch, meta, bytes(16), 8)


RAGGED = Signature(
    "m",
    64,
    (
        TensorSpec("X", Datatype.FP32, (-1,)),
        TensorSpec("T", Datatype.BYTES, (-1,)),
        TensorSpec("G", Datatype.UINT8, (-1, 2), reshape=(2, -1)),
        TensorSpec("F", Datatype.INT64, (3,)),
    ),
    (TensorSpec("Y", Datatype.FP32, (-1,)),),
    ragged=Ragged(frozenset({"X", "T", "G"})),
)
Sizes = tuple[int, int, int, int]  # rows, and the sizes of X, T and G


def ragged_call(sizes: Sizes, number: int) -> Call:
    """A request with values that occur in no other."""
    rows, x, t, g = sizes
    texts = np.empty((rows, t), object)
    texts[...] = [[f"{number}-{row}-{n}".encode() for n in range(t)] for row in range(rows)]
    arrays: list[Array] = [
        np.arange(rows * x, dtype=np.float32).reshape(rows, x) + 100 * number,
        texts,
        np.arange(rows * g * 2, dtype=np.uint8).reshape(rows, g, 2),
        np.full((rows, 3), number, np.int64),
    ]
    inputs = {
        spec.name: Tensor(spec.name, spec.datatype, array)
        for spec, array in zip(RAGGED.inputs, arrays, strict=True)
    }
    return Call("m", "", f"id{number}", inputs, (), {"n": number} if number % 2 else {})


@given(st.lists(st.lists(st.tuples(*[st.integers(1, 3)], *[st.integers(0, 3)] * 3), min_size=1,
                         max_size=4), min_size=1, max_size=4))  # fmt: skip
def test_each_request_of_a_ragged_batch_arrives_in_its_own_shape(
    plan: Sequence[Sequence[Sizes]],
) -> None:
    """Some batches in a row, which share forms and layouts, against the requests themselves."""
    told: list[bytes] = []
    frames, bench = BatchFrames(RAGGED, told.append), Bench()
    ours, theirs = socketpair()
    with ours, theirs:
        channel = WorkerChannel(theirs)
        batches, session = Batches(channel, False, ["Y"]), Session(channel, lambda form: None)
        for sizes in plan:
            calls = [
                entered(call, RAGGED.check(call), RAGGED.batch_key(call), 0, bench.batcher)
                for number, each in enumerate(sizes)
                for call in [ragged_call(each, number)]
            ]
            assert len({call.key for call in calls}) == 1
            meta, pieces, size = frames.pack(Batch(RAGGED, calls), 7)
            while told:
                batches.add_form(json.loads(told.pop(0)))
            header = Header(FrameKind.EXECUTE, 0, 0, len(meta), size)
            _, requests = batches.requests(header, meta, b"".join(pieces), session)
            assert [request.request_id() for request in requests] == [call.id for call in calls]
            for call, request in zip(calls, requests, strict=True):
                assert json.loads(request.parameters() or "{}") == call.parameters
                assert [tensor.name() for tensor in request.inputs()] == list(call.inputs)
                for tensor in request.inputs():
                    array = np.asarray(call.inputs[tensor.name()].array)
                    if tensor.name() == "G":
                        array = array.reshape(len(array), 2, -1)
                    np.testing.assert_array_equal(tensor.as_numpy(), array)
                    assert tensor.as_numpy().shape == array.shape
