"""The scorecard's own peers, the plain path and the echo: answers and refusals."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP
from benchmarks.peers import PEERS
from benchmarks.plain.batching import Refused, Version
from benchmarks.plain.grpc_door import GrpcCall, GrpcModel
from benchmarks.plain.grpc_door import decode as decode_message
from benchmarks.plain.http_door import HttpCall
from benchmarks.plain.http_door import decode as decode_json
from benchmarks.scorecard.processes import ask, start
from headrace.protocol.pb import grpc_service_pb2 as pb


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    folder = tmp_path_factory.mktemp("models")
    ALL_MODELS[MLP].write(folder)
    loop = asyncio.new_event_loop()
    yield Version(MLP, str(folder / MLP / "1" / "model.onnx"), loop)
    loop.close()


def test_json_to_arrays(version: Version) -> None:
    call = HttpCall()
    tensor = {"name": "input", "datatype": "FP32", "shape": [2, 64], "data": [0.5] * 128}
    document = {"id": "a", "parameters": {"timeout": 3}, "inputs": [tensor]}
    decode_json(json.dumps(document).encode(), version, call)
    assert (call.id, call.rows, call.timeout_ns) == ("a", 2, 3000)
    assert np.array_equal(call.inputs["input"], np.full((2, 64), 0.5, np.float32))


@pytest.mark.parametrize(("change", "text"), [
    ({"name": "other"}, "unexpected inference input 'other'"),
    ({"name": ["input"]}, r"unexpected inference input \['input'\]"),
    ({"datatype": "FP64"}, "has datatype 'FP64', expected FP32"),
    ({"shape": []}, r"expected 1 to 64 rows of \[64\]"),
    ({"shape": [1, 32]}, r"expected 1 to 64 rows of \[64\]"),
    ({"shape": [65, 64]}, r"expected 1 to 64 rows of \[64\]"),
    ({"shape": [True, 64]}, r"expected 1 to 64 rows of \[64\]"),
    ({"data": [0] * 63}, "are not 64 FP32"), ({"data": ["0"] * 64}, "are not 64 FP32"),
    ({"data": 0}, "are not 64 FP32"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    version: Version, change: dict[str, object], text: str
) -> None:
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [0] * 64} | change
    with pytest.raises(Refused, match=text):
        decode_json(json.dumps({"inputs": [tensor]}).encode(), version, HttpCall())


@pytest.mark.parametrize(("body", "text"), [
    (b"{", "failed to parse"), (b"[]", "failed to parse"), (b'{"inputs":[{}]}', "failed to parse"),
    (b'{"inputs":[]}', "expected 1 inputs but got 0"),
])  # fmt: skip
def test_documents_that_are_no_requests_are_refused(
    version: Version, body: bytes, text: str
) -> None:
    with pytest.raises(Refused, match=text):
        decode_json(body, version, HttpCall())


@pytest.mark.parametrize(("change", "text"), [
    ({"model_name": "other"}, "unknown model 'other'"),
    ({"raw": [bytes(8)]}, "unexpected size of the data of input 'input'"),
    ({"shape": [65, 64]}, "unexpected shape of input 'input'"),
    ({"datatype": "INT64"}, "unexpected inference input 'input' INT64"),
    ({"raw": []}, "expected 1 inputs with raw contents"),
])  # fmt: skip
def test_messages_that_do_not_fit_are_refused(
    version: Version, change: dict[str, Any], text: str
) -> None:
    def message(
        model_name: str = MLP,
        datatype: str = "FP32",
        shape: Sequence[int] = (1, 64),
        raw: Sequence[bytes] = (bytes(256),),
    ) -> bytes:
        request = pb.ModelInferRequest(model_name=model_name, id="a", raw_input_contents=raw)
        request.inputs.add(name="input", datatype=datatype, shape=shape)
        return request.SerializeToString()

    call = GrpcCall()
    models = {MLP: GrpcModel(version)}
    assert decode_message(message(), models, call) is models[MLP]
    assert (call.id, call.rows, call.inputs["input"].shape) == ("a", 1, (1, 64))
    with pytest.raises(Refused, match=text):
        decode_message(message(**change), models, GrpcCall())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "echo"])
def test_every_answer_is_right(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    server = start(peer, tmp_path, peer.models, None, sorted(peer.models))
    try:
        for protocol in sorted(peer.protocols):
            host = server.target.address(PROTOCOLS[protocol].transport)
            for exchange in 2 * PROTOCOLS[protocol].exchanges(host, ALL_MODELS[MLP]):
                assert ask(host, protocol, exchange) == ""
    finally:
        server.stop()
