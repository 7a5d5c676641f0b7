"""All services of the gRPC door, for the engine's process and for front ends.

The operations of the table come as `unary`: from the engine, or forwarded to its process.
Operations that a door answers itself are here: health, reflection, inference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from google.protobuf.descriptor import FileDescriptor

from headrace.api.gate import Gate
from headrace.api.messages import limits, read_message
from headrace.api.operations import (
    HEALTH,
    INFERENCE,
    NAMED,
    OPERATIONS,
    REFLECTION,
    TRAFFIC,
    Operation,
    by_procedure,
)
from headrace.core.errors import InvalidRequest, ServerExiting
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.doors.grpc.call import Direct, Handlers, Open, Peer, StreamSession, Unary
from headrace.doors.grpc.inference import InferenceService, stream_opener
from headrace.engine.admission import Admission
from headrace.engine.entrance import Entrance, Readiness
from headrace.protocol.compression import check_size
from headrace.protocol.pb import POOL, health_pb2, reflection_pb2
from headrace.protocol.pb import reflection_v1alpha_pb2 as reflection_v1alpha_pb2  # into the pool

_NOT_FOUND = 5
_CHECK = NAMED["Check"]
_REFLECT = by_procedure()[f"/{REFLECTION[0]}/ServerReflectionInfo"]
_INFER, _STREAM = (NAMED[name].procedure for name in ("ModelInfer", "ModelStreamInfer"))
_SERVICES = (INFERENCE, TRAFFIC, HEALTH, *REFLECTION)


def all_handlers(
    entrance: Entrance,
    streams: Entrance,
    unary: Mapping[str, Unary],
    readiness: Readiness,
    max_request_bytes: int,
    gate: Gate,
) -> Handlers:
    """The handlers of all services, behind the door's gate.

    `streams` leads to the engine for requests in streams, `entrance` for all others.
    """
    admission = entrance.admission
    check, watch = health_handlers(readiness, admission)
    direct: dict[str, Direct] = {_INFER: InferenceService(entrance, max_request_bytes, gate)}
    sessions: dict[str, Open] = {
        _STREAM: stream_opener(streams, max_request_bytes, gate=gate),
        f"/{HEALTH}/Watch": watch,
    }
    for service in REFLECTION:
        sessions[f"/{service}/ServerReflectionInfo"] = partial(Reflection, admission)
    handlers = Handlers(
        direct=direct,
        unary={**unary, f"/{HEALTH}/Check": check},
        sessions=sessions,
    )
    largest = limits(max_request_bytes)
    limited = replace(handlers, limits={path: largest[path] for path in handlers.paths()})
    return restricted(limited, gate)


def restricted(
    handlers: Handlers, gate: Gate, operations: Sequence[Operation] = OPERATIONS
) -> Handlers:
    """Put handlers behind a gate, as what the table of operations says that they are.

    Raises `LookupError` for a procedure missing in the table, so that none can be forgotten.
    """
    table = by_procedure(operations)
    if missing := [path for path in handlers.paths() if path not in table]:
        raise LookupError(f"{missing[0]} is not in the table of operations. This is a bug.")
    found = {path: table[path] for path in handlers.paths()}
    return replace(handlers, operations=found, gate=gate)


# --- grpc.health.v1.Health: the server's readiness for any service name, as in Triton


def health_handlers(readiness: Readiness, admission: Admission) -> tuple[Unary, Open]:
    """Check and Watch: the server's readiness now, and on each change."""

    async def check(data: Buffer, call: object) -> bytes:
        check_size(data, _CHECK.max_bytes, fixed=True)
        return _status(readiness.ready and not admission.exiting)

    return check, partial(HealthSession, readiness, admission)


