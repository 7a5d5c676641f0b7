"""gRPC alone: how tensors and parameters lie in a message, and what the transport itself does."""

from collections.abc import Callable
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

Change = Callable[[pb.ModelInferRequest], object]


def _typed(datatype: str, field: str, values: list[Any], model: str = "") -> pb.ModelInferRequest:
    """One row of `values` in a typed field."""
    message = pb.ModelInferRequest(model_name=model or f"identity_{datatype}")
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[1, len(values)])
    getattr(tensor.contents, field).extend(values)
    return message


def _simple() -> pb.ModelInferRequest:
    """A good request with raw tensors."""
    row = np.arange(16, dtype=np.int32).reshape(1, 16)
    return infer_message("simple", [Input("INPUT0", row), Input("INPUT1", row)])


def _infer(client: GrpcClient, message: pb.ModelInferRequest) -> Answer:
    return read_answer(client.call("ModelInfer", message, pb.ModelInferResponse))


# --- tensors


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-32768, 32767]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("FP32", "fp32_contents", [0.5, float("inf")]),
        ("FP64", "fp64_contents", [0.1, -1e300]),
        ("BYTES", "bytes_contents", [b"", b"x" * 300]),
    ],
)
def test_typed_contents(
    grpc_client: GrpcClient, datatype: str, field: str, values: list[Any]
) -> None:
    """Taken from the field of their type; the answer is in raw form all the same."""
    answer = _infer(grpc_client, _typed(datatype, field, values))
    assert answer["OUTPUT0"].tolist() == [values]


def test_no_typed_elements(grpc_client: GrpcClient) -> None:
    answer = _infer(grpc_client, _typed("FP32", "fp32_contents", []))
    assert answer["OUTPUT0"].shape == (1, 0)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_typed_contents(grpc_client: GrpcClient, datatype: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{datatype} .*raw_input_contents for input 'INPUT0'"):
        _infer(grpc_client, _typed(datatype, "fp32_contents", [1.0]))


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("FP32", "fp64_contents", [1.0]),
        ("FP64", "fp32_contents", [1.0]),
        ("INT32", "int64_contents", [1]),
        ("INT64", "int_contents", [1]),
        ("UINT8", "int_contents", [1]),
        ("BOOL", "int_contents", [1]),
        ("BYTES", "int_contents", [1]),
    ],
)
def test_contents_of_a_wrong_type(
    grpc_client: GrpcClient, datatype: str, field: str, values: list[Any]
) -> None:
    message = (
        f"unexpected explicit tensor data for input tensor 'INPUT0' for model 'identity_{datatype}'"
        f" of type '.*', expected"
    )
    with pytest.raises(InvalidRequest, match=message):
        _infer(grpc_client, _typed(datatype, field, values))


def test_two_typed_fields(grpc_client: GrpcClient) -> None:
    message = _typed("INT32", "int_contents", [1])
    message.inputs[0].contents.fp32_contents.append(1.0)
    with pytest.raises(InvalidRequest, match="unexpected explicit tensor data for input tensor"):
        _infer(grpc_client, message)


@pytest.mark.parametrize("value", [128, -129])
def test_typed_numbers_out_of_range(grpc_client: GrpcClient, value: int) -> None:
    with pytest.raises(InvalidRequest, match="out of the range of INT8"):
        _infer(grpc_client, _typed("INT8", "int_contents", [value]))


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [("FP32", "fp32_contents", [1.0]), ("BYTES", "bytes_contents", [b"a", b"b", b"c"])],
)
def test_wrong_number_of_typed_elements(
    grpc_client: GrpcClient, datatype: str, field: str, values: list[Any]
) -> None:
    message = _typed(datatype, field, values)
    message.inputs[0].shape[:] = [1, 2]
    with pytest.raises(InvalidRequest, match="input 'INPUT0'"):
        _infer(grpc_client, message)


