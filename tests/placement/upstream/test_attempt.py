"""Attempts at upstreams, including requests that cannot be encoded for one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.connections.endpoint import Endpoint
from headrace.core.errors import Unavailable
from headrace.placement.upstream.attempt import Attempt, Policy
from headrace.placement.upstream.connection import (
    CallFailed,
    Receiver,
    RemoteDescription,
    RemoteRequest,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.upstream import Upstream
from headrace.protocol.status import Failure, Fate
from headrace.protocol.v2_protobuf import RemoteAnswer

REQUEST = RemoteRequest([], [], {})
REFUSED = CallFailed(Failure(Fate.REFUSED, Unavailable("full")), "full")


class Connection:
    """Accepts nothing if `broken`, and refuses everything later on request."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken
        self.refuse: Callable[[], None] = lambda: None
        self.checked = asyncio.Event()
        self.checks = 0

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> "Connection":
        if self._broken:
            raise ValueError("cannot be written")
        self.refuse = lambda: receiver.failed(REFUSED)
        return self

    def stream(self, request: RemoteRequest, seconds: float, receiver: object) -> "Connection":
        raise AssertionError("no model here is decoupled")

    def cancel(self) -> None: ...

    def hold(self, held: bool) -> None: ...

    async def describe(self, seconds: float) -> RemoteDescription:
        raise AssertionError("nothing is loaded here")

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        raise AssertionError("nothing is awaited here")

    async def load(self, config: str, seconds: float) -> None:
        raise AssertionError("nothing is loaded here")

    async def unload(self, seconds: float) -> None:
        raise AssertionError("nothing is loaded here")

    async def ready(self, seconds: float) -> bool:
        self.checks += 1
        if self.checks > 1:
            self.checked.set()
            await asyncio.sleep(3600)
        if self._broken:
            raise ValueError("cannot be asked")
        return True

    async def close(self) -> None: ...


class Bench:
    """Upstreams and waiting requests."""

    def __init__(self, root: Path, broken: list[bool]) -> None:
        loop = asyncio.get_running_loop()
        options = RemoteOptions.of(
            {"endpoints": "grpc://127.0.0.1", "health_interval_secs": "0.01"}, "m", 0, root
        )
        self.connections = [Connection(each) for each in broken]
        self.upstreams = [
            Upstream(
                Endpoint(f"s{n}", "grpc", "127.0.0.1", n, "s"), connection, options, "m", loop,
                lambda: None, True,
            )
            for n, connection in enumerate(self.connections)
        ]  # fmt: skip
        self.ends: list[Exception] = []

    def next(self, tried: Set[Upstream]) -> Upstream | None:
        return next((one for one in self.upstreams if one not in tried), None)

    def attempt(self) -> Attempt:
        """An attempt at them."""
        return Attempt(Policy("m", self.next, asyncio.get_running_loop()), REQUEST, self)

    def answered(self, answer: RemoteAnswer | None) -> None:
        raise AssertionError("there is no answer")

    received = answered

    def failed(self, error: Exception) -> None:
        self.ends.append(error)

    @property
    def outstanding(self) -> list[int]:
        return [upstream.condition.outstanding for upstream in self.upstreams]


@asynccontextmanager
async def serving(root: Path, *broken: bool) -> AsyncIterator[Bench]:
    bench = Bench(root, list(broken))
    yield bench
    for upstream in bench.upstreams:
        await upstream.close()


async def test_a_request_that_cannot_be_encoded_leaves_nothing_in_flight(tmp_path: Path) -> None:
    async with serving(tmp_path, True) as bench:
        with pytest.raises(ValueError, match="written"):
            bench.attempt().begin()
        assert bench.outstanding == [0]


async def test_a_request_that_cannot_be_encoded_for_the_next_upstream_fails(tmp_path: Path) -> None:
    async with serving(tmp_path, False, True) as bench:
        assert bench.attempt().begin()
        bench.connections[0].refuse()
        [error] = bench.ends
        assert type(error) is ValueError
        assert bench.outstanding == [0, 0]


async def test_an_exception_in_a_health_check_does_not_end_the_checks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, True) as bench:
        await asyncio.wait_for(bench.connections[0].checked.wait(), 60)
        assert not bench.upstreams[0].condition.reachable
    assert "bug while checking server s0" in caplog.text
