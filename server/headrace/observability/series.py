"""The server and its versions as a scrape of the metrics sees them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.observability.answers import Sample
from headrace.observability.backends import BackendSeries
from headrace.observability.endpoints import EndpointSeries
from headrace.observability.statistics import VersionStatistics
from headrace.observability.workers import WorkerSeries


@dataclass(frozen=True, slots=True)
class VersionSeries:
    """One model version as a scrape sees it. `tags` are the configuration's `metric_tags`.

    `workers` is None where the model runs in this process. `memory_bytes` is 0 if it is not known.
    `instances` has how many there are by their kind, `endpoints` the servers that run it, if others
    do. `gpu_memory` has the bytes that it takes of each GPU, `backends` all of them if there are
    several. `stalled` is how many instances have made no progress for too long.
    """

    model: str
    version: str
    statistics: VersionStatistics
    pending: int
    load_seconds: float
    tags: Mapping[str, str] = field(default_factory=dict)
    workers: WorkerSeries | None = None
    memory_bytes: int = 0
    instances: Mapping[str, int] = field(default_factory=dict)
    endpoints: Sequence[EndpointSeries] = ()
    gpu_memory: Mapping[str, int] = field(default_factory=dict)
    backends: Sequence[BackendSeries] = ()
    stalled: int = 0


class LoadCounts(NamedTuple):
    """How often a model was loaded, or loaded again, and how often that failed."""

    model: str
    succeeded: int
    failed: int


class MemoryCounts(NamedTuple):
    """Models in memory, the bytes that they may take, and how many have gone for others."""

    models: int
    budget: int
    evictions: int


@dataclass(frozen=True, slots=True)
class ServerSeries:
    """The server as a scrape sees it: what is admitted, what may be, and what was refused.

    `memory` is None if all models are always loaded. `connections` are by door, `given_up` those
    whose clients made no progress, by what they did not do. `answers` are those of all requests.
    """

    ready: bool
    admitted_requests: int
    admitted_bytes: int
    max_requests: int
    max_bytes: int
    overloaded: int
    loads: Sequence[LoadCounts] = ()
    memory: MemoryCounts | None = None
    incoming: int = 0
    unread_bytes: int = 0
    connections: Mapping[str, int] = field(default_factory=dict)
    max_connections: int = 0
    refused_connections: int = 0
    given_up: Mapping[str, int] = field(default_factory=dict)
    dropped_lines: int = 0  # of the log
    peak_bytes: int = 0
    answers: Iterable[Sample] = ()
    instance_id: str = ""  # of the process
    failed_accepts: int = 0
