"""Model versions as a scrape of the metrics sees them."""

from collections import Counter

from headrace.engine.version import ModelVersion
from headrace.observability.series import VersionSeries


def series_of(version: ModelVersion) -> VersionSeries:
    """What is told of a version that serves."""
    return VersionSeries(
        version.model,
        version.name,
        version.statistics,
        version.pending,
        version.load_seconds,
        dict(version.config.metric_tags),
        version.workers,
        version.memory_bytes,
        Counter(instance.kind.value for instance in version.instances),
        version.endpoints,
        {on_gpu.uuid: on_gpu.nbytes for on_gpu in version.gpu_memory},
        version.backends,
        len(version.stalled),
    )
