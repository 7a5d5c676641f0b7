"""What a backend is asked to load, and what it says about what it has loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from headrace.core.datatypes import Datatype
from headrace.core.environment_options import EnvironmentOptions
from headrace.core.execution_limits import ExecutionLimits
from headrace.core.signature import Shape


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
