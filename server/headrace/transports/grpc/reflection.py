"""Server reflection (v1 and v1alpha), so that tools such as grpcurl need no .proto files."""

from collections.abc import AsyncIterator

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.transports.grpc.call import RpcContext, Stream
from headrace.wire.pb import POOL, reflection_pb2, reflection_v1alpha_pb2

_NOT_FOUND = 5
_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


def reflection_handlers(services: tuple[str, ...]) -> dict[str, Stream]:
    """ServerReflectionInfo of both packages; `services` are the names that it lists."""

    # The messages of the two packages are the same on the wire; only their names differ.
    async def info(requests: AsyncIterator[Buffer], call: RpcContext) -> AsyncIterator[bytes]:
        async for data in requests:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(bytes(data))
            except DecodeError as error:
                raise InvalidRequest(f"not a valid ServerReflectionRequest: {error}") from None
            yield _answer(request, services).SerializeToString()

    return {f"/{package}.ServerReflection/ServerReflectionInfo": info for package in _PACKAGES}


def reflection_services() -> tuple[str, ...]:
    """The names of the reflection services themselves."""
    assert reflection_v1alpha_pb2.DESCRIPTOR.package == _PACKAGES[1]
    return tuple(f"{package}.ServerReflection" for package in _PACKAGES)


def _answer(
    request: reflection_pb2.ServerReflectionRequest, services: tuple[str, ...]
) -> reflection_pb2.ServerReflectionResponse:
    response = reflection_pb2.ServerReflectionResponse(
        valid_host=request.host, original_request=request
    )
    kind = request.WhichOneof("message_request")
    try:
        match kind:
            case "list_services":
                response.list_services_response.SetInParent()
                for name in services:
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
    except KeyError:  # the pool does not find methods by their full names
        service, _, method = symbol.rpartition(".")
        descriptor = POOL.FindServiceByName(service)
        if method not in descriptor.methods_by_name:
            raise
        return descriptor.file


def _add_files(response: reflection_pb2.ServerReflectionResponse, file: FileDescriptor) -> None:
    """The file and all that it imports."""
    todo, seen = [file], set[str]()
    while todo:
        current = todo.pop()
        if current.name not in seen:
            seen.add(current.name)
            response.file_descriptor_response.file_descriptor_proto.append(current.serialized_pb)
            todo.extend(current.dependencies)
