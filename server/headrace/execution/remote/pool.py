"""Instances on other servers: a batch goes out as one call, and what comes back is an outcome.

The servers of a model are one pool. Each call that may be under way is a slot, which the scheduler
sees as an instance; which server gets its batch is decided when it is sent. A call that no server
has begun goes to another one. One that may have been executed is not sent again, whatever has
become of it: its requests fail. For an error that the model gives, a batch is run again in halves,
as with any backend.

While no server can be reached, slots are suspended and requests wait; after a while those fail, and
further ones are refused, until a server is there again.

Owned by the event-loop thread, but for the look-up of names.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core.errors import LoadFailed, ModelNotReady, ServerError
from headrace.core.signature import Signature
from headrace.execution.choice import InstanceKind
from headrace.execution.remote.backend import RemoteModel
from headrace.execution.remote.calls import CallFailed
from headrace.execution.remote.member import Member
from headrace.execution.remote.options import Endpoint
from headrace.execution.remote.slot import Lost, Slot
from headrace.observability.endpoints import EndpointSeries
from headrace.scheduling.batch import Instance, NotStarted
from headrace.scheduling.endpoints import choose
from headrace.wire.remote_status import Failure, Fate

log = logging.getLogger(__name__)

_RESOLVE_SECS = 15.0  # between looks at what addresses a name has


class Scheduler(Protocol):
    """What a pool's slots take their batches from; see `headrace.scheduling.batcher.Batcher`."""

    def add_instance(self, instance: Instance) -> None:
        """Let a slot take part."""

    def suspend(self, instance: Instance) -> None:
        """A slot can run nothing for now."""

    def resume(self, instance: Instance) -> None:
        """It can again."""

    def fail_waiting(self, error: ServerError) -> None:
        """End all that waits."""


class RemotePool:
    """The servers of a version, and the slots for calls to them."""

    kind = InstanceKind.REMOTE

    def __init__(
        self,
        name: str,
        model: RemoteModel,
        signature: Signature,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when `healthy` has changed, or `given_up`."""
        self.name = name
        self.given_up = False  # no server can be reached, and nothing waits for one any more
        self._model = model
        self._signature = signature
        self._scheduler = scheduler
        self._loop = loop
        self._changed = changed
        self._members: list[Member] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._wait: asyncio.TimerHandle | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._closed: asyncio.Task[None] | None = None
        for endpoint in model.endpoints:
            self._members.append(self._member(endpoint, endpoint == model.answered))
        count = model.max_in_flight
        self._slots = [Slot(self, signature, model.messages) for _ in range(count)]
        for slot in self._slots:
            scheduler.add_instance(slot)
        self._resolve_timer = loop.call_later(_RESOLVE_SECS, self._begin_resolving)

    @property
    def concurrency(self) -> int:
        """Batches that may be under way at the same time, 0 for one after the other."""
        return len(self._slots) if len(self._slots) > 1 else 0

    @property
    def healthy(self) -> bool:
        """Whether any server can be reached that has the model ready."""
        return any(member.condition.reachable for member in self._members)

    def waiting_error(self) -> ModelNotReady:
        """What a request is told that waits for servers which do not come back."""
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: none of its servers can be reached"
        )

    def series(self) -> Sequence[EndpointSeries]:
        """What a scrape shows of the servers."""
        return [member.series() for member in self._members]

    async def ask(self, message: bytes) -> bytes:
        """Have a server run a request; raises `Lost`, or `NotStarted` if none can be reached."""
        tried: set[int] = set()
        members = list(self._members)
        last: Failure | None = None
        while True:
            conditions = [member.condition for member in members]
            index = choose(conditions, self._loop.time(), tried)
            if index is None:
                if last is None or last.fate is Fate.UNSENT:
                    raise NotStarted
                raise Lost(last)
            try:
                return await members[index].infer(message)
            except CallFailed as failed:
                last = failed.failure(self._signature.model)
            if last.fate not in (Fate.UNSENT, Fate.REFUSED):
                raise Lost(last)
            tried.add(index)

    def rest(self, slot: Slot) -> None:
        """A slot is idle; it stays so while nothing can be reached."""
        if not self._reachable:
            self._scheduler.suspend(slot)

    def close(self) -> None:
        """End all connections; `closed` can be waited for."""
        if self._closed is not None:
            return
        self._resolve_timer.cancel()
        if self._wait is not None:
            self._wait.cancel()
        if self._resolving is not None:
            self._resolving.cancel()
        self._closed = self._loop.create_task(self._close())

    async def closed(self) -> None:
        """Wait until no connection is left."""
        if self._closed is not None:
            await asyncio.shield(self._closed)

    async def _close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members), *self._leaving)

    def _member(self, endpoint: Endpoint, reachable: bool = False) -> Member:
        return Member(
            endpoint, self._model.options, self._signature.model, self._loop, self._on_member,
            reachable,
        )  # fmt: skip

    # --- whether anything can be reached

    def _on_member(self) -> None:
        """A server can be reached again, or cannot any more."""
        if self._closed is not None:
            return
        reachable = self.healthy
        if reachable is not self._reachable:
            self._reachable = reachable
            if reachable:
                self._go_on()
            else:
                for slot in self._slots:
                    self._scheduler.suspend(slot)
                wait = self._model.options.wait
                self._wait = self._loop.call_later(wait, self._give_up)
        self._changed()

    def _go_on(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        self.given_up = False
        for slot in self._slots:
            self._scheduler.resume(slot)

    def _give_up(self) -> None:
        self._wait = None
        self.given_up = True
        log.error(
            "model %s: none of its servers can be reached", self._signature.model,
            extra={"model": self._signature.model},
        )  # fmt: skip
        self._scheduler.fail_waiting(self.waiting_error())
        self._changed()

    # --- which servers there are

    def _begin_resolving(self) -> None:
        self._resolving = self._loop.create_task(self._resolve())

    async def _resolve(self) -> None:
        """Take in what addresses the names have now."""
        try:
            found = await self._loop.run_in_executor(None, self._model.options.resolve)
        except LoadFailed as error:  # the servers that are known may do well all the same
            log.warning("model %s: %s", self._signature.model, error)
        else:
            self._adopt(found)
        self._resolve_timer = self._loop.call_later(_RESOLVE_SECS, self._begin_resolving)

    def _adopt(self, found: Sequence[Endpoint]) -> None:
        known = {member.endpoint for member in self._members}
        gone = [member for member in self._members if member.endpoint not in found]
        self._members = [member for member in self._members if member.endpoint in found]
        self._members += [self._member(endpoint) for endpoint in found if endpoint not in known]
        for member in gone:
            task = self._loop.create_task(self._dismiss(member))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        if gone:
            self._on_member()

    async def _dismiss(self, member: Member) -> None:
        """Close the connection to a server once what is under way there has ended."""
        await member.drained()
        await member.close()
