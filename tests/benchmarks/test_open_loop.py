"""Constant arrival rates: due times, and requests without an answer."""

import asyncio

import pytest

from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP
from benchmarks.open_loop import Arrived, Schedule, arrive

PROTOCOL = PROTOCOLS["http-json"]
ANSWER = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno"


@pytest.mark.parametrize(
    ("elapsed", "due"), [(-0.1, 0), (0.0, 1), (0.009, 1), (0.011, 2), (0.095, 10), (9.0, 30)]
)
def test_due_times(elapsed: float, due: int) -> None:
    assert Schedule(rate=100, warm_up=0.1, seconds=0.2).due(elapsed) == due


def test_requests_are_due_at_their_times_and_count_after_the_warm_up() -> None:
    schedule = Schedule(rate=8, warm_up=1, seconds=2)  # exact in binary
    assert schedule.total == 24
    for index in range(schedule.total):
        assert schedule.due(schedule.intended(index)) == index + 1
        assert schedule.counts(index) is (index >= 8)


class Server(asyncio.Protocol):
    """Answers every request with `answer`, or never."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(self._answer)


def put(answer: bytes, schedule: Schedule, patience: float) -> Arrived:
    """The load on a server with this answer, awaited for `patience` seconds."""

    async def run() -> Arrived:
        server = await asyncio.get_running_loop().create_server(
            lambda: Server(answer), "127.0.0.1", 0
        )
        async with server:
            host, port = server.sockets[0].getsockname()
            exchanges = PROTOCOL.exchanges(host, ALL_MODELS[MLP])
            wire = PROTOCOL.wire
            return await arrive(
                (host, port), lambda calls: wire(host, calls), exchanges, schedule, 2, patience
            )

    return asyncio.run(run())


def test_unanswered_requests_count_with_their_waiting_time() -> None:
    found = put(b"", Schedule(rate=1000, warm_up=0.01, seconds=0.05), 0.02)
    assert found.errors == {"not answered in time": 50}
    assert len(found.latencies) == 50
    assert found.answers == 0
    assert found.latencies[0] >= 0.02  # the last one was still awaited
    assert found.latencies[-1] >= 0.069  # the first counted one


def test_wrong_answers_are_errors() -> None:
    found = put(ANSWER, Schedule(rate=1000, warm_up=0.01, seconds=0.02), 60)
    assert found.errors == {"HTTP 500: no": 30}
    assert found.latencies == []
