"""The main program of a front end: its doors share their ports with other front ends.

Start: the first frame is the configuration; the doors open. End, when the engine asks for it:
announce the shutdown to clients, admit nothing new, finish admitted requests, close the doors, exit
0. When the time is up, the rest is answered with the server's shutdown error. Without the engine
nothing can be answered, so the process exits at once. Signals go to the engine's process, which
then requests the end.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import uvloop

from headrace.api.operations import handed_on
from headrace.doors.clients import ClientDoors
from headrace.doors.grpc.services import all_handlers
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.server import bind
from headrace.engine.admission import Admission
from headrace.observability.logs import Logs
from headrace.plugins.frontends.channel import allow_many_files
from headrace.plugins.frontends.config import FrontendConfig
from headrace.plugins.frontends.engine_session import (
    EngineSession,
    RemoteEngine,
    forwarding_app,
    forwarding_handler,
)
from headrace.plugins.frontends.link_infer import Flag
from headrace.workers.allocation import keep_memory

log = logging.getLogger(__name__)

_COLLECT_AFTER = 20_000  # allocations between garbage collections, as in the engine
_COUNT_SECS = 1.0  # between reports of answers and of lost log lines
_UNFINISHED_SECS = 2  # for the rest of incomplete requests


async def _open(
    doors: ClientDoors, config: FrontendConfig, link: EngineSession, admission: Admission
) -> None:
    """Open the doors; raises `OSError`."""
    limit = config.max_request_bytes
    if (http := config.http) is not None:
        entrance = RemoteEngine(link, admission, Flag.HTTP)
        generate = RemoteEngine(link, admission, Flag.GENERATE)
        app = forwarding_app(link, inference_routes(entrance, limit, http.rules, generate))
        doors.open_http(http, bind(http.address, http.port, shared=True), app, entrance)
    if (grpc := config.grpc) is not None:
        unary = {path: forwarding_handler(link, path) for path in handed_on()}
        entrance = RemoteEngine(link, admission, Flag.UNARY)
        streams = RemoteEngine(link, admission, 0)
        handlers = all_handlers(entrance, streams, unary, link.readiness, limit, grpc.rules)
        native = grpc.transport == "native"
        listener = bind(grpc.address, grpc.port, shared=True) if native else None
        await doors.open_grpc(grpc, listener, handlers, shared=True)


def main(descriptor: int) -> int:
    """Serve over the link whose end is open as `descriptor`; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    allow_many_files()
    return uvloop.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    setup: asyncio.Future[dict[str, Any]] = loop.create_future()
    drain: asyncio.Future[float] = loop.create_future()
    link = EngineSession(sock, setup.set_result, drain.set_result, _without_engine)
    config = FrontendConfig.of(await setup)
    logs = Logs(link.logs or config.logs)
    link.on_logs = logs.apply
    limits = config.max_admitted_requests, config.max_admitted_bytes
    admission = Admission(*limits, config.shares)
    link.watch(admission)
    doors = ClientDoors(admission, config.max_request_bytes, config.access_log)
    try:
        await _open(doors, config, link, admission)
    except OSError as error:
        log.error("a front end cannot start: %s", error)
        return 1
    # Objects built at start-up stay for good: the garbage collector need not visit them again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
    keep_memory(server=True)
    link.ready()
    told = 0

    def report() -> None:
        nonlocal told
        if logs.dropped > told:
            link.unlogged(logs.dropped - told)
            told = logs.dropped
        link.answered(admission.answers.take())
        link.report_soon()  # includes connections, whose changes are not reported at once

    while not (await asyncio.wait([drain], timeout=_COUNT_SECS))[0]:
        report()
    return await _shut_down(doors, admission, drain.result(), report)


async def _shut_down(
    doors: ClientDoors, admission: Admission, seconds: float, report: Callable[[], None]
) -> int:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    await doors.announce(seconds)
    admission.close()
    unfinished = loop.call_later(_UNFINISHED_SECS, doors.end_unfinished)
    drained = asyncio.Event()
    admission.when_empty(drained.set)
    status = 0
    try:
        async with asyncio.timeout_at(deadline):
            while not drained.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), _COUNT_SECS)
                report()
    except TimeoutError:
        status = 1
    unfinished.cancel()
    await doors.close(max(deadline - loop.time(), 0.1))
    report()
    return status


def _without_engine(reason: str) -> NoReturn:
    # Silently: the engine has logged the reason, or was killed.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)
