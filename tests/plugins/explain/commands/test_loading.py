"""The load of trials: when requests of an open loop are sent, and what they wait."""

import asyncio
from threading import Event

import pytest

from headrace.client import StatusError
from headrace.client.asynchronous import AsyncModels
from headrace.client.transport import InferRequest, Result
from headrace.core.call import InferResponse, Timing
from headrace.plugins.explain.commands.loading import measure

MS = 1_000_000
REQUEST = InferRequest("m", [], [])
ARRIVALS = (0, 210 * MS, 220 * MS, 230 * MS)  # the first comes before any counts


class HeldModels(AsyncModels):
    """A server that answers nothing until it has so many requests; then `error` to all, if any."""

    def __init__(self, requests: int, error: StatusError | None = None) -> None:
        super().__init__(0)
        self._left, self._error, self._full = requests, error, asyncio.Event()

    async def send(self, request: InferRequest, *_: object, **__: object) -> Result:
        self._left -= 1
        if not self._left:
            self._full.set()
        await self._full.wait()
        if self._error is not None:
            raise self._error
        return Result(InferResponse("m", "1", "", [], Timing(0, 0, 1)))


async def test_latencies_of_an_open_loop_begin_when_requests_are_due() -> None:
    level = await measure(HeldModels(4), REQUEST, 0, 1, Event(), ARRIVALS)
    assert (level.clients, level.requests) == (0, 3)
    assert level.per_second > 0
    assert level.p99_ns >= ARRIVALS[3] - ARRIVALS[1]  # all were under way until the last one came
    assert level.p50_ns >= ARRIVALS[3] - ARRIVALS[2]


async def test_a_refused_request_has_waited_for_the_longest_time() -> None:
    level = await measure(HeldModels(1, StatusError(503, "full")), REQUEST, 0, 1, Event(), ARRIVALS)
    assert (level.requests, level.per_second, level.p50_ns) == (3, 0, 5_000 * MS)


@pytest.mark.parametrize(("clients", "status"), [(0, 400), (1, 503)])
async def test_other_errors_end_a_load(clients: int, status: int) -> None:
    held = HeldModels(1, StatusError(status, "no"))
    with pytest.raises(StatusError, match="no"):
        await measure(held, REQUEST, clients, 1, Event(), () if clients else ARRIVALS)


async def test_no_request_is_sent_once_it_is_stopped() -> None:
    stopped = Event()
    stopped.set()
    assert (await measure(HeldModels(1), REQUEST, 0, 1, stopped, ARRIVALS)).requests == 0
