"""The HTTP routes of the table of operations, except inference: a FastAPI application.

Two checks need only a request's head: the gate, and, for a route that changes models or settings or
reads the log, the origin of a browser's request. A client that disconnects
before its request is complete is no error.
"""

import asyncio
import difflib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headrace import __version__
from headrace.api.audited import REQUEST_ID, AuditedRequest
from headrace.api.gate import Gate
from headrace.api.handlers import HANDLERS, Handler, answer_json, check_model
from headrace.api.operations import OPERATIONS, Category, Operation, Route
from headrace.core.errors import PayloadTooLarge, ServerError
from headrace.core.identity import CHANGING, NO_PEER, Identity
from headrace.core.plugins import PluginGroup
from headrace.doors.http.asgi import ACCOUNT, IDENTITY, OPERATION, PEER
from headrace.doors.http.head import values_in
from headrace.engine.admission import Account
from headrace.engine.engine import Engine
from headrace.protocol.compression import too_large
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT, STATUS, error_fields
from headrace.protocol.v2_json import error_body

AddPages = Callable[[FastAPI, Engine, Gate, Sequence[Operation]], None]
PAGES: PluginGroup[AddPages] = PluginGroup("headrace.pages")

log = logging.getLogger(__name__)

_JSON = "application/json"
_HTML = "text/html; charset=utf-8"
_NO_ROUTE = "Not Found: /docs describes all paths"
_ALWAYS = 64 << 10  # bytes of a body that are accepted even if the server is full
_LONG = 64 << 10  # bytes of a body from which on it is parsed on a thread


def create_app(
    engine: Engine,
    max_request_bytes: int,
    gate: Gate | None = None,
    operations: Sequence[Operation] = OPERATIONS,
    handlers: Mapping[str, Handler] = HANDLERS,
) -> FastAPI:
    """The application for `engine`, with these header gate; see `LateApp`."""
    app = FastAPI(
        title="headrace", version=__version__, redirect_slashes=False, docs_url=None,
        redoc_url=None, openapi_url=None,
    )  # fmt: skip
    gate = gate or Gate()
    served = _Operations(engine, max_request_bytes, gate)
    for operation in operations:
        if operation.in_door:
            continue
        for route in operation.routes:
            answer = served.endpoint(operation, route, handlers[operation.name])
            for path in (*route.forms, *route.also):
                # Some load balancers probe with HEAD.
                for method in ("GET", "HEAD") if _is_probe(operation, route) else (route.method,):
                    app.routes.append(
                        _OperationRoute(path, answer, method, operation, gate, route.changes)
                    )
    _add_errors(app)
    for add in PAGES.load(lambda add: add).values():
        add(app, engine, gate, operations)
    return app


