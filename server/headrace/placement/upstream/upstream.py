"""One upstream of a pool: its connection, condition, and health checks.

`RULES` is the table of the consequences of failures, described in docs/remote.md. Owned by the
event-loop thread.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from time import monotonic_ns
from typing import NamedTuple

from headrace.connections.endpoint import Endpoint
from headrace.core.errors import LoadFailed
from headrace.observability.statistics import EndpointCounts, EndpointSeries
from headrace.placement.child_process import Backoff
from headrace.placement.upstream.connection import (
    CallFailed,
    ProtocolClient,
    Receiver,
    RemoteRequest,
    RemoteStream,
    StreamReceiver,
    UpstreamCall,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.reconciler import ASK_SECS, LOAD_SECS, Difference, Reconciler
from headrace.protocol.status import Fate
from headrace.scheduling import upstreams
from headrace.scheduling.upstreams import Condition, Ending

log = logging.getLogger(__name__)

_SLACK_SECS = 0.5  # beyond the deadline, at which this server cancels: the upstream is not to blame


class Health(Enum):
    """The upstream's health after a failure."""

    GOOD = "the upstream works"
    FAILED = "counts towards ejection"
    GONE = "unreachable until a health check succeeds"


class Rule(NamedTuple):
    """The consequences of a failure for the upstream, the request, and its sequence.

    The request may be retried on another upstream if `retry`, while no response has come.
    """

    health: Health
    retry: bool
    ending: Ending


RULES = {
    Fate.UNSENT: Rule(Health.GONE, True, Ending.UNSURE),
    Fate.REFUSED: Rule(Health.FAILED, True, Ending.REFUSED),
    Fate.ANSWERED: Rule(Health.GOOD, False, Ending.RUN),
    Fate.UNCERTAIN: Rule(Health.GONE, False, Ending.UNSURE),
    Fate.LATE: Rule(Health.FAILED, False, Ending.UNSURE),
}


