"""The procedures of `GRPCInferenceService`, from message bytes to message bytes."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from headrace.core.errors import InvalidRequest, PayloadTooLarge, Unavailable, Unsupported
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.engine import CONTROL_DISABLED, Engine
from headrace.transports.grpc.call import Call, Unary
from headrace.wire.compression import too_large
from headrace.wire.grpc_infer import decode_infer, encode_infer, parse_infer
from headrace.wire.pb import grpc_service_pb2 as pb

M = TypeVar("M", bound=Message)

SERVICE = "inference.GRPCInferenceService"
TIMING_METADATA = "headrace-timing"  # any value: answer with `server-timing` as trailing metadata
TIMING_PARAMETER = (
    "headrace_timing"  # a request parameter: answer with timings among the parameters
)


class InferenceService:
    """The unary procedures; the stream is in `headrace.transports.grpc.stream`."""

    def __init__(self, engine: Engine, max_request_bytes: int) -> None:
        self._engine = engine
        self._limit = max_request_bytes

    def handlers(self) -> dict[str, Unary]:
        """The procedures by full path."""
        engine = self._engine
        table: dict[str, Unary] = {
            "ModelInfer": self.infer,
            "ServerLive": _answers(
                pb.ServerLiveRequest, lambda _: pb.ServerLiveResponse(live=engine.live)
            ),
            "ServerReady": _answers(
                pb.ServerReadyRequest, lambda _: pb.ServerReadyResponse(ready=engine.ready)
            ),
            "ModelReady": _answers(
                pb.ModelReadyRequest,
                lambda m: pb.ModelReadyResponse(ready=engine.model_ready(m.name, m.version)),
            ),
            "ServerMetadata": _answers(
                pb.ServerMetadataRequest, lambda _: engine.server_metadata()
            ),
            "ModelMetadata": _answers(
                pb.ModelMetadataRequest, lambda m: engine.model_metadata(m.name, m.version)
            ),
            "ModelConfig": _answers(
                pb.ModelConfigRequest,
                lambda m: pb.ModelConfigResponse(config=engine.model_config(m.name, m.version)),
            ),
            "ModelStatistics": _answers(
                pb.ModelStatisticsRequest, lambda m: engine.model_statistics(m.name, m.version)
            ),
            "RepositoryIndex": _answers(pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": _answers(pb.RepositoryModelLoadRequest, _refuse_control),
            "RepositoryModelUnload": _answers(pb.RepositoryModelUnloadRequest, _refuse_control),
        }
        return {f"/{SERVICE}/{name}": handler for name, handler in table.items()}

    async def infer(self, data: bytes, call: Call) -> bytes:
        """ModelInfer."""
        nbytes = check_size(data, self._limit)
        admission = self._engine.admission
        admission.enter(nbytes)
        try:
            message = parse_infer(data)
            found = self._engine.find(message.model_name, message.model_version)
            call.note("model", found.model)
            call.note("version", found.name)
            call.note("request_id", message.id)
            if found.decoupled:
                raise Unsupported(
                    "ModelInfer RPC doesn't support models with decoupled transaction policy"
                )
            request = decode_infer(message, nbytes)
            timed = wants_timing(request)
            response = await found.infer(request)
        finally:
            admission.leave(nbytes)
        if timed:
            add_timing(response)
        if TIMING_METADATA in call.metadata():
            timing = response.timing
            call.set_trailing(
                "server-timing",
                f"queue;dur={timing.queue_ns / 1e6:.3f}, compute;dur={timing.compute_ns / 1e6:.3f},"
                f' batch;desc="{timing.batch_rows}"',
            )
        return encode_infer(response).SerializeToString()

    def _index(self, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        if message.repository_name:
            raise Unsupported("'repository_name' specification is not supported")
        return self._engine.index(message.ready)


def check_size(data: bytes, limit: int) -> int:
    """The size of a message; raises `PayloadTooLarge`."""
    if len(data) > limit:
        raise PayloadTooLarge(too_large("request message", limit, len(data)))
    return len(data)


def wants_timing(request: InferRequest) -> bool:
    """Whether the request asks for timings; takes the parameter out, it is not the model's."""
    return request.parameters.pop(TIMING_PARAMETER, False) is True


def add_timing(response: InferResponse) -> None:
    """Put the timings among the response's parameters."""
    timing = response.timing
    response.parameters |= {
        "queue_us": timing.queue_ns // 1_000,
        "compute_us": timing.compute_ns // 1_000,
        "batch_rows": timing.batch_rows,
    }


def _refuse_control(
    message: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> Message:
    if message.repository_name:
        raise Unsupported("'repository_name' specification is not supported")
    raise Unavailable(CONTROL_DISABLED)


def _answers(kind: type[M], answer: Callable[[M], Message]) -> Unary:
    """A procedure that answers at once from the engine's state."""

    async def handler(data: bytes, call: Call) -> bytes:
        try:
            message = kind.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"not a valid {kind.__name__} message: {error}") from None
        return answer(message).SerializeToString()

    return handler
