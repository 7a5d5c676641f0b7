"""Specification of a model to load, its tensors, and the parameters of load requests."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from headrace.core.datatypes import Datatype
from headrace.core.limits import ExecutionLimits
from headrace.core.signature import Shape, Signature
from headrace.core.tensors import Buffer

_VARIABLE = re.compile(r"[^\s=,]+")


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Settings of Python environments.

    `cache` is their directory, empty for the default. `wheelhouse`, if not empty, is the directory
    that all packages come from. A build may take `build_secs`. `variables` are names, or patterns
    of names, of the server's environment variables that workers get besides the default ones. The
    cache keeps `cache_bytes`, any amount for 0.
    """

    cache: str = ""
    wheelhouse: str = ""
    build_secs: int = 1800
    variables: tuple[str, ...] = ()
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class IsolationOptions:
    """Settings that confine the processes of models.

    `users` are those that they may run as, by name or `UID:GID`: the first by default. `sandbox` is
    `off`, `preferred`, which goes without where the kernel has none, or `required`; in it, paths of
    `readable` and `writable` can be reached besides the model's own. A user has at most `processes`
    processes and threads, any number for 0, and a scratch directory at most `scratch_bytes`.
    """

    users: tuple[str, ...] = ()
    sandbox: str = "off"
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    processes: int = 0
    scratch_bytes: int = 1 << 30

    def confines(self, parameters: Mapping[str, str]) -> bool:
        """True if a model with these parameters is confined."""
        asked = not ISOLATION_PARAMETERS.isdisjoint(parameters)
        return asked or bool(self.users) or self.sandbox != "off"


# Parameters of a model that the server's operator decides, whoever else may load models.
ISOLATION_PARAMETERS = frozenset({"worker_user", "worker_sandbox"})


def variable_names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names, or patterns of names, of environment variables.

    Raises `ValueError` with the expected format.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(map(_VARIABLE.fullmatch, found)):
        raise ValueError("names of environment variables, or patterns such as SHOP_*, and commas")
    return found


def _nothing() -> str:
    return "{}"


# A model that another one runs, by its name, and its version, "" for any.
Used = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Specification of one instance of one model version, for a backend.

    `path` is the model file, or its directory; nothing outside `root`, the model's directory, may
    be read. `single_file` means that nothing else there belongs to the model. `parameters` are the
    configuration's, as strings. `graph_level` is the configuration's `optimization.graph.level`.
    `accelerators` are (name, options) in order of preference. `device` is None for CPU, otherwise a
    GPU's number; `by_model` is true if the model chooses the device itself. `pinned_outputs` allows
    outputs to be copied from a GPU to page-locked memory. `threads` is the number of cores for the
    instance. `group` is the index of its instance group, for messages. `instance` is its name.
    `as_json` returns the configuration as JSON, as far as known before loading; most backends do
    not ask. `auto_complete` allows the model to complete it, with `default_max_batch_size` if the
    configuration sets none; 0 disables that. After `deadline`, of the monotonic clock, loading is
    abandoned. `limits` are the server's execution limits, which `parameters` may override, and
    `isolation` confines processes; None for commands, which only prepare environments. `used` are
    the signatures of the models that this one runs.
    """

    model: str
    path: Path
    root: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    graph_level: int = 0
    accelerators: tuple[tuple[str, Mapping[str, str]], ...] = ()
    device: int | None = None
    threads: int = 1
    group: int = 0
    version: int = 0
    instance: str = ""
    as_json: Callable[[], str] = _nothing
    auto_complete: bool = False
    environments: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    default_max_batch_size: int = 0
    deadline: float = inf
    by_model: bool = False
    pinned_outputs: bool = True
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    single_file: bool = False
    isolation: IsolationOptions | None = None
    used: Mapping[Used, Signature] = field(default_factory=dict)

    @property
    def config(self) -> str:
        """The configuration as JSON, as far as known before loading."""
        return self.as_json()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output as declared by the loaded model; -1 is a variable dimension.

    `datatype` is None if the protocol has no such type; `type_name` names it then.
    """

    name: str
    datatype: Datatype | None
    shape: Shape
    type_name: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """Parameters of a load request: `config` is JSON text, None for the repository's configuration.

    `files` are the contents of a whole model directory by relative path; if given, they replace the
    repository's directory.
    """

    config: str | None = None
    files: Mapping[str, Buffer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of the files."""
        return sum(map(len, self.files.values()))

    def __bool__(self) -> bool:
        return self.config is not None or bool(self.files)