class Upstream:
    """An upstream. `changed` is called when it becomes reachable or unreachable."""

    def __init__(
        self,
        endpoint: Endpoint,
        connection: ProtocolClient,
        options: RemoteOptions,
        model: str,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        reachable: bool = False,
        reconciler: Reconciler | None = None,
        counts: EndpointCounts | None = None,
    ) -> None:
        """`reconciler` has the desired state of the upstream's model, if any.

        `counts` may be taken over from a replaced one.
        """
        self.endpoint = endpoint
        self.condition = Condition(reachable=reachable)
        self._options = options
        self._model = model
        self._loop = loop
        self._changed = changed
        self._connection = connection
        self._counts = EndpointCounts() if counts is None else counts
        self._reconciler = reconciler
        self._backoff = Backoff(1.0, 60.0)  # after failed loads
        self._not_before = 0.0  # time of the next load
        self._problem = ""  # reason of the last failed load
        self.differences: list[Difference] = []  # of its model, at the last look
        self._drained: asyncio.Event | None = None  # set while something waits for that
        self._next_check: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        self._checked = False  # the result of the first check was logged
        self._closed = False
        self._plan(0.0)
        self._watching: asyncio.Task[None] | None = None
        if reconciler is not None and reconciler.control.drift_secs:
            self._watching = loop.create_task(self._watch(reconciler))

    @property
    def usable(self) -> bool:
        """True if it can be called; a `Holder` of sequences' states."""
        return self.condition.reachable

    def begin(self, request: RemoteRequest, receiver: Receiver) -> UpstreamCall:
        """Start a call; its end must be reported to `succeeded`, `abandoned` or `failed`, unless
        this raises.
        """
        left, longest = _left(request.deadline), self._options.timeout
        seconds = min(left, longest) if left and longest else left or longest
        self._begin(request)
        try:
            return self._connection.begin(request, seconds, receiver)
        except BaseException:  # for example if the request cannot be encoded
            self.abandoned()
            raise

    def stream(self, request: RemoteRequest, receiver: StreamReceiver) -> RemoteStream:
        """Start a stream for one request, with any number of responses; as `begin`."""
        self._begin(request)
        try:
            return self._connection.stream(request, _left(request.deadline), receiver)
        except BaseException:
            self.abandoned()
            raise

    def _begin(self, request: RemoteRequest) -> None:
        self._counts.requests += 1
        upstreams.begin(self.condition)
        if request.trace is not None:
            request.trace.sent(self.endpoint.name)

    def succeeded(self) -> None:
        """Count a call with a response."""
        upstreams.succeed(self.condition)
        self._ended()

    def abandoned(self) -> None:
        """Count a cancelled call."""
        upstreams.abandon(self.condition)
        self._ended()

    def failed(self, failed: CallFailed) -> None:
        """Count a failed call."""
        self._note(failed)
        self._ended()

    async def drained(self) -> None:
        """Wait until no call is in flight."""
        while self.condition.outstanding:
            self._drained = asyncio.Event()
            await self._drained.wait()

    def series(self) -> EndpointSeries:
        """The upstream, for a scrape."""
        condition = self.condition
        return EndpointSeries(
            self.endpoint.name, self._counts, condition.outstanding,
            condition.reachable and self._loop.time() >= condition.ejected_until,
            differences=len(self.differences),
        )  # fmt: skip

    def note(self, found: list[Difference]) -> None:
        """Note the differences between its model and the configuration, and log changes."""
        if found != self.differences:
            texts = "; ".join(map(str, found))
            level = logging.WARNING if found else logging.INFO
            log.log(level, "model %s: server %s has it %s", self._model, self.endpoint.name,
                    f"otherwise than asked for: {texts}" if found else "as asked for again",
                    extra={"model": self._model})  # fmt: skip
        self.differences = found

    async def close(self) -> None:
        """Stop checks, and close the connection."""
        self._closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        tasks = [task for task in (self._checking, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._connection.close()

    def _ended(self) -> None:
        if self._drained is not None and not self.condition.outstanding:
            self._drained.set()

    def _note(self, failed: CallFailed) -> None:
        fate, condition = failed.failure.fate, self.condition
        health, reachable = RULES[fate].health, condition.reachable
        if health is Health.GOOD:
            upstreams.succeed(condition)
            return
        self._counts.failures += 1
        if health is Health.GONE:
            upstreams.disconnect(condition)
            if reachable:
                self._tell("cannot be reached", failed.text)
                self._plan(upstreams.next_check(condition, self._options.health_interval))
                self._changed()
            return
        ejected = upstreams.fail(condition, self._loop.time())
        if fate is Fate.REFUSED and reachable:
            self._plan(0.0)  # the upstream may be about to end, or has unloaded the model
        if ejected:
            self._counts.ejections += 1
            left = condition.ejected_until - self._loop.time()
            self._tell(f"fails again and again and is left out for {left:.0f} s", failed.text)

    # --- health

    def _plan(self, seconds: float) -> None:
        """Schedule the next health check, unless one is in progress."""
        if self._closed or self._checking is not None:
            return
        if self._next_check is not None:
            self._next_check.cancel()
        self._next_check = self._loop.call_later(seconds, self._begin_check)

    def _begin_check(self) -> None:
        self._next_check = None
        self._checking = self._loop.create_task(self._check())

    async def _check(self) -> None:
        try:
            healthy, why = await self._healthy()
        except Exception as error:  # the next check may succeed, and must take place
            log.exception("bug while checking server %s of model %s", self.endpoint.name,
                          self._model, extra={"model": self._model})  # fmt: skip
            healthy, why = False, repr(error)
        self._checking = None
        before = self.condition.reachable
        upstreams.check(self.condition, healthy)
        self._plan(upstreams.next_check(self.condition, self._options.health_interval))
        if healthy is before and self._checked:
            return
        self._checked = True
        if healthy:
            log.info("model %s: server %s serves", self._model, self.endpoint.name,
                     extra={"model": self._model})  # fmt: skip
        else:
            self._tell("does not serve", why)
        if healthy is not before:
            self._changed()

    async def _healthy(self) -> tuple[bool, str]:
        """Ask the server for the model's readiness: (ready, reason if not)."""
        ready, why = False, "the model is not ready there"
        try:
            ready = await self._connection.ready(self._options.health_timeout)
        except CallFailed as failed:
            why = failed.text
            if failed.failure.fate not in (Fate.ANSWERED, Fate.REFUSED):
                return False, why
        reconciler = self._reconciler
        loads = reconciler is not None and reconciler.control.load
        if reconciler is not None and loads and not (ready and self.condition.reachable):
            # It may have been restarted meanwhile, without the model or with another one. Loading
            # takes a while, during which it gets no requests.
            if not ready and self.condition.reachable:
                upstreams.check(self.condition, False)
                self._tell("does not serve", why)
                self._changed()
            why = await self._load(reconciler)
            return not why, why
        return ready, "" if ready else why

    async def _load(self, reconciler: Reconciler) -> str:
        """Load the model there; returns the reason why the upstream still does not serve, or "".

        A failed attempt is repeated after a delay that doubles each time.
        """
        if self._loop.time() < self._not_before:
            return self._problem
        try:
            await reconciler.ensure(self._connection, self.endpoint, LOAD_SECS)
        except LoadFailed as error:
            self._not_before = self._loop.time() + self._backoff.failed()
            self._problem = str(error)
            return self._problem
        self._backoff.succeeded()
        self._not_before = 0.0
        return ""

    async def _watch(self, reconciler: Reconciler) -> None:
        """Check periodically for differences from the configuration, and mend them if possible."""
        while True:
            await asyncio.sleep(reconciler.control.drift_secs)
            if not self.condition.reachable:
                self.differences = []
                continue
            try:
                found = await self._look(reconciler)
                if found and reconciler.control.load:
                    await reconciler.ensure(self._connection, self.endpoint, LOAD_SECS)
                    found = await self._look(reconciler)
            except (CallFailed, LoadFailed) as error:
                log.debug("model %s: server %s: %s", self._model, self.endpoint.name, error)
            except Exception:
                log.exception("bug while looking at the servers of model %s", self._model)
            else:
                self.note(found)

    async def _look(self, reconciler: Reconciler) -> list[Difference]:
        return reconciler.differences(await self._connection.describe(ASK_SECS))

    def _tell(self, what: str, why: str) -> None:
        log.warning(
            "model %s: server %s %s: %s", self._model, self.endpoint.name, what, why,
            extra={"model": self._model},
        )  # fmt: skip


def _left(deadline: int) -> float:
    """Seconds that a call with a deadline may take; 0 for no limit."""
    return max((deadline - monotonic_ns()) / 1e9, 0.0) + _SLACK_SECS if deadline else 0.0
