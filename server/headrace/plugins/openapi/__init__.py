"""Pages of the HTTP door: an overview at `/`, the OpenAPI document, and its page at `/docs`."""

import asyncio
import gzip
from collections.abc import Sequence
from pathlib import Path

import orjson
from fastapi import FastAPI, HTTPException, Request, Response

from headrace import __version__
from headrace.api.gate import Gate
from headrace.api.operations import Category, Operation
from headrace.core.identity import NO_PEER, Identity
from headrace.doors.http.asgi import PEER
from headrace.doors.http.head import values_in
from headrace.engine.engine import Engine
from headrace.plugins.openapi.document import DescribedVersion, document, loaded
from headrace.plugins.openapi.html import DOCS, SAFETY, missing_row, model_row, render_root

_JSON = "application/json"
_HTML = "text/html; charset=utf-8"
_CACHED = {"Cache-Control": "max-age=3600", "Vary": "Accept-Encoding"}
_FILES = Path(__file__).with_name("swagger_ui")
# Files of the page at `/docs`, with their types: compressed ones of Swagger UI, and our own script.
_ASSETS = {
    "swagger-ui-bundle.js": ("swagger-ui-bundle.js.gz", "text/javascript; charset=utf-8"),
    "swagger-ui.css": ("swagger-ui.css.gz", "text/css; charset=utf-8"),
    "start.js": ("start.js", "text/javascript; charset=utf-8"),
}


def add_pages(app: FastAPI, engine: Engine, gate: Gate, operations: Sequence[Operation]) -> None:
    """Add the HTML pages, and the OpenAPI document, which shows models as metadata do."""

    # There may be thousands of models. Rows are made in pieces; an OpenAPI document is made on a
    # thread, one at a time: each further thread would keep the event loop from the interpreter.
    making = asyncio.Lock()

    def client(request: Request) -> Identity:
        scope = request.scope
        values, peer = values_in(scope["headers"]), scope.get(PEER, NO_PEER)
        return gate.known(Category.METADATA, values, peer)

    async def models_for(identity: Identity) -> list[DescribedVersion]:
        """The loaded models that may be shown to a client."""
        await engine.pieces.begin()
        return loaded(v for v in engine.versions() if identity.sees(v.model))

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        identity = client(request)
        rows = await engine.pieces.each(await models_for(identity), model_row)
        await engine.pieces.begin()
        for name, reason in engine.unavailable():
            if identity.sees(name.partition("/")[0]):
                rows.append(missing_row(name, reason))
        return Response(render_root(__version__, rows), media_type=_HTML, headers=SAFETY)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(DOCS, media_type=_HTML, headers=SAFETY)

    @app.get("/docs/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        if name not in _ASSETS:
            raise HTTPException(404)
        plain = "gzip" not in request.headers.get("accept-encoding", "")
        return await asyncio.to_thread(_asset, *_ASSETS[name], plain)

    @app.get("/openapi.json", include_in_schema=False)
    @app.head("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        identity = client(request)
        bearer, headers = gate.access is not None, {c: key.header for c, key in gate.keys.items()}
        async with making:
            models = await models_for(identity)
            made = await asyncio.to_thread(
                lambda: orjson.dumps(document(models, operations, bearer, headers))
            )
        return Response(made, media_type=_JSON)


def _asset(file: str, media_type: str, plain: bool) -> Response:
    """A file of the page; `plain` for a client that takes no gzip."""
    content, headers = (_FILES / file).read_bytes(), dict(_CACHED)
    if file.endswith(".gz") and plain:
        content = gzip.decompress(content)
    elif file.endswith(".gz"):
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=media_type, headers=headers)
