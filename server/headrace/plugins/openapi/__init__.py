"""Pages of the HTTP door: an overview at `/`, the OpenAPI document, and its page at `/docs`."""

import asyncio
from collections.abc import Sequence

import orjson

from headrace import __version__
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import Category, Operation
from headrace.doors.http.exchange import Answer
from headrace.doors.http.head import opens
from headrace.doors.http.infer import not_allowed, send_answer
from headrace.doors.http.protocol import Receive, Scope, Send
from headrace.engine.engine import Engine
from headrace.plugins.openapi.document import document, loaded
from headrace.plugins.openapi.html import render_docs, render_root

_PATHS = ("/", "/docs", "/openapi.json")


class Pages:
    """The pages, as a `headrace.doors.http.infer.Route`; they show models as metadata do."""

    def __init__(self, engine: Engine, rules: HeaderRules, operations: Sequence[Operation]) -> None:
        self._engine = engine
        self._key = rules.keys().get(Category.METADATA)
        self._operations = operations

    def claims(self, method: str, path: str) -> bool:
        """Implements `Route.claims`."""
        return path in _PATHS

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `Route.handle`."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            await send_answer(send, not_allowed("GET"))
            return
        shown = self._key is None or opens(self._key, scope["headers"])
        models = loaded(self._engine.versions()) if shown else ()

        def written() -> str | bytes:
            if path == "/":
                return render_root(__version__)
            described = document(models, self._operations)
            return render_docs(described) if path == "/docs" else orjson.dumps(described)

        content = await asyncio.to_thread(written)  # there may be thousands of models
        kind = b"application/json" if path == "/openapi.json" else b"text/html; charset=utf-8"
        body = content.encode() if isinstance(content, str) else content
        await send_answer(send, Answer(200, b"content-type: %b\r\n" % kind, [body]))
