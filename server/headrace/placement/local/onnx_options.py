"""ONNX Runtime's options and execution providers, from a model's configuration.

The names are those of Triton's ONNX Runtime backend, so that a configuration means the same here. A
model on a GPU uses TensorRT's provider if it asks for that, CUDA's for unsupported nodes, and the
CPU's for the rest.
"""

import contextlib
import ctypes
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnxruntime as ort

from headrace.core.errors import InvalidOption
from headrace.core.model_spec import LoadSpec
from headrace.core.texts import invalid, unexpected, whole, whole_number

log = logging.getLogger(__name__)

_CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
_ACCELERATORS = {"cuda": CUDA, "tensorrt": _TENSORRT, "openvino": "OpenVINOExecutionProvider"}
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PRECISIONS = {
    "FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable",
}  # fmt: skip
# Configuration parameters for options of CUDA's provider, and the numbers that stand for values.
CUDA_PARAMETERS: Mapping[str, Sequence[str]] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": (),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": ("0", "1"),
}
_PACKAGES = {
    CUDA: "its libraries come with pip install 'onnxruntime-gpu[cuda,cudnn]'",
    _TENSORRT: "its libraries come with pip install tensorrt, and LD_LIBRARY_PATH has to name"
    " their directory",
}
_FATAL = 4
# A model of one identity node.
LEAST_MODEL = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12'
    b"\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider, and the field of the configuration that asks for it."""

    name: str
    options: dict[str, str]
    path: str = ""


def execution_providers(spec: LoadSpec) -> list[Provider]:
    """The execution providers, as `wanted_providers`.

    Also raises `InvalidOption` for one that the installed ONNX Runtime lacks.
    """
    providers = wanted_providers(spec)
    available = ort.get_available_providers()
    for provider in providers:
        if provider.name not in available:
            raise InvalidOption(
                provider.path,
                f"execution provider {provider.name} is not in the installed ONNX Runtime, which"
                f" has {', '.join(available)}; install a build that has it{_build(provider.name)},"
                " or take the accelerator or KIND_GPU out of the configuration",
            )
    return providers


def wanted_providers(spec: LoadSpec) -> list[Provider]:
    """The execution providers that an instance requests, most preferred first, the CPU last.

    Raises `InvalidOption` for invalid options.
    """
    where = "cpu" if spec.device is None else "gpu"
    field = f"optimization.execution_accelerators.{where}_execution_accelerator"
    providers = [
        _accelerator(name, options, f"{field}[{index}]")
        for index, (name, options) in enumerate(spec.accelerators)
    ]
    if spec.device is not None:
        asked = next((p for p in providers if p.name == CUDA), None)
        path = asked.path if asked is not None else f"instance_group[{spec.group}].kind"
        options = {**(asked.options if asked is not None else {}), **_cuda_options(spec.parameters)}
        # CUDA takes the nodes that TensorRT does not support, whatever their order.
        providers = [p for p in providers if p is not asked]
        providers.append(Provider(CUDA, options, path))
        device = {"device_id": str(spec.device)}
        providers = [Provider(p.name, p.options | device, p.path) for p in providers]
    if all(provider.name != _CPU for provider in providers):
        providers.append(Provider(_CPU, {}))
    return providers


def prepare_gpu() -> str:
    """Preload the CUDA libraries installed as packages; returns what is missing.

    Otherwise ONNX Runtime would print GPU problems for every model.
    """
    ort.set_default_logger_severity(_FATAL)
    said = io.StringIO()
    if preload := getattr(ort, "preload_dlls", None):  # since 1.21
        with contextlib.redirect_stdout(said):
            preload()
    return said.getvalue().strip()


def missing_build() -> str:
    """The error if the installed ONNX Runtime lacks GPU support; "" if it has it."""
    available = ort.get_available_providers()
    if CUDA in available:
        return ""
    return (
        f"the installed ONNX Runtime has no {CUDA}, it has {', '.join(available)}; install"
        " onnxruntime-gpu in place of onnxruntime"
    )


def cuda_obstacle() -> str:
    """The reason why ONNX Runtime cannot use the GPUs, by trying; "" if it can."""
    prepare_gpu()
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    try:
        session = ort.InferenceSession(
            LEAST_MODEL, options, providers=[CUDA, _CPU], enable_fallback=0
        )
    except Exception as error:  # of any type: it cannot be used
        log.debug("a first session with CUDA failed: %s", error)
        return why_not_started(CUDA)
    return "" if CUDA in session.get_providers() else why_not_started(CUDA)


def why_not_started(name: str) -> str:
    """The error for an execution provider that failed to start."""
    library = f"libonnxruntime_providers_{'cuda' if name == CUDA else 'tensorrt'}.so"
    reason = "its driver or a library that it needs is missing or too old"
    if name in _PACKAGES:
        try:
            ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / library))
        except OSError as error:
            # Without the directories, which must not be disclosed.
            told = re.sub(r"/\S*/", "", str(error))
            missing = "cannot open shared object" in told
            reason = f"{told}; {_PACKAGES[name] if missing else 'the driver may be too old'}"
    return f"execution provider {name} cannot start on this machine: {reason}"


