"""RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload."""

from google.protobuf.message import Message

from headrace.core.errors import Unsupported
from headrace.engine.engine import Engine
from headrace.transports.grpc.call import Unary
from headrace.transports.grpc.unary import awaits
from headrace.wire.parameters import load_parameters_of_message, unload_dependents_of_message
from headrace.wire.pb import grpc_service_pb2 as pb


def repository_handlers(engine: Engine, max_request_bytes: int) -> dict[str, Unary]:
    """The procedures, by name."""

    async def index(message: pb.RepositoryIndexRequest) -> Message:
        _check(message.repository_name)
        return await engine.control.index(message.ready)

    async def load(message: pb.RepositoryModelLoadRequest) -> Message:
        _check(message.repository_name)
        parameters = load_parameters_of_message(message.parameters)
        await engine.control.load(message.model_name, parameters)
        return pb.RepositoryModelLoadResponse()

    async def unload(message: pb.RepositoryModelUnloadRequest) -> Message:
        _check(message.repository_name)
        dependents = unload_dependents_of_message(message.parameters)
        await engine.control.unload(message.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    return {
        "RepositoryIndex": awaits(pb.RepositoryIndexRequest, index, max_request_bytes),
        "RepositoryModelLoad": awaits(pb.RepositoryModelLoadRequest, load, max_request_bytes),
        "RepositoryModelUnload": awaits(pb.RepositoryModelUnloadRequest, unload, max_request_bytes),
    }


def _check(repository: str) -> None:
    if repository:
        raise Unsupported("'repository_name' specification is not supported")
