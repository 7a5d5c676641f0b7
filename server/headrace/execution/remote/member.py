"""One server of a pool: its connection, what is known of it, and the health checks.

Owned by the event-loop thread.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from headrace.execution.remote.calls import CallFailed, Calls
from headrace.execution.remote.options import Endpoint, RemoteOptions
from headrace.observability.endpoints import EndpointSeries
from headrace.scheduling import endpoints as rules
from headrace.scheduling.endpoints import Condition
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_status import Fate

log = logging.getLogger(__name__)

_UNIMPLEMENTED = 12


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    failures: int = 0
    ejections: int = 0


@dataclass(slots=True)
class _Checks:
    """The next health check, or the one that is under way."""

    timer: asyncio.TimerHandle | None = None
    task: "asyncio.Task[None] | None" = None
    closed: bool = field(default=False)


class Member:
    """A server. `changed` is called when it is reachable again, or is not any more."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: RemoteOptions,
        model: str,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        reachable: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.condition = Condition(reachable=reachable)
        self._options = options
        self._model = model
        self._loop = loop
        self._changed = changed
        self._calls = Calls(endpoint, options.credentials)
        self._counts = _Counts()
        self._checks = _Checks()
        self._drained = asyncio.Event()
        self._drained.set()
        asked = pb.ModelReadyRequest(name=options.model, version=options.version)
        self._question = asked.SerializeToString()
        self._plan(0.0)

    async def infer(self, message: bytes) -> bytes:
        """One call; raises `CallFailed`. What becomes of it is taken into account."""
        self._counts.requests += 1
        self.condition = rules.begun(self.condition)
        self._drained.clear()
        try:
            answer = await self._calls.infer(message, self._options.timeout)
        except CallFailed as failed:
            self._note(failed)
            raise
        except BaseException:
            self.condition = rules.abandoned(self.condition)
            raise
        else:
            self.condition = rules.succeeded(self.condition)
            return answer
        finally:
            if not self.condition.outstanding:
                self._drained.set()

    async def drained(self) -> None:
        """Wait until no call is under way."""
        await self._drained.wait()

    def series(self) -> EndpointSeries:
        """What a scrape shows of it."""
        condition, counts = self.condition, self._counts
        return EndpointSeries(
            self.endpoint.name, counts.requests, counts.failures, counts.ejections,
            condition.outstanding,
            condition.reachable and self._loop.time() >= condition.ejected_until,
        )  # fmt: skip

    async def close(self) -> None:
        """Check no more, and end the connection with whatever is under way."""
        self._checks.closed = True
        if self._checks.timer is not None:
            self._checks.timer.cancel()
        if self._checks.task is not None:
            self._checks.task.cancel()
            await asyncio.wait([self._checks.task])
        await self._calls.close()

    def _note(self, failed: CallFailed) -> None:
        fate = failed.failure(self._model).fate
        before = self.condition
        if fate is Fate.ANSWERED:
            self.condition = rules.succeeded(before)
            return
        self._counts.failures += 1
        if fate is Fate.UNSENT or fate is Fate.UNCERTAIN:
            self.condition = rules.disconnected(before)
            if before.reachable:
                self._tell("cannot be reached", failed.text)
                self._plan(rules.next_check(self.condition, self._options.health_interval))
                self._changed()
            return
        self.condition = rules.failed(before, self._loop.time())
        if fate is Fate.REFUSED and before.reachable:
            self._plan(0.0)  # it may be about to end, or has unloaded the model
        if self.condition.ejections > before.ejections:
            self._counts.ejections += 1
            left = self.condition.ejected_until - self._loop.time()
            self._tell(f"fails again and again and is left out for {left:.0f} s", failed.text)

    # --- health

    def _plan(self, seconds: float) -> None:
        """Have the next health check in so many seconds, unless one is under way."""
        if self._checks.closed or self._checks.task is not None:
            return
        if self._checks.timer is not None:
            self._checks.timer.cancel()
        self._checks.timer = self._loop.call_later(seconds, self._begin_check)

    def _begin_check(self) -> None:
        self._checks.timer = None
        self._checks.task = self._loop.create_task(self._check())

    async def _check(self) -> None:
        healthy, why = await self._healthy()
        self._checks.task = None
        before = self.condition
        self.condition = rules.checked(before, healthy)
        self._plan(rules.next_check(self.condition, self._options.health_interval))
        if healthy is before.reachable:
            return
        if healthy:
            log.info("model %s: server %s serves", self._model, self.endpoint.name,
                     extra={"model": self._model})  # fmt: skip
        else:
            self._tell("does not serve", why)
        self._changed()

    async def _healthy(self) -> tuple[bool, str]:
        """Whether the server says that the model is ready, and what it says instead."""
        try:
            answer = await self._calls.ready(self._question, self._options.health_timeout)
            ready = pb.ModelReadyResponse.FromString(answer).ready
        except CallFailed as failed:  # a server without the procedure cannot say more
            return failed.status == _UNIMPLEMENTED, failed.text
        except DecodeError as error:
            return False, str(error)
        return ready, "" if ready else "the model is not ready there"

    def _tell(self, what: str, why: str) -> None:
        log.warning(
            "model %s: server %s %s: %s", self._model, self.endpoint.name, what, why,
            extra={"model": self._model},
        )  # fmt: skip
