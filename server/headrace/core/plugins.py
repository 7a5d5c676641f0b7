"""Plugins: extensions in installed packages, found by entry points and imported when needed.

A package declares `name = "module:attribute"` under one of the groups below. The server's own
plugins are in `OWN`, since a scan of installed packages takes longer than to start a command; the
metadata of the server's package, made by `hatch_build.py`, has the same. A plugin that cannot be
loaded is logged with its traceback and left out; so is one whose name is taken: the server's own
plugins come first.

`PARTS` are optional parts of the server that other packages do not add to: core packages, which
import no plugin, get them by name (`part`).
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

from headrace.core.errors import LoadFailed

log = logging.getLogger(__name__)

BACKENDS = "headrace.backends"  # made with a `headrace.placement.backend.BackendContext`
STAGES = "headrace.stages"  # a `headrace.engine.chain.StagePlugin`
COMMANDS = "headrace.commands"  # a `headrace.cli.command.Command`, named like it
PROTOCOLS = "headrace.protocols"  # gives a `headrace.placement.upstream.options.UpstreamProtocol`
ENVIRONMENTS = "headrace.environments"  # see `headrace.placement.worker.environment.demanded`
SOURCES = "headrace.sources"  # see `headrace.cli.command.take_sources`
DOORS = "headrace.doors"  # a `headrace.doors.door.Door`, made with the engine
STORES = "headrace.stores"  # makes a `headrace.repository.store.Store` of an address
PAGES = "headrace.pages"  # adds routes to a FastAPI application, see `headrace.doors.http.app`

_LOADERS = "headrace.plugins.loaders.backend"
OWN: Mapping[str, Mapping[str, str]] = {
    # In the order in which they examine a model's files.
    BACKENDS: {
        "onnxruntime": "headrace.placement.local.onnx:OnnxBackend.of",
        "python": "headrace.placement.worker.python_backend:PythonBackend.of",
        "sklearn": f"{_LOADERS}:sklearn",
        "xgboost": f"{_LOADERS}:xgboost",
        "lightgbm": f"{_LOADERS}:lightgbm",
        "catboost": f"{_LOADERS}:catboost",
        "mlflow": f"{_LOADERS}:mlflow",
        "pytorch": f"{_LOADERS}:pytorch",
        "triton": "headrace.placement.upstream.backend:RemoteBackend.of",
    },
    STAGES: {"traffic": "headrace.plugins.traffic.control:TrafficStage"},
    COMMANDS: {
        "serve": "headrace.cli.serve:SERVE",
        "infer": "headrace.cli.commands.infer:INFER",
        "top": "headrace.cli.commands.top:TOP",
        "models": "headrace.cli.commands.models:MODELS",
        "environments": "headrace.plugins.environments.command:ENVIRONMENTS",
        "triton": "headrace.plugins.triton.command:TRITON",
        "completion": "headrace.cli.commands.completion:COMPLETION",
    },
    PROTOCOLS: {
        "v2": "headrace.placement.upstream.options:v2_protocol",
        "tfserving": "headrace.plugins.dialects:tfserving_protocol",
        "torchserve": "headrace.plugins.dialects:torchserve_protocol",
    },
    ENVIRONMENTS: {"python": "headrace.plugins.environments.resolve:demanded"},
    SOURCES: {"pools": "headrace.plugins.triton.command:take_pools"},
    PAGES: {"openapi": "headrace.plugins.openapi:add_pages"},
}
PARTS: Mapping[str, str] = {
    # makes a `headrace.engine.shared_memory.Open`
    "cuda_memory": "headrace.plugins.cuda_memory:opener",
    # the supervisor of `headrace.doors.server.ServerDoors`
    "frontends": "headrace.plugins.frontends.supervisor:Supervisor",
    # `load` of a module for workers, as `headrace.workers.python_loader`
    "functions": "headrace.plugins.functions:load",
    # makes a `headrace.doors.grpc.call.Server`, as others by the name of --grpc-transport
    "grpcio": "headrace.plugins.grpcio:grpcio_server",
    # a `headrace.placement.loaded.LoadedModel` of a `LoadSpec` and a loader
    "in_process": "headrace.plugins.in_process:LoadedInProcess",
    # makes a `headrace.placement.local.gpus.GpuReader`
    "nvml": "headrace.plugins.nvml:Nvml",
    # `headrace.engine.lifecycle.Loads`, before those of the engine
    "on_request": "headrace.plugins.on_request:OnRequest",
    # `headrace.app.Application`
    "poll": "headrace.plugins.following:Follower",
    "reload": "headrace.plugins.following:Reloader",
    # makes a `headrace.engine.tracing.TraceWriter`
    "traces": "headrace.plugins.traces:trace_writer",
    # a `headrace.engine.model.Traffic`
    "traffic": "headrace.plugins.traffic.control:TrafficControl",
    # `headrace.placement.upstream.reconciler.OwnServers`
    "triton_servers": "headrace.plugins.triton.servers:TritonServers",
    # `headrace.placement.upstream.protocols.ProtocolClients`
    "upstream_memory": "headrace.plugins.upstream_memory.client:sharing_clients",
}
_US = "headrace"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point: `target` is `module:attribute`, `package` the distribution declaring it."""

    group: str
    name: str
    target: str
    package: str

    @property
    def kind(self) -> str:
        """The kind of plugin in this group, such as backend, stage or command."""
        return self.group.rpartition(".")[2].removesuffix("s")

    def load(self) -> Any:
        """Import the target; passes on what the import raises."""
        return resolve(self.target)

    def try_to(self, make: Callable[[Any], T]) -> T | Exception:
        """Return `make(target)`, or the error, which has been logged with its traceback."""
        try:
            return make(self.load())
        except (Exception, SystemExit) as error:
            log.error(
                "plugin left out: %s '%s' (%s) of %s: %s", self.kind, self.name, self.target,
                self.package, error, exc_info=error,
            )  # fmt: skip
            return error if isinstance(error, Exception) else RuntimeError("it called sys.exit")


