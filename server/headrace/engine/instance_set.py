"""The instances that one backend has for a version, wherever they run.

Owned by the event-loop thread.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from headrace.core.errors import ModelNotReady, ServerError
from headrace.core.execution_limits import ExecutionLimits
from headrace.core.signature import Signature
from headrace.engine.loading import LoadedInstance
from headrace.engine.model_host import ModelHost
from headrace.execution.local import LocalInstance
from headrace.execution.model_kinds import in_worker, is_elsewhere
from headrace.observability.endpoints import EndpointCounts, EndpointSeries
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.tiers import Tier

if TYPE_CHECKING:
    from headrace.execution.process import WorkerInstance
    from headrace.execution.remote.pool import RemotePool
    from headrace.execution.supervision import WorkerSet


class InstanceSet:
    """Instances in this process, in workers, and the servers of a model that others run."""

    def __init__(
        self,
        signature: Signature,
        scheduler: Batcher | Tier,
        host: ModelHost,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        counts: dict[str, EndpointCounts],
        limits: ExecutionLimits | None = None,
        ended: Counter[str] | None = None,
    ) -> None:
        """`changed` is called when `healthy` may have changed, or `given_up`.

        `counts` are those of the version's servers by their names, if others run it. `limits` are
        those of executions in this process, none by default; `ended` counts runs that were ended.
        """
        self._signature = signature
        self._scheduler = scheduler
        self._host = host
        self._loop = loop
        self._changed = changed
        self._counts = counts
        self._limits = limits
        self._ended = ended
        self._local: list[LocalInstance] = []
        self._removed: list[LocalInstance] = []
        self.workers: WorkerSet | None = None  # those that run it, if it is in workers
        self.servers: RemotePool | None = None  # the servers that run it, if others do

    def __iter__(self) -> "Iterator[LocalInstance | WorkerInstance | RemotePool]":
        """All of them; servers are one."""
        yield from self._local
        yield from self.workers or ()
        if self.servers is not None:
            yield self.servers

    def add(self, item: LoadedInstance) -> None:
        """Put a loaded instance behind the scheduler."""
        if in_worker(item.model):
            if self.workers is None:
                self.workers = item.model.worker_set(
                    self._signature, self._scheduler, self._host, self._loop, self._on_workers
                )
            self.workers.add(item.name, item.model)
        elif is_elsewhere(item.model):
            self.servers = item.model.pool(
                item.name, self._scheduler, self._loop, self._changed, self._counts
            )
        else:
            instance = LocalInstance(
                item.name, item.model, item.kind, self._loop, item.place, limits=self._limits,
                changed=self._changed, ended=self._ended,
            )  # fmt: skip
            self._local.append(instance)
            self._scheduler.add_instance(instance)

    def remove(self, name: str) -> None:
        """Have the instance of this name finish what it has, and go."""
        self._removed = [instance for instance in self._removed if not instance.released]
        if self.workers is not None:
            self.workers.remove(name)
        if instance := next((i for i in self._local if i.name == name), None):
            self._local.remove(instance)
            self._removed.append(instance)
            self._scheduler.remove_instance(instance, instance.close)

    @property
    def healthy(self) -> bool:
        """Whether any executes what it is given: not while all workers are down, all instances
        are stalled, or none of the servers can be reached.
        """
        if self.servers is not None and not self.servers.healthy:
            return False
        workers = list(self.workers or ())
        if workers:
            return any(worker.willing and not worker.stalled for worker in workers)
        local = any(not instance.stalled for instance in self._local)
        return local or self.servers is not None

    @property
    def obstacle(self) -> str:
        """Why nothing executes what it is given, where `healthy` says so."""
        if self.servers is not None:
            return "none of its servers can be reached"
        if self.stalled:
            texts = [f"{i.name} has made no progress for {i.silent:.0f} s" for i in self.stalled]
            return f"stalled: {', '.join(texts)}"
        if any(worker.running for worker in self.workers or ()):
            return "the model says that it is not ready"
        return "none of its worker processes runs"

    @property
    def given_up(self) -> bool:
        """Whether nothing waits for any of them to come back, be it that there is none."""
        if self.servers is not None:
            return self.servers.given_up
        return not self._local and all(worker.given_up for worker in self.workers or ())

    @property
    def stalled(self) -> "list[LocalInstance | WorkerInstance]":
        """Instances whose batch has made no progress for too long."""
        every = (*self._local, *(self.workers or ()))
        return [instance for instance in every if instance.stalled]

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The servers as a scrape sees them."""
        return () if self.servers is None else self.servers.series()

    def waiting_error(self) -> ServerError:
        """What a request is told that nothing can run."""
        remote = self.servers
        if remote is not None:
            return remote.waiting_error()
        # As the breaker closes: at the start of the first one that is tried again.
        tried = min((worker.tried_again for worker in self.workers or ()), default=0.0)
        seconds = max(ceil(tried - self._loop.time()), 1)
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: its worker processes end again and"
            f" again; they are tried again in {seconds} s, and the server's log says how they end",
            retry_after=seconds,
        )

    def leave(self, grace: float) -> None:
        """Finish what somebody waits for; what nobody does is ended after `grace` seconds."""
        if self.workers is not None:
            self.workers.leave(grace)
        for instance in (*self._local, *self._removed):
            instance.leave(grace)

    def close(self) -> None:
        """Look after workers no more; the scheduler closes the instances themselves."""
        if self.workers is not None:
            self.workers.close()

    async def closed(self) -> None:
        """Wait until all of them are gone."""
        await asyncio.gather(*(i.closed() for i in (*self._local, *self._removed)))
        if self.workers is not None:
            await self.workers.closed()
        if self.servers is not None:
            await self.servers.closed()

    def _on_workers(self) -> None:
        """A worker has ended, or runs again."""
        self._changed()  # first: who is told that a request has failed may have the next one ready
        if self.given_up:
            self._scheduler.fail_waiting(self.waiting_error())
