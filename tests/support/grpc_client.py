"""The client over gRPC, on grpcio and the project's own messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.support.client import (
    Answer,
    Client,
    Input,
    Output,
    Parameter,
    error_by_grpc,
    from_raw,
    spent_by,
    to_raw,
)

M = TypeVar("M", bound=Message)
SERVICE = "/inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for every channel
)
_SECONDS = 60.0


class GrpcClient(Client):
    """A gRPC client; tensors travel in `raw_input_contents`."""

    def __init__(
        self, address: str, *options: tuple[str, int], root: bytes = b"", key: str = ""
    ) -> None:
        """With a `root` of certificates, over TLS, and there with a `key`, if any."""
        if root:
            known = grpc.ssl_channel_credentials(root)
            if key:
                bearer = grpc.access_token_call_credentials(key)
                known = grpc.composite_channel_credentials(known, bearer)
            self.channel = grpc.secure_channel(address, known, (*OPTIONS, *options))
        else:
            self.channel = grpc.insecure_channel(address, (*OPTIONS, *options))

    def close(self) -> None:
        self.channel.close()

    def carries(self, datatype: Datatype) -> bool:
        return True

    def live(self) -> bool:
        return self.call("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live

    def ready(self) -> bool:
        return self.call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready

    def model_ready(self, name: str, version: str = "") -> bool:
        request = pb.ModelReadyRequest(name=name, version=version)
        return self.call("ModelReady", request, pb.ModelReadyResponse).ready

    def server_metadata(self) -> pb.ServerMetadataResponse:
        return self.call("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)

    def model_metadata(self, name: str, version: str = "") -> pb.ModelMetadataResponse:
        request = pb.ModelMetadataRequest(name=name, version=version)
        return self.call("ModelMetadata", request, pb.ModelMetadataResponse)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        request = pb.ModelConfigRequest(name=name, version=version)
        return self.call("ModelConfig", request, pb.ModelConfigResponse).config

    def statistics(self, name: str = "", version: str = "") -> list[pb.ModelStatistics]:
        request = pb.ModelStatisticsRequest(name=name, version=version)
        return list(self.call("ModelStatistics", request, pb.ModelStatisticsResponse).model_stats)

    def index(self, ready: bool = False) -> pb.RepositoryIndexResponse:
        request = pb.RepositoryIndexRequest(ready=ready)
        return self.call("RepositoryIndex", request, pb.RepositoryIndexResponse)

    def load(
        self,
        name: str,
        repository: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=name, repository_name=repository)
        if config is not None:
            request.parameters["config"].string_param = config
        for path, content in (files or {}).items():
            request.parameters[f"file:{path}"].bytes_param = content
        self.call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)

    def unload(self, name: str, repository: str = "", dependents: bool = False) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=name, repository_name=repository)
        if dependents:
            request.parameters["unload_dependents"].bool_param = True
        self.call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)

    def send_infer(
        self,
        model: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        version: str,
        id: str,
        parameters: dict[str, Parameter],
    ) -> Answer:
        message = infer_message(model, inputs, outputs, version, id, parameters)
        call = self.procedure("ModelInfer", pb.ModelInferResponse)
        try:
            response, done = call.with_call(message, timeout=_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from None
        trailing = dict(done.trailing_metadata())
        return read_answer(response, trailing.get("server-timing", ""))

    def call(self, name: str, request: Message, answer: type[M]) -> M:
        """Call a unary procedure of the inference service."""
        try:
            response: M = self.procedure(name, answer)(request, timeout=_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from None
        return response

    def procedure(self, name: str, answer: type[Message]) -> Any:
        """A unary procedure of the inference service, as grpcio's own callable."""
        return procedure(self.channel, f"{SERVICE}/{name}", answer)

    def stream(
        self, requests: Iterable[pb.ModelInferRequest], metadata: Sequence[tuple[str, str]] = ()
    ) -> Any:
        """ModelStreamInfer: grpcio's call, an iterator of the responses."""
        path = f"{SERVICE}/ModelStreamInfer"
        call = procedure(self.channel, path, pb.ModelStreamInferResponse, "stream_stream")
        return call(iter(requests), timeout=_SECONDS, metadata=metadata)


def procedure(
    channel: grpc.Channel, path: str, answer: type[Message], kind: str = "unary_unary"
) -> Any:
    """A procedure as grpcio's callable; it accepts messages or encoded bytes."""
    return getattr(channel, kind)(
        path, request_serializer=_serialise, response_deserializer=answer.FromString
    )


def infer_message(
    model: str,
    inputs: Sequence[Input] = (),
    outputs: Sequence[Output] = (),
    version: str = "",
    id: str = "",
    parameters: Mapping[str, Parameter] | None = None,
) -> pb.ModelInferRequest:
    """A request message with raw tensors."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for item in inputs:
        message.inputs.add(name=item.name, datatype=item.sent_datatype, shape=item.sent_shape)
        message.raw_input_contents.append(to_raw(item.array, item.sent_datatype))
    for wanted in outputs:
        output = message.outputs.add(name=wanted.name)
        if wanted.classes:
            output.parameters["classification"].int64_param = wanted.classes
    for name, value in (parameters or {}).items():
        field = _PARAMETER_FIELDS[type(value)]
        if field == "int64_param" and not -(2**63) <= value < 2**63:  # type: ignore[operator]
            field = "uint64_param"
        setattr(message.parameters[name], field, value)
    return message


def read_answer(message: pb.ModelInferResponse, server_timing: str = "") -> Answer:
    """Decode a response message, which must have one raw entry per output and no contents."""
    assert len(message.outputs) == len(message.raw_output_contents)
    assert not any(item.HasField("contents") for item in message.outputs)
    arrays = {
        item.name: from_raw(raw, item.datatype, item.shape)
        for item, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    return Answer(
        message.model_name,
        message.model_version,
        message.id,
        {name: parameter(value) for name, value in message.parameters.items()},
        arrays,
        {item.name: item.datatype for item in message.outputs},
        server_timing,
    )


def parameter(value: pb.InferParameter) -> Parameter:
    """The value of a parameter of any type."""
    choice = value.WhichOneof("parameter_choice")
    assert choice is not None
    result: Parameter = getattr(value, choice)
    return result


def error_of(error: grpc.RpcError) -> ServerError:
    """The `ServerError` of a call's status."""
    call: Any = error  # which it is too, but no type says so
    found = error_by_grpc(call.code().value[0], call.details() or "")
    found.retry_after = _retry_after(call)
    found.spent = spent_by(dict(call.trailing_metadata() or ()).get("server-timing", ""))
    return found


def _retry_after(call: Any) -> int:
    """Seconds of the status's `RetryInfo`; 0 without one."""
    details = dict(call.trailing_metadata() or ()).get("grpc-status-details-bin")
    if details is None:
        return 0
    status = status_pb2.Status.FromString(details)
    assert (status.code, status.message) == (call.code().value[0], call.details())
    [detail] = status.details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    seconds: int = info.retry_delay.seconds
    return seconds


_PARAMETER_FIELDS: dict[type, str] = {
    bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param",
}  # fmt: skip


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
