"""The gRPC services for health and reflection."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from headrace.protocol.pb import health_pb2, reflection_pb2
from tests.support.grpc_client import GrpcClient, procedure

_REFLECTION = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]
_SERVICES = {
    "inference.GRPCInferenceService", "headrace.v1.TrafficService", "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
}  # fmt: skip


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "anything"])
def test_health_check(grpc_client: GrpcClient, service: str) -> None:
    """The server's readiness, for any service name."""
    path = "/grpc.health.v1.Health/Check"
    check = procedure(grpc_client.channel, path, health_pb2.HealthCheckResponse)
    answer = check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_watch(grpc_client: GrpcClient) -> None:
    path = "/grpc.health.v1.Health/Watch"
    watch = procedure(grpc_client.channel, path, health_pb2.HealthCheckResponse, "unary_stream")
    updates = watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(updates).status == health_pb2.HealthCheckResponse.SERVING
    updates.cancel()


def _ask(
    client: GrpcClient, package: str, *requests: reflection_pb2.ServerReflectionRequest
) -> Iterator[reflection_pb2.ServerReflectionResponse]:
    path = f"/{package}.ServerReflection/ServerReflectionInfo"
    answer = reflection_pb2.ServerReflectionResponse
    yield from procedure(client.channel, path, answer, "stream_stream")(iter(requests), timeout=60)


@pytest.mark.parametrize("package", _REFLECTION)
def test_list_of_services(grpc_client: GrpcClient, package: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="", host="here")
    [answer] = _ask(grpc_client, package, request)
    assert {service.name for service in answer.list_services_response.service} == _SERVICES
    assert answer.valid_host == "here"
    assert answer.original_request == request


@pytest.mark.parametrize("package", _REFLECTION)
@pytest.mark.parametrize(("symbol", "file"), [
    ("inference.GRPCInferenceService", "grpc_service.proto"),
    ("inference.GRPCInferenceService.ModelInfer", "grpc_service.proto"),
    ("inference.ModelInferRequest", "grpc_service.proto"),
    ("inference.ModelInferRequest.InferInputTensor", "grpc_service.proto"),
    ("inference.ModelConfig", "model_config.proto"), ("grpc.health.v1.Health", "health.proto"),
    ("grpc.reflection.v1.ServerReflection", "reflection.proto"),
])  # fmt: skip
def test_file_of_a_symbol(grpc_client: GrpcClient, package: str, symbol: str, file: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    [answer] = _ask(grpc_client, package, request)
    files = [
        FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert files[0].name == file
    # All files that a tool needs are there.
    names = {descriptor.name for descriptor in files}
    assert {name for descriptor in files for name in descriptor.dependency} <= names


def test_several_reflection_requests_on_one_stream(grpc_client: GrpcClient) -> None:
    first, second, third = _ask(
        grpc_client,
        _REFLECTION[0],
        reflection_pb2.ServerReflectionRequest(file_by_filename="grpc_service.proto"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"),
        reflection_pb2.ServerReflectionRequest(list_services=""),
    )
    assert len(first.file_descriptor_response.file_descriptor_proto) == 2
    assert second.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert len(third.list_services_response.service) == len(_SERVICES)


@pytest.mark.parametrize("question", [
    reflection_pb2.ServerReflectionRequest(file_by_filename="nothing.proto"),
    reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="inference.Nothing"),
    reflection_pb2.ServerReflectionRequest(),
])  # fmt: skip
def test_reflection_requests_without_an_answer(
    grpc_client: GrpcClient, question: reflection_pb2.ServerReflectionRequest
) -> None:
    [answer] = _ask(grpc_client, _REFLECTION[0], question)
    assert answer.error_response.error_code != 0
    assert answer.error_response.error_message
