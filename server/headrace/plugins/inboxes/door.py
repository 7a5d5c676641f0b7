"""The door `inboxes`: all inboxes that a file declares."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from headrace.core.errors import Overloaded
from headrace.doors.door import Door
from headrace.engine.entrance import Entrance
from headrace.observability.statistics import Sourced
from headrace.plugins.inboxes.broker import InvalidInbox
from headrace.plugins.inboxes.config import read_inboxes
from headrace.plugins.inboxes.pump import DOOR, FAMILIES, Pump

log = logging.getLogger(__name__)

_OPERATION = "ModelInfer"


class Inboxes(Door):
    """Take messages of brokers, and send their answers back to one."""

    operations = (_OPERATION,)

    def __init__(self, engine: Entrance) -> None:
        self._engine = engine
        self._pumps: list[Pump] = []
        self._running: list[asyncio.Task[None]] = []

    async def open(self, address: str) -> str:
        """Implements `Door.open`: `address` is the path of the file."""
        try:
            self._account = account = self._engine.admission.connect(DOOR)
        except Overloaded as error:
            raise OSError(str(error)) from None
        answers = self._engine.admission.answers.of(DOOR, "infer")
        try:
            for at, config in enumerate(read_inboxes(Path(address)), 1):
                where = f"{address}: inbox {at}"
                self._pumps.append(Pump(self._engine, config, account, answers, where))
        except InvalidInbox as error:
            raise OSError(str(error)) from None
        self._running = [asyncio.ensure_future(pump.run()) for pump in self._pumps]
        for pump, task in zip(self._pumps, self._running, strict=True):
            task.add_done_callback(partial(_report, pump))
        return ", ".join(f"{p.config.source} -> {p.config.to}" for p in self._pumps)

    async def drain(self, seconds: float) -> None:
        """Implements `Door.drain`: fetch nothing more, deliver and commit what was taken."""
        for pump in self._pumps:
            pump.drain()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def close(self, grace: float) -> None:
        """Implements `Door.close`."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(pump.close() for pump in self._pumps))
        if self._pumps:
            self._account.close()

    def metrics(self) -> Iterable[Sourced]:
        """Implements `Door.metrics`."""
        sources = [
            ({"inbox": str(p.config.source), "model": p.config.model}, p) for p in self._pumps
        ]
        return [(family, sources) for family in FAMILIES]


def _report(pump: Pump, task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("bug in %s, which has stopped", pump, exc_info=error)
