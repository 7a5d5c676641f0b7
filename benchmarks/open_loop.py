"""Open-loop load: requests are sent at a constant rate, whether answers come or not.

A latency begins when a request was *meant* to be sent. One that has to wait, because all
connections are taken by slow answers, waits on the clock: nothing is left out of the percentiles
because the server was too slow to be asked (no coordinated omission). A request that is never
answered counts with the time that it has waited, and as an error.

The generator's loop spins instead of sleeping, since timers are a millisecond coarse.
"""

import asyncio
import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from benchmarks.load import CONNECT_SECS
from benchmarks.messages import Exchange
from benchmarks.wire import Answer, ProtocolError, Wire

_CHECK_EVERY = 64  # answers whose contents are compared


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests at `rate` per second, the first at 0; those of the first `warm_up` seconds do not
    count, those of the following `seconds` do.
    """

    rate: float
    warm_up: float
    seconds: float

    @property
    def total(self) -> int:
        """The number of requests."""
        return round(self.rate * (self.warm_up + self.seconds))

    def intended(self, index: int) -> float:
        """The send time of request `index`."""
        return index / self.rate

    def due(self, elapsed: float) -> int:
        """The number of requests due by `elapsed`."""
        return min(int(elapsed * self.rate) + 1, self.total) if elapsed >= 0 else 0

    def counts(self, index: int) -> bool:
        """True if request `index` belongs to the measured time."""
        return self.intended(index) >= self.warm_up


@dataclass(frozen=True, slots=True)
class Arrived:
    """Latencies of the measured requests, ascending; how late each was sent though a connection
    was free; all right answers, and those within the measured time by its length; errors by text.
    """

    latencies: list[float]
    late: list[float]
    answers: int
    answers_per_second: float
    errors: Counter[str]


class _Run:
    """State that the connections share: schedule, free connections, answers."""

    def __init__(self, schedule: Schedule, exchanges: Sequence[Exchange]) -> None:
        self.schedule = schedule
        self._exchanges = itertools.cycle(exchanges)
        self.free: deque[_Connection] = deque()
        self.begun = 0.0
        self.sent = 0
        self.under_way: dict[int, float] = {}
        self.latencies: list[float] = []
        self.late: list[float] = []
        self.answers = self.in_time = 0
        self.errors: Counter[str] = Counter()
        self._checks = 0
        self.lost = 0
        self.closing = False
        self._waited = False  # whether the last look left requests waiting for a connection

    def dispatch(self) -> None:
        """Send what is due, as far as connections are free."""
        free, schedule = self.free, self.schedule
        due = schedule.due(perf_counter() - self.begun)
        waited = self._waited
        while self.sent < due and free:
            index = self.sent
            self.sent += 1
            intended = self.begun + schedule.intended(index)
            self.under_way[index] = intended
            free.popleft().begin(index, next(self._exchanges))
            if not waited and schedule.counts(index):
                self.late.append(perf_counter() - intended)
        self._waited = self.sent < due

    def take(self, index: int, exchange: Exchange, answer: Answer, now: float) -> None:
        """Count an answer."""
        intended = self.under_way.pop(index)
        fault = answer.error
        if not fault and not exchange.smallest <= len(answer.body) <= exchange.largest:
            fault = f"an answer of {len(answer.body)} bytes"
        self._checks += 1
        if not fault and self._checks % _CHECK_EVERY == 1:
            fault = exchange.fault(answer)
        if fault:
            self.errors[fault] += 1
            return
        self.answers += 1
        if self.schedule.counts(index):
            self.latencies.append(now - intended)
        begin = self.begun + self.schedule.warm_up
        if begin <= now < begin + self.schedule.seconds:
            self.in_time += 1


class _Connection(asyncio.Protocol):
    """One connection; it is in the free list as often as it takes further calls."""

    def __init__(self, run: _Run, wire: Wire) -> None:
        self._run = run
        self._wire = wire
        self._sent: dict[int, tuple[int, Exchange]] = {}
        self._transport: asyncio.Transport | None = None
        self._reason = "the server closed a connection"
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop registers no subclass
        self._transport.write(self._wire.start())
        if self._wire.ready:
            self.ready.set_result(None)

    def begin(self, index: int, exchange: Exchange) -> None:
        """Send a request."""
        assert self._transport is not None
        token, data = self._wire.send(exchange.message)
        self._sent[token] = (index, exchange)
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        run = self._run
        assert self._transport is not None
        try:
            answers, reply = self._wire.receive(data)
        except ProtocolError as error:
            self._reason = str(error)
            self._transport.abort()
            return
        if reply:
            self._transport.write(reply)
        if self._wire.ready and not self.ready.done():
            self.ready.set_result(None)
        if answers:
            now = perf_counter()
            for answer in answers:
                run.take(*self._sent.pop(answer.token), answer, now)
                run.free.append(self)
            run.dispatch()

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"{self._reason}: {error}" if error else self._reason
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
        run = self._run
        if run.closing:
            return
        run.errors[reason] += 1  # its requests stay unanswered, and count as that
        run.lost += 1
        while self in run.free:
            run.free.remove(self)

    def close(self) -> None:
        """Hang up; what comes of that is no error."""
        self._run.closing = True
        if self._transport is not None:
            self._transport.abort()


async def arrive(
    address: tuple[str, int],
    wire: Callable[[int], Wire],
    exchanges: Sequence[Exchange],
    schedule: Schedule,
    connections: int,
    patience: float,
    streams: int = 1,
) -> Arrived:
    """Put the load on a server; answers are awaited for `patience` seconds after the last request.

    Raises `OSError` or `TimeoutError` if the server cannot be reached.
    """
    run = _Run(schedule, exchanges)
    opened: list[_Connection] = []
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()
    try:
        async with asyncio.timeout(CONNECT_SECS):
            for _ in range(connections):
                _, connection = await loop.create_connection(
                    lambda: _Connection(run, wire(streams)), *address
                )
                opened.append(connection)
                await connection.ready
        for _ in range(streams):
            run.free.extend(opened)
        run.begun = perf_counter()
        end = run.begun + schedule.warm_up + schedule.seconds + patience
        while run.sent < schedule.total or run.under_way:
            run.dispatch()
            if perf_counter() > end or run.lost == len(opened):
                break
            await asyncio.sleep(0)
        now = perf_counter()
    finally:
        for connection in opened:
            connection.close()
        gc.enable()
    return _arrived(run, now)


def _arrived(run: _Run, now: float) -> Arrived:
    schedule = run.schedule
    waiting = [i for i in run.under_way if schedule.counts(i)]
    waiting += [i for i in range(run.sent, schedule.total) if schedule.counts(i)]
    if waiting:
        run.errors["not answered in time"] += len(waiting)
    waited = [now - run.begun - schedule.intended(index) for index in waiting]
    return Arrived(
        sorted([*run.latencies, *waited]),
        sorted(run.late),
        run.answers,
        run.in_time / schedule.seconds,
        run.errors,
    )
