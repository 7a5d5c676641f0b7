"""Closed-loop load: so many requests are always under way, each answer lets the next request go.

One event loop and plain protocols; a lane is one connection. Nothing waits for ever: connecting,
measuring and the wait for the last answers are bounded, and what does not come counts as an error.
"""

import asyncio
import gc
import itertools
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from benchmarks.messages import Exchange
from benchmarks.wire import Answer, ProtocolError, Wire

CONNECT_SECS = 10.0
DRAIN_SECS = 10.0
_CHECK_EVERY = 64  # answers whose contents are compared, beside the first of each lane


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` requests at once, `streams` of them on a connection; times in seconds."""

    concurrency: int
    streams: int
    warm_up: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Result of a run: latencies of the measured time, ascending, and all errors by text.

    `before` and `after` are what the probe said at its two ends.
    """

    seconds: float
    latencies: list[float]
    errors: Counter[str]
    before: tuple[float, ...]
    after: tuple[float, ...]


class _Run:
    """State that the lanes of one run share."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = itertools.cycle(exchanges)
        self._checks = 0
        self.sending = True
        self.latencies: list[float] = []
        self.errors: Counter[str] = Counter()
        self.under_way = 0
        self.lanes_left = 0
        self.idle = asyncio.Event()  # set once nothing is under way and nothing more is sent

    def begin(self) -> Exchange:
        """The next request, counted as under way."""
        self.under_way += 1
        return next(self._exchanges)

    def take(self, latency: float, exchange: Exchange, answer: Answer, check: bool) -> None:
        """Count an answer."""
        self.under_way -= 1
        fault = answer.error
        if not fault:
            if not exchange.smallest <= len(answer.body) <= exchange.largest:
                fault = f"an answer of {len(answer.body)} bytes"
            elif check or self._checks >= _CHECK_EVERY:
                self._checks = 0
                fault = exchange.fault(answer)
        self._checks += 1
        if fault:
            self.errors[fault] += 1
        else:
            self.latencies.append(latency)
        self.look_idle()

    def lose(self, requests: int, reason: str) -> None:
        """Count a lane out, with the requests that were under way on it."""
        self.lanes_left -= 1
        self.under_way -= requests
        if requests or self.sending:
            self.errors[reason] += max(requests, 1)
        self.look_idle()

    def look_idle(self) -> None:
        """Note whether all is over."""
        if not self.under_way and (not self.sending or not self.lanes_left):
            self.idle.set()


class _Lane(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: _Run, wire: Wire) -> None:
        self._run = run
        self._wire = wire
        self._sent: dict[int, tuple[float, Exchange]] = {}
        self._reason = "the server closed a connection"
        self._checked = False
        self._transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop registers no subclass
        self._transport = transport
        self._run.lanes_left += 1
        transport.write(self._wire.start())
        if self._wire.ready:
            self.ready.set_result(None)

    def begin(self) -> None:
        """Send the first or one more request."""
        assert self._transport is not None
        self._transport.write(self._next())

    def _next(self) -> bytes:
        exchange = self._run.begin()
        begun = perf_counter()
        token, data = self._wire.send(exchange.message)
        self._sent[token] = (begun, exchange)
        return data

    def data_received(self, data: bytes) -> None:
        run, transport = self._run, self._transport
        assert transport is not None
        try:
            answers, reply = self._wire.receive(data)
        except ProtocolError as error:
            self._reason = str(error)
            transport.abort()
            return
        now = perf_counter()
        for answer in answers:
            begun, exchange = self._sent.pop(answer.token)
            run.take(now - begun, exchange, answer, not self._checked)
            self._checked = True
            if run.sending:
                reply += self._next()
        if reply:
            transport.write(reply)
        if self._wire.ready and not self.ready.done():
            self.ready.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"{self._reason}: {error}" if error else self._reason
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
        self._run.lose(len(self._sent), reason)
        self._sent.clear()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


async def drive(
    address: tuple[str, int],
    wire: Callable[[int], Wire],
    exchanges: Sequence[Exchange],
    load: Load,
    probe: Callable[[], tuple[float, ...]],
    tls: ssl.SSLContext | None = None,
) -> Observed:
    """Put the load on a server; raises `OSError` or `TimeoutError` if it cannot be reached."""
    run = _Run(exchanges)
    slots = [
        min(load.streams, load.concurrency - first)
        for first in range(0, load.concurrency, load.streams)
    ]
    lanes: list[_Lane] = []
    gc.collect()
    gc.disable()  # answers hold no cycles, and a collection would look like a slow one
    try:
        async with asyncio.timeout(CONNECT_SECS):
            lanes.extend([await _connect(address, run, wire(count), tls) for count in slots])
        for lane, count in zip(lanes, slots, strict=True):
            for _ in range(count):
                lane.begin()
        await _wait(run, load.warm_up)
        run.latencies = []
        before, begun = probe(), perf_counter()
        await _wait(run, load.seconds)
        seconds, after = perf_counter() - begun, probe()
        latencies, run.latencies = run.latencies, []
        run.sending = False
        run.look_idle()
        await _wait(run, DRAIN_SECS)
        if run.under_way:
            run.errors[f"no answer within {DRAIN_SECS:g} s"] += run.under_way
    finally:
        run.sending = False
        for lane in lanes:
            lane.close()
        gc.enable()
    return Observed(seconds, sorted(latencies), Counter(run.errors), before, after)


async def _connect(
    address: tuple[str, int], run: _Run, wire: Wire, tls: ssl.SSLContext | None
) -> _Lane:
    loop = asyncio.get_running_loop()
    host = None if tls is None else "localhost"
    _, lane = await loop.create_connection(
        lambda: _Lane(run, wire), *address, ssl=tls, server_hostname=host
    )
    await lane.ready
    return lane


async def _wait(run: _Run, seconds: float) -> None:
    """Until the time is over, or all lanes are."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await run.idle.wait()
