"""The report of a version: what scrapes, statistics and the index read of it.

Computed when it is read: nothing here is kept up to date by requests, but for the counters. Without
loaded parts, it is that of a version without instances. Owned by the event-loop thread.
"""

from collections.abc import Iterable, Mapping, Sequence

from headrace.engine.loading import GpuMemory, LoadedInstance
from headrace.engine.running import RunningVersion
from headrace.observability.statistics import (
    BackendSeries,
    EndpointSeries,
    SequenceSeries,
    VersionStatistics,
    WorkerSeries,
)
from headrace.placement.placement import PlacedInstance, Placement


class VersionReport:
    """The report of one version; `running` are its parts while it is loaded.

    Its counters are possibly taken over from a replaced version.
    """

    def __init__(self, statistics: VersionStatistics) -> None:
        self._statistics = statistics
        self.running: RunningVersion | None = None
        self._measured: dict[str, int] = {}  # bytes of instances, where measured after the load

    @property
    def statistics(self) -> VersionStatistics:
        """The counters, up to date."""
        self._statistics.settle()
        return self._statistics

    @property
    def instances(self) -> list[PlacedInstance]:
        """The instances, wherever they run; a model's upstreams count as one."""
        return [] if self.running is None else self.running.instances

    @property
    def stalled(self) -> list[PlacedInstance]:
        """The instances whose batch makes no progress."""
        return [instance for placement in self._placements for instance in placement.stalled]

    @property
    def busy(self) -> bool:
        """True if requests are unfinished."""
        return self.running is not None and self.running.scheduler.busy

    @property
    def pending(self) -> int:
        """Accepted requests that no instance has started."""
        return 0 if self.running is None else self.running.pending

    @property
    def detour(self) -> str:
        """The backend in use instead of a preferred one; "" if there is none."""
        fail_over = None if self.running is None else self.running.fail_over
        return "" if fail_over is None else fail_over.detour

    @property
    def load_seconds(self) -> float:
        """The duration of the load; 0 before it."""
        return 0.0 if self.running is None else self.running.loaded.seconds

    # --- by where instances run

    @property
    def workers(self) -> WorkerSeries | None:
        """The worker processes; None if there are none."""
        found = (placement.workers for placement in self._placements)
        return next((each for each in found if each is not None), None)

    @property
    def sequences(self) -> SequenceSeries | None:
        """The sequences, also those on upstreams; None if the model has none."""
        stage = None if self.running is None else self.running.sequences
        return None if stage is None else stage.series

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The upstreams, if there are any."""
        return [endpoint for placement in self._placements for endpoint in placement.endpoints]

    @property
    def backends(self) -> Sequence[BackendSeries]:
        """The backends, if there are several."""
        fail_over = None if self.running is None else self.running.fail_over
        return () if fail_over is None else fail_over.series()

    # --- memory

    @property
    def memory_bytes(self) -> int:
        """Memory of the instances at the last measurement; 0 if unknown.

        See `headrace.observability.machine` for its accuracy.
        """
        pids = self.instance_pids
        return sum(
            self._measured.get(item.name, item.memory)
            for item in self._loaded
            if pids.get(item.name) != 0
        )

    @property
    def gpu_memory(self) -> list[GpuMemory]:
        """GPU memory taken by the instances when they were loaded, by GPU."""
        found: dict[int, GpuMemory] = {}
        for item in (item.gpu for item in self._loaded if item.gpu is not None):
            before = found[item.device].nbytes if item.device in found else 0
            found[item.device] = GpuMemory(item.device, item.uuid, before + item.nbytes)
        return [found[device] for device in sorted(found) if found[device].nbytes]

    def worker_pids(self) -> dict[str, int]:
        """The process ids of instances with a running worker."""
        return {name: pid for name, pid in self.instance_pids.items() if pid}

    def note_memory(self, found: Mapping[str, int]) -> None:
        """Store the measured bytes of instances."""
        self._measured |= found

    def forget_memory(self, names: Iterable[str]) -> None:
        """Drop the measurements of removed instances."""
        for name in names:
            self._measured.pop(name, None)

    @property
    def _placements(self) -> Iterable[Placement]:
        return () if self.running is None else self.running.placements.values()

    @property
    def _loaded(self) -> Sequence[LoadedInstance]:
        return () if self.running is None else self.running.loaded.instances

    @property
    def instance_pids(self) -> dict[str, int]:
        """The process ids of instances in workers, by name; 0 for one that does not run."""
        return {name: pid for placement in self._placements for name, pid in placement.pids.items()}
