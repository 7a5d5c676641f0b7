"""The scheduler of a version, and what stands before it for a model that other servers run."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.requests import Call
from headrace.core.shares import ModelLoad
from headrace.engine.clock import LoopClock
from headrace.engine.loading import LoadedVersion
from headrace.engine.remote_submission import RemoteSubmission
from headrace.execution.model_kinds import in_worker, is_elsewhere
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.dividing import DividingBatcher
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.sequences import SequenceQueue, Submit

if TYPE_CHECKING:
    from headrace.execution.remote.model import RemoteModel
    from headrace.execution.remote.pool import RemotePool


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


def before(
    remote: "RemoteModel",
    pool: "RemotePool",
    submit: Submit,
    batcher: Batcher,
    statistics: VersionStatistics,
) -> tuple[Submit, SequenceQueue | None]:
    """How requests come to a scheduler whose own way in is `submit`, and where sequences wait."""
    sequences = pool.in_sequence(submit, batcher.expect, statistics.request_failed)
    if sequences is not None:
        submit = sequences.submit
    return RemoteSubmission(submit, remote.options.forward_headers).submit, sequences


def _quarantine(loaded: LoadedVersion) -> Quarantine | None:
    """The quarantine as a Python model's configuration has it."""
    for item in loaded.instances:
        if in_worker(item.model):
            return Quarantine(loaded.signature.model, item.model.options.quarantine_deaths)
    return None
