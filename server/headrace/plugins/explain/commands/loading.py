"""The load of a trial: clients that each wait for an answer before they send again."""

import asyncio
from collections.abc import Iterator
from threading import Event
from time import perf_counter_ns, process_time

from headrace.cli.paced import paced
from headrace.client.asynchronous import AsyncModels
from headrace.client.transport import InferRequest
from headrace.plugins.explain.replay import percentile
from headrace.plugins.explain.searching import ClientLevel

_WARM = 0.2  # of the time, before latencies count
_LEAST = 200  # requests that count, unless that takes
_LONGEST = 5  # times as long


async def measure(
    client: AsyncModels, request: InferRequest, clients: int, seconds: float, stopped: Event
) -> ClientLevel:
    """Send a request again and again, by so many clients; raises `ClientError` for a failed one.

    Answers of the first fifth of `seconds` do not count. Of slow models, it lasts longer.
    Once it is `stopped`, no more are sent.
    """
    loop, latencies = asyncio.get_running_loop(), list[int]()
    began, used = loop.time(), process_time()
    counted = ended = began + _WARM * seconds
    until, latest = began + seconds, began + _LONGEST * seconds

    def requests() -> Iterator[tuple[float, InferRequest]]:
        while (now := loop.time()) < until or (len(latencies) < _LEAST and now < latest):
            if stopped.is_set():
                return
            yield 0.0, request

    async def send(request: InferRequest) -> None:
        nonlocal ended
        sent = perf_counter_ns()
        await client.send(request)
        taken, now = perf_counter_ns() - sent, loop.time()
        if now >= counted:
            latencies.append(taken)
            ended = now

    await paced(requests(), send, clients)
    elapsed = max(ended - counted, 1e-9)
    return ClientLevel(
        clients, len(latencies), len(latencies) / elapsed,
        sum(latencies) // max(len(latencies), 1), percentile(latencies, 0.5),
        percentile(latencies, 0.99), (process_time() - used) / max(loop.time() - began, 1e-9),
    )  # fmt: skip
