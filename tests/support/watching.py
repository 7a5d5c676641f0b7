"""Observation of a server from outside: metrics, statistics and process.

Tests wait for these values to know the server's state.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import orjson
import psutil

from tests.support.raw_clients import get
from tests.support.scrape import pause
from tests.support.server_process import ServerProcess

_SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


async def metrics(server: ServerProcess) -> dict[str, float]:
    """Every sample of a scrape, by its name with labels as printed."""
    text = (await get(server.metrics, "/metrics")).body.decode()
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


async def admitted(server: ServerProcess) -> tuple[float, float]:
    """Requests and bytes in flight, as the server counts them."""
    samples = await metrics(server)
    return samples["headrace_admitted_requests"], samples["headrace_admitted_bytes"]


async def incoming(server: ServerProcess) -> float:
    """Requests being received."""
    return (await metrics(server))["headrace_incoming_requests"]


async def failures(server: ServerProcess, model: str, reason: str) -> float:
    """Accepted requests of a model that failed for this reason."""
    name = f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}}'
    return (await metrics(server))[name]


async def pending(server: ServerProcess, model: str) -> float:
    """Accepted requests of a model that no instance has started."""
    name = f'nv_inference_pending_request_count{{model="{model}",version="1"}}'
    return (await metrics(server))[name]


async def statistics(server: ServerProcess, model: str) -> dict[str, Any]:
    """The statistics document of a model's only version."""
    answer = await get(server.http, f"/v2/models/{model}/stats")
    assert answer.status == 200, answer
    document: dict[str, Any] = orjson.loads(answer.body)["model_stats"][0]
    return document


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the server's process at one moment."""

    files: int
    threads: int
    resident: int  # bytes

    @classmethod
    def of(cls, pid: int) -> "Resources":
        """Current resources of process `pid`."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)


async def until(
    probe: Callable[[], Awaitable[Any]], expected: Callable[[Any], bool], within: float = 60
) -> Any:
    """Repeat a query until the answer is as expected; the answer."""
    begun = monotonic()
    while not expected(answer := await probe()):
        waited = monotonic() - begun
        if waited > within:
            raise AssertionError(f"after {within} s it is still {answer!r}")
        await asyncio.sleep(pause(waited))
    return answer
