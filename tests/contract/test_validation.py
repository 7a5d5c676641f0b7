"""Invalid requests: refused alike over every transport.

One case per class; the rest is in `tests/protocol` and `tests/core`.
"""

import json
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.call import MAX_TEXT
from headrace.core.errors import InvalidRequest
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import Client, Input, strings
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess

_ROW = np.zeros((1, 16), np.int32)
_SIMPLE = {"INPUT0": _ROW, "INPUT1": _ROW}


def _inputs(array: Any, **more: Any) -> list[Input]:
    return [Input("INPUT0", _ROW), Input("INPUT1", array, **more)]


def _same(array: Any) -> list[Input]:
    return [Input("INPUT0", array), Input("INPUT1", array)]


_MISMATCH = "'INPUT1'.*input byte size mismatch|input byte size mismatch.*'INPUT1'|true shape"


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("simple", {"inputs": {"INPUT0": _ROW}},
         r"expected 2 inputs but got 1 inputs for model 'simple'\. Got input\(s\) \['INPUT0'\],"
         r" but missing required input\(s\) \['INPUT1'\]\. Please provide all required"),
        ("simple", {"inputs": {"INPUT0": _ROW, "WRONG": _ROW}},
         "unexpected inference input 'WRONG' for model 'simple'"),
        ("optional_bias", {"inputs": {}}, "expected number of inputs between 1 and 2 but got 0"),
        ("simple", {"inputs": _inputs(_ROW.astype(np.int64))},
         "inference input 'INPUT1' data-type is 'INT64', but model 'simple' expects 'INT32'"),
        ("simple", {"inputs": _same(np.zeros((1, 8), np.int32))},
         r"unexpected shape for input 'INPUT0' for model 'simple'\. Expected \[-1,16\], got"
         r" \[1,8\]\. NOTE: Setting a non-zero max_batch_size"),
        ("unbatched", {"inputs": _same(np.zeros((3, 3), np.float32))},
         r"unexpected shape for input 'INPUT0' .* Expected \[2,3\], got \[3,3\]\.$"),
        ("simple", {"inputs": _inputs(np.zeros((2, 16), np.int32))},
         "input 'INPUT1' batch size does not match other inputs for 'simple'"),
        ("simple", {"inputs": _same(np.zeros((9, 16), np.int32))},
         "inference request batch-size must be <= 8 for 'simple'"),
        ("simple", {"inputs": [*_inputs(_ROW), Input("INPUT0", _ROW)]},
         "input 'INPUT0' already exists in request"),
        ("simple", {"inputs": _inputs(_ROW, datatype="INT33")},
         "input 'INPUT1' has the unknown datatype 'INT33', expected one of"),
        ("simple", {"inputs": _inputs(_ROW, shape=[2**40, 2**40])},
         "input 'INPUT1' causes total element count to exceed maximum size of"),
        ("simple", {"inputs": _inputs(np.zeros(15, np.int32), shape=[1, 16])}, _MISMATCH),
        ("identity_BYTES", {"inputs": [Input("INPUT0", strings([b"a"] * 3), shape=[1, 2])]},
         "'INPUT0'|true shape"),
        ("simple", {"inputs": _SIMPLE, "outputs": ["WRONG"]},
         "unexpected inference output 'WRONG' for model 'simple'"),
        ("simple", {"inputs": _SIMPLE, "parameters": {"priority": "high"}},
         "invalid value type for 'priority' parameter, expected"),
        ("simple", {"inputs": _SIMPLE, "parameters": {"triton_anything": 1}},
         "parameter keys starting with 'triton_' are reserved for Triton usage and should not be"),
        ("simple", {"inputs": {}}, r"^\[request id: <id_unknown>\] expected 2 inputs"),
        ("simple", {"inputs": {}, "id": "call 7"}, r"^\[request id: call 7\] expected 2 inputs"),
    ],
)  # fmt: skip
def test_invalid_requests(client: Client, model: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.infer(model, **given)


def test_ids_and_texts_of_parameters_are_bounded(client: Client) -> None:
    most = "\u00e4" * (MAX_TEXT // 2)
    for text in ("7", most):  # often enough to be known
        for _ in range(3):
            answer = client.infer("simple", _SIMPLE, id=text)
            assert answer.id == text
    client.infer("simple", _SIMPLE, id=most, parameters={"p" * MAX_TEXT: "x" * MAX_TEXT})
    longer: list[dict[str, Any]] = [
        {"id": most + "i"}, {"id": "i" * 60_000}, {"id": "\\" * (1 << 20)},
        {"parameters": {"given": most + "x"}}, {"parameters": {"x" * (MAX_TEXT + 1): 1}},
        {"parameters": {"sequence_id": "x" * (MAX_TEXT + 1)}},
    ]  # fmt: skip
    for given in longer:
        with pytest.raises(InvalidRequest, match=rf"may have {MAX_TEXT} bytes, got \d+$"):
            client.infer("simple", _SIMPLE, **given)


@pytest.mark.parametrize(("data", "text"), [
    (b"\1\0\0\0a", "expected 2 string elements {}, got 1"),
    (b"\1\0\0\0a" * 3, "unexpected number of string elements 3 {}, expecting 2"),
    (b"\1\0\0\0a\1\0", "incomplete string length indicator {}, expecting 4 bytes but only 2"),
    (b"\1\0\0\0a\5\0\0\0a", "incomplete string data {}, expecting string of length 5 but only 1"),
])  # fmt: skip
def test_strings_that_do_not_fit_their_shape(
    server: ServerProcess, grpc_client: GrpcClient, data: bytes, text: str
) -> None:
    """Named by input, model and request, as in Triton."""
    item: dict[str, Any] = {"name": "INPUT0", "shape": [1, 2], "datatype": "BYTES"}
    size = {"parameters": {"binary_data_size": len(data)}}
    document = json.dumps({"id": "seven", "inputs": [{**item, **size}]}).encode()
    answer = ask(
        server.http, "POST", "/v2/models/identity_BYTES/infer", document + data,
        **{"Inference-Header-Content-Length": str(len(document))},
    )  # fmt: skip
    tensor = pb.ModelInferRequest.InferInputTensor(**item)
    message = pb.ModelInferRequest(
        model_name="identity_BYTES", id="seven", inputs=[tensor], raw_input_contents=[data]
    )
    with pytest.raises(grpc.RpcError) as raised:
        grpc_client.procedure("ModelInfer", pb.ModelInferResponse)(message)
    error: Any = raised.value
    text = text.format("for inference input 'INPUT0' for model 'identity_BYTES'")
    for found in (answer.error, error.details()):
        assert found.startswith(f"[request id: seven] {text}")
    assert answer.status == 400
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_strings_that_are_not_utf8(client: Client) -> None:
    if not client.carries_bytes:
        pytest.skip("a JSON string is text")
    with pytest.raises(InvalidRequest, match="input 'INPUT0' holds an element that is not UTF-8"):
        client.infer("identity_BYTES", [Input("INPUT0", strings([b"\xff\xfe"], [1, 1]))])


def test_refusals_are_not_counted(client: Client) -> None:
    """Validation precedes admission to the model's queue, and so its statistics."""

    def counters() -> pb.ModelStatistics:
        [model] = client.statistics("simple")
        return model

    before = counters()
    for inputs in ({}, {"INPUT0": _ROW, "WRONG": _ROW}):
        with pytest.raises(InvalidRequest):
            client.infer("simple", inputs)
    assert counters() == before
