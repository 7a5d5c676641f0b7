"""Placements: the instances of a version in this process, in workers, or on upstreams.

A version has one placement for each backend with its loaded instances, which handles everything
that depends on the place; see `Servable.placement` in `headrace.placement.loaded`.
Owned by the event-loop thread.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.core.call import Call
from headrace.core.errors import ServerError, Unavailable
from headrace.core.limits import ExecutionLimits, ModelLoad
from headrace.core.signature import Signature
from headrace.core.tensors import Array
from headrace.observability.statistics import (
    EndpointCounts,
    EndpointSeries,
    VersionStatistics,
    WorkerSeries,
)
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.scheduling.scheduler import InstanceScheduler, Scheduler
from headrace.scheduling.sequences import SequenceQueue


class ModelServices(Protocol):
    """The server's services for models."""

    def submit(self, call: Call, inside: bool) -> None:
        """Run a model; raises `ServerError`.

        `inside` means that the calling model is blocked until the answer.
        """

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Execute a control operation of a model, and answer once, with its result or error."""

    def metric(self, document: Mapping[str, Any]) -> None:
        """Update one of the model's own metrics; invalid documents raise any exception."""


class NoServices:
    """Services that are unavailable: every call fails with `text`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def submit(self, call: Call, inside: bool) -> None:
        """Raise `Unavailable`."""
        raise Unavailable(self._text)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Answer with an error."""
        answer(None, Unavailable(self._text))

    def metric(self, document: Mapping[str, Any]) -> None:
        """Do nothing: metric updates are kept until the model serves."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The context of a version for its placements.

    `changed` is called when `healthy` or `given_up` of a placement may have changed. `host`
    provides services to models. `endpoints` are the counters of upstreams by name, `limits` those
    of executions, `ended_runs` counts terminated runs, by reason. `traces` are the
    `headrace.placement.upstream.connection.CallTraces`, if any.
    """

    signature: Signature
    scheduler: InstanceScheduler
    host: ModelServices
    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    endpoints: dict[str, EndpointCounts] = field(default_factory=dict)
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    ended_runs: Counter[str] = field(default_factory=Counter)
    traces: Any = None


class PlacedInstance(Protocol):
    """One instance; a model's upstreams count as one.

    `concurrency` is the number of concurrent batches, 0 for one after the other.
    """

    @property
    def name(self) -> str:
        """The name of the instance, unique in its version."""

    @property
    def kind(self) -> InstanceKind:
        """The place where its next batch runs."""

    @property
    def concurrency(self) -> int:
        """The number of concurrent batches, 0 for one after the other."""


class StallingInstance(PlacedInstance, Protocol):
    """An instance whose batches are watched for progress."""

    @property
    def silent(self) -> float:
        """Seconds without progress, as of the last look."""


class Placement(ABC):
    """The instances of one backend for one version."""

    @abstractmethod
    def __iter__(self) -> Iterator[PlacedInstance]:
        """The serving instances, without those that only finish their requests."""

    @abstractmethod
    def add(
        self,
        name: str,
        model: Any,
        kind: InstanceKind | AutoChoice,
        place: Callable[[int], Array | None] | None = None,
    ) -> None:
        """Add a loaded instance to the scheduler; `model` is what its backend has loaded.

        In this process, `place` may allocate the memory in which batches are gathered.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an instance, and close it once it has finished its requests."""

    def memory(self, nbytes: int, begin: int) -> memoryview | None:
        """Memory for a message of `nbytes` whose tensors begin at `begin`; None: any will do."""
        return None

    async def settled(self) -> None:  # noqa: B027
        """Wait until removed instances without requests are finalized and gone."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """True if any instance executes batches."""

    @property
    def obstacle(self) -> str:
        """The reason why no instance executes batches, if `healthy` is False."""
        texts = [f"{i.name} has made no progress for {i.silent:.0f} s" for i in self.stalled]
        return f"stalled: {', '.join(texts)}" if texts else "it has no instances"

    @property
    @abstractmethod
    def given_up(self) -> bool:
        """True if there is no instance, and none is expected back soon."""

    @abstractmethod
    def waiting_error(self) -> ServerError:
        """The error of calls that wait while `given_up`."""

    @abstractmethod
    def leave(self, grace: float) -> None:
        """Start draining: abandoned executions are ended after `grace` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Stop watching instances; the scheduler closes them."""

    @abstractmethod
    async def closed(self) -> None:
        """Wait until all instances are gone."""

    @property
    def stalled(self) -> Sequence[StallingInstance]:
        """Instances whose batch makes no progress."""
        return ()

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes of instances, by name; 0 for one that is not running."""
        return {}

    def in_sequence(
        self, scheduler: Scheduler, failed: Callable[[str, int], None]
    ) -> SequenceQueue | None:
        """The stage that keeps each sequence on one upstream; arguments of `SequenceQueue`."""
        return None

    def in_place_of(
        self, scheduler: Scheduler, version: str, statistics: VersionStatistics, load: ModelLoad
    ) -> Scheduler:
        """The scheduler of the version's calls: by default the one that it was given."""
        return scheduler

    @property
    def workers(self) -> WorkerSeries | None:
        """The worker processes, for a scrape; None if there are none."""
        return None

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The upstreams, for a scrape."""
        return ()
