"""Routes that change something are open to allowed origins alone, with few exceptions."""

import asyncio
import re
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from headrace.api.header_rules import DoorRules, HeaderRules
from headrace.doors.http.app import create_app
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.engine.worlds import LOAD_OPTIONS

READING = {"/v2/repository/index", "/v2/repository/{repository}/index"}
SAFE = {"GET", "HEAD", "OPTIONS"}


def application(*origins: str) -> FastAPI:
    engine = Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))
    return create_app(engine, 1 << 20, DoorRules(HeaderRules(origins=origins)))


def unsafe(app: FastAPI) -> list[tuple[str, str]]:
    """Methods and paths of the routes that may change something."""
    found: list[tuple[str, str]] = []
    for route in app.routes:
        methods: set[str] = getattr(route, "methods", None) or {"ANY"}
        path: str = getattr(route, "path", "?")
        found += [(method, path) for method in sorted(methods - SAFE)]
    return found


async def ask(app: FastAPI, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    """The status of a request without a body."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": list(headers), "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000), "state": {},
        },
        receive,
        send,
    )  # fmt: skip
    [status] = statuses
    return status


def test_changing_routes_are_open_to_allowed_pages() -> None:
    app = application("https://ops.example")
    routes = unsafe(app)
    assert {path for _, path in routes} > READING
    assert len(routes) > 15
    evil = (b"origin", b"http://evil.example:8000")
    host = (b"host", b"evil.example:8000")

    async def statuses(path: str, method: str) -> tuple[bool, bool, bool, bool]:
        path = re.sub(r"\{[^}]*\}", "1", path)
        asked = [
            await ask(app, method, path, host, evil),
            await ask(app, method, path, host, (b"sec-fetch-site", b"cross-site")),
            await ask(app, method, path, host, (b"origin", b"https://ops.example")),
            await ask(app, method, path, host),
        ]
        return tuple(status == 403 for status in asked)  # type: ignore[return-value]

    async def scenario() -> None:
        for method, path in routes:
            refused = (path not in READING,) * 2 + (False, False)
            assert await statuses(path, method) == refused, (method, path)

    asyncio.run(scenario())


def test_every_route_is_of_a_kind_that_this_test_knows() -> None:
    for route in application().routes:
        methods: set[str] = getattr(route, "methods", None) or {"ANY"}
        assert isinstance(route, APIRoute) or methods <= SAFE


def test_reading_routes_are_open_to_every_page() -> None:
    app = application()
    evil = (b"origin", b"http://evil.example")
    assert asyncio.run(ask(app, "GET", "/v2/logging", evil)) == 200
    assert asyncio.run(ask(app, "POST", "/v2/repository/index", evil)) == 200
