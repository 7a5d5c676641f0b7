"""The plain infer route: a bare ASGI endpoint over bytes, in front of the FastAPI application.

It bypasses FastAPI's routing and dependency machinery. Requests on the fast path
(`headrace.doors.http.connection`) never reach it; it is their reference, and handles what they
leave: chunked bodies, `Expect: 100-continue`, HTTP/1.0.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.api.operations import NAMED, Operation
from headrace.core.errors import InvalidRequest, ServerError, ServerExiting
from headrace.core.identity import NO_PEER, NOBODY
from headrace.doors.http.asgi import ACCOUNT, GONE, IDENTITY, NAMES, OPERATION, PEER, log_access
from headrace.doors.http.exchange import (
    CLOSE,
    JSON,
    Answer,
    Exchange,
    error_lines,
)
from headrace.doors.http.head import InferHead, passed, values_in
from headrace.engine.admission import Account
from headrace.engine.entrance import Entrance
from headrace.observability.statistics import OTHER, Answers
from headrace.protocol.status import STATUS
from headrace.protocol.v2_json import error_body

_WATCH_AFTER = 0.005  # seconds; most answers are ready before a client can disconnect


class Disconnected(Exception):
    """The client has disconnected."""


class _RouteCall(Exchange):
    """A request whose answer the route awaits."""

    __slots__ = ("future",)

    def __init__(self, limit: int, head: InferHead, account: Account) -> None:
        super().__init__(limit, head, account)
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def end(self, answer: Answer) -> None:
        """Deliver the answer to the route."""
        if not self.future.done():
            self.future.set_result(answer)


class BareRoute(Protocol):
    """A bare endpoint for some paths, in front of an application."""

    def claims(self, method: str, path: str) -> bool:
        """True if the route handles such requests."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI). Never raises."""


class PostRoute:
    """The POST routes of some inference operations."""

    operations: Sequence[str]  # their names

    def __init__(self, engine: Entrance, max_request_bytes: int, gate: Gate | None = None) -> None:
        self._engine = engine
        self._gate = gate or Gate()
        self._limit = max_request_bytes

    def claims(self, method: str, path: str) -> bool:
        """Implements `BareRoute.claims`."""
        return self._found(path) is not None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `BareRoute.handle`."""
        found = self._found(scope["path"])
        assert found is not None, "a route that does not claim the path. This is a bug."
        parts, operation = found
        scope[OPERATION] = operation.counted
        headers = scope["headers"]
        try:
            peer = scope.get(PEER, NO_PEER)
            if scope["method"] != "POST":
                self._gate.enter(operation, values_in(headers), peer)
                text = "Method Not Allowed: this path takes POST"
                await send_answer(send, Answer(405, JSON, [error_body(text)]))
                return
            names = scope.get(NAMES) or headers
            head = passed(
                self._gate, operation, self._engine, scope["path"], parts, headers, names, peer
            )
        except ServerError as error:
            lines = JSON + error_lines(error)
            lines += CLOSE if isinstance(error, InvalidRequest) else b""
            await send_answer(
                send, Answer(STATUS[type(error)].http, lines, [error_body(str(error))])
            )
            return
        await self.post(head, scope, receive, send)

    def account(self, scope: Scope) -> Account:
        """The account of a request's connection, or the server's if it has none."""
        found: Account = scope.get(ACCOUNT) or self._engine.admission
        return found

    async def post(self, head: InferHead, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Never raises."""
        raise NotImplementedError

    def _found(self, path: str) -> tuple[Mapping[str, str], Operation] | None:
        """The parameters in a path, and its operation; None if no route matches."""
        for operation in map(NAMED.__getitem__, self.operations):
            for route in operation.routes:
                if (parts := route.match(path)) is not None:
                    return parts, operation
        return None


