"""Fakes of an engine and its versions for the metrics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.host import HostFacts
from headrace.engine.metrics import ServerCollector
from headrace.engine.model import Traffic
from headrace.engine.pieces import Pieces
from headrace.observability.audit import Audit
from headrace.observability.capture import Capture
from headrace.observability.machine import Machine
from headrace.observability.model_metrics import ModelMetrics
from headrace.observability.statistics import GpuSeries, MetricsOptions, VersionStatistics
from headrace.plugins.traffic.control import TrafficControl
from headrace.repository.catalogue import Catalogue


@dataclass
class FakeVersion:
    """A serving version."""

    model: str
    name: str
    statistics: VersionStatistics
    pending: int = 0
    load_seconds: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)
    stalled: Sequence[object] = ()
    ready: bool = True
    workers: None = None
    sequences: None = None
    memory_bytes: int = 0
    instances: Sequence[object] = ()
    endpoints: Sequence[object] = ()
    gpu_memory: Sequence[object] = ()
    backends: Sequence[object] = ()

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(metric_tags=self.tags)

    @property
    def report(self) -> "FakeVersion":
        return self


@dataclass
class FakeEngine:
    """An engine with these versions, load counts and load failures."""

    serving: Sequence[FakeVersion] = ()
    known: Sequence[tuple[str, int, int]] = ()
    audit: Audit | None = None
    capture: Capture | None = None
    ready: bool = True
    admission: Admission = field(default_factory=lambda: Admission(0, 0))
    instance_id: str = "this"
    loads: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(counts=lambda: None))
    logs: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dropped=0))
    host: HostFacts = field(default_factory=HostFacts)
    model_metrics: ModelMetrics = field(default_factory=ModelMetrics)
    pieces: Pieces = field(default_factory=Pieces)
    control: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(catalogue=Catalogue()))

    @property
    def traffic(self) -> Traffic:
        return TrafficControl({}, self.admission, lambda: None)

    def versions(self) -> Iterator[FakeVersion]:
        return iter(self.serving)

    def models(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, loads=loads, failed_loads=failed)
            for name, loads, failed in self.known
        ]


def collector(
    engine: FakeEngine,
    machine: Machine | None = None,
    options: MetricsOptions | None = None,
    gpus: GpuSeries | None = None,
) -> ServerCollector:
    """The collector that turns an engine's state into metric families."""
    found = gpus or GpuSeries()
    return ServerCollector(cast(Engine, engine), machine, options, lambda: found)
