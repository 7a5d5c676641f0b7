"""The scheduler of a version."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.call import Call
from headrace.core.limits import ModelLoad
from headrace.engine.loading import LoadedVersion
from headrace.execution.model_kinds import in_worker, is_elsewhere
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batcher import Batcher, DividingBatcher, LoopClock
from headrace.scheduling.quarantine import Quarantine

if TYPE_CHECKING:
    from headrace.execution.remote.model import RemoteModel


def remote_model(loaded: LoadedVersion) -> "RemoteModel | None":
    """The model, if other servers run it."""
    return next((i.model for i in loaded.instances if is_elsewhere(i.model)), None)


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
    remote = remote_model(loaded)
    kind: Callable[..., Batcher] = Batcher
    if remote is not None:
        kind = partial(DividingBatcher, alike=remote.forwarding.alike)
    return kind(
        loaded.signature, version, loaded.scheduling, LoopClock(loop), statistics, report,
        _quarantine(loaded), load,
    )  # fmt: skip


def _quarantine(loaded: LoadedVersion) -> Quarantine | None:
    """The quarantine as a Python model's configuration has it."""
    for item in loaded.instances:
        if in_worker(item.model):
            return Quarantine(loaded.signature.model, item.model.options.quarantine_deaths)
    return None
