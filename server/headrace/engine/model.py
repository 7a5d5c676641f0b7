"""A model under one name, with its versions. Owned by the event-loop thread."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from headrace.core.errors import InvalidRequest, ModelNotReady, NotFound, Unavailable
from headrace.engine.admission import Admission
from headrace.engine.doors import Target
from headrace.engine.version import ModelVersion
from headrace.observability.series import TrafficSeries
from headrace.observability.statistics import VersionStatistics
from headrace.repository.layout import ModelSource
from headrace.wire.pb.traffic_pb2 import ModelTrafficResponse

NO_TRAFFIC = "this server has no rules for the traffic between versions"
_LONGEST_VERSION = len(str(2**63))


class Model:
    """All versions of one model, by number; `reason` says why there is none.

    `source` is what its versions were loaded from. `loading` is there while something is being
    loaded, and `wanted` is what is to be loaded after that. `unloaded` is whether that was the last
    that was asked of it, `unreadable` whether its last load has failed before any version was
    looked at. `added` is whether it came to a server that was well without it. `loads` and
    `failed_loads` count.
    """

    def __init__(
        self,
        source: ModelSource,
        statistics: Callable[[], VersionStatistics] = VersionStatistics,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """`statistics` makes the counters of a version; `announce` is called when `loaded` may
        have changed, as it may have now.
        """
        self.name = source.name
        self.source = source
        self._statistics = statistics
        self.versions: dict[int, ModelVersion] = {}
        self.reason = ""
        self.wanted: ModelSource | None = None
        self.loading: asyncio.Task[str] | None = None
        self.unloaded = False
        self.unreadable = False
        self.added = False
        self.loads = 0
        self.failed_loads = 0
        self._descending: list[ModelVersion] = []
        self._announce = announce
        announce()

    @property
    def loaded(self) -> bool:
        """Whether all of it that is to serve was loaded: what was added to what serves, first has
        to serve.
        """
        if self.unloaded or (self.added and not self.loads):
            return True  # whatever what was unloaded has still to finish
        versions = [v for v in self.versions.values() if v.ready or not v.added]
        return bool(versions) and all(version.ready for version in versions)

    def want(self, source: ModelSource) -> None:
        """Be loaded from `source` next."""
        self.wanted = source
        self.unloaded = False
        self._announce()

    def expect(self, numbers: Iterable[int]) -> None:
        """Know of versions that are being loaded; those that serve stay until they are."""
        serves = self.newest() is not None
        for number in numbers:
            known = self.versions.get(number)
            if known is None or not known.ready:
                statistics = known.statistics if known else self._statistics()
                version = ModelVersion(self.name, number, statistics)
                version.added = known.added if known is not None else serves
                self.put(version)

    def put(self, version: ModelVersion) -> None:
        """Have a version stand under its number, in place of any other."""
        self.versions[version.number] = version
        self._descending = [self.versions[n] for n in sorted(self.versions, reverse=True)]
        self._announce()

    def remove(self, number: int) -> ModelVersion:
        """Know of a version no more; the version."""
        version = self.versions.pop(number)
        self._descending.remove(version)
        self._announce()
        return version

    def refuse(self, number: int, reason: str) -> None:
        """A version could not be loaded: what serves under its number goes on, and says why."""
        version = self.versions[number]
        if version.ready:
            version.reason = f"a change could not be loaded: {reason}"
        else:
            version.fail(reason)
        self._announce()

    def find(self, version: str) -> ModelVersion:
        """The version of that number, which takes requests; "" for the highest one that does.

        Raises `NotFound`, `ModelNotReady` while it is being loaded, or `InvalidRequest` for what is
        no number.
        """
        if not version:
            newest = self.newest()
            if newest is None:
                self._refuse_while_loading()
                raise NotFound(
                    f"Request for unknown model: '{self.name}' has no available versions"
                    f"{self.states}"
                )
            return newest
        found = self.versions.get(parse_version(version))
        if found is None:
            if not self.versions:  # which there are is not known yet
                self._refuse_while_loading()
            raise NotFound(
                f"Request for unknown model: '{self.name}' version {version} is not found"
            )
        if not found.ready:
            raise found.not_ready()
        return found

    @property
    def awaited(self) -> bool:
        """Whether versions of it are on their way."""
        return self.loading is not None and not self.unloaded

    def _refuse_while_loading(self) -> None:
        """Raise `ModelNotReady` while versions of it are on their way."""
        if self.awaited:
            raise ModelNotReady(
                f"model '{self.name}' is not ready: it is being loaded{self.states}", retry_after=1
            )

    def newest(self) -> ModelVersion | None:
        """The highest version that takes requests."""
        for version in self._descending:
            if version.ready:
                return version
        return None

    def ready_versions(self) -> list[ModelVersion]:
        """Those that take requests, ascending."""
        return [self.versions[n] for n in sorted(self.versions) if self.versions[n].ready]

    def why(self, version: str) -> str:
        """Why a version, or for "" any, is not loaded, as the index says it; "" if that is not
        known.
        """
        reasons = {v.reason for v in self.versions.values() if v.name == version or not version}
        return "; ".join(sorted(filter(None, reasons))) or self.reason

    @property
    def states(self) -> str:
        """The state of each version, in brackets; empty without any."""
        states = ", ".join(f"version {v.name} is {v.state}" for v in self.versions.values())
        return f" ({states})" if states else ""


def parse_version(text: str) -> int:
    """A version as a number; raises `InvalidRequest`."""
    # By length first: Python refuses to convert thousands of digits, with an error of its own.
    digits = text.isascii() and text.isdigit() and len(text) <= _LONGEST_VERSION
    if not digits or int(text) >= 2**63:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:40]}',"
            " version should be an integral value > 0"
        )
    return int(text)


class Router(Target, Protocol):
    """What stands for the versions of a model that has rules for requests without a version."""

    @property
    def ready(self) -> bool:
        """Whether it stands as it was found."""

    @property
    def obstacle(self) -> str:
        """Why requests are not executed; "" if they are."""

    def waits_for(self, version: object) -> bool:
        """Whether a request may have to wait until this version has done what it does."""


class Traffic:
    """Which versions serve requests that name none: without a plugin, the highest that is ready.

    One for all models; see `headrace.plugins.traffic` for what a plugin makes of it.
    """

    headers: Mapping[str, str] = {}  # by model, the header whose value decides

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when requests for a model may go elsewhere than before."""
        self.models = models
        self.admission = admission
        self.changed = changed

    def follow(self, model: Model) -> None:
        """Take other versions of a model than before, and another configuration."""

    def router(self, model: Model) -> Router | None:
        """What serves requests without a version, if that is not the highest version."""
        return None

    def reason(self, name: str, version: int) -> str:
        """Why a version has lost its requests, "" if it has not."""
        return ""

    def series(self) -> Sequence[TrafficSeries]:
        """The traffic as a scrape sees it."""
        return ()

    def watch_headers(self, callback: Callable[[Mapping[str, str]], None]) -> None:
        """Call `callback` with `headers` whenever they change."""

    def close(self) -> None:
        """Decide nothing any more."""

    # What clients may ask for; raises `Unavailable` without a plugin.

    def document(self, name: str) -> ModelTrafficResponse:
        """The rules of a model, and what they do; raises `NotFound`."""
        raise Unavailable(NO_TRAFFIC)

    def set(self, name: str, document: object) -> None:
        """Replace a model's rules by those in a JSON document; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def reset(self, name: str) -> None:
        """Go back to the rules of a model's configuration; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def promote(self, name: str, version: str, reason: str = "") -> None:
        """Give a version all requests; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def roll_back(self, name: str, version: str, reason: str = "") -> None:
        """Give a version's requests to the baseline; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)
