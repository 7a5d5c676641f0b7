"""BYTES in worker frames: unchanged, and without an object per element."""

import json
import sys

import pytest

from headrace.core.call import Timing
from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.ipc.elements import Buffer, join
from headrace.ipc.frames import BrokenFrame, result_struct
from headrace.placement.worker.batch_frames import BatchFrames, one_answer
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_json import decode_infer
from headrace.protocol.v2_protobuf import InferReader, InferWriter
from headrace.scheduling.batch import Batch, Part
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
