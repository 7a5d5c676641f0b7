"""Plugins: extensions in installed packages, found by entry points and imported when needed.

A package declares `name = "module:attribute"` under a group: a `PluginGroup` of the type that its
plugins have, which stands beside that type. The server's own plugins are in `OWN`, since a scan of
installed packages takes longer than to start a command; the metadata of the server's package, made
by `hatch_build.py`, has the same. A plugin that cannot be loaded is logged with its traceback and
left out; so is one whose name is taken: the server's own plugins come first.

`PARTS` are parts of the server that other packages do not add to, each an `OptionalPart` of its
type beside the code that uses it. A plugin is removed with its lines here; a test removes each.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from headrace.core.errors import LoadFailed

log = logging.getLogger(__name__)

OWN: Mapping[str, Mapping[str, str]] = {
    # In the order in which they examine a model's files.
    "headrace.backends": {
        "onnxruntime": "headrace.placement.local.onnx:OnnxBackend.of",
        "python": "headrace.placement.worker.python_backend:PythonBackend.of",
        "sklearn": "headrace.plugins.loaders.backend:sklearn",
        "xgboost": "headrace.plugins.loaders.backend:xgboost",
        "lightgbm": "headrace.plugins.loaders.backend:lightgbm",
        "catboost": "headrace.plugins.loaders.backend:catboost",
        "mlflow": "headrace.plugins.loaders.backend:mlflow",
        "pmml": "headrace.plugins.loaders.backend:pmml",
        "mojo": "headrace.plugins.loaders.backend:mojo",
        "pytorch": "headrace.plugins.loaders.backend:pytorch",
        "triton": "headrace.placement.upstream.backend:RemoteBackend.of",
        "ensemble": "headrace.plugins.ensembles.backend:EnsembleBackend",
    },
    "headrace.stages": {
        "traffic": "headrace.plugins.traffic.control:TrafficStage",
    },
    "headrace.commands": {
        "serve": "headrace.cli.serve:SERVE",
        "consume": "headrace.plugins.inboxes.command:CONSUME",
        "infer": "headrace.cli.commands.infer:INFER",
        "status": "headrace.cli.commands.status:STATUS",
        "top": "headrace.cli.commands.top:TOP",
        "models": "headrace.cli.commands.models:MODELS",
        "environments": "headrace.plugins.environments.command:ENVIRONMENTS",
        "triton": "headrace.plugins.triton.command:TRITON",
        "certificates": "headrace.cli.commands.certificates:CERTIFICATES",
        "stubs": "headrace.cli.commands.stubs:STUBS",
        "run": "headrace.plugins.run.command:RUN",
        "completion": "headrace.cli.commands.completion:COMPLETION",
        "access": "headrace.plugins.access.command:ACCESS",
        "activator": "headrace.plugins.activator.command:ACTIVATOR",
        "replay": "headrace.plugins.capture.commands.replay:REPLAY",
        "explain": "headrace.plugins.explain.commands.explain:EXPLAIN",
        "tune": "headrace.plugins.explain.commands.tune:TUNE",
    },
    "headrace.protocols": {
        "v2": "headrace.placement.upstream.options:v2_protocol",
        "tfserving": "headrace.plugins.dialects:tfserving_protocol",
        "torchserve": "headrace.plugins.dialects:torchserve_protocol",
    },
    "headrace.environments": {
        "python": "headrace.plugins.environments.resolve:demanded",
    },
    "headrace.sources": {
        "pools": "headrace.plugins.triton.command:take_pools",
    },
    "headrace.doors": {  # HTTP and gRPC are none
        "flight": "headrace.plugins.flight.door:FlightDoor",
        "inboxes": "headrace.plugins.inboxes.door:Inboxes",
    },
    "headrace.stores": {
        "s3": "headrace.plugins.stores.objects:object_store",
        "gs": "headrace.plugins.stores.objects:object_store",
        "az": "headrace.plugins.stores.objects:object_store",
        "as": "headrace.plugins.stores.objects:object_store",
        "sqlite": "headrace.plugins.stores.database:database_store",
        "postgresql": "headrace.plugins.stores.database:database_store",
        "mysql": "headrace.plugins.stores.database:database_store",
        "http": "headrace.plugins.stores.web:web_store",
        "https": "headrace.plugins.stores.web:web_store",
        "oci": "headrace.plugins.stores.oci:oci_store",
        "hf": "headrace.plugins.stores.hub:hub_store",
        "mlflow": "headrace.plugins.stores.mlflow_registry:mlflow_store",
    },
    "headrace.pages": {
        "console": "headrace.plugins.console:add_console",
        "openapi": "headrace.plugins.openapi:add_pages",
        "v1": "headrace.plugins.kserve_v1:add_v1",
    },
}
PARTS: Mapping[str, str] = {
    "access": "headrace.plugins.access.file:open_access",
    "audit": "headrace.plugins.audit:audit_log",
    "beam": "headrace.plugins.beam:BeamHandler",
    "capture": "headrace.plugins.capture.opening:open_capture",
    "cache": "headrace.plugins.cache.flights:SharedCache",
    "cuda_memory": "headrace.plugins.cuda_memory:opener",
    "explain": "headrace.plugins.explain.explaining:explain",
    "frontends": "headrace.plugins.frontends.supervisor:Supervisor",
    "functions": "headrace.plugins.functions:load",
    "graphs": "headrace.plugins.ensembles.drawing:draw",
    "grpcio": "headrace.plugins.grpcio:grpcio_server",
    "in_process": "headrace.plugins.in_process:LoadedInProcess",
    "nvml": "headrace.plugins.nvml:Nvml",
    "on_request": "headrace.plugins.on_request:OnRequest",
    "padding": "headrace.plugins.padding:BucketPadding",
    "poll": "headrace.plugins.following:Follower",
    "rate_limiter": "headrace.plugins.rate_limiter:rate_limiter",
    "reload": "headrace.plugins.following:Reloader",
    "sequences": "headrace.plugins.sequences:SequenceBatching",
    "sign": "headrace.plugins.stores.signatures:signed",
    "signatures": "headrace.plugins.stores.signatures:required",
    "traces": "headrace.plugins.traces:trace_sink",
    "traffic": "headrace.plugins.traffic.control:TrafficControl",
    "triton_servers": "headrace.plugins.triton.servers:TritonServers",
    "upstream_memory": "headrace.plugins.upstream_memory.client:sharing_clients",
}
_US = "headrace"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """An entry point: `target` is `module:attribute`, `package` the distribution declaring it."""

    group: str
    name: str
    target: str
    package: str

    @property
    def kind(self) -> str:
        """The kind of plugin in this group, such as backend, stage or command."""
        return self.group.rpartition(".")[2].removesuffix("s")

    def load(self) -> T:
        """Import the target; passes on what the import raises."""
        found: T = resolve(self.target)
        return found

    def try_to(self, make: Callable[[T], R]) -> R | Exception:
        """Return `make(target)`, or the error, which has been logged with its traceback."""
        try:
            return make(self.load())
        except (Exception, SystemExit) as error:
            log.error(
                "plugin left out: %s '%s' (%s) of %s: %s", self.kind, self.name, self.target,
                self.package, error, exc_info=error,
            )  # fmt: skip
            return error if isinstance(error, Exception) else RuntimeError("it called sys.exit")


@dataclass(frozen=True, slots=True)
class PluginGroup(Generic[T]):
    """A group of entry points, each of which names a `T`."""

    name: str

    def own(self) -> dict[str, Plugin[T]]:
        """The server's own plugins by name, without a scan of installed packages."""
        targets = OWN[self.name]
        return {name: Plugin(self.name, name, target, _US) for name, target in targets.items()}

    def installed(self) -> dict[str, Plugin[T]]:
        """Every plugin by name; of several with one name the first, the server's own."""
        found = self.own()
        for entry in sorted(_entries(self.name), key=lambda one: (one.package, one.name)):
            taken = found.setdefault(entry.name, entry)
            if taken.target != entry.target:
                log.error(
                    "plugin left out: '%s' (%s) of %s: its name in %s is taken by %s of %s",
                    entry.name, entry.target, entry.package, self.name, taken.target,
                    taken.package,
                )  # fmt: skip
        return found

    def load(self, make: Callable[[T], R]) -> dict[str, R]:
        """Apply `make` to every plugin, by name; broken ones are omitted."""
        tried = {name: plugin.try_to(make) for name, plugin in self.installed().items()}
        return {name: made for name, made in tried.items() if not isinstance(made, Exception)}


