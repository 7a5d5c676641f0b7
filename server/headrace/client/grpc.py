"""The client's gRPC transport, with the codecs and the channel of upstreams."""

import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.operations import NAMED, Document, Operation
from headrace.client import AnswerError, ClientError, StatusError
from headrace.client.address import Address
from headrace.client.documents import answer_document, request_message
from headrace.client.memory import NOTHING, ClientMemory, SharedTensors
from headrace.client.transport import (
    InferRequest,
    Responses,
    endpoint_of,
    header_text,
    hung_up,
    late,
    not_connected,
)
from headrace.client.values import ModelSignature
from headrace.connections.grpc_channel import GrpcChannel, RequestHeads, StreamCall, receive_buffer
from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import BY_NUMPY
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer, Tensor
from headrace.protocol.grpc import DEADLINE_EXCEEDED, MAX_MESSAGE, End, Reason
from headrace.protocol.status import http_status_of
from headrace.protocol.v2_protobuf import (
    AnswerReader,
    RemoteInput,
    RemoteMessages,
    StreamError,
    shared_request,
    streamed_answer,
)

_STREAMED_STATUS = 500  # status of an error on a stream, which only has a text
_INTERNAL = 13
# The answer of this server, and of Triton, to a request without the required header. Over gRPC it
# has the status of servers that are not there for now, but it helps nobody to ask again.
_RESTRICTED, _UNAVAILABLE, _FORBIDDEN = "This protocol is restricted", 14, 403


class GrpcTransport:
    """A client's transport over gRPC; see `headrace.client.http.HttpTransport`."""

    def __init__(
        self,
        address: Address,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`headers` are sent with every call as metadata. Raises `InputError` as over HTTP."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        header_text(headers)  # validates metadata, too
        endpoint = endpoint_of(address)
        self._address = address
        self._memory = ClientMemory(address.socket) if address.socket else None
        self._channel = GrpcChannel(endpoint, tls, receive_buffer(), MAX_MESSAGE)
        self._heads = RequestHeads(endpoint, list(headers.items()))
        self._messages: dict[tuple[str, str], RemoteMessages] = {}
        self._reader = AnswerReader()

    async def ask(
        self,
        operation: Operation,
        given: Document | None,
        parts: Mapping[str, str],
        seconds: float,
    ) -> Any:
        """The answer of an operation, as HTTP's document where that differs from the message."""
        if not operation.procedure:
            raise ClientError(f"{operation.name} is not offered over gRPC")
        message = request_message(operation, given or {}, parts)
        data = await self._ask(operation, [message], seconds)
        try:
            return answer_document(operation, bytes(data))
        except DecodeError as error:
            raise self._nonsense(error) from None

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """The response to a request."""

        async def send(asked: InferRequest, shared: SharedTensors) -> InferResponse:
            message = self._message(asked, shared)
            return self._response(
                await self._ask(NAMED["ModelInfer"], message, seconds), shared.views
            )

        if self._memory is None:
            return await send(request, NOTHING)
        return await self._memory.infer(request, send)

    async def stream(
        self, request: InferRequest, signature: ModelSignature, seconds: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request."""
        head = self._heads.head(NAMED["ModelStreamInfer"].procedure.encode())
        call = _Stream(self._channel, head, self._message(request))
        responses: Responses[Buffer] = Responses(call.hold, seconds, late(self._address, seconds))
        call.responses, call.explain = responses, lambda end: self._explained(end, seconds)
        self._channel.start(call)
        try:
            async for data in responses:
                found = streamed_answer(data)
                if isinstance(found, StreamError):
                    raise StatusError(_STREAMED_STATUS, found.text, _INTERNAL)
                yield self._response(found)
        except InvalidRequest as error:
            raise self._nonsense(error) from None
        finally:
            call.cancel()

    def generate(
        self, model: str, version: str, document: Document, seconds: float
    ) -> AsyncGenerator[Document, None]:
        """Raise `ClientError`: flat JSON is HTTP only."""
        raise ClientError("generate_stream is of HTTP: ask an http:// URL, or call stream")

    async def fetch(self, path: str, seconds: float) -> bytes:
        """Raise `ClientError`: paths are HTTP only."""
        raise ClientError(f"{path} is of HTTP: ask an http:// URL")

    async def close(self) -> None:
        """Close all connections."""
        if self._memory is not None:
            self._memory.close()
        await self._channel.close()

    def _message(self, request: InferRequest, shared: SharedTensors = NOTHING) -> list[Buffer]:
        names = request.model, request.version
        messages = self._messages.get(names)
        if messages is None:
            messages = self._messages[names] = RemoteMessages(*names)
        inputs = [RemoteInput(t.name, t.datatype, t.array.shape, [t.array]) for t in request.inputs]
        if shared is not NOTHING:
            return shared_request(
                *names, inputs, request.outputs, request.parameters, request.id,
                shared.places, shared.rooms,
            )  # fmt: skip
        return messages.request(
            inputs, request.outputs, request.parameters, request.id, request.classes
        )

    async def _ask(self, operation: Operation, message: list[Buffer], seconds: float) -> Buffer:
        head = self._heads.head(operation.procedure.encode(), seconds=seconds)
        data, end = await self._channel.answer(head, message, seconds)
        if data is None:
            assert end is not None
            raise self._explained(end, seconds)
        return data

    def _response(
        self, data: Buffer, shared: Mapping[str, memoryview] | None = None
    ) -> InferResponse:
        try:
            answer = self._reader.read(data, shared)
        except InvalidRequest as error:
            raise self._nonsense(error) from None
        outputs = [
            Tensor(name, BY_NUMPY[array.dtype], array) for name, array in answer.outputs.items()
        ]
        return InferResponse(
            answer.model, answer.version, answer.id, outputs, Timing(0, 0, 0), answer.parameters
        )

    def _nonsense(self, error: Exception) -> AnswerError:
        return AnswerError(f"{self._address} has sent an invalid response: {error}")

    def _explained(self, end: End, seconds: float) -> ClientError:
        """The client's error for the end of a call."""
        match end.reason:
            case Reason.UNSENT:
                return not_connected(self._address, end.text)
            case Reason.LATE:
                return late(self._address, seconds)
            case Reason.STATUS if end.status == DEADLINE_EXCEEDED:
                return late(self._address, seconds)
            case Reason.STATUS if end.status == _UNAVAILABLE and end.text.startswith(_RESTRICTED):
                return StatusError(_FORBIDDEN, end.text, end.status)
            case Reason.STATUS | Reason.REFUSED:
                return StatusError(http_status_of(end.status), end.text, end.status)
            case Reason.LOST:
                return hung_up(self._address)
        return self._nonsense(Exception(end.text))


class _Stream(StreamCall):
    """A stream of responses, for an iterator."""

    responses: Responses[Buffer]
    explain: Callable[[End], ClientError]

    def message(self, data: Buffer) -> None:
        """Queue a response."""
        self.responses.put(data)

    def closed(self, end: End | None) -> None:
        """Queue the end."""
        self.responses.end(None if end is None else self.explain(end))
