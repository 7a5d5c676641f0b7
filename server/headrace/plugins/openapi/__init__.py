"""Pages of the HTTP door: an overview at `/`, the OpenAPI document, and its page at `/docs`."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from headrace import __version__
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import Category, Operation
from headrace.doors.http.head import opens
from headrace.engine.engine import Engine
from headrace.plugins.openapi.document import document, loaded
from headrace.plugins.openapi.html import render_docs, render_root

_JSON = "application/json"
_HTML = "text/html; charset=utf-8"


def add_pages(
    app: FastAPI, engine: Engine, rules: HeaderRules, operations: Sequence[Operation]
) -> None:
    """Add the HTML pages, and the OpenAPI document, which shows models as metadata do."""
    key = rules.keys().get(Category.METADATA)

    async def described(
        request: Request, write: Callable[[dict[str, Any]], bytes | str]
    ) -> bytes | str:
        """The output of `write`, made on a thread: there may be thousands of models."""
        shown = key is None or opens(key, request.scope["headers"])
        models = loaded(engine.versions()) if shown else ()
        return await asyncio.to_thread(lambda: write(document(models, operations)))

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def root() -> Response:
        return Response(render_root(__version__), media_type=_HTML)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return Response(await described(request, render_docs), media_type=_HTML)

    @app.get("/openapi.json", include_in_schema=False)
    @app.head("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return Response(await described(request, orjson.dumps), media_type=_JSON)
