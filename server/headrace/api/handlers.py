"""Handlers of the operations: functions over messages and the engine.

Over gRPC a handler's `answer` receives the request's message. Over HTTP it receives one made of the
path's parameters and the body, and its answer is sent as JSON; where Triton's documents differ from
those messages, `json` answers instead. Both may be coroutines, and raise `ServerError`.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, NamedTuple, Protocol

import orjson
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from headrace.api.audited import REQUEST_ID, AuditedRequest, is_changing
from headrace.api.gate import check, elsewhere
from headrace.api.messages import read_message, request_class
from headrace.api.operations import OPERATIONS, Document, Operation, by_procedure, handed_on
from headrace.core.errors import (
    InvalidRequest,
    LoadFailed,
    ServerError,
    Unavailable,
    Unsupported,
)
from headrace.core.identity import (
    ANYONE,
    CHANGING,
    NO_PEER,
    Identity,
    PeerFacts,
    Permission,
)
from headrace.core.model_spec import LoadParameters
from headrace.core.plugins import OptionalPart
from headrace.core.tensors import Buffer
from headrace.core.texts import shown
from headrace.engine import documents
from headrace.engine.engine import Engine
from headrace.engine.status import status
from headrace.engine.version import ModelVersion
from headrace.observability.logs import FORMATS
from headrace.protocol.documents import to_json
from headrace.protocol.elements import json_name
from headrace.protocol.json_text import parse_object
from headrace.protocol.load_json import read_load
from headrace.protocol.parameters import (
    load_parameters_of_message,
    unload_dependents_of_json,
    unload_dependents_of_message,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb import traffic_pb2

EXPLAIN: OptionalPart[Callable[[ModelVersion], Awaitable[Document]]] = OptionalPart("explain")
_LONG = 8 << 10  # bytes of a message from which on it is decoded on a thread

Parts = Mapping[str, str]  # parameters of a path


class AskingCall(Protocol):
    """A remote procedure call, as far as these handlers are concerned."""

    @property
    def identity(self) -> Identity:
        """The client."""

    @property
    def peer_facts(self) -> PeerFacts:
        """The facts about the other end of the connection."""

    def metadata(self) -> Mapping[str, str]:
        """The client's metadata."""


class BareCall(NamedTuple):
    """A procedure call of which no more is known than the client; ours, unless it is given."""

    identity: Identity = ANYONE
    peer_facts: PeerFacts = NO_PEER
    request_id: str = ""

    def metadata(self) -> Mapping[str, str]:
        """The client's metadata, as far as these handlers need it."""
        return {REQUEST_ID: self.request_id}


Unary = Callable[[Buffer, Any], Coroutine[Any, Any, bytes]]


def _read_object(operation: Operation, body: bytes | bytearray) -> Document:
    return parse_object(body, operation.max_elements)


def _allow_all(engine: Engine) -> None:
    """Refuse nothing."""


@dataclass(frozen=True, slots=True)
class Handler:
    """The handler of an operation.

    `json` receives the path's parameters and the body as decoded by `read`, which may take long for
    a large body; it returns the document, None for no body. `allow` refuses requests before they
    are decoded; `check` also refuses an HTTP request by its path. `changes` tells messages that
    change something, of an operation that also reads. With `listing`, the answer depends on which
    models the client may know of: both functions get its identity as a further argument.
    """

    answer: Callable[..., Any]  # of the engine and the message
    json: Callable[..., Any] | None = None  # of the engine, the path's parameters and the body
    check: Callable[[Engine, Parts], None] | None = None
    read: Callable[[Operation, bytes | bytearray], Any] = _read_object
    allow: Callable[[Engine], None] = _allow_all
    changes: Callable[[Any], bool] = lambda asked: False
    listing: bool = False


def check_model(
    identity: Identity,
    operation: Operation,
    changes: bool,
    names: Mapping[str, str],
    audited: AuditedRequest | None = None,
) -> None:
    """Raise `Forbidden` or `NotFound` unless a client may request this of the model, if any.

    `names` has the model's `name`, and the `version` if there is one. A request that names no model
    is about all of them, unless it only reads: then the answer is without those that the client may
    not know of. `audited` is told of a refusal.
    """
    permission = operation.needs(changes)
    model = names.get("name", "") if operation.of_model else ""
    try:
        if model:
            check(identity, permission, model, names.get("version", ""))
        elif permission in CHANGING:
            check(identity, permission)
    except ServerError:
        if audited is not None:
            audited.refuse(names if operation.of_model else {})
        raise


