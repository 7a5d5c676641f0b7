"""Protocols over HTTP, on the thread that loads a model and on the event loop."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from headrace.core.errors import InvalidRequest, ServerError, Unsupported
from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import (
    Call,
    CallFailed,
    PassedAnswer,
    PassedRequest,
    Receiver,
    RemoteDescription,
    RemoteRequest,
    nonsense,
    with_headers,
)
from headrace.execution.remote.http_lines import (
    CONNECT_SECS,
    Disconnected,
    Line,
    Lines,
    NoAnswer,
    NotConnected,
)
from headrace.execution.remote.obstacles import CLOSED, obstacle
from headrace.execution.remote.options import Endpoint, RemoteOptions
from headrace.execution.remote.rest import Conversation, Inference, Rest, RestControl, RestPassing
from headrace.execution.remote.task_call import TaskCall
from headrace.execution.remote.tls import secured, tls_context
from headrace.wire.compression import ANSWER_RATIO, LARGE, compress, decompress
from headrace.wire.http_exchange import (
    LARGEST_BODY,
    HttpRequest,
    HttpResponse,
    ResponseReader,
    header_lines,
    request_pieces,
)
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate, late, lost, unsent

T = TypeVar("T")
_ENCODING = b"content-encoding"


class HttpDialect:
    """`headrace.execution.remote.connection.Dialect`, of the protocol `rest`."""

    def __init__(self, options: RemoteOptions, model: str, rest: Rest, secure: bool) -> None:
        """Raises `InvalidOption`."""
        self.options = options
        self.model = model
        self.rest = rest
        self.passing = rest if isinstance(rest, RestPassing) else None
        self.tls = tls_context(options.credentials) if secure else None

    def visit(self, endpoint: Endpoint) -> "HttpLoading":
        """For the thread that loads the model."""
        return HttpLoading(endpoint, self)

    def connect(self, endpoint: Endpoint) -> "HttpConnection":
        """For the event loop that is running."""
        return HttpConnection(endpoint, self)

    def headers(self, endpoint: Endpoint) -> list[tuple[str, str]]:
        """What all requests to a server have in common, names in lower case."""
        found = [("host", endpoint.authority), ("user-agent", "headrace")]
        if self.options.compression:
            found.append(("accept-encoding", "gzip, deflate"))
        if self.options.credentials.authorization:
            found.append(("authorization", self.options.credentials.authorization))
        return found

    def placed(self, request: HttpRequest, endpoint: Endpoint) -> HttpRequest:
        """A request with the path that a server has it at, and with its body packed."""
        headers, body = request.headers, request.body
        if body and self.options.compression:
            encoding = self.options.compression
            headers = {**headers, "content-encoding": encoding}
            body = [compress(b"".join(body), encoding)]
        return HttpRequest(request.method, endpoint.path + request.path, headers, body)

    def unpacked(self, response: HttpResponse) -> HttpResponse:
        """An answer with its body unpacked; raises `CallFailed`."""
        encoding = response.headers.get(_ENCODING)
        if encoding is None:
            return response
        try:
            body = decompress(
                response.body, encoding.decode("latin-1"), LARGEST_BODY, "answer",
                max_ratio=ANSWER_RATIO,
            )  # fmt: skip
        except ServerError as error:
            raise nonsense(self.model, error) from None
        return HttpResponse(response.status, response.headers, body, response.reusable)

    def failed(self, error: Exception) -> CallFailed:
        """What it means that there is no answer."""
        if isinstance(error, NotConnected):
            return CallFailed(unsent(self.model), str(error))
        if isinstance(error, NoAnswer):
            return CallFailed(late(self.model), "no answer in time")
        if isinstance(error, Disconnected):
            return CallFailed(lost(self.model), str(error))
        return nonsense(self.model, error)


class HttpLoading:
    """`LoadingConnection` and `ModelControl` of `headrace.execution.remote.connection`."""

    def __init__(self, endpoint: Endpoint, dialect: HttpDialect) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._common = header_lines(dialect.headers(endpoint))
        self._socket: socket.socket | None = None
        self._reader = ResponseReader()

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
        return self._talk(self._dialect.rest.describe(), _until(seconds))

    def load(self, config: str, seconds: float) -> None:
        """Have the model loaded; raises `CallFailed`."""
        self._talk(self._control().load(config), _until(seconds))

    def unload(self, seconds: float) -> None:
        """Have the model unloaded; raises `CallFailed`."""
        self._talk(self._control().unload(), _until(seconds))

    def _control(self) -> RestControl:
        rest = self._dialect.rest
        if isinstance(rest, RestControl):
            return rest
        text = "this protocol has no way to have models loaded"
        raise CallFailed(Failure(Fate.ANSWERED, Unsupported(text)), text)

    def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """One run; raises `CallFailed`."""
        until = _until(seconds)
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
            raise dialect.failed(error) from None
        if not response.reusable:
            self._close()
        return dialect.unpacked(response)

    def _exchange(self, pieces: Any, until: float) -> HttpResponse:
        connection = self._socket = self._socket or self._connect(until)
        try:
            for piece in pieces:
                connection.settimeout(_left(until))
                connection.sendall(piece)
            while True:
                connection.settimeout(_left(until))
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
        seconds = min(_left(until) or CONNECT_SECS, CONNECT_SECS)
        try:
            found = socket.create_connection((endpoint.address, endpoint.port), seconds)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found if tls is None else secured(found, tls, endpoint.host)
        except OSError as error:  # among them those of TLS
            raise NotConnected(obstacle(error)) from None

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._reader = None, ResponseReader()


class HttpConnection:
    """`headrace.execution.remote.connection.Connection`."""

    def __init__(self, endpoint: Endpoint, dialect: HttpDialect) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._headers = dialect.headers(endpoint)
        self._common = header_lines(self._headers)
        # The client says itself what it can read.
        self._passed = [item for item in self._headers if item[0] != "accept-encoding"]
        self._own = header_lines(self._passed)
        self._lines = Lines(endpoint, dialect.tls)
        self._inference: Inference | None = None

    def begin(
        self, request: RemoteRequest | PassedRequest, seconds: float, receiver: Receiver
    ) -> Call:
        """One run."""
        if isinstance(request, PassedRequest):
            return self._pass_on(request, seconds, receiver)
        inference = self._inference
        if inference is None or self._dialect.options.compression:
            return TaskCall(self._run(request, seconds), receiver)
        try:
            common = self._lines_for(request)
            placed = self._dialect.placed(inference.request(request), self._endpoint)
        except CallFailed:  # which the task tells, once this has ended
            return TaskCall(self._run(request, seconds), receiver)
        line = self._lines.take()
        if line is None:
            return TaskCall(self._run(request, seconds), receiver)
        dialect = self._dialect
        call = HttpCall(
            line, dialect, lambda found: inference.answer(dialect.unpacked(found)), receiver
        )
        line.send(request_pieces(placed, common), seconds, call.done)
        return call

    def _pass_on(self, request: PassedRequest, seconds: float, receiver: Receiver) -> Call:
        """One run with a request as it came."""
        try:
            pieces = self._passed_pieces(request)
        except CallFailed:  # which the task tells, once this has ended
            return TaskCall(self._run_passed(request, seconds), receiver)
        line = self._lines.take()
        if line is None:
            return TaskCall(self._run_passed(request, seconds), receiver)
        read = partial(self._passing().passed_answer, request.request)
        call = HttpCall(line, self._dialect, read, receiver)
        line.send(pieces, seconds, call.done)
        return call

    async def _run_passed(self, request: PassedRequest, seconds: float) -> PassedAnswer:
        try:
            response = await self._lines.ask(self._passed_pieces(request), seconds)
        except (NotConnected, Disconnected, NoAnswer, InvalidRequest) as error:
            raise self._dialect.failed(error) from None
        return self._passing().passed_answer(request.request, response)

    def _passed_pieces(self, request: PassedRequest) -> list[Buffer]:
        """What is sent; raises `CallFailed`."""
        placed = self._passing().passed(request.request)
        placed = replace(placed, path=self._endpoint.path + placed.path)
        common = self._own if not request.headers else self._lines_for(request, self._passed)
        return request_pieces(placed, common)

    def _passing(self) -> RestPassing:
        assert self._dialect.passing is not None  # others are not asked to
        return self._dialect.passing

    async def ready(self, seconds: float) -> bool:
        """Whether the model is ready there; raises `CallFailed`."""
        until = _until(seconds)
        if not await self._talk(self._dialect.rest.ready(), until):
            return False
        if self._inference is None:
            await self._learn(until)
        return True

    async def close(self) -> None:
        """End the connections, with whatever is under way."""
        await self._lines.close()

    def _lines_for(
        self, request: RemoteRequest | PassedRequest, own: Sequence[tuple[str, str]] = ()
    ) -> str:
        """The header lines of a call; raises `CallFailed`."""
        if not request.headers:
            return self._common
        try:
            return header_lines(with_headers(own or self._headers, request.headers))
        except InvalidRequest as error:
            raise CallFailed(Failure(Fate.ANSWERED, error), str(error)) from None

    async def _run(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        until = _until(seconds)
        common = self._lines_for(request)
        inference = self._inference or await self._learn(until)
        return inference.answer(await self._ask(inference.request(request), until, common))

    async def _learn(self, until: float) -> Inference:
        self._inference = await self._talk(self._dialect.rest.learn(), until)
        return self._inference

    async def _talk(self, conversation: Conversation[T], until: float) -> T:
        try:
            request = next(conversation)
            while True:
                request = conversation.send(await self._ask(request, until))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _ask(self, request: HttpRequest, until: float, common: str = "") -> HttpResponse:
        dialect, large = self._dialect, sum(map(len, request.body)) > LARGE
        loop = asyncio.get_running_loop()
        if large and dialect.options.compression:
            request = await loop.run_in_executor(None, dialect.placed, request, self._endpoint)
        else:
            request = dialect.placed(request, self._endpoint)
        pieces = request_pieces(request, common or self._common)
        try:
            response = await self._lines.ask(pieces, _left(until) or 0.0)
        except (NotConnected, Disconnected, NoAnswer, InvalidRequest) as error:
            raise dialect.failed(error) from None
        if _ENCODING in response.headers and len(response.body) > LARGE:
            return await loop.run_in_executor(None, dialect.unpacked, response)
        return dialect.unpacked(response)


class HttpCall:
    """`headrace.execution.remote.connection.Call`: a request on a connection that was idle."""

    def __init__(
        self,
        line: Line,
        dialect: HttpDialect,
        read: Callable[[HttpResponse], RemoteAnswer | PassedAnswer],
        receiver: Receiver,
    ) -> None:
        """`read` gives what an answer says, or raises `CallFailed`."""
        self._line = line
        self._dialect = dialect
        self._read = read
        self._receiver: Receiver | None = receiver
        self._reading: TaskCall | None = None  # of an answer that takes long

    def cancel(self) -> None:
        """End the connection with it, unless the answer is here."""
        if self._receiver is not None:
            self._receiver = None
            self._line.abort()
        elif self._reading is not None:
            self._reading.cancel()

    def done(self, outcome: HttpResponse | Exception) -> None:
        """Take what has become of the request."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if not isinstance(outcome, HttpResponse):
            receiver.failed(self._dialect.failed(outcome))
            return
        if _ENCODING in outcome.headers and len(outcome.body) > LARGE:
            work = asyncio.to_thread(self._read, outcome)
            self._reading = TaskCall(work, receiver)
            return
        try:
            answer = self._read(outcome)
        except Exception as error:  # whatever it is, it belongs to this call alone
            receiver.failed(error)
        else:
            receiver.answered(answer)


def _until(seconds: float) -> float:
    """The time that is in so many seconds, 0 for none."""
    return monotonic() + seconds if seconds else 0.0


def _left(until: float) -> float | None:
    """Seconds until a time, always some; None if it is none."""
    return max(until - monotonic(), 0.001) if until else None
