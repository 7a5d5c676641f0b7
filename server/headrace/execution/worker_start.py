"""Starting the model in a worker process, which may have other models loaded meanwhile.

Done on the event loop of a loading thread, by which what the model asks for is answered.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.execution.host import Host, NoHost
from headrace.execution.model_calls import ModelCalls
from headrace.execution.worker import WorkerProcess
from headrace.observability.statistics import EndKind
from headrace.workers.elements import Buffer
from headrace.workers.frames import BrokenFrame, Header, Kind

_START_SECS = 600.0
_NOT_NOW = "there is no server to ask while the model is started"


def start_worker(
    process: WorkerProcess, document: Mapping[str, Any], host: Host | None = None
) -> dict[str, Any]:
    """Start the model, and wait; what it says of how it runs.

    `host` is whom it may ask meanwhile, from the event loop of this thread; None for nobody.
    Raises `LoadFailed`, after which the process has ended, also if it takes too long.
    """
    try:
        return asyncio.run(_start(process, document, host or NoHost(_NOT_NOW)))
    except BaseException:
        process.kill()
        raise


async def _start(process: WorkerProcess, document: Mapping[str, Any], host: Host) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    started: asyncio.Future[dict[str, Any]] = loop.create_future()
    calls = ModelCalls(process, host)

    def take(header: Header, meta: bytes, data: Buffer) -> None:
        if header.kind is Kind.CALL:
            calls.begin(json.loads(meta), data, header.data, None)
        elif header.kind is Kind.METRIC:
            process.keep(header, meta)
        elif header.kind in (Kind.STARTED, Kind.FAILED) and not started.done():
            try:
                started.set_result(process.answer(header.kind, meta))
            except LoadFailed as error:
                started.set_exception(error)
        else:
            raise BrokenFrame(f"a frame of kind {header.kind.name}")

    def end(how: str) -> None:
        if not started.done():
            nonsense = process.end_kind is EndKind.NONSENSE
            text = f"the worker {'sent nonsense' if nonsense else how}"
            started.set_exception(LoadFailed(text))

    process.attach(loop, take, end)
    process.send(Kind.START, json.dumps(document).encode())
    limit = _START_SECS if process.patience is None else min(process.patience, _START_SECS)
    try:
        async with asyncio.timeout(limit):
            return await started
    except TimeoutError:
        raise LoadFailed("the worker did not answer in time") from None
    finally:
        calls.end()
        process.detach()