def _names(asked: Any) -> dict[str, str]:
    """The model and version that a message names."""
    fields = asked.DESCRIPTOR.fields_by_name
    found = {"name": asked.model_name if "model_name" in fields else getattr(asked, "name", "")}
    if "version" in fields:
        found["version"] = asked.version
    return found


# --- health and documents


def _server_ready(engine: Engine, parts: Parts, body: Document, identity: Identity) -> Document:
    reason = engine.readiness.reason
    if reason and not identity.sees_all:
        reason = "not all models are ready"  # whose names the client may not know
    return {"ready": False, "reason": reason} if reason else {"ready": True}


def _model_ready(engine: Engine, parts: Parts, body: Document) -> Document:
    reason = engine.model_obstacle(parts["name"], parts.get("version", ""))
    document: Document = {"name": parts["name"], "ready": not reason}
    if reason:
        document |= {"error": "Model version not ready", "reason": reason}
    return document


def _server_metadata(engine: Engine, parts: Parts, body: Document) -> Document:
    """Server metadata with the answering process; clients ignore members they do not know."""
    return to_json(engine.server_metadata()) | {"headrace": engine.identity()}


async def _model_metadata(
    engine: Engine, asked: pb.ModelMetadataRequest
) -> pb.ModelMetadataResponse:
    await engine.bring(asked.name, asked.version)
    return engine.model_metadata(asked.name, asked.version)


