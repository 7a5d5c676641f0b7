"""Probes are answered in front of the framework, with the same bytes as the framework's routes."""

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp

from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.doors.http.app import create_app
from headrace.doors.http.routes import HealthRoute
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.engine.worlds import LOAD_OPTIONS

RULES = Gate(HeaderRules(restricted=["health:x-key=right"]))
KEY = (b"x-key", b"right")


def engine() -> Engine:
    return Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))


def asked(app: ASGIApp, path: str, *headers: tuple[bytes, bytes]) -> list[Any]:
    """Send a request without a body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": list(headers), "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent


def plain(sent: list[Any]) -> list[Any]:
    """Messages sent, with sorted headers."""
    return [sent[0] | {"headers": sorted(sent[0]["headers"])}, *sent[1:]]


@pytest.mark.parametrize(("path", "status"), [
    ("/v2/health/live", 200), ("/v2/health/ready", 503), ("/v2/models/nope/ready", 503),
    ("/v2/models/größe/ready", 503), ("/v2/models/nope/versions/1/ready", 503),
    ("/v2/models/nope/versions/99999999999999999999/ready", 400),
])  # fmt: skip
def test_the_same_answer_as_the_framework(path: str, status: int) -> None:
    for rules in (Gate(), RULES):
        served = engine()
        route = HealthRoute(served, rules)
        app = create_app(served, 1 << 20, rules)
        assert route.claims("GET", path)
        assert route.claims("HEAD", path)
        for headers in ((), (KEY,)):
            sent = asked(route.handle, path, *headers)
            assert sent[0]["status"] == (403 if rules is RULES and not headers else status)
            assert plain(sent) == plain(asked(app, path, *headers))


@pytest.mark.parametrize(("method", "path"), [
    ("POST", "/v2/health/live"), ("GET", "/v2/health"), ("GET", "/v2/health/ready/"),
    ("GET", "/v2/models//ready"), ("GET", "/v2/models/a/b/ready"),
    ("GET", "/v2/models/a/versions/x/ready"), ("GET", "/v2/models/a/versions/²/ready"),
    ("GET", "/v2/models/a/infer"),
])  # fmt: skip
def test_the_rest_is_the_frameworks(method: str, path: str) -> None:
    assert not HealthRoute(engine(), Gate()).claims(method, path)