@dataclass(frozen=True, slots=True)
class OptionalPart(Generic[T]):
    """A part that the server may be without: a `T`, by its name in `PARTS`."""

    name: str

    @property
    def target(self) -> str:
        """The `module:attribute` of the part; "" if the server is without it."""
        return PARTS.get(self.name, "")

    def load(self) -> T:
        """Import it; raises `LoadFailed` if the server is without it."""
        if not self.target:
            raise LoadFailed(f"this server was installed without its part '{self.name}'")
        found: T = resolve(self.target)
        return found


def resolve(target: str) -> Any:
    """Import the object that `module:attribute` names; passes on what the import raises."""
    module, _, attribute = target.partition(":")
    found = import_module(module)
    return attrgetter(attribute)(found) if attribute else found


def all_plugins() -> Iterator[Plugin[Any]]:
    """The plugins of all groups, and the parts of the server, which are of the kind `part`."""
    for name in OWN:
        group: PluginGroup[Any] = PluginGroup(name)
        yield from group.installed().values()
    yield from (Plugin("parts", name, target, _US) for name, target in PARTS.items())


def _entries(group: str) -> Iterator[Plugin[Any]]:
    if not _others_declare(tuple(sys.path)):
        return
    for entry in _installed_entries(tuple(sys.path)).select(group=group):
        name = _package(entry.dist)
        if name.partition(" ")[0] != _US:
            yield Plugin(group, entry.name, entry.value, name)


