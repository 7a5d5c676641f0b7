"""Calls over HTTP that wait for their answers, for the thread that loads a model."""

import socket
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.execution.remote.connection import (
    CallFailed,
    RemoteDescription,
    RemoteRequest,
)
from headrace.execution.remote.http_lines import (
    CONNECT_SECS,
    Disconnected,
    NoAnswer,
    NotConnected,
    deadline_in,
    seconds_left,
)
from headrace.execution.remote.obstacles import CLOSED, obstacle
from headrace.execution.remote.options import Endpoint
from headrace.execution.remote.rest import Conversation, RestControl
from headrace.execution.remote.tls import secured
from headrace.wire.http_exchange import (
    HttpRequest,
    HttpResponse,
    ResponseReader,
    header_lines,
    request_pieces,
)
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate

if TYPE_CHECKING:
    from headrace.execution.remote.http_calls import HttpDialect

T = TypeVar("T")


class HttpLoading:
    """`LoadingConnection` and `ModelControl` of `headrace.execution.remote.connection`."""

    def __init__(self, endpoint: Endpoint, dialect: "HttpDialect") -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._common = header_lines(dialect.headers(endpoint))
        self._socket: socket.socket | None = None
        self._reader = ResponseReader(dialect.options.largest_response)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def describe(self, seconds: float) -> RemoteDescription:
        """What the server says of the model."""
        return self._talk(self._dialect.rest.describe(), deadline_in(seconds))

    def load(self, config: str, seconds: float) -> None:
        """Have the model loaded; raises `CallFailed`."""
        self._talk(self._control().load(config), deadline_in(seconds))

    def unload(self, seconds: float) -> None:
        """Have the model unloaded; raises `CallFailed`."""
        self._talk(self._control().unload(), deadline_in(seconds))

    def _control(self) -> RestControl:
        rest = self._dialect.rest
        if isinstance(rest, RestControl):
            return rest
        text = "this protocol has no way to have models loaded"
        raise CallFailed(Failure(Fate.ANSWERED, Unsupported(text)), text)

    def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """One run; raises `CallFailed`."""
        until = deadline_in(seconds)
        inference = self._talk(self._dialect.rest.learn(), until)
        return inference.answer(self._ask(inference.request(request), until))

    def _talk(self, conversation: Conversation[T], until: float) -> T:
        try:
            request = next(conversation)
            while True:
                request = conversation.send(self._ask(request, until))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _ask(self, request: HttpRequest, until: float) -> HttpResponse:
        dialect = self._dialect
        pieces = request_pieces(dialect.placed(request, self._endpoint), self._common)
        try:
            response = self._exchange(pieces, until)
        except (NotConnected, Disconnected, NoAnswer, InvalidRequest) as error:
            self._close()
            raise dialect.failed(error, self._endpoint) from None
        if not response.reusable:
            self._close()
        return dialect.unpacked(response, self._endpoint)

    def _exchange(self, pieces: Any, until: float) -> HttpResponse:
        connection = self._socket = self._socket or self._connect(until)
        try:
            for piece in pieces:
                connection.settimeout(seconds_left(until))
                connection.sendall(piece)
            while True:
                connection.settimeout(seconds_left(until))
                count = connection.recv_into(self._reader.buffer())
                response = self._reader.received(count) if count else self._reader.closed()
                if response is not None:
                    return response
                if not count:
                    raise Disconnected(CLOSED.format("HTTP"))
        except TimeoutError:
            raise NoAnswer from None
        except OSError as error:
            raise Disconnected(obstacle(error)) from None

    def _connect(self, until: float) -> socket.socket:
        endpoint, tls = self._endpoint, self._dialect.tls
        seconds = min(seconds_left(until) or CONNECT_SECS, CONNECT_SECS)
        try:
            found = socket.create_connection((endpoint.address, endpoint.port), seconds)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found if tls is None else secured(found, tls, endpoint.host)
        except OSError as error:  # among them those of TLS
            raise NotConnected(obstacle(error)) from None

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._reader = ResponseReader(self._dialect.options.largest_response)
