"""The console at `/console`: a page of static files that shows and controls the server.

Its scripts ask the operations of the protocol, above all `/v2/status`, with what the client may do;
nothing here knows models. Everything comes from this server, and nothing else is allowed to.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import RedirectResponse

from headrace.api.gate import Gate
from headrace.api.operations import Operation
from headrace.engine.engine import Engine

FILES = Path(__file__).with_name("files")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# No scripts, styles or connections but those of this server, and no page may frame this one.
SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Files of another version of the server do not fit each other.
    "Cache-Control": "no-cache",
}


def add_console(app: FastAPI, engine: Engine, gate: Gate, operations: Sequence[Operation]) -> None:
    """Add the page and its files, which are the same for all clients."""
    names = frozenset(path.name for path in FILES.iterdir() if path.suffix in TYPES)

    @app.get("/console", include_in_schema=False)
    @app.head("/console", include_in_schema=False)
    async def page() -> Response:
        return await asyncio.to_thread(_file, "index.html")

    @app.get("/console/", include_in_schema=False)
    async def with_slash() -> Response:
        return RedirectResponse("../console")  # relative, as for a proxy that adds a path

    @app.get("/console/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in names or name == "index.html":
            raise HTTPException(404)
        return await asyncio.to_thread(_file, name)


def _file(name: str) -> Response:
    path = FILES / name
    kind = f"{TYPES[path.suffix]}; charset=utf-8"
    return Response(path.read_bytes(), media_type=kind, headers=SAFETY)