class InferRoute(PostRoute):
    """The route of infer requests."""

    operations = ("ModelInfer",)

    async def post(self, head: InferHead, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `PostRoute.post`."""
        exchange = _RouteCall(self._limit, head, self.account(scope))
        try:
            answer = await self._answer(exchange, receive)
            scope["inference"] = exchange.fields()
            if answer is not None:
                if self._engine.exiting and not answer.closes:
                    answer.lines += CLOSE
                await send_answer(send, answer)
        finally:
            exchange.close()

    async def _answer(self, exchange: _RouteCall, receive: Receive) -> Answer | None:
        """The answer, None if the client has disconnected."""
        try:
            exchange.open()
            body = await read_body(exchange, receive)
            exchange.submit(body)
            try:
                return await _first(exchange.future, receive)
            except BaseException:
                exchange.cancel()
                raise
        except (Exception, asyncio.CancelledError) as error:
            return answer_instead(exchange, error)


def answer_instead(exchange: Exchange, error: BaseException) -> Answer | None:
    """The answer for an exception; None if the client has disconnected."""
    if isinstance(error, Disconnected):
        return None
    if isinstance(error, asyncio.CancelledError):
        # Only the end of the process cancels a request, after waiting for it long enough.
        answer = exchange.failure(ServerExiting("Server exiting"))
        answer.lines += b"" if answer.closes else CLOSE
        return answer
    return exchange.failure(error)


async def read_body(exchange: Exchange, receive: Receive) -> bytes | memoryview:
    """Read the whole body within its limit; closes the connection if it is incomplete.

    Raises `ServerError` and `Disconnected`.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece: bytes = message.get("body", b"")
        exchange.grow(len(piece))
        if not message.get("more_body", False):
            if not body:
                return piece
            body += piece
            return memoryview(body)
        body += piece  # grows in place: pieces and their whole would be twice the memory


async def watch_disconnect(receive: Receive, gone: Callable[[], None]) -> None:
    """Call `gone` once the client has disconnected; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


async def _first(future: "asyncio.Future[Answer]", receive: Receive) -> Answer:
    """Wait for the answer, unless the client disconnects first.

    Watching for that costs a task, so it begins only if the answer takes a while.
    """
    loop = asyncio.get_running_loop()
    watch: list[asyncio.Task[None]] = []

    def gone() -> None:
        if not future.done():
            future.set_exception(Disconnected())

    def begin() -> None:
        watch.append(loop.create_task(watch_disconnect(receive, gone)))

    timer = loop.call_later(_WATCH_AFTER, begin)
    try:
        return await future
    finally:
        timer.cancel()
        for task in watch:
            task.cancel()


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a complete answer."""
    lines = answer.lines + b"content-length: %d\r\n" % answer.size
    await send_head(send, answer.status, lines)
    for buffer in answer.buffers[:-1]:
        await send({"type": "http.response.body", "body": buffer, "more_body": True})
    await send({"type": "http.response.body", "body": answer.buffers[-1]})


async def send_head(send: Send, status: int, lines: bytes) -> None:
    """Send a status and header lines."""
    headers = [tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n")[:-1]]
    await send({"type": "http.response.start", "status": status, "headers": headers})


class CountedApp:
    """An application whose answers are counted by operation and status, and logged if enabled.

    The handler of a request stores its label in the scope, as `OPERATION`; "" for requests that
    another process counts.
    """

    def __init__(self, app: ASGIApp, answers: Answers, logged: bool) -> None:
        self._app = app
        self._answers = answers
        self._logged = logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if operation := scope.get(OPERATION, OTHER):
                identity = scope.get(IDENTITY, NOBODY).kind
                counters = self._answers.of("http", operation, identity=identity)
                counters.answered(status or GONE, int((perf_counter() - begun) * 1e9))
            if self._logged:
                client = scope.get("client")
                log_access(
                    client[0] if client else "", scope["method"], scope["path"], status or GONE,
                    begun, scope.get("inference", {}),
                )  # fmt: skip
