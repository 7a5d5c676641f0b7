"""The application of the HTTP door: routes, of which the first that claims a request answers it.

Two checks need only a request's head: the header required by the operation's category, and, for a
route that changes models or settings, the origin of a browser's request. A client that disconnects
before its request is complete is no error.
"""

import asyncio
import difflib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, cached_property
from typing import Any
from urllib.parse import quote

import orjson

from headrace.api.handlers import HANDLERS, Handler, answer_json
from headrace.api.header_rules import NO_RULES, HeaderRules
from headrace.api.operations import OPERATIONS, Category, Operation
from headrace.api.operations import Route as OperationRoute
from headrace.core import plugins
from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.doors.http.exchange import JSON, Answer
from headrace.doors.http.head import check_key
from headrace.doors.http.infer import Application, Route, not_allowed, received, send_answer
from headrace.doors.http.protocol import ACCOUNT, OPERATION, Receive, Scope, Send
from headrace.engine.admission import Account
from headrace.engine.engine import Engine
from headrace.protocol.compression import too_large
from headrace.protocol.json_text import refuse_without_memory
from headrace.protocol.v2_json import error_body

Scrape = Callable[[], Awaitable[bytes]]
_EXPOSITION = b"; version=0.0.4; charset=utf-8"  # Prometheus' text format

_NO_ROUTE = "Not Found: /docs describes all paths"
_BODY_LIMIT = 1 << 20  # bytes of a body, unless it is large
_ALWAYS = 64 << 10  # bytes of a body that are accepted even if the server is full
_LONG = 64 << 10  # bytes of a body from which on it is parsed on a thread


def create_app(
    engine: Engine,
    max_request_bytes: int,
    rules: HeaderRules = NO_RULES,
    operations: Sequence[Operation] = OPERATIONS,
    handlers: Mapping[str, Handler] = HANDLERS,
    inference: Sequence[Route] = (),
) -> Application:
    """The application for `engine`, with these header rules.

    `inference` are the routes of inference, unless other processes have them.
    """
    table = OperationRoutes(engine, max_request_bytes, rules, operations, handlers)

    def pages() -> Sequence[Route]:
        made = plugins.load(plugins.PAGES, lambda make: make(engine, rules, operations))
        return list(made.values())

    return Application([*inference, table, OtherRoutes(pages)])


class OperationRoutes:
    """The routes of all operations that no door answers itself."""

    def __init__(
        self,
        engine: Engine,
        max_request_bytes: int,
        rules: HeaderRules,
        operations: Sequence[Operation],
        handlers: Mapping[str, Handler],
    ) -> None:
        self._engine = engine
        self._limit = max_request_bytes
        self._keys = rules.keys()
        self._origins = rules.allowed_origins()
        self._table = [
            (route, operation, handlers[operation.name])
            for operation in operations
            if not operation.in_door
            for route in operation.routes
        ]

    def claims(self, method: str, path: str) -> bool:
        """Implements `Route.claims`."""
        return any(route.match(path) is not None for route, *_ in self._table)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `Route.handle`."""
        method, path = scope["method"], scope["path"]
        matching = [row for row in self._table if row[0].match(path) is not None]
        route, operation, handler = next(
            (row for row in matching if _takes(row[1], row[0], method)), matching[0]
        )
        scope[OPERATION] = operation.counted
        if operation.category is not None:
            check_key(self._keys.get(operation.category), scope["headers"])
        if not _takes(operation, route, method):
            await send_answer(send, not_allowed(route.method))
            return
        if route.changes:
            self._origins.check(scope["headers"], scope["server"])
        parts = route.match(path) or {}
        if handler.check is not None:
            handler.check(self._engine, parts)
        body = await self._body(scope, receive, route, handler) if route.body else {}
        found = await answer_json(self._engine, operation, handler, parts, body)
        content, status = (
            (b"", 200) if found is None else (orjson.dumps(found), route.status(found))
        )
        await send_answer(send, Answer(status, JSON, [content]))

    async def _body(
        self, scope: Scope, receive: Receive, route: OperationRoute, handler: Handler
    ) -> Any:
        """Read the request's body and pass it through the handler's `read`."""

        def read() -> Any:
            return handler.read(parse_object(body))

        account: Account = scope.get(ACCOUNT) or self._engine.admission
        limit = self._limit if route.large else 0
        async with whole_body(received(receive), account, limit) as body:
            return read() if len(body) < _LONG else await asyncio.to_thread(read)


def _takes(operation: Operation, route: OperationRoute, method: str) -> bool:
    """True if a route takes requests with this method: some load balancers probe with HEAD."""
    probed = operation.category is Category.HEALTH and method == "HEAD"
    return route.method == ("GET" if probed else method)


class OtherRoutes:
    """The pages of plugins, made by `pages` for the first request that needs them, and the 404."""

    def __init__(self, pages: Callable[[], Sequence[Route]]) -> None:
        self._make = pages

    def claims(self, method: str, path: str) -> bool:
        """Implements `Route.claims`."""
        return True

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `Route.handle`."""
        path: str = scope["path"]
        for page in self._pages:
            if page.claims(scope["method"], path):
                await page.handle(scope, receive, send)
                return
        await send_answer(send, Answer(404, JSON, [error_body(_NO_ROUTE + hint(path))]))

    @cached_property
    def _pages(self) -> Sequence[Route]:
        return self._make()


class MetricsRoute:
    """The metrics door: answers `GET /metrics` with the output of what `build` makes.

    `build` is called on a thread by the first request: it imports prometheus_client.
    """

    def __init__(self, build: Callable[[], Scrape]) -> None:
        self._build = build
        self._scrape: Scrape | None = None

    def claims(self, method: str, path: str) -> bool:
        """Implements `Route.claims`."""
        return True

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `Route.handle`."""
        plain = b"content-type: text/plain%b\r\n"
        if scope["path"].rstrip("/") != "/metrics":
            answer = Answer(404, plain % b"", [b"metrics are at /metrics\n"])
        elif scope["method"] != "GET":
            answer = Answer(405, plain % b"", [b"only GET is possible here\n"])
        else:
            if self._scrape is None:
                self._scrape = await asyncio.to_thread(self._build)
            answer = Answer(200, plain % _EXPOSITION, [await self._scrape()])
        await send_answer(send, answer)


@asynccontextmanager
async def whole_body(
    pieces: AsyncIterator[bytes], account: Account, limit: int = 0
) -> AsyncIterator[bytes]:
    """Read a body of up to `limit` bytes, 0 for that of control requests.

    It is charged while it arrives and is in use, except for its first bytes: the operator of a full
    server has to be able to control it. Raises `PayloadTooLarge`, `Overloaded` and `ServerExiting`.
    """
    body = bytearray()
    size, charged, begun = 0, 0, False  # charged: bytes beyond the first ones
    try:
        async for piece in pieces:
            wanted = size + len(piece)
            if wanted > (limit or _BODY_LIMIT):
                refusal = f"the request body exceeds {_BODY_LIMIT} bytes"
                raise PayloadTooLarge(too_large("request body", limit) if limit else refusal)
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
        whole = bytes(body)
        body.clear()
        yield whole
    finally:
        account.count(charged - size)
        if begun:
            account.drop(charged)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, an empty one for an empty body; raises `InvalidRequest`."""
    if not body.strip():
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if type(found) is not dict:
        raise InvalidRequest("the request must be a JSON object")
    return found


# --- unknown paths

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
