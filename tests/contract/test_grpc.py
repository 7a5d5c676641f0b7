"""gRPC alone: tensors and parameters in messages, and the transport."""

from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, NotFound, Unsupported
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import Answer, Input
from tests.support.grpc_client import (
    OPTIONS,
    SERVICE,
    GrpcClient,
    infer_message,
    procedure,
    read_answer,
)
from tests.support.server_process import ServerProcess


def _typed(datatype: str, field: str, values: list[Any], model: str = "") -> pb.ModelInferRequest:
    """One row of `values` in a typed field."""
    message = pb.ModelInferRequest(model_name=model or f"identity_{datatype}")
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[1, len(values)])
    getattr(tensor.contents, field).extend(values)
    return message


def _simple() -> pb.ModelInferRequest:
    row = np.arange(16, dtype=np.int32).reshape(1, 16)
    return infer_message("simple", [Input("INPUT0", row), Input("INPUT1", row)])


def _infer(client: GrpcClient, message: pb.ModelInferRequest) -> Answer:
    return read_answer(client.call("ModelInfer", message, pb.ModelInferResponse))


# --- tensors and parameters: one case each, the codec's tests have the rest


def test_typed_contents_and_parameters(grpc_client: GrpcClient) -> None:
    """Read from the typed field; the answer has raw contents all the same."""
    for datatype, field, values in (
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("FP32", "fp32_contents", [0.5, float("inf")]),
        ("FP32", "fp32_contents", []),
        ("BYTES", "bytes_contents", [b"", b"x" * 300]),
    ):
        answer = _infer(grpc_client, _typed(datatype, field, values))
        assert answer["OUTPUT0"].tolist() == [values]
    assert _infer(grpc_client, _with_parameter("uint64_param", 1)).parameters == {}


def test_long_messages_at_once(server: ServerProcess) -> None:
    """Of one connection: grpcio mixes their frames."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 255, (1, n), np.uint8) for n in (1 << 20, 3, 2 << 20) * 3]
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        calls = [
            infer.future(infer_message("identity_UINT8", [Input("INPUT0", row)])) for row in rows
        ]
        for call, row in zip(calls, rows, strict=True):
            assert call.result(timeout=60).raw_output_contents == [row.tobytes()]


def _with_parameter(field: str, value: object) -> pb.ModelInferRequest:
    message = _simple()
    setattr(message.parameters["priority"], field, value)
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (_typed("FP32", "fp64_contents", [1.0]), "unexpected explicit tensor data for input tensor"
         " 'INPUT0' for model 'identity_FP32' of type '.*', expected"),
        (_typed("FP16", "fp32_contents", [1.0]), "FP16 .*raw_input_contents for input 'INPUT0'"),
        (_typed("INT8", "int_contents", [128]), "out of the range of INT8"),
        (_with_parameter("string_param", "1"), "invalid value type for 'priority' parameter, exp"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(
    grpc_client: GrpcClient, message: pb.ModelInferRequest, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        _infer(grpc_client, message)


# --- names and versions


@pytest.mark.parametrize("version", ["abc", "-1", " 1", "\u0661"])
def test_a_version_that_is_not_a_number(grpc_client: GrpcClient, version: str) -> None:
    message = _simple()
    message.model_version = version
    with pytest.raises(InvalidRequest, match="version should be an integral value > 0"):
        _infer(grpc_client, message)
    for ask in (grpc_client.model_metadata, grpc_client.model_config, grpc_client.model_ready):
        with pytest.raises(InvalidRequest, match="failed to get model version from specified"):
            ask("simple", version)


@pytest.mark.parametrize("name", ["", "../simple", "SIMPLE"])
def test_unknown_model_names(grpc_client: GrpcClient, name: str) -> None:
    message = _simple()
    message.model_name = name
    with pytest.raises(NotFound):
        _infer(grpc_client, message)
    assert not grpc_client.model_ready(name)


# --- the transport


@pytest.mark.parametrize(("path", "message", "status"), [
    (f"{SERVICE}/Nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
    ("/inference.Nothing/ModelInfer", b"", grpc.StatusCode.UNIMPLEMENTED),
    (f"{SERVICE}/ModelInfer", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    (f"{SERVICE}/ModelConfig", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    (f"{SERVICE}/ModelInfer", b"", grpc.StatusCode.NOT_FOUND),
])  # fmt: skip
def test_statuses(
    server: ServerProcess, path: str, message: bytes, status: grpc.StatusCode
) -> None:
    assert _status(server, path, message) is status


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_request(server: ServerProcess, algorithm: grpc.Compression) -> None:
    with grpc.insecure_channel(server.grpc, OPTIONS, compression=algorithm) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        values = np.zeros((8, 10_000), np.float32)
        message = infer_message("identity_FP32", [Input("INPUT0", values)])
        answer = read_answer(infer(message, timeout=60))
    assert answer["OUTPUT0"].shape == (8, 10_000)


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_timing_as_trailing_metadata(
    server: ServerProcess, compression: grpc.Compression | None
) -> None:
    """On the first answer of a connection, and on later ones with known fields."""
    with grpc.insecure_channel(server.grpc, OPTIONS, compression=compression) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        for _ in range(3):
            _, call = infer.with_call(_simple(), timeout=60)
            [(name, told)] = call.trailing_metadata()
            assert name == "server-timing"
            assert told.startswith("queue;dur=")
            assert told.endswith('batch;desc="1"')


def test_unknown_metadata_is_ignored(grpc_client: GrpcClient) -> None:
    metadata = [("x-anything", "1"), ("binary-bin", b"\x00\xff"), ("traceparent", "00-1-1-00")]
    infer = grpc_client.procedure("ModelInfer", pb.ModelInferResponse)
    assert infer(_simple(), timeout=60, metadata=metadata).model_name == "simple"
    for value in (" a", "a ", " "):
        answer = infer(_simple(), timeout=60, metadata=[("x-anything", value)])
        assert answer.model_name == "simple"


@pytest.mark.parametrize("letter", ["x", "\u20ac", "%"])
def test_long_errors_are_cut(grpc_client: GrpcClient, letter: str) -> None:
    """Errors travel in headers, whose size clients limit; longer ones would hide the status."""
    with pytest.raises(NotFound, match=f"^Request for unknown model: '{letter}+\u2026$"):
        grpc_client.model_metadata(letter * 20_000)


def test_errors_are_text_in_any_language(grpc_client: GrpcClient) -> None:
    with pytest.raises(NotFound, match="'\u00fc\u20ac\U0001f600' is not found"):
        grpc_client.model_metadata("\u00fc\u20ac\U0001f600")
    # The name of a repository is invalid.
    request = pb.RepositoryIndexRequest(repository_name="r")
    with pytest.raises(Unsupported, match="'repository_name' specification is not supported"):
        grpc_client.call("RepositoryIndex", request, pb.RepositoryIndexResponse)


def _status(server: ServerProcess, path: str, message: bytes) -> grpc.StatusCode:
    """The status of a unary call with these bytes."""
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        call = procedure(channel, path, pb.ModelInferResponse).future(message, timeout=60)
        code: grpc.StatusCode = call.code()
    return code
