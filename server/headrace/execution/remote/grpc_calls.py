"""The V2 protocol over gRPC."""

import logging
import ssl
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.message import DecodeError

from headrace.core.errors import ExecutionFailed, InvalidRequest, Unavailable
from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import (
    CallFailed,
    RemoteDescription,
    RemoteRequest,
    StreamAnswer,
    Visit,
    nonsense,
    visiting,
)
from headrace.execution.remote.grpc_link import receive_buffer
from headrace.execution.remote.grpc_procedures import CONFIG, INFER, METADATA, READY
from headrace.execution.remote.options import Endpoint, RemoteOptions
from headrace.execution.remote.shared_region import remove_left_behind
from headrace.execution.remote.tls import tls_context
from headrace.wire.compression import DEFAULT_LEVEL, compress
from headrace.wire.grpc_call import End, Reason
from headrace.wire.grpc_response import UNIMPLEMENTED
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import AnswerReader, RemoteAnswer, RemoteMessages, response_in
from headrace.wire.remote_status import Failure, Fate, failure_of, late, lost, too_large, unsent

if TYPE_CHECKING:
    from headrace.execution.remote.grpc_connection import GrpcConnection

log = logging.getLogger(__name__)

# A path and a message; and a conversation of such, which are answered by what `ask` gives.
Question: TypeAlias = tuple[bytes, bytes]
Description: TypeAlias = Generator[Question, tuple[Buffer | None, End | None], RemoteDescription]


class GrpcDialect:
    """`headrace.execution.remote.connection.Dialect`. Made on any thread but the event loop's.

    Another protocol over gRPC has this with other procedures and messages.
    """

    infer_path = INFER

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """Raises `InvalidOption` for what is no certificate or key."""
        self.options = options
        self.model = model
        self.packing = options.compression
        self.packed = bool(self.packing)
        self.context: ssl.SSLContext | None = None
        if any(url.scheme == "grpcs" for url in options.urls):
            self.context = tls_context(options.credentials)
            self.context.set_alpn_protocols(["h2"])
        self.buffer = receive_buffer()  # for all connections of the event loop
        if options.shared_memory and (count := remove_left_behind()):
            log.info("removed shared memory that ended servers have left: %d regions", count)
        self._messages = RemoteMessages(options.model, options.version)
        self._reader = AnswerReader()

    def visit(self, endpoint: Endpoint) -> AbstractContextManager[Visit]:
        """For the thread that loads the model."""
        from headrace.execution.remote.grpc_connection import GrpcConnection

        return visiting(lambda: GrpcConnection(endpoint, self))

    def connect(self, endpoint: Endpoint) -> "GrpcConnection":
        """For the event loop that is running."""
        from headrace.execution.remote.grpc_connection import GrpcConnection

        return GrpcConnection(endpoint, self, self.buffer)

    def describe(self) -> Description:
        """Ask for the model's metadata, and its configuration where the server offers that."""
        name, version = self.options.model, self.options.version
        asked = pb.ModelMetadataRequest(name=name, version=version)
        said = self.given(*(yield METADATA, asked.SerializeToString()))
        wanted = pb.ModelConfigRequest(name=name, version=version)
        config, end = yield CONFIG, wanted.SerializeToString()
        if end is not None and end.status != UNIMPLEMENTED:
            raise self.failed(end)
        try:
            metadata = pb.ModelMetadataResponse.FromString(bytes(said))
            if config is None:
                return RemoteDescription(metadata, None)
            response = pb.ModelConfigResponse.FromString(bytes(config))
        except DecodeError as error:
            raise nonsense(self.model, error) from None
        return RemoteDescription(metadata, response.config)

    def given(self, data: Buffer | None, end: End | None) -> Buffer:
        """What a call has given; raises `CallFailed` if it is nothing."""
        if data is None:
            assert end is not None
            raise self.failed(end)
        return data

    def readiness(self) -> Question:
        """The question whether the model is ready."""
        asked = pb.ModelReadyRequest(name=self.options.model, version=self.options.version)
        return READY, asked.SerializeToString()

    def is_ready(self, data: Buffer) -> bool:
        """What the answer to that says; raises `CallFailed`."""
        try:
            return pb.ModelReadyResponse.FromString(bytes(data)).ready
        except DecodeError as error:
            raise nonsense(self.model, error) from None

    def message(self, request: RemoteRequest) -> list[Buffer]:
        """The message that carries a request, as it is."""
        return self._messages.request(
            request.inputs, request.outputs, request.parameters, request.id
        )

    def request(self, request: RemoteRequest) -> list[Buffer]:
        """The message that carries a request, as it is sent."""
        message = self.message(request)
        if self.packing:
            return [compress(b"".join(message), self.packing, DEFAULT_LEVEL)]
        return message

    def answer(self, data: Buffer) -> RemoteAnswer:
        """What a message says; raises `CallFailed`."""
        try:
            return self._reader.read(data)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def shared_answer(self, data: Buffer, shared: Mapping[str, memoryview]) -> RemoteAnswer:
        """The same with outputs that are `shared`; raises `CallFailed`."""
        try:
            return self._reader.read(data, shared)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def stream_answer(self, data: Buffer) -> StreamAnswer:
        """What a message of a stream says; raises `CallFailed`."""
        found = response_in(data)
        if found is not None:  # as nearly always: no error
            answer = self.answer(found)
            return StreamAnswer(answer.id, answer, None)
        try:
            message = pb.ModelStreamInferResponse.FromString(bytes(data))
        except DecodeError as error:
            raise self.nonsense(error) from None
        response = message.infer_response
        if message.error_message:
            return StreamAnswer(response.id, None, ExecutionFailed(message.error_message))
        return StreamAnswer(response.id, self.answer(response.SerializeToString()), None)

    def nonsense(self, problem: Exception) -> CallFailed:
        """An answer that cannot be read, which is logged."""
        log.error("model %s: a server's answer makes no sense: %s", self.model, problem,
                  extra={"model": self.model})  # fmt: skip
        return nonsense(self.model, problem)

    def failed(self, end: End) -> CallFailed:
        """What the end of a call means."""
        text = end.text
        if not text and end.status == UNIMPLEMENTED:
            text = f"it does not know this procedure of the protocol {self.options.protocol.name}"
        return CallFailed(self._failure(end), text or f"status {end.status} of gRPC")

    def _failure(self, end: End) -> Failure:
        if end.reason is Reason.STATUS:
            return failure_of(self.model, end.status, end.text)
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
