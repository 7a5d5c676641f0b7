"""Keeping a model on its servers as it was asked for, while it is served.

Owned by the event-loop thread; what waits for servers is on threads beside it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.core.errors import LoadFailed
from headrace.execution.aside import aside
from headrace.execution.remote.options import Endpoint
from headrace.execution.triton.drift import Difference
from headrace.execution.triton.keeping import LOAD_SECS, Keeper

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0


class Upkeep:
    """Has one server serve the model again when it is found that it does not.

    An attempt that fails is not repeated before a time that doubles from one to the next.
    """

    def __init__(self, keeper: Keeper, endpoint: Endpoint) -> None:
        self._keeper = keeper
        self._endpoint = endpoint
        self._failures = 0
        self._not_before = 0.0
        self._problem = ""

    async def mend(self) -> str:
        """Why the server still does not serve it; empty if it does."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return self._problem
        try:
            await aside(
                lambda: self._keeper.ensure(self._endpoint, LOAD_SECS),
                f"load on {self._endpoint.name}",
            )
        except LoadFailed as error:
            pause = min(_FIRST_PAUSE_SECS * 2.0 ** min(self._failures, 16), _LONGEST_PAUSE_SECS)
            self._failures += 1
            self._not_before = loop.time() + pause
            self._problem = str(error)
            return self._problem
        self._failures = 0
        self._not_before = 0.0
        return ""


class DriftWatch:
    """Looks now and then whether the servers of a model have it as it was asked for.

    `look` asks one of them, blocks, and raises `LoadFailed` if that one does not answer. `mend`,
    where there is one, has it serve as it was asked for again.
    """

    def __init__(
        self,
        model: str,
        interval: float,
        endpoints: Callable[[], Sequence[Endpoint]],
        look: Callable[[Endpoint], Sequence[Difference]],
        keeper: Keeper | None,
    ) -> None:
        self._model = model
        self._interval = interval
        self._endpoints = endpoints
        self._look = look
        self._keeper = keeper
        self._found: dict[Endpoint, Sequence[Difference]] = {}
        self._task: asyncio.Task[None] | None = None
        if interval:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    def count(self, endpoint: Endpoint) -> int:
        """How many differences a server had when it was last looked at."""
        return len(self._found.get(endpoint, ()))

    def note(self, endpoint: Endpoint, found: Sequence[Difference]) -> None:
        """Know what a server's differences are, and tell if they are others than before."""
        found = tuple(found)
        if found != self._found.get(endpoint, ()):
            texts = "; ".join(map(str, found))
            level = logging.WARNING if found else logging.INFO
            log.log(level, "model %s: server %s has it %s", self._model, endpoint.name,
                    f"otherwise than asked for: {texts}" if found else "as asked for again",
                    extra={"model": self._model})  # fmt: skip
        self._found[endpoint] = found

    def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            endpoints = self._endpoints()
            self._found = {one: found for one, found in self._found.items() if one in endpoints}
            for endpoint in endpoints:
                await self._check(endpoint)

    async def _check(self, endpoint: Endpoint) -> None:
        keeper = self._keeper
        try:
            found = await aside(lambda: self._look(endpoint), f"look at {endpoint.name}")
            if found and keeper is not None:
                await aside(lambda: keeper.ensure(endpoint, LOAD_SECS), f"load on {endpoint.name}")
                found = await aside(lambda: self._look(endpoint), f"look at {endpoint.name}")
        except LoadFailed as error:
            log.debug("model %s: server %s: %s", self._model, endpoint.name, error)
            return
        except Exception:
            log.exception("bug while looking at the servers of model %s", self._model)
            return
        self.note(endpoint, found)