def _raw(*entries: bytes) -> Change:
    def change(message: pb.ModelInferRequest) -> None:
        message.ClearField("raw_input_contents")
        message.raw_input_contents.extend(entries)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m.inputs[1].contents.int_contents.append(1),
            "contents field must not be specified when using raw_input_contents for 'INPUT1'"
            " for model 'simple'",
        ),
        (
            _raw(bytes(64)),
            "unable to find data for input tensor 'INPUT1' for model 'simple' in request",
        ),
        (
            _raw(bytes(64), bytes(60)),
            r"\[request id: <id_unknown>\] input byte size mismatch for input 'INPUT1'"
            r" for model 'simple'\. Expected 64, got 60",
        ),
        (_raw(bytes(64), bytes(68)), "input byte size mismatch for input 'INPUT1'"),
        (_raw(), "input 'INPUT0'"),
        (
            lambda m: m.inputs[0].ClearField("datatype"),
            "input 'INPUT0' has the unknown datatype ''",
        ),
        (lambda m: m.inputs[0].ClearField("name"), "expects|unexpected inference input ''"),
    ],
)
def test_raw_contents_that_do_not_fit(grpc_client: GrpcClient, change: Change, text: str) -> None:
    message = _simple()
    change(message)
    with pytest.raises(InvalidRequest, match=text):
        _infer(grpc_client, message)


def test_surplus_raw_contents_are_ignored(grpc_client: GrpcClient) -> None:
    message = _simple()
    message.raw_input_contents.append(b"more")
    assert _infer(grpc_client, message)["OUTPUT0"].tolist() == [list(range(0, 32, 2))]


# --- parameters


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("priority", "uint64_param", 1),
        ("priority", "int64_param", 1),
        ("timeout", "int64_param", 60_000_000),
        ("sequence_id", "int64_param", 0),
        ("sequence_id", "string_param", ""),
        ("triton_enable_empty_final_response", "bool_param", True),
        ("binary_data_output", "bool_param", True),
        ("custom", "double_param", 0.5),
        ("custom", "string_param", "x"),
    ],
)
def test_parameters_of_a_good_type(
    grpc_client: GrpcClient, name: str, field: str, value: object
) -> None:
    message = _simple()
    setattr(message.parameters[name], field, value)
    assert _infer(grpc_client, message).parameters == {}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("priority", "int64_param", -1),
        ("priority", "string_param", "1"),
        ("timeout", "string_param", "1"),
        ("timeout", "uint64_param", 1),
        ("sequence_id", "double_param", 1.0),
        ("sequence_start", "int64_param", 1),
        ("sequence_end", "string_param", "true"),
        ("triton_enable_empty_final_response", "string_param", "true"),
        ("custom", "uint64_param", 1),
    ],
)
def test_parameters_of_a_wrong_type(
    grpc_client: GrpcClient, name: str, field: str, value: object
) -> None:
    message = _simple()
    setattr(message.parameters[name], field, value)
    with pytest.raises(
        InvalidRequest, match=f"invalid value type for '{name}' parameter, expected"
    ):
        _infer(grpc_client, message)


@pytest.mark.parametrize(
    ("field", "value"), [("int64_param", 0), ("int64_param", -1), ("string_param", "1")]
)
def test_class_counts_that_are_none(grpc_client: GrpcClient, field: str, value: object) -> None:
    message = _simple()
    output = message.outputs.add(name="OUTPUT0")
    setattr(output.parameters["classification"], field, value)
    with pytest.raises(InvalidRequest, match="'classification' of output 'OUTPUT0' must be a posi"):
        _infer(grpc_client, message)


def test_a_parameter_without_a_value(grpc_client: GrpcClient) -> None:
    message = _simple()
    message.parameters["custom"].SetInParent()
    with pytest.raises(InvalidRequest, match="invalid value type for 'custom' parameter, expected"):
        _infer(grpc_client, message)


# --- names and versions


