"""Probes by GET and HEAD, and other requests of their paths."""

import asyncio
from typing import Any

import pytest

from headrace.api.header_rules import HeaderRules
from headrace.doors.http.app import create_app
from headrace.doors.http.protocol import ASGIApp
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.engine.worlds import LOAD_OPTIONS

RULES = HeaderRules(restricted=["health:x-key=right"])
KEY = (b"x-key", b"right")


def engine() -> Engine:
    return Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))


def asked(app: ASGIApp, path: str, *headers: tuple[bytes, bytes], method: str = "GET") -> list[Any]:
    """Bytes of a request without a body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": list(headers), "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize(("path", "status"), [
    ("/v2/health/live", 200), ("/v2/health/ready", 503), ("/v2/models/nope/ready", 503),
    ("/v2/models/größe/ready", 503), ("/v2/models/nope/versions/1/ready", 503),
    ("/v2/models/nope/versions/99999999999999999999/ready", 400),
])  # fmt: skip
def test_probes(path: str, status: int) -> None:
    for rules in (HeaderRules(), RULES):
        app = create_app(engine(), 1 << 20, rules)
        for headers in ((), (KEY,)):
            sent = asked(app, path, *headers)
            assert sent[0]["status"] == (403 if rules is RULES and not headers else status)
            assert (b"content-type", b"application/json") in sent[0]["headers"]
            assert asked(app, path, *headers, method="HEAD") == sent


@pytest.mark.parametrize(("method", "path", "status"), [
    ("POST", "/v2/health/live", 405), ("GET", "/v2/health", 404),
    ("GET", "/v2/health/ready/", 404), ("GET", "/v2/models//ready", 404),
    ("GET", "/v2/models/a/b/ready", 404), ("GET", "/v2/models/a/versions/x/ready", 404),
    ("GET", "/v2/models/a/versions/²/ready", 404), ("GET", "/v2/models/a/infer", 404),
])  # fmt: skip
def test_requests_that_are_not_probes(method: str, path: str, status: int) -> None:
    assert asked(create_app(engine(), 1 << 20), path, method=method)[0]["status"] == status
