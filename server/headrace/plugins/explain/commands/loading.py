"""The load of a trial: a closed loop of clients, or an open loop of requests that arrive.

A client waits for an answer before it sends again; requests arrive by a Poisson process, whether or
not others have been answered.
"""

import asyncio
from collections.abc import Iterator, Sequence
from threading import Event
from time import perf_counter_ns, process_time

from headrace.cli.paced import paced
from headrace.client import StatusError
from headrace.client.asynchronous import AsyncModels
from headrace.client.transport import InferRequest
from headrace.plugins.explain.replay import percentile
from headrace.plugins.explain.searching import LEAST, LONGEST, ClientLevel

_WARM = 0.2  # of the time, before latencies count
_UNDER_WAY = 512  # requests at once of an open loop: others wait here, and that counts
_REFUSED = frozenset({429, 503})  # statuses of a server with more requests than it can take


async def measure(
    client: AsyncModels,
    request: InferRequest,
    clients: int,
    seconds: float,
    stopped: Event,
    arrivals: Sequence[int] = (),
) -> ClientLevel:
    """Send a request again and again; raises `ClientError` for a failed one.

    A closed loop has so many `clients`; of slow models, it lasts longer than `seconds`. Answers of
    the first fifth do not count. In an open loop, with 0 clients, requests are due at the moments
    `arrivals`, in nanoseconds from now, and their latencies begin there, however late they are
    sent. Those that are refused, or could not be sent five times `seconds` after the last one was
    due, count as waiting that long. Once it is `stopped`, no more are sent.
    """
    loop, latencies = asyncio.get_running_loop(), list[int]()
    began, began_ns, used = loop.time(), perf_counter_ns(), process_time()
    counted = ended = began + _WARM * seconds
    until, latest = began + seconds, began + LONGEST * seconds + sum(arrivals[-1:]) / 1e9
    missed = 0

    def closed() -> Iterator[int]:
        while (now := loop.time()) < until or (len(latencies) < LEAST and now < latest):
            yield 0

    def requests() -> Iterator[tuple[float, int]]:
        for due in closed() if clients else arrivals:
            if stopped.is_set():
                return
            yield due / 1e9, due

    async def send(due: int) -> None:
        nonlocal ended, missed
        sent = perf_counter_ns() if clients else began_ns + due
        answered = bool(clients) or loop.time() < latest
        if answered:
            try:
                await client.send(request)
            except StatusError as error:
                if clients or error.status not in _REFUSED:
                    raise
                answered = False
        taken, now = perf_counter_ns() - sent, loop.time()
        if (now if clients else began + due / 1e9) >= counted:
            latencies.append(taken if answered else max(taken, round(LONGEST * seconds * 1e9)))
            missed += not answered
            ended = now

    await paced(requests(), send, clients or _UNDER_WAY)
    # An open loop's answers come a latency after its requests: that is no lower rate.
    later = 0 if clients else min(latencies, default=0) / 1e9
    elapsed = max(ended - counted - later, 1e-9)
    return ClientLevel(
        clients, len(latencies), (len(latencies) - missed) / elapsed,
        sum(latencies) // max(len(latencies), 1), percentile(latencies, 0.5),
        percentile(latencies, 0.99), (process_time() - used) / max(loop.time() - began, 1e-9),
    )  # fmt: skip
