"""The application behind the routes."""

import asyncio
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import pytest

from headrace.api.operations import OPERATIONS, Category, Operation
from headrace.doors.http.app import create_app
from headrace.doors.http.asgi import GONE
from headrace.doors.http.infer import CountedApp
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.doors.http.asgi import application, ask
from tests.engine.worlds import LOAD_OPTIONS


def test_a_client_that_disconnects_in_its_request_gets_no_answer() -> None:
    """The request is not counted either."""
    engine = Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))
    answers = engine.admission.answers
    app = CountedApp(create_app(engine, 1 << 20), answers, False)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v2/logging"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert sent == []
    counts = answers.of("http", Category.LOGGING)
    assert (counts[GONE], sum(counts)) == (1, 1)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/openapi.json", "/v2/health/live"])
def test_head_requests_of_tools(path: str, method: str) -> None:
    assert asyncio.run(ask(application(), method, path)) == 200


class Table(tuple[Operation, ...]):
    """The table of operations, recording the threads of its readers."""

    readers: list[int]

    def __iter__(self) -> Iterator[Operation]:
        self.readers.append(get_ident())
        return super().__iter__()


def test_the_openapi_document_is_built_off_the_event_loop() -> None:
    """The document may describe thousands of models."""
    engine = Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))
    table = Table(OPERATIONS)
    table.readers = []
    app = create_app(engine, 1 << 20, operations=table)
    table.readers.clear()
    assert asyncio.run(ask(app, "GET", "/openapi.json")) == 200
    assert table.readers
    assert get_ident() not in table.readers
