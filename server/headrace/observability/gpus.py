"""Prometheus series of GPUs, under Triton's names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.observability.nvml import GpuReading

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """GPUs as a scrape sees them, and the bytes of page-locked memory: in all, and in use."""

    readings: Sequence[GpuReading] = ()
    pinned: tuple[int, int] | None = None


_FAMILIES: tuple[tuple[str, str, str, Callable[[GpuReading], float | None]], ...] = (
    ("nv_gpu_memory_total_bytes", "Memory of a GPU", "gauge", lambda r: r.memory_total),
    ("nv_gpu_memory_used_bytes", "Memory of a GPU in use", "gauge", lambda r: r.memory_used),
    ("nv_gpu_utilization", "Share of time that a GPU computes, 0 to 1", "gauge",
     lambda r: r.utilization),
    ("nv_gpu_power_usage", "Watts that a GPU takes", "gauge", lambda r: r.power_usage),
    ("nv_gpu_power_limit", "Watts that a GPU may take", "gauge", lambda r: r.power_limit),
    ("nv_energy_consumption", "Joules that a GPU has taken since its driver was loaded", "counter",
     lambda r: r.energy),
)  # fmt: skip


def gpu_families(series: GpuSeries) -> "Iterator[Metric]":
    """The families that have samples: none where there are no GPUs."""
    from prometheus_client.core import Metric  # as late as that: see `metrics`

    for name, documentation, kind, value in _FAMILIES:
        family = Metric(name, documentation, kind)
        for reading in series.readings:
            found = value(reading)
            if found is not None:
                family.add_sample(name, {"gpu_uuid": reading.uuid}, found)
        if family.samples:
            yield family
    if series.pinned is not None:
        for name, documentation, size in zip(
            ("nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"),
            ("Page-locked memory for copies to GPUs", "Page-locked memory in use"),
            series.pinned,
            strict=True,
        ):
            family = Metric(name, documentation, "gauge")
            family.add_sample(name, {}, size)
            yield family
