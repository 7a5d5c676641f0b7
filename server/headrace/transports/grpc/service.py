"""The procedures of `GRPCInferenceService`, from message bytes to message bytes."""

from contextlib import suppress

from google.protobuf.message import DecodeError

from headrace.core.errors import (
    ExecutionFailed,
    ServerError,
    Unsupported,
)
from headrace.core.requests import InferRequest, InferResponse, Ticket
from headrace.core.tensors import Buffer
from headrace.engine.doors import GRPC_NOT_DECOUPLED, Entrance, Target
from headrace.engine.engine import Engine
from headrace.engine.forwarding import forwarding
from headrace.transports.grpc.call import Call, Direct, Reply, Unary
from headrace.transports.grpc.log_settings import log_settings_handler
from headrace.transports.grpc.repository import repository_handlers
from headrace.transports.grpc.shared_memory import shared_memory_handlers
from headrace.transports.grpc.trace_setting import trace_setting_handler
from headrace.transports.grpc.unary import answers, check_size
from headrace.wire.grpc_messages import InferReader, InferWriter
from headrace.wire.header_rules import HeaderPattern
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.timing import add_timing, server_timing, wants_timing

SERVICE = "inference.GRPCInferenceService"
_DOCUMENTS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig",
    "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
    "LogSettings", "TraceSetting", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
)  # fmt: skip
# The paths of the unary procedures that tell about the engine.
DOCUMENT_PROCEDURES = tuple(f"/{SERVICE}/{name}" for name in _DOCUMENTS)
TIMING_METADATA = "headrace-timing"  # any value: answer with `server-timing` as trailing metadata


class _Answer:
    """The sink of one ModelInfer, and the ticket that its transport holds."""

    __slots__ = ("named", "nbytes", "reply", "service", "ticket", "timed")

    door = "GRPC"

    def __init__(self, service: "InferenceService", reply: Reply, nbytes: int) -> None:
        self.service = service
        self.reply = reply
        self.nbytes = nbytes
        self.timed = False
        self.named = True
        self.ticket: Ticket | None = None

    def respond(self, response: InferResponse, final: bool) -> None:
        """Encode and send."""
        service, reply = self.service, self.reply
        service.admission.leave(self.nbytes)
        if self.timed:
            add_timing(response)
        if not self.named:
            reply.note(response.model_name, response.model_version, response.id)
        metadata = reply.metadata()
        if metadata and TIMING_METADATA in metadata:
            reply.set_trailing("server-timing", server_timing(response.timing).decode())
        reply.respond(service.writer.pieces(response))

    def finish(self) -> None:
        """Send that there is no answer."""
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.service.admission.leave(self.nbytes)
        self.reply.fail(error)

    refuse = fail

    def header(self, name: str) -> str:
        """What the client sent under a name in lower case, "" for nothing."""
        return self.reply.metadata().get(name, "")

    def routed(self, request: InferRequest, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.reply.note(target.model, target.name, request.id)

    def cancel(self) -> None:
        """Nobody waits any more."""
        if self.ticket is not None:
            self.ticket.cancel()
        self.service.admission.leave(self.nbytes)

    def hold(self, held: bool) -> None:
        """There is one response only."""


class InferenceService:
    """ModelInfer; the stream is in `headrace.transports.grpc.stream`."""

    def __init__(
        self,
        engine: Entrance,
        max_request_bytes: int,
        reader: InferReader | None = None,
        writer: InferWriter | None = None,
    ) -> None:
        self.admission = engine.admission
        self.writer = writer or InferWriter()
        self._reader = reader or InferReader()
        self._engine = engine
        self._limit = max_request_bytes

    def infer(self, data: Buffer, reply: Reply) -> Ticket | None:
        """ModelInfer; raises `ServerError`."""
        nbytes = check_size(data, self._limit)
        admission = self.admission
        admission.enter(nbytes)
        try:
            message = self._reader.read(data)
            found = self._engine.find(message.model_name, message.model_version)
            reply.note(found.model, found.name, message.id)
            if found.decoupled:
                raise Unsupported(GRPC_NOT_DECOUPLED)
            request = message.request(nbytes)
            answer = _Answer(self, reply, nbytes)
            if not found.name:  # in a front end, or by rules, the answer says which version it was
                answer.named = False
            answer.timed = wants_timing(request)
            answer.ticket = found.submit(request, answer)
        except BaseException:
            admission.leave(nbytes)
            raise
        return answer


def infer_handlers(
    engine: Entrance, max_request_bytes: int, pattern: HeaderPattern | None = None
) -> dict[str, Direct]:
    """ModelInfer, by full path; `pattern` picks what of the metadata models are told."""
    if pattern is None:
        return {f"/{SERVICE}/ModelInfer": InferenceService(engine, max_request_bytes).infer}
    reader, writer = InferReader(), InferWriter()

    def infer(data: Buffer, reply: Reply) -> Ticket | None:
        entrance = forwarding(engine, pattern, reply.metadata().items())
        return InferenceService(entrance, max_request_bytes, reader, writer).infer(data, reply)

    return {f"/{SERVICE}/ModelInfer": infer}


def document_handlers(engine: Engine, max_request_bytes: int) -> dict[str, Unary]:
    """The other unary procedures, by full path."""

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
    return {f"/{SERVICE}/{name}": handler for name, handler in table.items()}


def _bringing(
    engine: Engine,
    kind: type[pb.ModelMetadataRequest] | type[pb.ModelConfigRequest],
    handler: Unary,
) -> Unary:
    """A procedure that has the model that it tells about loaded first."""

    async def bring(data: Buffer, call: Call) -> bytes:
        with suppress(DecodeError):  # which the handler tells of
            message = kind.FromString(bytes(data))
            await engine.bring(message.name, message.version)
        return await handler(data, call)

    return bring