def _accelerator(name: str, options: Mapping[str, str], path: str) -> Provider:
    provider = _ACCELERATORS.get(name.lower(), name)
    given = dict(options)
    if provider == _TENSORRT:
        given = dict(_tensorrt_option(key, value, path) for key, value in options.items())
        given.pop("", None)
    elif provider == CUDA:
        given = {key: _cuda_value(key, value, path) for key, value in options.items()}
    return Provider(provider, given, f"{path}.name")


def _tensorrt_option(key: str, value: str, path: str) -> tuple[str, str]:
    """The provider's name and value of an option; an empty name means its default."""
    if key == "precision_mode":
        if value not in _PRECISIONS:
            known = ", ".join(_PRECISIONS)
            text = f"unsupported precision mode '{value}' is requested; there are {known}"
            raise InvalidOption(f"{path}.parameters['{key}']", text)
        return _PRECISIONS[value], "1"
    if key not in _TENSORRT_NAMES and not key.startswith("trt_"):
        text = f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator"
        raise InvalidOption(f"{path}.parameters['{key}']", text)
    if key == "max_workspace_size_bytes":
        _check_bytes(value, f"{path}.parameters['{key}']")
    return _TENSORRT_NAMES.get(key, key), value


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    return {
        name: _cuda_value(name, parameters[name], "")
        for name in CUDA_PARAMETERS
        if name in parameters
    }


def _cuda_value(key: str, value: str, path: str) -> str:
    """The provider's value of an option, which may be given as a number."""
    where = f"{path}.parameters['{key}']".removeprefix(".")
    if key == "gpu_mem_limit":
        _check_bytes(value, where)
    known = CUDA_PARAMETERS.get(key, ())
    if not known or value in known:
        return value
    number = whole_number(value, 0, len(known) - 1)
    if number is not None:
        return known[number]
    if key == "do_copy_in_default_stream" and value.lower() in ("true", "false"):
        return str(int(value.lower() == "true"))
    numbered = ", ".join(f"{number} ({name})" for number, name in enumerate(known))
    raise InvalidOption(
        where, f"unsupported {key} value '{value}' is requested; expected {numbered}"
    )


def _check_bytes(value: str, where: str) -> None:
    if whole_number(value, 1, (1 << 64) - 1) is None:
        raise InvalidOption(where, f"expected a number of bytes, got '{value}'")


def _build(name: str) -> str:
    return ", onnxruntime-gpu in place of onnxruntime," if name in _PACKAGES else ""


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
# ONNX Runtime also raises what it would print; the server logs it with model and version.
_QUIET = 4

# Configuration parameters read by this backend, besides every key with one of PREFIXES, which is
# passed to ONNX Runtime unchanged.
PARAMETERS = frozenset(
    {
        "intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena",
        "enable_mem_pattern", "memory.enable_memory_arena_shrinkage", "execution_limit_secs",
        "stall_secs", *CUDA_PARAMETERS,
    }
)  # fmt: skip
PREFIXES = ("session.", "optimization.", "ep.")


def reads_parameter(name: str) -> bool:
    """True if this backend reads the configuration parameter `name`."""
    return name in PARAMETERS or name.startswith(PREFIXES)


def session_options(spec: LoadSpec) -> ort.SessionOptions:
    """The options of a session; raises `InvalidOption` for an invalid value."""
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
    threads = _threads(parameters, "intra_op_thread_count")
    options.intra_op_num_threads = threads or spec.threads
    # Only used in parallel mode; its default would be the host's number of cores.
    threads = _threads(parameters, "inter_op_thread_count")
    options.inter_op_num_threads = threads or spec.threads
    if _read(parameters, "execution_mode", _mode, 0):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = _read(parameters, "enable_mem_arena", _boolean, True)
    options.enable_mem_pattern = _read(parameters, "enable_mem_pattern", _boolean, True)
    # Spinning threads would take the cores of the event loop and of other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    for key, value in parameters.items():
        if key.startswith(PREFIXES):
            try:
                options.add_session_config_entry(key, value)
            except RuntimeError as error:
                raise invalid(key, str(error)) from None
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
    # All instances of a model share one configuration, even those on other GPUs.
    given = value.split(";")
    own = [name for name in given if name in has or spec.device is None or "gpu" not in name]
    # ONNX Runtime would report this, too, but on every run.
    for device in own:
        if device not in has:
            known = " and ".join(sorted(has)) or "none, as enable_mem_arena is 0"
            raise invalid(
                _SHRINKAGE, f"the model has no memory arena on {device}; its arenas: {known}"
            )
    if own:
        options.add_run_config_entry(_SHRINKAGE, ";".join(own))
    return options


def shrinking_options() -> ort.RunOptions:
    """The options of a run that only releases memory cached by the CPU's arena.

    There is no other way: ONNX Runtime shrinks an arena at the end of a run, even of one that is
    terminated before it begins.
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
        raise unexpected(parameters, name, str(error)) from None


_threads = partial(whole, most=9999, expected="a number of threads, at most 9999")


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
