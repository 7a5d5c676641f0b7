"""Calls to a server over gRPC that wait, for the thread that loads a model.

They are the event loop's calls, on a loop of their own for as long as they last.
"""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import RemoteDescription, RemoteRequest
from headrace.execution.remote.grpc_connection import GrpcConnection
from headrace.execution.remote.options import Endpoint
from headrace.wire.grpc_call import End
from headrace.wire.http2.request_blocks import RequestHead
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import RemoteAnswer

if TYPE_CHECKING:
    from headrace.execution.remote.grpc_calls import GrpcDialect


class GrpcLoading:
    """`LoadingConnection` and `ModelControl` of `headrace.execution.remote.connection`."""

    def __init__(self, endpoint: Endpoint, dialect: "GrpcDialect") -> None:
        self._dialect = dialect
        self._runner = asyncio.Runner()
        self._connection = self._runner.run(self._connect(endpoint))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def describe(self, seconds: float) -> RemoteDescription:
        """What the server says of the model."""
        conversation, connection = self._dialect.describe(), self._connection
        try:
            path, message = next(conversation)
            while True:
                said = self._ask(connection.procedures.head(path), message, seconds)
                path, message = conversation.send(said)
        except StopIteration as stop:
            result: RemoteDescription = stop.value
            return result

    def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """One run; raises `CallFailed`."""
        dialect, head = self._dialect, self._connection.procedures.infer(request.headers)
        data, end = self._ask(head, b"".join(dialect.request(request)), seconds, dialect.packed)
        if data is None:
            assert end is not None
            raise dialect.failed(end)
        return dialect.answer(data)

    def load(self, config: str, seconds: float) -> None:
        """Have the model loaded; raises `CallFailed`."""
        wanted = pb.RepositoryModelLoadRequest(model_name=self._dialect.options.model)
        if config:
            wanted.parameters["config"].string_param = config
        self._change(self._connection.procedures.load, wanted.SerializeToString(), seconds)

    def unload(self, seconds: float) -> None:
        """Have the model unloaded; raises `CallFailed`."""
        wanted = pb.RepositoryModelUnloadRequest(model_name=self._dialect.options.model)
        self._change(self._connection.procedures.unload, wanted.SerializeToString(), seconds)

    def _change(self, head: RequestHead, message: bytes, seconds: float) -> None:
        _, end = self._ask(head, message, seconds)
        if end is not None:
            raise self._dialect.failed(end)

    def _ask(
        self, head: RequestHead, message: bytes, seconds: float, packed: bool = False
    ) -> tuple[Buffer | None, End | None]:
        return self._runner.run(self._connection.ask(head, message, seconds, packed))

    async def _connect(self, endpoint: Endpoint) -> GrpcConnection:
        return GrpcConnection(endpoint, self._dialect)
