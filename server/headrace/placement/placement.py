"""The places where the instances of a version run: in this process, in workers, on other servers.

Whoever serves a version puts its loaded instances into one placement for each backend and asks that
for whatever differs from place to place; see `LoadedModel.placement` in
`headrace.placement.local.instances`. Owned by the event-loop thread.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.core.call import Call
from headrace.core.errors import ServerError, Unavailable
from headrace.core.limits import ExecutionLimits
from headrace.core.signature import Signature
from headrace.core.tensors import Array
from headrace.observability.statistics import EndpointCounts, EndpointSeries, WorkerSeries
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.scheduling.batch import Answer, Instance
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.sequences import SequenceQueue


class ModelServices(Protocol):
    """The server, as far as models may ask something of it."""

    def submit(self, call: Call, inside: bool) -> None:
        """Run a model; raises `ServerError`.

        `inside` means that the model that asks does nothing else until it is answered.
        """

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Execute another request of a model, and answer once, with its result or error."""

    def metric(self, document: Mapping[str, Any]) -> None:
        """Change one of the model's own metrics; raises what nonsense raises."""


class NoServices:
    """Nobody to ask: every question is answered with `text`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def submit(self, call: Call, inside: bool) -> None:
        """Raise `Unavailable`."""
        raise Unavailable(self._text)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Answer with the error."""
        answer(None, Unavailable(self._text))

    def metric(self, document: Mapping[str, Any]) -> None:
        """Nothing: changes of metrics are kept until the model serves."""


class Scheduler(Protocol):
    """A `Batcher`, or the `Tier` of one of several backends: what instances get batches from."""

    @property
    def quarantine(self) -> Quarantine:
        """Inputs that workers have died of."""

    def add_instance(self, instance: Instance) -> None:
        """Give an instance batches from now on."""

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Give an instance nothing more; `removed` is called once it is idle."""

    def suspend(self, instance: Instance) -> None:
        """Give an instance nothing for now."""

    def resume(self, instance: Instance) -> None:
        """Give a suspended instance batches again."""

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Take a response to one call, outside of its batch; None is the end alone."""

    def fail_waiting(self, error: ServerError) -> bool:
        """End all that waits, unless something else may run it; whether it has ended."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A version as its placements see it.

    `changed` is called when `healthy` or `given_up` of a placement may have changed. `host` is
    what models may ask for something. `endpoints` are the counters of other servers by their names,
    `limits` those of executions, `ended_runs` counts runs that were ended, by reason. `traces` are
    the `headrace.placement.upstream.connection.CallTraces`, if there are any.
    """

    signature: Signature
    scheduler: Scheduler
    host: ModelServices
    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    endpoints: dict[str, EndpointCounts] = field(default_factory=dict)
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    ended_runs: Counter[str] = field(default_factory=Counter)
    traces: Any = None


class PlacedInstance(Protocol):
    """One instance; other servers are one together.

    `concurrency` is how many batches may be under way at a time, 0 for one after the other.
    """

    @property
    def name(self) -> str:
        """The name of the instance, unique in its version."""

    @property
    def kind(self) -> InstanceKind:
        """Where its next batch runs."""

    @property
    def concurrency(self) -> int:
        """How many batches it runs at a time, 0 for one after the other."""


class StallingInstance(PlacedInstance, Protocol):
    """An instance whose batches are watched; `silent` is for how many seconds one got nowhere."""

    @property
    def silent(self) -> float:
        """Seconds without progress, as of the last look."""


class Placement(ABC):
    """The instances of one backend for one version."""

    @abstractmethod
    def __iter__(self) -> Iterator[PlacedInstance]:
        """Instances that serve; those that finish what they have are none."""

    @abstractmethod
    def add(
        self,
        name: str,
        model: Any,
        kind: InstanceKind | AutoChoice,
        place: Callable[[int], Array | None] | None = None,
    ) -> None:
        """Put a loaded instance behind the scheduler: `model` is what its backend has loaded.

        In this process, batches are put together in memory that `place` gives, where it gives some.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Give an instance nothing more, and close it once it has finished what it has."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """True if any instance executes what it is given."""

    @property
    def obstacle(self) -> str:
        """Why nothing executes what it is given, where `healthy` is False."""
        texts = [f"{i.name} has made no progress for {i.silent:.0f} s" for i in self.stalled]
        return f"stalled: {', '.join(texts)}" if texts else "it has no instances"

    @property
    @abstractmethod
    def given_up(self) -> bool:
        """True if no instance is there, and none is expected to come back soon."""

    @abstractmethod
    def waiting_error(self) -> ServerError:
        """The error of calls that wait while everything is given up."""

    @abstractmethod
    def leave(self, grace: float) -> None:
        """End after `grace` seconds what no client waits for: the version is being unloaded."""

    @abstractmethod
    def close(self) -> None:
        """Watch instances no more; the scheduler closes them."""

    @abstractmethod
    async def closed(self) -> None:
        """Wait until all instances are gone."""

    @property
    def stalled(self) -> Sequence[StallingInstance]:
        """Instances whose batch has made no progress for too long."""
        return ()

    @property
    def pids(self) -> Mapping[str, int]:
        """Processes of instances that have their own, by name; 0 for one that does not run."""
        return {}

    def in_sequence(
        self, expect: Callable[[int], None], failed: Callable[[str, int], None]
    ) -> SequenceQueue | None:
        """A stage that keeps each sequence on one server; the rest is for `SequenceQueue`."""
        return None

    @property
    def workers(self) -> WorkerSeries | None:
        """The worker processes for a scrape; None if it has none."""
        return None

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The other servers for a scrape."""
        return ()
