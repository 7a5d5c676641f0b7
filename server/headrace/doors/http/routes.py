"""The application of the HTTP door: bare routes, and FastAPI's, built when first needed.

Importing FastAPI and building its application takes a quarter of a second and 18 MB, and a server
that only serves inference and probes never needs it: the routes in front answer those. The first
other request triggers the build on a thread, so that everything else is served meanwhile; further
ones wait for the same build.
"""

import asyncio
import gc
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.api.handlers import HANDLERS, Handler, answer_json
from headrace.api.operations import OPERATIONS, Category, Operation
from headrace.core.errors import ServerError
from headrace.core.identity import NO_PEER, Identity, Permission
from headrace.doors.http.asgi import OPERATION, PEER
from headrace.doors.http.exchange import JSON, Answer, error_lines
from headrace.doors.http.head import values_in
from headrace.doors.http.infer import BareRoute, send_answer
from headrace.engine.engine import Engine
from headrace.engine.exposition import OPENMETRICS, PROTOBUF, TEXT, Exposition, chosen
from headrace.engine.pieces import Pieces
from headrace.engine.workbench import Threads
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT, STATUS
from headrace.protocol.v2_json import error_body

log = logging.getLogger(__name__)


class HealthRoute:
    """The paths of liveness and readiness, which every probe requests, some with HEAD.

    FastAPI's application answers them for all other methods.
    """

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        operations: Sequence[Operation] = OPERATIONS,
        handlers: Mapping[str, Handler] = HANDLERS,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._probes = [
            (route, operation, handlers[operation.name])
            for operation in operations
            for route in operation.routes
            if operation.category is Category.HEALTH and route.method == "GET"
        ]

    def claims(self, method: str, path: str) -> bool:
        """Implements `BareRoute.claims`."""
        return method in ("GET", "HEAD") and any(
            route.match(path) is not None for route, *_ in self._probes
        )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `BareRoute.handle`."""
        scope[OPERATION] = Category.HEALTH
        lines = JSON
        try:
            status, body = await self._answer(scope)
        except ServerError as error:
            status, body = STATUS[type(error)].http, error_body(str(error))
            lines += error_lines(error)
        except Exception as error:
            log.error("bug while answering %s", scope["path"], exc_info=error)
            status, body = INTERNAL.http, error_body(INTERNAL_TEXT)
        await send_answer(send, Answer(status, lines, [body]))

    async def _answer(self, scope: Scope) -> tuple[int, bytes]:
        values, peer = values_in(scope["headers"]), scope.get(PEER, NO_PEER)
        for route, operation, handler in self._probes:
            if (parts := route.match(scope["path"])) is not None:
                identity = self._gate.enter(operation, values, peer)
                if operation.of_model:
                    names = parts["name"], parts.get("version", "")
                    self._gate.check(operation, identity, values, peer, *names)
                document = await answer_json(self._engine, operation, handler, parts, {}, identity)
                return route.status(document), orjson.dumps(document)
        raise AssertionError("a route that does not claim the path. This is a bug.")


class LateApp:
    """Routes in front of an application that `build` makes, on a thread, when first needed.

    A failed build is logged; requests waiting for it are answered with a 500, and the next one
    retries. Owned by the event loop.
    """

    def __init__(self, routes: Sequence[BareRoute], build: Callable[[], ASGIApp]) -> None:
        self._routes = routes
        self._build = build
        self._threads = Threads(1, "http-application")
        self._pieces = Pieces()
        self._app: ASGIApp | None = None
        self._building: asyncio.Task[ASGIApp | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        for route in self._routes:
            if route.claims(scope["method"], scope["path"]):
                await route.handle(scope, receive, send)
                return
        app = self._app or await self._built()
        if app is None:
            await send_answer(send, Answer(INTERNAL.http, JSON, [error_body(INTERNAL_TEXT)]))
            return
        await app(scope, receive, send)

    async def _built(self) -> ASGIApp | None:
        """The application, None if it cannot be built."""
        if self._building is None:
            self._building = asyncio.create_task(self._make())
        # Cancelling one waiter must not cancel the build.
        app = await asyncio.shield(self._building)
        await self._pieces.begin()  # not all that have waited at once
        return app

    async def _make(self) -> ASGIApp | None:
        try:
            self._app = await self._threads.run(self._build)
        except Exception as error:
            log.error("bug while building an HTTP application", exc_info=error)
        else:
            gc.freeze()  # the imported modules and the application stay for good
        self._building = None
        return self._app


def late_app(
    engine: Engine, max_request_bytes: int, gate: Gate, inference: Sequence[BareRoute] = ()
) -> LateApp:
    """The application for `engine`, with its gate.

    `inference` are the routes of inference, unless other processes have them.
    """

    def build() -> ASGIApp:
        from headrace.doors.http.app import create_app  # imports FastAPI

        return create_app(engine, max_request_bytes, gate)

    return LateApp([*inference, HealthRoute(engine, gate)], build)


class _Shared:
    """Runs of a coroutine one after the other, each for all that have asked before it began."""

    def __init__(self, run: Callable[[], Awaitable[bytes]]) -> None:
        self._run = run
        self._last: asyncio.Task[bytes] | None = None  # under way, or about to begin
        self._begun = True

    async def next(self) -> bytes:
        """The result of the next run; cancelling the wait cancels nothing else."""
        if self._begun or self._last is None:
            self._begun = False
            self._last = asyncio.get_running_loop().create_task(self._after(self._last))
        return await asyncio.shield(self._last)

    async def _after(self, before: "asyncio.Task[bytes] | None") -> bytes:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        self._begun = True
        return await self._run()


_OF_MODEL = re.compile(rb'model="((?:[^"\\\\]|\\\\.)*)"')


def _visible(metrics: bytes, identity: Identity) -> bytes:
    """Metrics without the series of models that a client may not observe."""

    def seen(line: bytes) -> bool:
        if line.startswith(b"#") or (found := _OF_MODEL.search(line)) is None:
            return True
        return identity.may(Permission.OBSERVE, found[1].decode())

    return b"".join(line for line in metrics.splitlines(True) if seen(line))


def create_metrics_app(
    scrape: Callable[[Exposition], Awaitable[bytes]], gate: Gate, native: bool
) -> ASGIApp:
    """The metrics door: answers `GET /metrics` with the output of `scrape`, in the client's format.

    Of the gate, only who asks counts here: header rules are for the other doors.

    There is one scrape of a format at a time, and all requests that arrive meanwhile share the next
    one: with a thousand models it takes a second, and some megabytes.
    """
    scrapes = {format: _Shared(partial(scrape, format)) for format in (TEXT, OPENMETRICS, PROTOBUF)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, status, kind, more = b"", 200, "text/plain", b""
        if scope["path"].rstrip("/") != "/metrics":
            body, status = b"metrics are at /metrics\n", 404
        elif scope["method"] != "GET":
            body, status = b"only GET is possible here\n", 405
        else:
            try:
                values, peer = values_in(scope["headers"]), scope.get(PEER, NO_PEER)
                identity = gate.require(Permission.OBSERVE, values, peer)
            except ServerError as error:
                body, status = f"{error}\n".encode(), STATUS[type(error)].http
                more = error_lines(error)
            else:
                everything = identity.may(Permission.OBSERVE)
                accept = b",".join(values("accept")).decode("latin-1")
                # Only lines can be left out.
                format = chosen(accept, native and everything)
                body, kind = await scrapes[format].next(), format.content_type
                if not everything:
                    body = await asyncio.to_thread(_visible, body, identity)
        lines = f"content-type: {kind}\r\n".encode() + more
        await send_answer(send, Answer(status, lines, [body]))

    return app
