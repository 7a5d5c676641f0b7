"""The series of GPUs."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from headrace.observability.series import GpuReading, GpuSeries
from tests.engine.metrics.fakes import FakeEngine, collector


def gpu_families(gpus: GpuSeries) -> Iterator[Metric]:
    """The families of GPUs, and of memory for them, in a scrape of a server without models."""
    names = ("nv_gpu", "nv_energy", "nv_pinned")
    return (
        part for part in collector(FakeEngine(), gpus=gpus).parts() if part.name.startswith(names)
    )


def test_without_gpus_there_are_no_families() -> None:
    assert list(gpu_families(GpuSeries())) == []


def test_a_gpu_has_what_it_tells() -> None:
    readings = (
        GpuReading("GPU-a", 1000, 100, 0.25, 70.5, 300.0, 12.5),
        GpuReading("MIG-b", 2000, 200),
    )
    found = {
        (sample.name, sample.labels.get("gpu_uuid")): sample.value
        for family in gpu_families(GpuSeries(readings, (1024, 512)))
        for sample in family.samples
    }
    assert found == {
        ("nv_gpu_memory_total_bytes", "GPU-a"): 1000,
        ("nv_gpu_memory_total_bytes", "MIG-b"): 2000,
        ("nv_gpu_memory_used_bytes", "GPU-a"): 100,
        ("nv_gpu_memory_used_bytes", "MIG-b"): 200,
        ("nv_gpu_utilization", "GPU-a"): 0.25,
        ("nv_gpu_power_usage", "GPU-a"): 70.5,
        ("nv_gpu_power_limit", "GPU-a"): 300.0,
        ("nv_energy_consumption", "GPU-a"): 12.5,
        ("nv_pinned_memory_pool_total_bytes", None): 1024,
        ("nv_pinned_memory_pool_used_bytes", None): 512,
    }
