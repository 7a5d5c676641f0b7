"""Calls to a server over gRPC, on the event loop."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import (
    Call,
    Receiver,
    RemoteDescription,
    RemoteRequest,
    RemoteStream,
    StreamReceiver,
)
from headrace.execution.remote.grpc_channel import Channel, UnaryCall
from headrace.execution.remote.grpc_link import receive_buffer
from headrace.execution.remote.grpc_procedures import Procedures
from headrace.execution.remote.grpc_stream import GrpcStream
from headrace.execution.remote.options import Endpoint
from headrace.wire.grpc_call import End
from headrace.wire.grpc_response import UNIMPLEMENTED
from headrace.wire.http2.request_blocks import RequestHead
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import RemoteAnswer

if TYPE_CHECKING:
    from headrace.execution.remote.grpc_calls import GrpcDialect

log = logging.getLogger(__name__)


class InferCall(UnaryCall):
    """A run, for whoever is told by being called; `headrace.execution.remote.connection.Call`."""

    __slots__ = ("dialect", "receiver")

    dialect: "GrpcDialect"
    receiver: Receiver

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Tell."""
        try:
            if data is None:
                assert end is not None
                self.receiver.failed(self.dialect.failed(end))
                return
            try:
                answer = self.dialect.answer(data)
            except Exception as error:  # whatever it is, it belongs to this call alone
                self.receiver.failed(error)
                return
            self.receiver.answered(answer)
        except Exception:  # of whoever is told; the connection has other calls as well
            log.exception("bug after a call")


class AwaitedCall(UnaryCall):
    """A call whose outcome is awaited."""

    __slots__ = ("outcome",)

    outcome: "asyncio.Future[tuple[Buffer | None, End | None]]"

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Let it be known."""
        if not self.outcome.done():
            self.outcome.set_result((data, end))


class GrpcConnection:
    """`StreamingConnection` and `LoadingConnection` of `headrace.execution.remote.connection`."""

    def __init__(
        self, endpoint: Endpoint, dialect: "GrpcDialect", buffer: memoryview | None = None
    ) -> None:
        """Bytes are received in `buffer`, which is the loop's, or in one of its own."""
        options = dialect.options
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self.procedures = Procedures(
            endpoint, options.credentials, dialect.packing, dialect.infer_path
        )
        context = dialect.context if endpoint.secure else None
        self._channel = Channel(
            endpoint, context, buffer or receive_buffer(), options.largest_response
        )
        path, self._question = dialect.readiness()
        self._readiness = self.procedures.head(path)

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> Call:
        """One run."""
        dialect, procedures = self._dialect, self.procedures
        call = InferCall(
            self._channel, procedures.infer(request.headers), dialect.request(request),
            self._now(), seconds, procedures.own(request.headers, seconds), dialect.packed,
        )  # fmt: skip
        call.dialect = dialect
        call.receiver = receiver
        self._channel.start(call)
        return call

    def stream(
        self,
        receiver: StreamReceiver,
        seconds: float = 0.0,
        headers: Sequence[tuple[str, str]] = (),
    ) -> RemoteStream:
        """Open a stream."""
        procedures = self.procedures
        stream = GrpcStream(
            self._dialect, receiver, procedures.stream(headers), procedures.own(headers, seconds),
            self._now(), seconds,
        )  # fmt: skip
        self._channel.start(stream)
        return stream

    async def ready(self, seconds: float) -> bool:
        """Whether the model is ready there; raises `CallFailed`."""
        data, end = await self.ask(self._readiness, self._question, seconds)
        if data is None:
            assert end is not None
            if end.status == UNIMPLEMENTED:
                return True  # a server without the procedure cannot say more
            raise self._dialect.failed(end)
        return self._dialect.is_ready(data)

    async def describe(self, seconds: float) -> RemoteDescription:
        """What the server says of the model."""
        conversation = self._dialect.describe()
        try:
            path, message = next(conversation)
            while True:
                said = await self.ask(self.procedures.head(path), message, seconds)
                path, message = conversation.send(said)
        except StopIteration as stop:
            result: RemoteDescription = stop.value
            return result

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """One run; raises `CallFailed`."""
        dialect, head = self._dialect, self.procedures.infer(request.headers)
        message = b"".join(dialect.request(request))
        return dialect.answer(
            dialect.given(*await self.ask(head, message, seconds, dialect.packed))
        )

    async def load(self, config: str, seconds: float) -> None:
        """Have the model loaded; raises `CallFailed`."""
        wanted = pb.RepositoryModelLoadRequest(model_name=self._dialect.options.model)
        if config:
            wanted.parameters["config"].string_param = config
        message = wanted.SerializeToString()
        self._dialect.given(*await self.ask(self.procedures.load, message, seconds))

    async def unload(self, seconds: float) -> None:
        """Have the model unloaded; raises `CallFailed`."""
        wanted = pb.RepositoryModelUnloadRequest(model_name=self._dialect.options.model)
        message = wanted.SerializeToString()
        self._dialect.given(*await self.ask(self.procedures.unload, message, seconds))

    async def ask(
        self, head: RequestHead, message: bytes, seconds: float, packed: bool = False
    ) -> tuple[Buffer | None, End | None]:
        """The answer to a message, which may be `packed`, or how the call has failed.

        To cancel the wait cancels the call. A connection is attempted in any case.
        """
        own = self.procedures.own((), seconds)
        call = AwaitedCall(self._channel, head, [message], self._now(), seconds, own, packed)
        call.outcome = self._loop.create_future()
        call.urgent = True
        self._channel.start(call)
        try:
            return await call.outcome
        finally:
            call.cancel()

    async def close(self) -> None:
        """End the connection, with whatever is under way."""
        await self._channel.close()
