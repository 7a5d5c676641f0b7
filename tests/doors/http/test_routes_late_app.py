"""The application built at its first request, and the routes answered meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.doors.http.routes import LateApp


class Greeting:
    """A bare route for one path."""

    def claims(self, method: str, path: str) -> bool:
        return (method, path) == ("GET", "/hello")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, b"hello")


async def answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the path."""
    await answer(send, 201, scope["path"].encode())


async def ask(app: LateApp, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of the answer to a request."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise NotImplementedError

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path}, receive, send)
    head, *body = sent
    return head["status"], b"".join(piece["body"] for piece in body)


class Building:
    """Builds `echo` on the calling thread, once `go` is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self) -> ASGIApp:
        self.threads.append(threading.current_thread())
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(30)
        return echo


@pytest.fixture
async def building() -> AsyncIterator[Building]:
    building = Building(asyncio.get_running_loop())
    yield building
    building.go.set()


@pytest.fixture
def app(building: Building) -> LateApp:
    """An unbuilt application."""
    return LateApp([Greeting()], building)


async def test_bare_routes_need_no_application(app: LateApp, building: Building) -> None:
    assert await ask(app, "/hello") == (200, b"hello")
    assert building.threads == []


async def test_first_requests_wait_for_one_build_and_the_rest_is_answered(
    app: LateApp, building: Building
) -> None:
    first = asyncio.create_task(ask(app, "/a"))
    await building.begun.wait()
    second = asyncio.create_task(ask(app, "/hello", "POST"))
    assert await ask(app, "/hello") == (200, b"hello")
    assert not first.done()
    building.go.set()
    assert await first == (201, b"/a")
    assert await second == (201, b"/hello")
    assert await ask(app, "/c") == (201, b"/c")
    [thread] = building.threads
    assert thread is not threading.main_thread()
    assert thread.daemon  # so that a server may end meanwhile


async def test_a_cancelled_request_does_not_cancel_the_build(
    app: LateApp, building: Building
) -> None:
    first = asyncio.create_task(ask(app, "/a"))
    await building.begun.wait()
    second = asyncio.create_task(ask(app, "/b"))
    first.cancel()
    await asyncio.wait([first])
    building.go.set()
    assert await second == (201, b"/b")
    assert len(building.threads) == 1


async def test_requests_that_waited_for_the_build_go_on_in_turns(
    app: LateApp, building: Building
) -> None:
    waiting = [asyncio.create_task(ask(app, f"/{number}")) for number in range(200)]
    await building.begun.wait()
    building.go.set()
    done = 0
    while done < len(waiting):
        await asyncio.sleep(0)
        now = sum(task.done() for task in waiting)
        assert now - done < 20
        done = now
    assert {task.result()[0] for task in waiting} == {201}


async def test_a_build_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    builds = 0

    def build() -> ASGIApp:
        nonlocal builds
        builds += 1
        if builds == 1:
            raise ImportError("no such library")
        return echo

    app = LateApp([], build)
    internal = (500, b'{"error":"internal error"}')
    assert list(await asyncio.gather(ask(app, "/a"), ask(app, "/b"))) == [internal] * 2
    [record] = caplog.records
    assert record.exc_info is not None
    assert "no such library" in caplog.text
    assert await ask(app, "/a") == (201, b"/a")
    assert builds == 2
