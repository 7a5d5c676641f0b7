"""Specification of a model to load, its tensors, and what load requests may bring along."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from headrace.core.datatypes import Datatype
from headrace.core.limits import ExecutionLimits
from headrace.core.signature import Shape
from headrace.core.tensors import Buffer

_VARIABLE = re.compile(r"[^\s=,]+")


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Where environments lie, and what they are made from.

    `cache` is the directory where they lie, empty for the usual one. `wheelhouse` is a directory
    that packages come from and no other place, if it is not empty. Building one may take
    `build_secs`. `variables` are the names, or patterns of names, of the server's environment
    variables that workers see besides the usual ones. `installer` is `uv`, `pip` or `auto`.
    """

    cache: str = ""
    wheelhouse: str = ""
    build_secs: int = 1800
    variables: tuple[str, ...] = ()
    installer: str = "auto"


def variable_names(text: str) -> tuple[str, ...]:
    """Names of environment variables, or patterns of names, between commas.

    Raises `ValueError` that says what was expected.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(map(_VARIABLE.fullmatch, found)):
        raise ValueError("names of environment variables, or patterns such as SHOP_*, and commas")
    return found


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One instance of one model version, as a backend needs to know it.

    `path` is the model file, or a directory that holds it; nothing outside `root`, the model's own
    directory, may be read. `parameters` are the configuration's, as strings. `graph_level` is the
    configuration's `optimization.graph.level`. `accelerators` are (name, options) in order of
    preference. `device` is None for CPU and a GPU's number otherwise; `by_model` is whether the
    model decides that itself. `pinned_outputs` is whether outputs may be copied from a GPU to
    page-locked memory. `threads` is how many cores the instance may use. `group` is the index of
    its instance group, for messages. `instance` is its name, `config` the configuration as JSON, as
    far as it goes before the model is loaded, and `auto_complete` whether the model may complete
    it, with `default_max_batch_size` rows in a batch if the configuration leaves that open; 0 if it
    does not. What has to be loaded by the time `deadline`, of the monotonic clock, is of no use
    later. `limits` are the server's on executions, which `parameters` may override.
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
    config: str = "{}"
    auto_complete: bool = False
    environments: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    default_max_batch_size: int = 0
    deadline: float = inf
    by_model: bool = False
    pinned_outputs: bool = True
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output as the loaded model itself declares it; -1 is a variable dimension.

    `datatype` is None, and `type_name` says what it is, where the protocol has no such tensor.
    """

    name: str
    datatype: Datatype | None
    shape: Shape
    type_name: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """`config` is a configuration as JSON text, None for that of the repository.

    `files` are the contents of a whole model directory, by their paths in it; if there are any, the
    repository's own directory is not used.
    """

    config: str | None = None
    files: Mapping[str, Buffer] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.config is not None or bool(self.files)
