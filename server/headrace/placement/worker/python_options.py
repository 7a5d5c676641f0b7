"""A Python model's configuration: options of its worker, and arguments of `initialize`.

Parameters become `WorkerOptions`; `WorkerSpec` specifies the process (interpreter, threads,
environment variables); `start_arguments` are the arguments of `initialize`, and `with_completion`
applies the result of `auto_complete_config`.
"""

import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from headrace.core.columns import COLUMNS, columns_by_input, columns_text
from headrace.core.errors import Contradiction, InvalidConfig
from headrace.core.limits import ExecutionLimits
from headrace.core.model_spec import LoadSpec, variable_names
from headrace.core.texts import seconds, unexpected, whole
from headrace.placement.child_process import passed_variables
from headrace.placement.confinement import Confinement
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.scheduling.quarantine import DEATHS
from headrace.workers.limits import WorkerLimits

CODE_ROWS = "the max_batch_size that its code sets"
HEARTBEAT_SECS = 30.0
_LEAST_HEARTBEAT_SECS = 1.0  # the worker beats twice within it
_MOST_NICE = 19
_LEAST_FILES = 32
_LEAST_MEMORY = 128 << 20  # numpy with a few threads takes nearly as much
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(|[KMGT]i?B|B)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Parameters read for every worker, including those parsed elsewhere.
WORKER_PARAMETERS = frozenset(
    {
        "EXECUTION_ENV_PATH", "execution_limit_secs", "stall_secs", "heartbeat_secs", "max_rss",
        "max_requests", "quarantine_deaths", "nice", "memory_limit", "max_open_files", "python",
        "worker_env", "worker_user", "worker_sandbox", "max_processes", "scratch_bytes",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker: times in seconds, sizes in bytes; 0 switches a limit off.

    `execution` limits a batch, `heartbeat_secs` the time without a heartbeat, `max_rss` and
    `max_requests` the life of a process, and `quarantine_deaths` is the number of deaths after
    which an input is refused. `variables` are names or patterns of further environment variables
    for the model. `user` and `sandboxed` are what the model asks for, `scratch_bytes` the size of
    its scratch directory.
    """

    execution: ExecutionLimits = field(default_factory=ExecutionLimits)
    heartbeat_secs: float = HEARTBEAT_SECS
    max_rss: int = 0
    max_requests: int = 0
    quarantine_deaths: int = DEATHS
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    variables: tuple[str, ...] = ()
    user: str = ""
    sandboxed: bool = False
    scratch_bytes: int = 0

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], defaults: ExecutionLimits | None = None
    ) -> "WorkerOptions":
        """Parse a configuration's parameters; raises `InvalidOption` naming the invalid one.

        `defaults` are the server's execution limits, by default none.
        """
        heartbeat = seconds(parameters, "heartbeat_secs", HEARTBEAT_SECS)
        if 0 < heartbeat < _LEAST_HEARTBEAT_SECS:
            raise unexpected(parameters, "heartbeat_secs", "0 or a number of seconds from 1 on")
        expected = "0 or a whole number from 2 on"
        deaths = whole(parameters, "quarantine_deaths", DEATHS, expected=expected)
        if deaths == 1:  # 1 would also refuse the other inputs of the batch
            raise unexpected(parameters, "quarantine_deaths", expected)
        return cls(
            (defaults or ExecutionLimits()).of(parameters),
            heartbeat,
            _size(parameters, "max_rss"),
            whole(parameters, "max_requests"),
            deaths,
            _limits(parameters),
            _variables(parameters),
            parameters.get("worker_user", ""),
            _sandboxed(parameters),
            _size(parameters, "scratch_bytes"),
        )


def _limits(parameters: Mapping[str, str]) -> WorkerLimits:
    expected = f"a whole number from 0 to {_MOST_NICE}"
    nice = whole(parameters, "nice", most=_MOST_NICE, expected=expected)
    memory = _size(parameters, "memory_limit")
    if 0 < memory < _LEAST_MEMORY:
        raise unexpected(parameters, "memory_limit", "0 or a size from 128MiB on")
    files = whole(parameters, "max_open_files")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files and (files < _LEAST_FILES or (most != resource.RLIM_INFINITY and files > most)):
        limit = "no limit" if most == resource.RLIM_INFINITY else f"{most}, the server's own limit"
        raise unexpected(
            parameters, "max_open_files", f"0 or a number from {_LEAST_FILES} to {limit}"
        )
    processes = whole(parameters, "max_processes")
    return WorkerLimits(nice, memory, files, processes)


def _sandboxed(parameters: Mapping[str, str]) -> bool:
    if parameters.get("worker_sandbox", "required") != "required":
        expected = "required; what the server's --worker-sandbox demands cannot be lowered"
        raise unexpected(parameters, "worker_sandbox", expected)
    return "worker_sandbox" in parameters


def _variables(parameters: Mapping[str, str]) -> tuple[str, ...]:
    text = parameters.get("worker_env")
    if text is None:
        return ()
    try:
        return variable_names(text)
    except ValueError as error:
        raise unexpected(parameters, "worker_env", str(error)) from None


def _size(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name)
    if text is None:
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise unexpected(
            parameters, name, "a number of bytes or a size such as 512MiB, 0 for no limit"
        )
    number, unit = found.groups()
    prefix = unit.removesuffix("B")
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(number) * base ** _POWERS[prefix.removesuffix("i")])


# Environment variables for every model; others may be secret.
_PASSED = (
    "VIRTUAL_ENV", "ORT_DISABLE_TELEMETRY", "GLIBC_TUNABLES", "CUDA_*", "NVIDIA_*", "HF_*",
    "TRANSFORMERS_*", "TORCH_*", "OMP_*", "MKL_*", "MALLOC_*",
)  # fmt: skip
_OWN = "HEADRACE_"  # settings of the server, including keys
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def passed_environment(*patterns: str) -> dict[str, str]:
    """Environment variables that are not secret, and those matching `patterns`.

    Never the server's own settings.
    """
    found = passed_variables(os.environ, (*_PASSED, *patterns))
    return {name: value for name, value in found.items() if not name.startswith(_OWN)}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The execution options that a model reported at its start, and its configuration.

    `concurrency` is the number of concurrent batches of a coroutine, 0 for one after the other;
    `asks` is true if the model reports its readiness.
    """

    concurrency: int = 0
    asks: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The specification of a worker process, and its owner for the log.

    `threads` is for numeric libraries. `prefix` is the directory of the model's own environment.
    `variables` are names or patterns of further environment variables. A process with a
    `confinement` has its `limits`, instead of these.
    """

    model: str
    version: str
    instance: str
    python: str = sys.executable
    threads: int = 1
    prefix: str = ""
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    variables: tuple[str, ...] = ()
    confinement: Confinement | None = None

    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        passed = passed_environment(*self.variables)
        threads = {name: str(self.threads) for name in _THREADS if name not in passed}
        return {**passed, **threads, **self._own(), "PYTHONUNBUFFERED": "1"}

    def _own(self) -> dict[str, str]:
        """The variables of an activated environment, as set by shells, for child processes."""
        if not self.prefix:
            return {}
        kind = "CONDA_PREFIX" if os.path.isdir(f"{self.prefix}/conda-meta") else "VIRTUAL_ENV"
        path = os.pathsep.join([f"{self.prefix}/bin", os.environ.get("PATH", os.defpath)])
        return {
            "VIRTUAL_ENV": self.prefix,
            kind: self.prefix,
            "PATH": path,
            "PYTHONNOUSERSITE": "1",
        }


# The fields that `auto_complete_config` may set.
_COMPLETED = (
    "max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy",
)  # fmt: skip


def with_completion(config: ModelConfig, completed: dict[str, Any] | None) -> ModelConfig:
    """A copy of `config` with the model's own declarations; raises `InvalidConfig`.

    Such a model cannot be inspected, so its tensors must be declared. A model without inputs or
    outputs has to declare this itself: mostly they were forgotten. Raises `Contradiction`.
    """
    result = ModelConfig()
    result.CopyFrom(config)
    for name in _COMPLETED if completed is not None else ():
        assert completed is not None
        if name in completed:
            result.ClearField(name)  # type: ignore[arg-type]
            try:
                json_format.ParseDict({name: completed[name]}, result)
            except json_format.ParseError as error:
                raise InvalidConfig(f"auto_complete_config: {error}") from error
    problems = []
    if not (result.input or result.output or completed is not None):
        text = "declare inputs and outputs here, or in the model's auto_complete_config"
        problems.append(("input", text))
    if result.model_transaction_policy.decoupled and result.dynamic_batching.preserve_ordering:
        text = "cannot be combined with a decoupled model, which answers when it likes"
        problems.append(("dynamic_batching.preserve_ordering", text))
    if problems:
        raise Contradiction(problems)
    return result


def with_columns(config: ModelConfig, columns: Sequence[str]) -> ModelConfig:
    """A copy of `config` that names the columns of a matrix input, for clients.

    Raises `Contradiction` if it names others already.
    """
    if len(config.input) != 1 or not columns or config.input[0].name in columns:
        return config
    name = config.input[0].name
    if COLUMNS in config.parameters:
        declared = columns_by_input(config.parameters[COLUMNS].string_value)
        if declared.get(name) != tuple(columns):
            text = f"the model was trained with the columns {', '.join(columns)}, in this order"
            raise Contradiction([(f"parameters['{COLUMNS}']", text)])
        return config
    result = ModelConfig()
    result.CopyFrom(config)
    result.parameters[COLUMNS].string_value = columns_text({name: columns})
    return result


def with_instances(config: ModelConfig, count: int) -> ModelConfig:
    """A copy of `config` with the instances that the code asks for, if it says none itself."""
    if config.instance_group or count == 1:
        return config
    result = ModelConfig()
    result.CopyFrom(config)
    result.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)
    return result


def start_arguments(spec: LoadSpec, config: str) -> dict[str, str]:
    """The argument of `initialize`; `config` is the complete configuration as JSON."""
    return {
        "model_config": config,
        "model_instance_kind": _kind(spec),
        "model_instance_name": spec.instance,
        "model_instance_device_id": str(spec.device or 0),
        "model_repository": str(Path(spec.root)),
        "model_version": str(spec.version),
        "model_name": spec.model,
    }


def _kind(spec: LoadSpec) -> str:
    if spec.by_model:
        return "MODEL"
    return "CPU" if spec.device is None else "GPU"
