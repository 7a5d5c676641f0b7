"""ONNX Runtime's options from a model's configuration.

The names are those that Triton's ONNX Runtime backend reads, so that a configuration means the same
here.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import onnxruntime as ort

from headrace.backends.onnx_providers import CUDA_PARAMETERS
from headrace.core.errors import InvalidOption
from headrace.core.model_spec import LoadSpec

T = TypeVar("T")

_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_DEVICE = re.compile(r"(cpu|gpu):[0-9]{1,3}")
# ONNX Runtime also raises what it would print; the server logs that with model and version.
_QUIET = 4

# Parameters of the configuration that this backend reads, besides every key that starts with one of
# PREFIXES, which go to ONNX Runtime as they are.
PARAMETERS = frozenset(
    {
        "intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena",
        "enable_mem_pattern", "memory.enable_memory_arena_shrinkage", "execution_limit_secs",
        "stall_secs", *CUDA_PARAMETERS,
    }
)  # fmt: skip
PREFIXES = ("session.", "optimization.", "ep.")


def reads_parameter(name: str) -> bool:
    """Whether this backend gives a meaning to the configuration's parameter `name`."""
    return name in PARAMETERS or name.startswith(PREFIXES)


def session_options(spec: LoadSpec) -> ort.SessionOptions:
    """The options of a session; raises `InvalidOption` for a bad value."""
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    level = _GRAPH_LEVELS.get(spec.graph_level)
    if level is None:
        raise InvalidOption(
            "optimization.graph.level",
            f"must be one of {', '.join(map(str, sorted(_GRAPH_LEVELS)))}, got {spec.graph_level}",
        )
    options.graph_optimization_level = level
    parameters = spec.parameters
    threads = _read(parameters, "intra_op_thread_count", _count, 0)
    options.intra_op_num_threads = threads or spec.threads
    # Only used by the parallel mode; its default would be the host's number of cores.
    threads = _read(parameters, "inter_op_thread_count", _count, 0)
    options.inter_op_num_threads = threads or spec.threads
    if _read(parameters, "execution_mode", _mode, 0):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = _read(parameters, "enable_mem_arena", _boolean, True)
    options.enable_mem_pattern = _read(parameters, "enable_mem_pattern", _boolean, True)
    # Threads that spin take the cores that the event loop and other instances need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    for key, value in parameters.items():
        if key.startswith(PREFIXES):
            try:
                options.add_session_config_entry(key, value)
            except RuntimeError as error:
                raise InvalidOption(f"parameters['{key}']", str(error)) from None
    return options


def run_options(spec: LoadSpec) -> ort.RunOptions:
    """The options of a run; raises `InvalidOption`."""
    options = ort.RunOptions()
    if not spec.parameters.get(_SHRINKAGE):
        return options
    value = _read(spec.parameters, _SHRINKAGE, _devices, "")
    has = {"cpu:0"} if _read(spec.parameters, "enable_mem_arena", _boolean, True) else set()
    if spec.device is not None:
        has.add(f"gpu:{spec.device}")
    # Instances of a model have one configuration, also those on other GPUs.
    given = value.split(";")
    own = [name for name in given if name in has or spec.device is None or "gpu" not in name]
    # ONNX Runtime would say so too, but of every run.
    for device in own:
        if device not in has:
            known = " and ".join(sorted(has)) or "none, as enable_mem_arena is 0"
            raise InvalidOption(
                f"parameters['{_SHRINKAGE}']",
                f"the model has no memory arena on {device}; its arenas: {known}",
            )
    if own:
        options.add_run_config_entry(_SHRINKAGE, ";".join(own))
    return options


def shrinking_options() -> ort.RunOptions:
    """The options of a run that does nothing but give back what the CPU's arena keeps.

    ONNX Runtime has no other way: an arena shrinks at the end of a run, also of one that is told to
    end before it has begun.
    """
    options = ort.RunOptions()
    options.log_severity_level = _QUIET
    options.add_run_config_entry(_SHRINKAGE, "cpu:0")
    options.terminate = True
    return options


def _read(parameters: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    if name not in parameters:
        return default
    try:
        return parse(parameters[name])
    except ValueError as error:
        text = f"expected {error}, got {parameters[name]!r}"
        raise InvalidOption(f"parameters['{name}']", text) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 4:
        raise ValueError("a number of threads, at most 9999")
    return int(text)


def _mode(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("0 (sequential) or 1 (parallel)")
    return int(text)


def _devices(text: str) -> str:
    devices = [device if ":" in device else f"{device}:0" for device in text.split(";")]
    if not all(_DEVICE.fullmatch(device) for device in devices):
        raise ValueError("devices such as 'cpu:0' or 'cpu:0;gpu:0'")
    return ";".join(devices)


def _boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError("0 or 1")
    return value