@pytest.mark.parametrize("version", ["abc", "-1", "1.0", " 1", "1 ", "\u0661"])
def test_version_that_is_no_number(grpc_client: GrpcClient, version: str) -> None:
    message = _simple()
    message.model_version = version
    with pytest.raises(InvalidRequest, match="version should be an integral value > 0"):
        _infer(grpc_client, message)
    for ask in (grpc_client.model_metadata, grpc_client.model_config, grpc_client.model_ready):
        with pytest.raises(InvalidRequest, match="failed to get model version from specified"):
            ask("simple", version)


@pytest.mark.parametrize("name", ["", "..", "../simple", "simple/1", "SIMPLE", "simple "])
def test_names_that_no_model_has(grpc_client: GrpcClient, name: str) -> None:
    message = _simple()
    message.model_name = name
    with pytest.raises(NotFound):
        _infer(grpc_client, message)
    assert not grpc_client.model_ready(name)


def test_index_of_a_named_repository(grpc_client: GrpcClient) -> None:
    request = pb.RepositoryIndexRequest(repository_name="r")
    with pytest.raises(Unsupported, match="'repository_name' specification is not supported"):
        grpc_client.call("RepositoryIndex", request, pb.RepositoryIndexResponse)


# --- the transport


@pytest.mark.parametrize("name", ["Nothing", "infer"])
def test_procedures_that_are_not_there(server: ServerProcess, name: str) -> None:
    assert _status(server, f"{SERVICE}/{name}", b"") is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("path", ["/inference.Nothing/ModelInfer", "/nothing/at/all"])
def test_services_that_are_not_there(server: ServerProcess, path: str) -> None:
    assert _status(server, path, b"") is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["ModelInfer", "ModelConfig", "ServerLive", "RepositoryIndex"])
def test_bytes_that_are_no_message(server: ServerProcess, name: str) -> None:
    status = _status(server, f"{SERVICE}/{name}", b"\xff\xff\xff")
    assert status is grpc.StatusCode.INVALID_ARGUMENT


def test_an_empty_message(server: ServerProcess) -> None:
    assert _status(server, f"{SERVICE}/ModelInfer", b"") is grpc.StatusCode.NOT_FOUND


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
    """The first answer of a connection, and those for which the fields are known."""
    with grpc.insecure_channel(server.grpc, OPTIONS, compression=compression) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        for _ in range(3):
            _, call = infer.with_call(_simple(), timeout=60)
            [(name, told)] = call.trailing_metadata()
            assert name == "server-timing"
            assert told.startswith("queue;dur=")
            assert told.endswith('batch;desc="1"')


def test_metadata_does_not_disturb(grpc_client: GrpcClient) -> None:
    metadata = [("x-anything", "1"), ("binary-bin", b"\x00\xff"), ("traceparent", "00-1-1-00")]
    infer = grpc_client.procedure("ModelInfer", pb.ModelInferResponse)
    assert infer(_simple(), timeout=60, metadata=metadata).model_name == "simple"
    for value in (" a", "a ", " "):
        answer = infer(_simple(), timeout=60, metadata=[("x-anything", value)])
        assert answer.model_name == "simple"


@pytest.mark.parametrize("letter", ["x", "\u20ac", "%"])
def test_long_errors_are_cut(grpc_client: GrpcClient, letter: str) -> None:
    """They travel in headers, of which clients take only so much; more would hide the status."""
    with pytest.raises(NotFound, match=f"^Request for unknown model: '{letter}+\u2026$"):
        grpc_client.model_metadata(letter * 20_000)


def test_errors_are_text_in_any_language(grpc_client: GrpcClient) -> None:
    with pytest.raises(NotFound, match="'\u00fc\u20ac\U0001f600' is not found"):
        grpc_client.model_metadata("\u00fc\u20ac\U0001f600")


def _status(server: ServerProcess, path: str, message: bytes) -> grpc.StatusCode:
    """The status of a unary call with these bytes."""
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        call = procedure(channel, path, pb.ModelInferResponse).future(message, timeout=60)
        code: grpc.StatusCode = call.code()
    return code