class HealthSession(StreamSession):
    """A `StreamSession` that reports the server's readiness until it exits.

    The client's single message names a service, which is ignored.
    """

    def __init__(self, readiness: Readiness, admission: Admission, peer: Peer) -> None:
        self._readiness, self._admission, self._peer = readiness, admission, peer
        self._asked = self._begun = False
        self._last: bool | None = None  # as last reported
        admission.watch_close(self.sent)

    @property
    def idle(self) -> bool:
        """Implements `StreamSession.idle`."""
        return not self._begun

    def receive(self, message: Buffer) -> None:
        """Receive the single message."""
        if self._asked:
            raise InvalidRequest("the call takes one message, got another")
        self._asked = True

    def half_close(self) -> None:
        """Start reporting."""
        if not self._asked:
            raise InvalidRequest("the call takes one message, got none")
        self._begun = True
        self._readiness.watch(self.sent)
        self.sent()

    def sent(self) -> None:
        """Send the status if it has changed, once there is room."""
        exiting = self._admission.exiting
        if not self._begun:
            if exiting:  # a client without requests must not delay the exit
                self._peer.finish(ServerExiting("Server exiting"))
            return
        if self._peer.congested:
            return
        ready = self._readiness.ready and not exiting
        if ready is not self._last:
            self._last = ready
            self._peer.send([_status(ready)])
        if exiting:
            self._peer.finish()

    def closed(self) -> None:
        """Stop watching."""
        self._begun = False
        self._readiness.unwatch(self.sent)
        self._admission.unwatch_close(self.sent)


def _status(ready: bool) -> bytes:
    message = health_pb2.HealthCheckResponse
    status = message.SERVING if ready else message.NOT_SERVING
    return message(status=status).SerializeToString()


# --- reflection (v1 and v1alpha), so that tools such as grpcurl need no .proto files


class Reflection(StreamSession):
    """The `StreamSession` of ServerReflectionInfo.

    The messages of the two packages are the same on the wire; only their names differ.
    """

    def __init__(self, admission: Admission, peer: Peer) -> None:
        self._admission, self._peer = admission, peer
        admission.watch_close(self._exit)

    @property
    def idle(self) -> bool:
        """Implements `StreamSession.idle`: every message is answered at once."""
        return True

    def receive(self, message: Buffer) -> None:
        """Answer; stop reading while the client does not read."""
        request = read_message(_REFLECT, message, 0)
        self._peer.send([_reflected(request).SerializeToString()])
        if self._peer.congested:
            self._peer.hold(True)

    def half_close(self) -> None:
        """End: everything is answered."""
        self._peer.finish()

    def sent(self) -> None:
        """Resume reading once there is room."""
        if not self._peer.congested:
            self._peer.hold(False)

    def closed(self) -> None:
        """Stop watching for the server's end."""
        self._admission.unwatch_close(self._exit)

    def _exit(self) -> None:
        self._peer.finish(ServerExiting("Server exiting"))


def _reflected(
    request: reflection_pb2.ServerReflectionRequest,
) -> reflection_pb2.ServerReflectionResponse:
    response = reflection_pb2.ServerReflectionResponse(
        valid_host=request.host, original_request=request
    )
    kind = request.WhichOneof("message_request")
    try:
        match kind:
            case "list_services":
                response.list_services_response.SetInParent()
                for name in _SERVICES:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, POOL.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, _file_of(request.file_containing_symbol))
            case _:
                raise KeyError(f"no extensions are known ({kind})")
    except KeyError as error:
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = bounded(str(error.args[0] if error.args else error))
    return response


def _file_of(symbol: str) -> FileDescriptor:
    """The file that declares `symbol`; raises `KeyError`."""
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:  # the pool cannot look up methods by full name
        service, _, method = symbol.rpartition(".")
        descriptor = POOL.FindServiceByName(service)
        if method not in descriptor.methods_by_name:
            raise
        return descriptor.file


def _add_files(response: reflection_pb2.ServerReflectionResponse, file: FileDescriptor) -> None:
    """Add the file and everything that it imports."""
    todo, seen = [file], set[str]()
    while todo:
        current = todo.pop()
        if current.name not in seen:
            seen.add(current.name)
            response.file_descriptor_response.file_descriptor_proto.append(current.serialized_pb)
            todo.extend(current.dependencies)