def resolve(target: str) -> Any:
    """Import the object that `module:attribute` names; passes on what the import raises."""
    module, _, attribute = target.partition(":")
    found = import_module(module)
    return attrgetter(attribute)(found) if attribute else found


def own(group: str) -> dict[str, Plugin]:
    """The server's own plugins of a group by name, without a scan of installed packages."""
    return {name: Plugin(group, name, to, _US) for name, to in OWN.get(group, {}).items()}


def part(name: str, without: Any = None) -> Any:
    """The target of a part; `without` if the server does not have it, or else `LoadFailed`."""
    if name in PARTS:
        return resolve(PARTS[name])
    if without is None:
        raise LoadFailed(f"this server was installed without its part '{name}'")
    return without


def all_plugins() -> Iterator[Plugin]:
    """The plugins of all groups, and the parts of the server, which are of the kind `part`."""
    for group in (*OWN, DOORS, STORES):  # the server has none of its own in the last two
        yield from installed(group).values()
    yield from (Plugin("parts", name, to, _US) for name, to in PARTS.items())


def installed(group: str) -> dict[str, Plugin]:
    """Every plugin of a group by name; of several with one name the first, the server's own."""
    found = own(group)
    for plugin in sorted(_entries(group), key=lambda one: (one.package, one.name)):
        taken = found.setdefault(plugin.name, plugin)
        if taken.target != plugin.target:
            log.error(
                "plugin left out: '%s' (%s) of %s: its name in %s is taken by %s of %s",
                plugin.name, plugin.target, plugin.package, group, taken.target, taken.package,
            )  # fmt: skip
    return found


def load(group: str, make: Callable[[Any], T]) -> dict[str, T]:
    """Apply `make` to every plugin of a group, by name; broken ones are omitted."""
    tried = {name: plugin.try_to(make) for name, plugin in installed(group).items()}
    return {name: made for name, made in tried.items() if not isinstance(made, Exception)}


def _entries(group: str) -> Iterator[Plugin]:
    for entry in _installed_entries(tuple(sys.path)).select(group=group):
        package = entry.dist
        name = f"{package.name} {package.version}" if package is not None else "an unknown package"
        if package is None or package.name != _US:
            yield Plugin(group, entry.name, entry.value, name)


@cache
def _installed_entries(path: tuple[str, ...]) -> Any:
    """All entry points on a path, which are looked for once: it takes 10 ms and more."""
    # Imported late: commands that need no plugin start in less time than this takes.
    from importlib.metadata import entry_points

    return entry_points()
