"""The V2 protocol over gRPC, for upstreams: messages, calls, streams, connections.

Other protocols over gRPC derive from `GrpcMessages`. Owned by the event-loop thread.
"""

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from headrace.connections.endpoint import Endpoint
from headrace.connections.grpc_channel import (
    ChannelCall,
    GrpcChannel,
    RequestHeads,
    StreamCall,
    UnaryCall,
)
from headrace.core.errors import InvalidRequest, Unavailable
from headrace.core.tensors import Buffer
from headrace.placement.upstream.connection import (
    CallFailed,
    Receiver,
    RemoteDescription,
    RemoteRequest,
    RemoteStream,
    StreamReceiver,
    UpstreamCall,
    nonsense,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.compression import DEFAULT_LEVEL, compress
from headrace.protocol.grpc import (
    UNIMPLEMENTED,
    End,
    Reason,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import (
    Failure,
    Fate,
    failure_of,
    failure_of_text,
    late,
    lost,
    too_large,
    unsent,
)
from headrace.protocol.v2_protobuf import (
    AnswerReader,
    RemoteAnswer,
    RemoteMessages,
    StreamError,
    streamed_answer,
)

log = logging.getLogger(__name__)

_SERVICE = b"/inference.GRPCInferenceService/"
INFER = _SERVICE + b"ModelInfer"
LIVE = _SERVICE + b"ServerLive"
READY = _SERVICE + b"ModelReady"
METADATA = _SERVICE + b"ModelMetadata"
CONFIG = _SERVICE + b"ModelConfig"
_STREAM = _SERVICE + b"ModelStreamInfer"
_LOAD = _SERVICE + b"RepositoryModelLoad"
_UNLOAD = _SERVICE + b"RepositoryModelUnload"


# A path and a message, and a function that sends them and returns the answer, or the failure.
Question: TypeAlias = tuple[bytes, bytes]
Ask: TypeAlias = Callable[[bytes, bytes], Awaitable[tuple[Buffer | None, End | None]]]
M = TypeVar("M", bound=Message)


class GrpcMessages:
    """Encodes requests and decodes responses for one model over gRPC, without connections.

    Derive from it for other procedures and messages.
    """

    infer_path = INFER

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """`model` is the local name of the model, for errors."""
        self.options = options
        self.model = model
        self.packing = options.compression
        self.packed = bool(self.packing)
        self._messages = RemoteMessages(options.model, options.version)
        self._reader = AnswerReader()

    async def describe(self, ask: Ask) -> RemoteDescription:
        """Query the model's metadata, and its configuration if the server provides it."""
        name, version = self.options.model, self.options.version
        asked = pb.ModelMetadataRequest(name=name, version=version)
        said = self.given(*await ask(METADATA, asked.SerializeToString()))
        wanted = pb.ModelConfigRequest(name=name, version=version)
        config, end = await ask(CONFIG, wanted.SerializeToString())
        metadata = self.parsed(pb.ModelMetadataResponse, said)
        if end is not None and end.status == UNIMPLEMENTED:
            return RemoteDescription(metadata, None)
        response = self.parsed(pb.ModelConfigResponse, self.given(config, end))
        return RemoteDescription(metadata, response.config)

    def given(self, data: Buffer | None, end: End | None) -> Buffer:
        """The response of a call; raises `CallFailed` if it failed."""
        if data is None:
            assert end is not None
            raise self.failed(end)
        return data

    def parsed(self, kind: type[M], data: Buffer) -> M:
        """The message in a response; raises `CallFailed`."""
        try:
            return kind.FromString(bytes(data))
        except DecodeError as error:
            raise self.nonsense(error) from None

    def readiness(self) -> Question:
        """The request for the model's readiness."""
        asked = pb.ModelReadyRequest(name=self.options.model, version=self.options.version)
        return READY, asked.SerializeToString()

    def is_ready(self, data: Buffer) -> bool:
        """Parse the answer to `readiness`; raises `CallFailed`."""
        return self.parsed(pb.ModelReadyResponse, data).ready

    def message(self, request: RemoteRequest) -> list[Buffer]:
        """The message for a request, uncompressed."""
        return self._messages.request(
            request.inputs, request.outputs, request.parameters, request.id
        )

    def request(self, request: RemoteRequest) -> list[Buffer]:
        """The message for a request, possibly compressed."""
        message = self.message(request)
        if self.packing:
            return [compress(b"".join(message), self.packing, DEFAULT_LEVEL)]
        return message

    def answer(self, data: Buffer) -> RemoteAnswer:
        """Decode a ModelInferResponse; raises `CallFailed`."""
        try:
            return self._reader.read(data)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def shared_answer(self, data: Buffer, shared: Mapping[str, memoryview]) -> RemoteAnswer:
        """Decode a ModelInferResponse with `shared` outputs; raises `CallFailed`."""
        try:
            return self._reader.read(data, shared)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def stream_answer(self, data: Buffer) -> RemoteAnswer | Failure:
        """Decode a message of a stream; raises `CallFailed`."""
        try:
            found = streamed_answer(data)
        except InvalidRequest as error:
            raise self.nonsense(error) from None
        return failure_of_text(*found) if isinstance(found, StreamError) else self.answer(found)

    def nonsense(self, problem: Exception) -> CallFailed:
        """Log a malformed response; returns the failure."""
        log.error("model %s: a server has sent an invalid response: %s", self.model, problem,
                  extra={"model": self.model})  # fmt: skip
        return nonsense(self.model, problem)

    def failed(self, end: End) -> CallFailed:
        """The failure for the end of a call."""
        text = end.text
        if not text and end.status == UNIMPLEMENTED:
            text = f"it does not know this procedure of the protocol {self.options.protocol.name}"
        return CallFailed(self._failure(end), text or f"status {end.status} of gRPC")

    def _failure(self, end: End) -> Failure:
        if end.reason is Reason.STATUS:
            return failure_of(self.model, end.status, end.text, end.begun)
        if end.reason is Reason.BROKEN:
            return self.nonsense(Exception(end.text)).failure
        if end.reason in (Reason.TOO_LARGE, Reason.GROWN):
            log.error("model %s: a server's answer cannot be used: %s", self.model, end.text,
                      extra={"model": self.model})  # fmt: skip
            grown = end.reason is Reason.GROWN
            return too_large(self.model, self.options.largest_response, grown)
        if end.reason is Reason.UNSENT:
            return unsent(self.model)
        if end.reason is Reason.REFUSED:
            return Failure(Fate.REFUSED, Unavailable(end.text))
        return late(self.model) if end.reason is Reason.LATE else lost(self.model)


class GrpcStream(StreamCall):
    """A stream with one request; implements `RemoteStream`."""

    messages: GrpcMessages
    receiver: StreamReceiver

    def message(self, data: Buffer) -> None:
        """Receive a response."""
        try:
            answer = self.messages.stream_answer(data)
        except Exception as error:  # any error concerns this stream alone
            self.cancel()
            self._end(error if isinstance(error, CallFailed) else self.messages.nonsense(error))
            return
        try:
            self.receiver.received(answer)
        except Exception:  # the connection has other calls
            log.exception("bug after a response")

    def closed(self, end: End | None) -> None:
        """Report the end."""
        self._end(None if end is None else self.messages.failed(end))

    def _end(self, failed: CallFailed | None) -> None:
        try:
            if failed is None:
                self.receiver.ended()
            else:
                self.receiver.failed(failed)
        except Exception:
            log.exception("bug after a stream")


class UpstreamInferCall(UnaryCall):
    """An inference call with callbacks.

    Implements `headrace.placement.upstream.connection.UpstreamCall`.
    """

    messages: GrpcMessages
    receiver: Receiver

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Report the outcome to the receiver."""
        try:
            if data is None:
                assert end is not None
                self.receiver.failed(self.messages.failed(end))
                return
            try:
                answer = self.messages.answer(data)
            except Exception as error:  # any error concerns this call alone
                self.receiver.failed(error)
                return
            self.receiver.answered(answer)
        except Exception:  # from the receiver; the connection has other calls
            log.exception("bug after a call")


C = TypeVar("C", bound=ChannelCall)


class GrpcClient(GrpcChannel):
    """Implements `headrace.placement.upstream.connection.ProtocolClient` over gRPC."""

    def __init__(
        self,
        endpoint: Endpoint,
        messages: GrpcMessages,
        context: ssl.SSLContext | None,
        buffer: memoryview,
    ) -> None:
        """`buffer` receives bytes; other clients of the loop may share it.

        `context` is None without TLS.
        """
        options = messages.options
        super().__init__(endpoint, context, buffer, options.largest_response)
        self._messages = messages
        self.heads = RequestHeads(
            endpoint, options.credentials.metadata, options.credentials.authorization,
            messages.packing,
        )  # fmt: skip
        self._readiness = messages.readiness()

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> UpstreamCall:
        """Start an inference call."""
        messages = self._messages
        message = messages.request(request)
        call = self._call(UpstreamInferCall, messages.infer_path, request.headers, message, seconds)
        call.messages, call.receiver = messages, receiver
        self.start(call)
        return call

    def stream(
        self, request: RemoteRequest, seconds: float, receiver: StreamReceiver
    ) -> RemoteStream:
        """Start a call with any number of responses."""
        # Without `triton_grpc_error`, which would provide real statuses: a Triton crashes if a
        # model continues after one.
        message = self._messages.request(request)
        stream = self._call(GrpcStream, _STREAM, request.headers, message, seconds)
        stream.messages, stream.receiver = self._messages, receiver
        self.start(stream)
        return stream

    def _call(
        self,
        kind: type[C],
        path: bytes,
        headers: Sequence[tuple[str, str]],
        message: list[Buffer],
        seconds: float,
    ) -> C:
        messages, heads = self._messages, self.heads
        head = heads.head(path, headers, seconds, messages.packed)
        return kind(self, head, message, seconds, messages.packed)

    async def ready(self, seconds: float) -> bool:
        """True if the upstream reports the model as ready; raises `CallFailed`."""
        data, end = await self.ask(*self._readiness, seconds)
        if end is not None and end.status == UNIMPLEMENTED:
            return True  # a server without the procedure cannot report it
        return self._messages.is_ready(self._messages.given(data, end))

    async def describe(self, seconds: float) -> RemoteDescription:
        """The upstream's description of the model."""
        return await self._messages.describe(partial(self.ask, seconds=seconds))

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """The response of one call; raises `CallFailed`."""
        messages, message = self._messages, b"".join(self._messages.request(request))
        path, packed = messages.infer_path, messages.packed
        found = await self.ask(path, message, seconds, packed, request.headers)
        return messages.answer(messages.given(*found))

    async def load(self, config: str, seconds: float) -> None:
        """Load the model; raises `CallFailed`."""
        wanted = pb.RepositoryModelLoadRequest(model_name=self._messages.options.model)
        if config:
            wanted.parameters["config"].string_param = config
        message = wanted.SerializeToString()
        self._messages.given(*await self.ask(_LOAD, message, seconds))

    async def unload(self, seconds: float) -> None:
        """Unload the model; raises `CallFailed`."""
        wanted = pb.RepositoryModelUnloadRequest(model_name=self._messages.options.model)
        message = wanted.SerializeToString()
        self._messages.given(*await self.ask(_UNLOAD, message, seconds))

    async def ask(
        self,
        path: bytes,
        message: bytes,
        seconds: float,
        packed: bool = False,
        headers: Sequence[tuple[str, str]] = (),
    ) -> tuple[Buffer | None, End | None]:
        """The response to a message, which may be `packed`, or the failure of the call.

        Cancelling the wait cancels the call. A connection is attempted in any case.
        """
        head = self.heads.head(path, headers, seconds, packed)
        return await self.answer(head, [message], seconds, packed)
