"""Models by name, their versions, and the interface for the traffic between versions.

Owned by the event-loop thread.
"""

from collections.abc import Callable, Iterable, Mapping

from headrace.core.errors import InvalidRequest, ModelNotReady, NotFound, Unavailable
from headrace.engine.admission import Admission
from headrace.engine.entrance import Router
from headrace.engine.shared_outcome import SharedOutcome
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import Sourced, VersionStatistics
from headrace.protocol.pb.traffic_pb2 import ModelTrafficResponse
from headrace.repository.layout import ModelSource

NO_TRAFFIC = "this server has no rules for the traffic between versions"
_LONGEST_VERSION = len(str(2**63))


class Model:
    """All versions of one model, by number; `reason` is set if there are none.

    `source` is the source of the versions. `loading` is set during a load, `wanted` is the source
    of the next load. `unloaded` is true if the last command was an unload, `unreadable` if the last
    load failed before any version was examined, `added` if the model was added to a running server.
    `loads` and `failed_loads` count.
    """

    def __init__(
        self,
        source: ModelSource,
        statistics: Callable[[], VersionStatistics] = VersionStatistics,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """`statistics` makes the counters of a version; `announce` is called when `loaded` may
        have changed.
        """
        self.name = source.name
        self.source = source
        self._statistics = statistics
        self.versions: dict[int, ModelVersion] = {}
        self.reason = ""
        self.wanted: ModelSource | None = None
        self.loading: SharedOutcome[str] | None = None
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
        """True if everything that should serve was loaded; an added model counts from its first
        success.
        """
        if self.unloaded or (self.added and not self.loads):
            return True  # even while unloaded versions drain
        versions = [v for v in self.versions.values() if v.ready or not v.added]
        return bool(versions) and all(version.ready for version in versions)

    @property
    def coming(self) -> bool:
        """True during the first load of a model that was added to a running server."""
        return self.added and self.loading is not None and not (self.loads or self.failed_loads)

    def want(self, source: ModelSource) -> None:
        """Set the source of the next load."""
        self.wanted = source
        self.unloaded = False
        self._announce()

    def expect(self, numbers: Iterable[int]) -> None:
        """Add versions that are being loaded, unless others serve under their numbers."""
        serves = self.newest() is not None
        for number in numbers:
            known = self.versions.get(number)
            if known is None or not known.ready:
                statistics = known.report.statistics if known else self._statistics()
                version = ModelVersion(self.name, number, statistics)
                version.added = known.added if known is not None else serves
                self.put(version)

    def put(self, version: ModelVersion) -> None:
        """Store a version under its number, replacing any other."""
        self.versions[version.number] = version
        self._descending = [self.versions[n] for n in sorted(self.versions, reverse=True)]
        self._announce()

    def remove(self, number: int) -> ModelVersion:
        """Remove a version and return it."""
        version = self.versions.pop(number)
        self._descending.remove(version)
        self._announce()
        return version

    def refuse(self, number: int, reason: str) -> None:
        """Note that a version failed to load: the one that serves stays, with the reason."""
        version = self.versions[number]
        if version.ready:
            version.reason = f"a change could not be loaded: {reason}"
        else:
            version.fail(reason)
        self._announce()

    def find(self, version: str) -> ModelVersion:
        """The version of that number, if it takes requests; "" for the highest one that does.

        Raises `NotFound`, `ModelNotReady` while it is being loaded, or `InvalidRequest` for an
        invalid number.
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
            if not self.versions:  # the set of versions is not known yet
                self._refuse_while_loading()
            raise NotFound(
                f"Request for unknown model: '{self.name}' version {version} is not found"
            )
        if not found.ready:
            raise found.not_ready()
        return found

    @property
    def awaited(self) -> bool:
        """True if versions of it are being loaded."""
        return self.loading is not None and not self.unloaded

    def _refuse_while_loading(self) -> None:
        """Raise `ModelNotReady` while versions are being loaded."""
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
        """Versions that take requests, ascending."""
        return [self.versions[n] for n in sorted(self.versions) if self.versions[n].ready]

    def why(self, version: str) -> str:
        """The reason why a version, or for "" any, is not loaded, for the index; "" if unknown."""
        reasons = {v.reason for v in self.versions.values() if v.name == version or not version}
        return "; ".join(sorted(filter(None, reasons))) or self.reason

    @property
    def states(self) -> str:
        """The state of each version, in brackets; "" without versions."""
        states = ", ".join(f"version {v.name} is {v.state}" for v in self.versions.values())
        return f" ({states})" if states else ""


def parse_version(text: str) -> int:
    """A version as a number; raises `InvalidRequest`."""
    # Length first: Python refuses to convert thousands of digits, with an error of its own.
    digits = text.isascii() and text.isdigit() and len(text) <= _LONGEST_VERSION
    if not digits or int(text) >= 2**63:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:40]}',"
            " version should be an integral value > 0"
        )
    return int(text)


class Traffic:
    """Rules for requests without a version: by default, the highest ready version serves.

    One for all models; see `headrace.plugins.traffic` for the plugin.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        changed: Callable[[], None],
        allowed: bool = False,
    ) -> None:
        """`changed` is called when requests for a model may be routed differently; `allowed` tells
        if clients may change the rules.
        """
        self.models = models
        self.admission = admission
        self.changed = changed
        self.allowed = allowed

    @property
    def headers(self) -> Mapping[str, str]:
        """The header that the rules evaluate, by model."""
        return {}

    def follow(self, model: Model) -> None:
        """Update to a model's current versions and configuration."""

    def router(self, model: Model) -> Router | None:
        """The target of requests without a version; None for the highest version."""
        return None

    def reason(self, name: str, version: int) -> str:
        """The reason why a version has lost its requests; "" if it has not."""
        return ""

    def metrics(self) -> Iterable[Sourced]:
        """Metric families of the traffic."""
        return ()

    def close(self) -> None:
        """Stop deciding."""

    # Client operations; these raise `Unavailable` without a plugin.

    def document(self, name: str) -> ModelTrafficResponse:
        """The rules of a model, and their effects; raises `NotFound`."""
        raise Unavailable(NO_TRAFFIC)

    def set(self, name: str, document: object) -> None:
        """Replace a model's rules from a JSON document; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def reset(self, name: str) -> None:
        """Restore the rules of a model's configuration; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def promote(self, name: str, version: str, reason: str = "") -> None:
        """Give a version all requests; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def roll_back(self, name: str, version: str, reason: str = "") -> None:
        """Give a version's requests to the baseline; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)
