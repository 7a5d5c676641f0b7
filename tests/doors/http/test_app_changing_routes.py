"""Routes that change something are open to allowed origins alone, with few exceptions."""

import asyncio
import re

from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.doors.http.asgi import application, ask

READING = {
    "/v2/repository/index", "/v2/repository/{repository}/index", "/v1/models/{name}:predict",
}  # fmt: skip
SAFE = {"GET", "HEAD", "OPTIONS"}


def unsafe(app: FastAPI) -> list[tuple[str, str]]:
    """Methods and paths of the routes that may change something."""
    found: list[tuple[str, str]] = []
    for route in app.routes:
        methods: set[str] = getattr(route, "methods", None) or {"ANY"}
        path: str = getattr(route, "path", "?")
        found += [(method, path) for method in sorted(methods - SAFE)]
    return found


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