class _OperationRoute(APIRoute):
    """A route of an operation, which passes the gate before its method is compared."""

    def __init__(
        self,
        path: str,
        answer: Callable[[Request], Awaitable[Response]],
        method: str,
        operation: Operation,
        gate: Gate,
        changes: bool,
    ) -> None:
        super().__init__(
            path, answer, methods=[method], response_class=Response, include_in_schema=False
        )
        self._operation = operation
        self._changes = changes
        self._gate = gate

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (Starlette's interface); raises as `Gate.enter`."""
        scope[OPERATION] = self._operation.counted
        values, peer = values_in(scope["headers"]), scope.get(PEER, NO_PEER)
        scope[IDENTITY] = self._gate.enter(self._operation, values, peer, self._changes)
        try:
            await super().handle(scope, receive, send)
        except ClientDisconnect:  # without an answer, which would be counted
            log.debug("the client of %s left before its request was complete", scope["path"])


def _is_probe(operation: Operation, route: Route) -> bool:
    return operation.category is Category.HEALTH and route.method == "GET"


class _Operations:
    """Endpoints for the routes of operations."""

    def __init__(self, engine: Engine, max_request_bytes: int, gate: Gate) -> None:
        self._engine = engine
        self._limit = max_request_bytes
        self._gate = gate
        # Long bodies are parsed one at a time: each holds the interpreter for milliseconds, and the
        # event loop would wait for all that are.
        self._reading = asyncio.Lock()

    def endpoint(
        self, operation: Operation, route: Route, handler: Handler
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a route of an operation; raises `ServerError`."""

        async def answer(request: Request) -> Response:
            if self._engine.audit is None:
                return await respond(request)
            scope = request.scope
            ids = values_in(scope["headers"])(REQUEST_ID)
            audited = AuditedRequest(
                self._engine.audit.record, operation, "http", (scope.get("client") or ("",))[0],
                ids[0].decode("latin-1") if ids else "", scope[IDENTITY], route.changes,
            )  # fmt: skip
            audited.names(request.path_params)
            with audited:
                return await respond(request, audited)

        async def respond(request: Request, audited: AuditedRequest | None = None) -> Response:
            scope, parts = request.scope, request.path_params
            if route.changes or operation.permission in CHANGING:
                self._gate.origins.check(scope["headers"], scope["server"])
            if not re.fullmatch("[0-9]*", parts.get("version", "")):  # as in Triton
                return Response(error_body(_NO_ROUTE), 404, media_type=_JSON)
            identity: Identity = scope[IDENTITY]
            check_model(identity, operation, route.changes, parts, audited)
            handler.allow(self._engine)
            if handler.check is not None:
                handler.check(self._engine, parts)
            body = await self._body(request, operation, handler) if route.body else {}
            if audited is not None and route.changes:
                await audited.asks(body)
            found = await answer_json(self._engine, operation, handler, parts, body, identity)
            if found is None:
                return Response(media_type=_JSON)
            return Response(orjson.dumps(found), route.status(found), media_type=_JSON)

        return answer

    async def _body(self, request: Request, operation: Operation, handler: Handler) -> Any:
        """Read the request's body and pass it through the handler's `read`."""
        account: Account = request.scope.get(ACCOUNT) or self._engine.admission
        fixed = operation.max_bytes
        async with whole_body(request.stream(), account, fixed or self._limit, bool(fixed)) as body:
            if len(body) < _LONG:
                return handler.read(operation, body)
            account.grow(len(body), len(body))  # what is decoded is about as long
            try:
                async with self._reading:
                    return await asyncio.to_thread(handler.read, operation, body)
            finally:
                account.count(-len(body))


@asynccontextmanager
async def whole_body(
    pieces: AsyncIterator[bytes], account: Account, limit: int, fixed: bool = False
) -> AsyncIterator[bytearray]:
    """Read a body of up to `limit` bytes, which may be `fixed`: an operation's own.

    It is charged while it arrives and is in use, except for its first bytes: the operator of a full
    server has to be able to control it. Raises `PayloadTooLarge`, `Overloaded` and `ServerExiting`.
    """
    body = bytearray()
    size, charged, begun = 0, 0, False  # charged: bytes beyond the first ones
    try:
        async for piece in pieces:
            wanted = size + len(piece)
            if wanted > limit:
                raise PayloadTooLarge(too_large("request body", limit, fixed=fixed))
            if wanted <= _ALWAYS:
                account.count(len(piece))
            else:
                if not begun:
                    account.begin(len(piece))
                    begun = True
                account.grow(len(piece), charged)
                charged += len(piece)
            size = wanted
            body += piece
        yield body
    finally:
        account.count(charged - size)
        if begun:
            account.drop(charged)


# --- errors


def _add_errors(app: FastAPI) -> None:
    """Return every error in the protocol's form, including the framework's own."""

    @app.exception_handler(ServerError)
    async def server_error(_: Request, error: ServerError) -> Response:
        status = STATUS[type(error)]
        return Response(error_body(str(error)), status.http, dict(error_fields(error)), _JSON)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = error.detail
        if error.status_code == 404:
            text = _NO_ROUTE + hint(request.url.path)
        if allowed := (error.headers or {}).get("Allow"):
            text += f": this path takes {allowed}"
        return Response(error_body(text), error.status_code, error.headers, _JSON)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("bug while answering %s", request.url.path, exc_info=error)
        return Response(error_body(INTERNAL_TEXT), INTERNAL.http, media_type=_JSON)


_ALIKE = 0.65  # similarity from which on a path is suggested
_LONGEST = 100  # longest path that is compared with others
_MODEL = "/v2/models/{name}"
_OF_MODEL = re.compile(
    r"(?:/v\d)?/models?/(?P<name>[^/:]+)(?:/versions?/(?P<version>\d+))?(?:[/:](?P<end>[\w/]+))?",
    re.IGNORECASE,
)
# Path elements of other servers.
_INFER = frozenset({"infer", "predict", "predictions", "invocations", "inference", "run"})
_METRICS = "metrics have a port of their own, 8002 unless --metrics-port says another"


@cache
def _known() -> tuple[list[str], list[str]]:
    """The known paths: their ends behind a model's name, and all others."""
    forms = [form for found in OPERATIONS for route in found.routes for form in route.forms]
    ends = [form.removeprefix(_MODEL) for form in forms if form.startswith(_MODEL)]
    others = [form for form in forms if "{" not in form]
    named = [f"/v2/models/NAME/{end}" for end in ("infer", "generate")]
    return [end for end in ends if end and "{" not in end], others + named


def hint(path: str) -> str:
    """A suggestion for an unknown path, as the end of a sentence; "" if nothing is similar.

    Users of other servers try `/v1/models/m:predict`, `/models/m/infer` or `/health`.
    """
    if len(path) > _LONGEST:
        return ""
    clean = "/" + "/".join(part for part in path.split("/") if part)
    if clean.endswith("/metrics"):
        return f"; {_METRICS}"
    if clean[1:].lower() in _INFER:
        clean = "/v2/models/NAME/infer"
    others = _known()[1]
    near = _of_model(clean) or _nearest(clean, others) or _nearest(f"/v2{clean}", others)
    return f"; did you mean {near}?" if near and near != path else ""


def _of_model(path: str) -> str:
    found = _OF_MODEL.fullmatch(path)
    if found is None:
        return ""
    end = (found["end"] or "").lower()
    if end:
        end = "/infer" if end in _INFER else _nearest(f"/{end}", _known()[0])
        if not end:
            return ""
    version = f"/versions/{found['version']}" if found["version"] else ""
    return f"/v2/models/{quote(found['name'], safe='')}{version}{end}"


def _nearest(path: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(path, list(known), 1, _ALIKE)), "")
