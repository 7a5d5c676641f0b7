"""The scheduler of a version."""

import asyncio
from collections.abc import Callable, Sequence

from headrace.core.call import Call
from headrace.core.limits import ModelLoad
from headrace.engine.loading import LoadedVersion
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batcher import Batcher, DividingBatcher, LoopClock
from headrace.scheduling.quarantine import Quarantine


def make_batcher(
    loaded: LoadedVersion,
    version: str,
    loop: asyncio.AbstractEventLoop,
    statistics: VersionStatistics,
    report: Callable[[Sequence[Call], Exception], None],
    load: ModelLoad,
) -> Batcher:
    """A scheduler without instances; `report` is told which requests a backend failed on.

    `load` counts the requests of all versions of the model.
    """
    models = [instance.model for instance in loaded.instances]
    alike = next((model.alike for model in models if model.alike is not None), None)
    deaths = next((m.quarantine_deaths for m in models if m.quarantine_deaths is not None), None)
    quarantine = None if deaths is None else Quarantine(loaded.signature.model, deaths)
    given = (
        loaded.signature, version, loaded.scheduling, LoopClock(loop), statistics, report,
        quarantine, load,
    )  # fmt: skip
    return Batcher(*given) if alike is None else DividingBatcher(*given, alike=alike)
