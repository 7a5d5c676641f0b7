"""ONNX Runtime session options and execution providers from a model's configuration.

The names are those that Triton's ONNX Runtime backend reads, so that a configuration means the same
here.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import onnxruntime as ort

from headrace.core.errors import InvalidConfig, LoadFailed
from headrace.core.model_spec import LoadSpec

T = TypeVar("T")

_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_CPU = "CPUExecutionProvider"
_ACCELERATORS = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
# ONNX Runtime also raises what it would print; the server logs that with model and version.
_QUIET = 4

# Parameters of the configuration that this backend reads, besides every key that starts with one of
# PREFIXES, which go to ONNX Runtime as they are.
PARAMETERS = frozenset(
    {
        "intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena",
        "enable_mem_pattern",
    }
)  # fmt: skip
PREFIXES = ("session.", "optimization.", "ep.")


def reads_parameter(name: str) -> bool:
    """Whether this backend gives a meaning to the configuration's parameter `name`."""
    return name in PARAMETERS or name.startswith(PREFIXES)


def session_options(spec: LoadSpec) -> ort.SessionOptions:
    """The options of a session; raises `InvalidConfig` naming a parameter with a bad value."""
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    level = _GRAPH_LEVELS.get(spec.graph_level)
    if level is None:
        raise InvalidConfig(
            f"optimization.graph.level must be one of {sorted(_GRAPH_LEVELS)},"
            f" got {spec.graph_level}"
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
                raise InvalidConfig(f"parameter '{key}': {error}") from None
    return options


def execution_providers(spec: LoadSpec) -> list[tuple[str, dict[str, str]]]:
    """Provider names with their options, most preferred first, the CPU last.

    Raises `LoadFailed` for one that the installed ONNX Runtime does not have.
    """
    providers: list[tuple[str, dict[str, str]]] = []
    for name, options in spec.accelerators:
        provider = _ACCELERATORS.get(name.lower(), name)
        providers.append((provider, dict(options)))
    if spec.device is not None:
        device = {"device_id": str(spec.device)}
        if all(name != "CUDAExecutionProvider" for name, _ in providers):
            providers.append(("CUDAExecutionProvider", device))
        providers = [(name, device | options) for name, options in providers]
    available = ort.get_available_providers()
    for name, _ in providers:
        if name not in available:
            raise LoadFailed(
                f"execution provider {name} is not in the installed ONNX Runtime, which has"
                f" {', '.join(available)}; install a build that has it, or take"
                " the accelerator or KIND_GPU out of the configuration"
            )
    if all(name != _CPU for name, _ in providers):
        providers.append((_CPU, {}))
    return providers


def _read(parameters: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    if name not in parameters:
        return default
    try:
        return parse(parameters[name])
    except ValueError as error:
        raise InvalidConfig(
            f"parameter '{name}': expected {error}, got {parameters[name]!r}"
        ) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 4:
        raise ValueError("a number of threads, at most 9999")
    return int(text)


def _mode(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("0 (sequential) or 1 (parallel)")
    return int(text)


def _boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError("0 or 1")
    return value
