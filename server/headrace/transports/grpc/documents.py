"""The unary procedures of `GRPCInferenceService` that tell about the engine or change it."""

from contextlib import suppress

from google.protobuf.message import DecodeError

from headrace.core.tensors import Buffer
from headrace.engine.engine import Engine
from headrace.transports.grpc.call import RpcContext, Unary
from headrace.transports.grpc.log_settings import log_settings_handler
from headrace.transports.grpc.procedures import INFERENCE
from headrace.transports.grpc.repository import repository_handlers
from headrace.transports.grpc.shared_memory import shared_memory_handlers
from headrace.transports.grpc.trace_setting import trace_setting_handler
from headrace.transports.grpc.unary import answers
from headrace.wire.pb import grpc_service_pb2 as pb


def document_handlers(engine: Engine, max_request_bytes: int) -> dict[str, Unary]:
    """All of them, by full path."""

    table: dict[str, Unary] = {
        "ServerLive": answers(
            pb.ServerLiveRequest, lambda _: pb.ServerLiveResponse(live=engine.live)
        ),
        "ServerReady": answers(
            pb.ServerReadyRequest, lambda _: pb.ServerReadyResponse(ready=engine.ready)
        ),
        "ModelReady": answers(
            pb.ModelReadyRequest,
            lambda m: pb.ModelReadyResponse(ready=engine.model_ready(m.name, m.version)),
        ),
        "ServerMetadata": answers(pb.ServerMetadataRequest, lambda _: engine.server_metadata()),
        "ModelMetadata": answers(
            pb.ModelMetadataRequest, lambda m: engine.model_metadata(m.name, m.version)
        ),
        "ModelConfig": answers(
            pb.ModelConfigRequest,
            lambda m: pb.ModelConfigResponse(config=engine.model_config(m.name, m.version)),
        ),
        "ModelStatistics": answers(
            pb.ModelStatisticsRequest, lambda m: engine.model_statistics(m.name, m.version)
        ),
        "LogSettings": log_settings_handler(engine.logs),
        **repository_handlers(engine, max_request_bytes),
        "TraceSetting": trace_setting_handler(engine.tracing),
        **shared_memory_handlers(engine.regions),
    }
    if engine.on_request is not None:
        table["ModelMetadata"] = _bringing(engine, pb.ModelMetadataRequest, table["ModelMetadata"])
        table["ModelConfig"] = _bringing(engine, pb.ModelConfigRequest, table["ModelConfig"])
    return {f"/{INFERENCE}/{name}": handler for name, handler in table.items()}


def _bringing(
    engine: Engine,
    kind: type[pb.ModelMetadataRequest] | type[pb.ModelConfigRequest],
    handler: Unary,
) -> Unary:
    """A procedure that has the model that it tells about loaded first."""

    async def bring(data: Buffer, call: RpcContext) -> bytes:
        with suppress(DecodeError):  # which the handler tells of
            message = kind.FromString(bytes(data))
            await engine.bring(message.name, message.version)
        return await handler(data, call)

    return bring