@cache
def _package(distribution: Any) -> str:
    """Name and version of a distribution, whose metadata take 0.6 ms to parse."""
    if distribution is None:
        return "an unknown package"
    metadata = distribution.metadata
    return f"{metadata['Name']} {metadata['Version']}"


@runtime_checkable
class _FindsDistributions(Protocol):
    def find_distributions(self, context: Any) -> Any: ...


@cache
def _others_declare(path: tuple[str, ...]) -> bool:
    """False if surely no other package on a path declares a plugin.

    Nearly always so, and told in 2 ms; `importlib.metadata` is imported in 20 and needs 10 more.
    """
    finders = [one for one in sys.meta_path if one is not PathFinder]
    return any(isinstance(one, _FindsDistributions) for one in finders) or any(
        map(_may_declare, path)
    )


def _may_declare(folder: str) -> bool:
    try:
        names = os.listdir(folder or ".")
    except NotADirectoryError:  # an archive
        return True
    except OSError:
        return False
    for name in names:
        if name.endswith(".egg"):
            return True
        if name.endswith((".dist-info", ".egg-info")) and not name.startswith(f"{_US}-"):
            with suppress(FileNotFoundError, NotADirectoryError):
                declared = Path(folder, name, "entry_points.txt").read_bytes()
                if b"headrace." in declared:
                    return True
    return False


@cache
def _installed_entries(path: tuple[str, ...]) -> Any:
    """All entry points on a path, which are looked for once: it takes 10 ms and more."""
    # Imported late: commands that need no plugin start in less time than this takes.
    from importlib.metadata import entry_points

    return entry_points()
