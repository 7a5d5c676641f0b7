"""The HTTP application without a server."""

from typing import Any

from fastapi import FastAPI

from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.doors.http.app import create_app
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.engine.worlds import LOAD_OPTIONS


def application(*origins: str) -> FastAPI:
    engine = Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))
    return create_app(engine, 1 << 20, Gate(HeaderRules(origins=origins)))


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
