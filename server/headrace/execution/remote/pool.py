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
from collections.abc import Callable, Container, Iterator, Sequence, Set
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from headrace.core.call import Call
from headrace.core.errors import InvalidOption, LoadFailed, ModelNotReady, ServerError
from headrace.core.signature import Signature
from headrace.execution.aside import aside
from headrace.execution.choice import InstanceKind
from headrace.execution.placement import Placement
from headrace.execution.remote.member import Member
from headrace.execution.remote.options import Endpoint
from headrace.execution.remote.slot import Slot
from headrace.execution.remote.slots import make_slots
from headrace.observability.endpoints import EndpointCounts, EndpointSeries
from headrace.scheduling.batch import Answer, Instance
from headrace.scheduling.sequences import SequenceQueue, SequenceTable
from headrace.scheduling.upstreams import Condition, choose

if TYPE_CHECKING:
    from headrace.execution.remote.model import RemoteModel

log = logging.getLogger(__name__)

_RESOLVE_SECS = 15.0  # between looks at what addresses a name has
_SEQUENCES_SECS = 0.2  # between looks whether a server that leaves has sequences


class Scheduler(Protocol):
    """What a pool's slots take their batches from; see `headrace.scheduling.batcher.Batcher`."""

    def add_instance(self, instance: Instance) -> None:
        """Let a slot take part."""

    def suspend(self, instance: Instance) -> None:
        """A slot can run nothing for now."""

    def resume(self, instance: Instance) -> None:
        """It can again."""

    def fail_waiting(self, error: ServerError) -> bool:
        """End all that waits, unless something else may run it; whether it has ended."""

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Take what comes for a request by itself."""


class RemotePool(Placement):
    """The servers of a version, and the slots for calls to them."""

    kind = InstanceKind.REMOTE
    given_up = False  # no server can be reached, and nothing waits for one any more

    def __init__(
        self,
        name: str,
        model: "RemoteModel",
        signature: Signature,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        counts: dict[str, EndpointCounts],
    ) -> None:
        """`changed` is called when `healthy` has changed, or `given_up`.

        `counts` has the counters of servers by their names, and gets those that are new.
        """
        self.name = name
        self._model = model
        self._signature = signature
        self._scheduler = scheduler
        self._loop = loop
        self._changed = changed
        self._counts = counts
        self._sequences: SequenceTable | None = None
        self._members: list[Member] = []
        self._conditions: list[Condition] = []  # theirs
        self._leaving: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._wait: asyncio.TimerHandle | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._closed: asyncio.Task[None] | None = None
        self._drift = model.watch(self._looked_at)
        for endpoint in model.endpoints:
            self._members.append(self._member(endpoint, endpoint == model.answered))
        self._conditions = [member.condition for member in self._members]
        if model.sequences is not None:
            self._sequences = SequenceTable(model.sequences.idle_ns, monotonic_ns)
        self._slots = make_slots(self, model, signature, self._sequences, loop, scheduler.answer)
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

    @property
    def obstacle(self) -> str:
        """See `Placement`."""
        return "none of its servers can be reached"

    def __iter__(self) -> Iterator["RemotePool"]:
        """All servers are one instance."""
        yield self

    def add(self, *loaded: object) -> None:
        """The servers are there already, with their first instance."""

    def remove(self, name: str) -> None:
        """Instance groups are up to the servers."""

    def leave(self, grace: float) -> None:
        """What goes on without anybody waiting is up to the servers."""

    def waiting_error(self) -> ModelNotReady:
        """What a request is told that waits for servers which do not come back."""
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: none of its servers can be reached",
            retry_after=1,
        )

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """What a scrape shows of the servers."""
        found = [member.series() for member in self._members]
        for member, series in zip(self._members, found, strict=True):
            series.differences = self._drift.count(member.endpoint)
        if self._sequences is not None:
            self._sequences.forget_idle()
            for member, series in zip(self._members, found, strict=True):
                series.sequences = self._sequences.count(member)
        return found

    def in_sequence(
        self,
        expect: Callable[[int], None],
        failed: Callable[[str, int], None],
    ) -> SequenceQueue | None:
        """What stands before the scheduler for sequences; the rest is for `SequenceQueue`."""
        rules, table = self._model.sequences, self._sequences
        if rules is None or table is None:
            return None
        starts = max(len(self._slots) // 2, 1)
        return SequenceQueue(self._signature.model, table, rules, starts, expect, failed)

    def next(self, tried: Set[Member]) -> Member | None:
        """The server for the next call, other than those `tried`; None if there is none."""
        members = self._members
        if tried:
            among: Container[int] = {i for i, one in enumerate(members) if one in tried}
        else:
            among = ()
        index = choose(self._conditions, self._loop.time(), among)
        return None if index is None else members[index]

    def rest(self, slot: Slot) -> None:
        """A slot is idle; it stays so while nothing can be reached."""
        if not self._reachable:
            self._scheduler.suspend(slot)

    def close(self) -> None:
        """End all connections; `closed` can be waited for."""
        if self._closed is not None:
            return
        self._resolve_timer.cancel()
        self._drift.close()
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
        await aside(self._model.close, f"release {self.name}")

    def _looked_at(self) -> Sequence[Endpoint]:
        """The servers that can be asked what they have."""
        return [member.endpoint for member in self._members if member.condition.reachable]

    def _member(self, endpoint: Endpoint, reachable: bool = False) -> Member:
        return Member(
            endpoint, self._model.connect(endpoint, self._signature), self._model.options,
            self._signature.model, self._loop, self._on_member, reachable,
            self._model.upkeep(endpoint), self._counts.setdefault(endpoint.name, EndpointCounts()),
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
        self._changed()  # first: who is told that a request has failed may have the next one ready
        alone = self._scheduler.fail_waiting(self.waiting_error())
        log.log(
            logging.ERROR if alone else logging.WARNING,
            "model %s: none of its servers can be reached", self._signature.model,
            extra={"model": self._signature.model},
        )  # fmt: skip

    # --- which servers there are

    def _begin_resolving(self) -> None:
        self._resolving = self._loop.create_task(self._resolve())

    async def _resolve(self) -> None:
        await self.look_again()
        self._resolve_timer = self._loop.call_later(_RESOLVE_SECS, self._begin_resolving)

    async def look_again(self) -> None:
        """Take in what addresses the names have now, and what the files with credentials hold."""
        name = self._signature.model
        try:
            # Names can take long: neither other names nor other work must wait for one.
            found, dialects = await aside(self._model.look, f"look up {self.name}")
        except (LoadFailed, InvalidOption, OSError) as error:
            # The servers that are known may do well all the same.
            log.warning("model %s: %s", name, error, extra={"model": name})
            return
        if dialects is not None:
            self._model.renew(dialects)
            log.info("model %s: its credentials have changed; servers are connected to anew", name,
                     extra={"model": name})  # fmt: skip
        self._adopt(found, anew=dialects is not None)

    def _adopt(self, found: Sequence[Endpoint], anew: bool) -> None:
        kept = [m for m in self._members if m.endpoint in found and not anew]
        gone = [member for member in self._members if member not in kept]
        before = {member.endpoint: member.condition.reachable for member in self._members}
        known = {member.endpoint for member in kept}
        self._members = kept + [
            self._member(endpoint, before.get(endpoint, False))
            for endpoint in found
            if endpoint not in known
        ]
        self._conditions = [member.condition for member in self._members]
        for member in gone:
            task = self._loop.create_task(self._dismiss(member))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        if gone:
            self._on_member()

    async def _dismiss(self, member: Member) -> None:
        """Close the connection to a server once what is under way there has ended."""
        await member.drained()
        while self._sequences is not None and self._closed is None:
            self._sequences.forget_idle()
            if not self._sequences.count(member):
                break
            await asyncio.sleep(_SEQUENCES_SECS)
            await member.drained()
        member.condition.reachable = False
        await member.close()
        name = member.endpoint.name
        if not any(other.endpoint.name == name for other in self._members):
            self._counts.pop(name, None)  # addresses may come and go for years