async def _model_config(engine: Engine, asked: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
    await engine.bring(asked.name, asked.version)
    return pb.ModelConfigResponse(config=engine.find_version(asked.name, asked.version).config)


async def _model_config_json(engine: Engine, parts: Parts, body: Document) -> Message:
    return (await _model_config(engine, pb.ModelConfigRequest(**parts))).config


async def _statistics(
    engine: Engine, asked: pb.ModelStatisticsRequest, identity: Identity
) -> pb.ModelStatisticsResponse:
    versions = _seen(engine.counted(asked.name, asked.version), identity)
    found = await engine.pieces.each(versions, documents.statistics)
    return pb.ModelStatisticsResponse(model_stats=found)


def _seen(versions: Sequence[ModelVersion], identity: Identity) -> list[ModelVersion]:
    """The versions of models whose statistics a client may see."""
    may = identity.may
    return [v for v in versions if may(Permission.OBSERVE, v.model, v.name)]


async def _statistics_json(
    engine: Engine, parts: Parts, body: Document, identity: Identity
) -> Document:
    versions = _seen(engine.counted(parts.get("name", ""), parts.get("version", "")), identity)
    return {"model_stats": await engine.pieces.each(versions, _counters)}


def _counters(version: ModelVersion) -> orjson.Fragment:
    # As text: the document of a thousand models takes longer to write than a piece of it may take.
    text = orjson.dumps(to_json(documents.statistics(version)))
    return orjson.Fragment(bytes(memoryview(text)))  # a copy, since orjson's own takes up 4 KB


def _model_explain(engine: Engine, parts: Parts, body: Document) -> Awaitable[Document]:
    version = engine.find_version(parts["name"], parts.get("version", ""))
    try:
        explain = EXPLAIN.load()
    except LoadFailed as error:
        raise Unsupported(str(error)) from None
    return explain(version)


async def _server_status(
    engine: Engine, parts: Parts, body: Document, identity: Identity
) -> Document:
    return await status(engine, identity)


# --- model repository


async def _index(
    engine: Engine, asked: pb.RepositoryIndexRequest, identity: Identity
) -> pb.RepositoryIndexResponse:
    _refuse_repository(asked.repository_name)
    models = await engine.control.index(asked.ready)
    return pb.RepositoryIndexResponse(models=filter(lambda m: identity.sees(m.name), models))


async def _index_json(
    engine: Engine, parts: Parts, body: Document, identity: Identity
) -> list[Document]:
    """List the models; a repository in the path is ignored."""
    ready = body.get("ready", False)
    if type(ready) is not bool:
        raise InvalidRequest("Invalid value for 'ready': expected a boolean")
    models = [m for m in await engine.control.index(ready) if identity.sees(m.name)]
    return await engine.pieces.each(models, _entry)


def _entry(model: Message) -> Document:
    # A model that was never loaded has only a name.
    return {key: value for key, value in to_json(model).items() if value}


async def _load(
    engine: Engine, asked: pb.RepositoryModelLoadRequest
) -> pb.RepositoryModelLoadResponse:
    _refuse_repository(asked.repository_name)
    parameters = load_parameters_of_message(asked.parameters)
    await _load_with(engine, asked.model_name, parameters)
    return pb.RepositoryModelLoadResponse()


async def _load_json(engine: Engine, parts: Parts, parameters: LoadParameters) -> None:
    await _load_with(engine, parts["name"], parameters)


async def _load_with(engine: Engine, name: str, parameters: LoadParameters) -> None:
    """Load a model; its files are charged meanwhile."""
    nbytes = parameters.nbytes
    engine.admission.count(nbytes)
    try:
        await engine.control.load(name, parameters)
    finally:
        engine.admission.count(-nbytes)


def _read_load(operation: Operation, body: bytes | bytearray) -> LoadParameters:
    return read_load(body, operation.max_elements)


async def _unload(
    engine: Engine, asked: pb.RepositoryModelUnloadRequest
) -> pb.RepositoryModelUnloadResponse:
    _refuse_repository(asked.repository_name)
    dependents = unload_dependents_of_message(asked.parameters)
    await engine.control.unload(asked.model_name, dependents)
    return pb.RepositoryModelUnloadResponse()


async def _unload_json(engine: Engine, parts: Parts, body: Document) -> None:
    await engine.control.unload(parts["name"], unload_dependents_of_json(body))


def _allow_control(engine: Engine) -> None:
    engine.control.allow()


def _check_control(engine: Engine, parts: Parts) -> None:
    """Refuse repository names, and models that clients may not load."""
    _refuse_repository(parts.get("repository", ""))
    engine.control.check(parts["name"])


def _refuse_repository(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")


# --- shared memory


async def _register_system(
    engine: Engine, asked: pb.SystemSharedMemoryRegisterRequest
) -> pb.SystemSharedMemoryRegisterResponse:
    await engine.regions.register_system(asked.name, asked.key, asked.offset, asked.byte_size)
    return pb.SystemSharedMemoryRegisterResponse()


async def _register_system_json(engine: Engine, parts: Parts, body: Document) -> None:
    key = _member(body, "key", str)
    offset = 0 if body.get("offset") is None else _member(body, "offset", int)
    size = _member(body, "byte_size", int)
    await engine.regions.register_system(parts["region"], key, offset, size)


async def _register_cuda(
    engine: Engine, asked: pb.CudaSharedMemoryRegisterRequest
) -> pb.CudaSharedMemoryRegisterResponse:
    handle, device = asked.raw_handle, asked.device_id
    await engine.regions.register_cuda(asked.name, handle, device, asked.byte_size)
    return pb.CudaSharedMemoryRegisterResponse()


async def _register_cuda_json(engine: Engine, parts: Parts, body: Document) -> None:
    text = _member(_member(body, "raw_handle", dict), "b64", str)
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("'raw_handle' must have 'b64', a text in base64") from None
    size, device = _member(body, "byte_size", int), _member(body, "device_id", int)
    await engine.regions.register_cuda(parts["region"], handle, device, size)


def _unregister(response: type[Message], cuda: bool) -> Handler:
    def answer(engine: Engine, asked: Any) -> Message:
        engine.regions.unregister(asked.name, cuda)
        return response()

    return Handler(answer, lambda e, parts, _: e.regions.unregister(parts.get("region", ""), cuda))


def _status(status: Callable[[Engine, str], Message]) -> Handler:
    def json(engine: Engine, parts: Parts, body: Document) -> list[Document]:
        found: Document = to_json(status(engine, parts.get("region", "")))["regions"]
        return [found[name] for name in sorted(found)]

    return Handler(lambda engine, asked: status(engine, asked.name), json)


def _member(given: Document, name: str, kind: type) -> Any:
    value = given.get(name)
    if type(value) is not kind:
        expected, got = json_name(kind), json_name(type(value))
        raise InvalidRequest(f"'{name}' of a region must be {expected}, got {got}")
    return value


# --- traces and the log


def _trace_setting(engine: Engine, asked: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
    changes = {name: list(setting.value) for name, setting in asked.settings.items()}
    engine.tracing.change(asked.model_name, changes)
    response = pb.TraceSettingResponse()
    for name, values in engine.tracing.document(asked.model_name).items():
        response.settings[name].value.extend(values)
    return response


def _trace_setting_json(engine: Engine, parts: Parts, body: Document) -> Document:
    """Trace settings as JSON: levels are an array, everything else is text."""
    changes: dict[str, list[object] | None] = {}
    for name, value in body.items():
        if name == "trace_level" and value is not None and not isinstance(value, list):
            raise InvalidRequest("'trace_level' must be an array of levels")
        changes[name] = value if name == "trace_level" or value is None else [value]
    model = parts.get("name", "")
    engine.tracing.change(model, changes)
    return {
        name: values if name == "trace_level" else ",".join(values)
        for name, values in engine.tracing.document(model).items()
    }


def _has_settings(asked: Any) -> bool:
    return bool(asked.settings)


def _log_settings(engine: Engine, asked: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
    changes: Document = {}
    for name, given in asked.settings.items():
        kind = given.WhichOneof("parameter_choice")
        changes[name] = getattr(given, kind) if kind else ""
    engine.logs.change(changes)
    response = pb.LogSettingsResponse()
    fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    for name, value in engine.logs.document().items():
        setattr(response.settings[name], fields[type(value)], value)
    return response


def _log_settings_json(engine: Engine, parts: Parts, body: Document) -> Document:
    wanted = body.get("log_format")
    if isinstance(wanted, str) and wanted not in FORMATS:
        # Triton's status, which over gRPC is that of any invalid value.
        raise Unavailable(f"invalid argument for --log_format, got: {wanted[:80]}")
    engine.logs.change(body)
    return engine.logs.document()


def _log_tail(engine: Engine, parts: Parts, body: Document) -> Document:
    if not (kept := engine.logs.settings.tail):
        raise Unsupported(
            "no records of the log are kept: that takes --log-tail-lines, and an access file"
            " (--access) unless HTTP is open to this machine alone"
        )
    return {"kept": kept, "records": engine.logs.tail()}


# --- traffic between the versions of a model


def _set_traffic(engine: Engine, name: str, rules: Document) -> Message:
    engine.traffic.set(name, rules)
    return engine.traffic.document(name)


def _reset_traffic(engine: Engine, asked: traffic_pb2.ModelTrafficRequest) -> Message:
    engine.traffic.reset(asked.name)
    return engine.traffic.document(asked.name)


def _promote(engine: Engine, asked: traffic_pb2.ModelVersionRequest) -> Message:
    engine.traffic.promote(asked.name, asked.version, asked.reason)
    return engine.traffic.document(asked.name)


def _roll_back(engine: Engine, asked: traffic_pb2.ModelVersionRequest) -> Message:
    engine.traffic.roll_back(asked.name, asked.version, asked.reason)
    return engine.traffic.document(asked.name)


def _version_and_reason(parts: Parts, body: Document) -> traffic_pb2.ModelVersionRequest:
    """Return version and reason of a change, both optional."""
    for name in body:
        if name not in ("version", "reason"):
            raise InvalidRequest(f"unknown member {name!r:.60}, it may have version, reason")
    given = dict(body)
    if type(given.get("version")) is int:
        given["version"] = str(given["version"])
    for name, value in given.items():
        if type(value) is not str:
            raise InvalidRequest(f"'{name}' must be a string, got {shown(value)}")
    return traffic_pb2.ModelVersionRequest(name=parts["name"], **given)


def _without_procedure(engine: Engine, *asked: Any) -> Message:
    raise AssertionError("a message for an operation that is HTTP only. This is a bug.")


HANDLERS: Mapping[str, Handler] = {
    "ServerLive": Handler(lambda engine, _: pb.ServerLiveResponse(live=True)),
    "ServerReady": Handler(
        lambda e, asked, identity: pb.ServerReadyResponse(ready=e.ready),
        _server_ready,
        listing=True,
    ),
    "ModelReady": Handler(
        lambda e, asked: pb.ModelReadyResponse(ready=e.model_ready(asked.name, asked.version)),
        _model_ready,
    ),
    "ServerMetadata": Handler(lambda engine, _: engine.server_metadata(), _server_metadata),
    "ModelMetadata": Handler(_model_metadata),
    "ModelConfig": Handler(_model_config, _model_config_json),
    "ModelStatistics": Handler(_statistics, _statistics_json, listing=True),
    "ModelExplain": Handler(_without_procedure, _model_explain),
    "ServerStatus": Handler(_without_procedure, _server_status, listing=True),
    "RepositoryIndex": Handler(_index, _index_json, listing=True),
    "RepositoryModelLoad": Handler(_load, _load_json, _check_control, _read_load, _allow_control),
    "RepositoryModelUnload": Handler(_unload, _unload_json, _check_control, allow=_allow_control),
    "SystemSharedMemoryStatus": _status(lambda e, name: e.regions.system_status(name)),
    "SystemSharedMemoryRegister": Handler(_register_system, _register_system_json),
    "SystemSharedMemoryUnregister": _unregister(pb.SystemSharedMemoryUnregisterResponse, False),
    "CudaSharedMemoryStatus": _status(lambda e, name: e.regions.cuda_status(name)),
    "CudaSharedMemoryRegister": Handler(_register_cuda, _register_cuda_json),
    "CudaSharedMemoryUnregister": _unregister(pb.CudaSharedMemoryUnregisterResponse, True),
    "TraceSetting": Handler(_trace_setting, _trace_setting_json, changes=_has_settings),
    "LogSettings": Handler(_log_settings, _log_settings_json, changes=_has_settings),
    "LogTail": Handler(_without_procedure, _log_tail),
    "ModelTraffic": Handler(lambda engine, asked: engine.traffic.document(asked.name)),
    "SetModelTraffic": Handler(
        lambda engine, asked: _set_traffic(engine, asked.name, to_json(asked.rules)),
        lambda engine, parts, body: _set_traffic(engine, parts["name"], body),
    ),
    "ResetModelTraffic": Handler(_reset_traffic),
    "PromoteModelVersion": Handler(
        _promote, lambda e, parts, body: _promote(e, _version_and_reason(parts, body))
    ),
    "RollBackModelVersion": Handler(
        _roll_back, lambda e, parts, body: _roll_back(e, _version_and_reason(parts, body))
    ),
}


# --- for the doors


def unary_handlers(
    engine: Engine,
    max_request_bytes: int,
    operations: Sequence[Operation] = OPERATIONS,
    handlers: Mapping[str, Handler] = HANDLERS,
    read_only: bool = False,
) -> dict[str, Unary]:
    """The procedures answered by the engine, by full path: from message bytes to message bytes.

    With `read_only`, messages that change something are refused.
    """

    def unary(operation: Operation, handler: Handler) -> Unary:
        changing = is_changing(operation)

        # Not a coroutine, which would have the request in memory until it is answered.
        def handle(data: Buffer, call: AskingCall) -> Coroutine[Any, Any, bytes]:
            if engine.audit is None:
                return answer(data, call.identity)
            audited = AuditedRequest(
                engine.audit.record, operation, "grpc", call.peer_facts.address,
                call.metadata().get(REQUEST_ID, ""), call.identity, changing,
            )  # fmt: skip
            return recorded(data, call.identity, audited)

        async def answer(
            data: Buffer, identity: Identity, audited: AuditedRequest | None = None
        ) -> bytes:
            handler.allow(engine)
            if len(data) <= _LONG:
                asked = read_message(operation, data, max_request_bytes)
            else:
                asked = await _read_long(engine, operation, data, max_request_bytes)
            del data
            changes = handler.changes(asked)
            if audited is not None and changing:
                await audited.asks(asked, changes or operation.changing is None)
            if read_only and operation.needs(changes) in CHANGING:
                raise elsewhere()
            check_model(identity, operation, changes, _names(asked), audited)
            found = handler.answer(engine, asked, *((identity,) if handler.listing else ()))
            del asked
            message: Message = await found if isawaitable(found) else found
            return message.SerializeToString()

        async def recorded(data: Buffer, identity: Identity, audited: AuditedRequest) -> bytes:
            with audited:
                answering = answer(data, identity, audited)
                del data
                return await answering

        return handle

    found = by_procedure(operations)
    return {path: unary(found[path], handlers[found[path].name]) for path in handed_on(operations)}


async def _read_long(
    engine: Engine, operation: Operation, data: Buffer, max_request_bytes: int
) -> Any:
    """Decode a message on a thread; its copies are charged meanwhile; raises `ServerError`."""
    nbytes = len(data)
    engine.admission.grow(nbytes, nbytes)
    try:
        return await asyncio.to_thread(read_message, operation, data, max_request_bytes)
    finally:
        engine.admission.count(-nbytes)


async def answer_json(
    engine: Engine,
    operation: Operation,
    handler: Handler,
    parts: Parts,
    body: Any,
    identity: Identity,
) -> Any:
    """The JSON document of an answer, None if it has no body; raises `ServerError`."""
    told = (identity,) if handler.listing else ()
    if handler.json is not None:
        found = handler.json(engine, parts, body, *told)
    else:
        try:
            asked = ParseDict({**body, **parts}, request_class(operation)())
        except ParseError as error:
            raise InvalidRequest(str(error)) from None
        found = handler.answer(engine, asked, *told)
    if isawaitable(found):
        found = await found
    if isinstance(found, Message):
        return to_json(found) if found.DESCRIPTOR.fields else None
    return found
