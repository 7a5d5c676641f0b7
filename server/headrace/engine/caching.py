"""The interface of the response cache, an optional part, to the versions that it answers for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.call import Submit
from headrace.core.limits import ModelLoad
from headrace.engine.chain import StageModel
from headrace.engine.shared_memory import Expect
from headrace.engine.workbench import Workbench
from headrace.observability.statistics import Sourced, VersionStatistics
from headrace.repository.model_files import Content
from headrace.scheduling.clock import Clock

OPT_OUT = "response_cache"  # the request parameter; false: no answer of the cache, and none for it


@dataclass(frozen=True, slots=True)
class CachedParts:
    """The parts of a running version that its cache uses.

    `expect` announces calls to its scheduler, `load` counts its requests in flight, `headers` are
    those of clients that its upstreams get; see `ResponseCache.renew` for those of its steps'.
    """

    clock: Clock
    expect: Expect
    load: ModelLoad
    bench: Workbench
    statistics: VersionStatistics
    headers: Sequence[str]


class VersionCache(Protocol):
    """The answers of one version, from its load to its end; its keys are those of no other."""

    def stage(self, parts: CachedParts, submit: Submit) -> Submit:
        """The stage that answers checked calls, or passes them to `submit`; on the event loop."""

    def close(self) -> None:
        """Drop the answers: the version has finished its requests."""


class ResponseCache(Protocol):
    """The cache of an engine."""

    def version(self, model: StageModel, content: Content, composed: bool) -> VersionCache:
        """The cache of a version whose answers depend on `content`; on a loading thread.

        Those of a `composed` one, an ensemble, depend on other models, too: see `renew`.
        """

    def renew(self, headers: Callable[[str], Sequence[str]]) -> None:
        """Drop the answers of composed versions: other models may answer their steps now.

        `headers` are those of clients that the steps of a model get from now on.
        """

    def families(self) -> Iterable[Sourced]:
        """The metrics of the cache."""

    async def close(self) -> None:
        """Close connections; no version is left by then."""
