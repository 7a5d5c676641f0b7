"""Execution providers and their options in a configuration."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from headrace.core.errors import InvalidOption
from headrace.core.model_spec import LoadSpec
from headrace.placement.local.onnx import OnnxBackend
from headrace.placement.local.onnx_options import (
    LEAST_MODEL,
    cuda_obstacle,
    missing_build,
    wanted_providers,
)

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
HAS_CUDA = CUDA in ort.get_available_providers()
_FIELD = "optimization.execution_accelerators.gpu_execution_accelerator"
Accelerators = tuple[tuple[str, Mapping[str, str]], ...]


def spec_of(
    accelerators: Accelerators = (),
    device: int | None = 1,
    parameters: Mapping[str, str] | None = None,
) -> LoadSpec:
    return LoadSpec(
        "m", Path("1/m.onnx"), Path(), parameters or {}, 0, accelerators, device, group=2
    )


def wanted(spec: LoadSpec) -> list[tuple[str, dict[str, str]]]:
    return [(provider.name, provider.options) for provider in wanted_providers(spec)]


DEVICE = {"device_id": "1"}


@pytest.mark.parametrize(
    ("accelerators", "providers"),
    [
        ((), [(CUDA, DEVICE)]),
        ((("cuda", {"use_tf32": "0"}),), [(CUDA, {"use_tf32": "0"} | DEVICE)]),
        ((("tensorrt", {}),), [(TENSORRT, DEVICE), (CUDA, DEVICE)]),
        # CUDA runs what TensorRT leaves, in either order.
        (
            (("cuda", {"use_tf32": "0"}), ("TensorRT", {"precision_mode": "FP16"})),
            [(TENSORRT, {"trt_fp16_enable": "1"} | DEVICE), (CUDA, {"use_tf32": "0"} | DEVICE)],
        ),
        # The instance's own device, whatever is configured.
        ((("cuda", {"device_id": "5"}),), [(CUDA, DEVICE)]),
    ],
)
def test_on_a_gpu(accelerators: Accelerators, providers: list[tuple[str, dict[str, str]]]) -> None:
    assert wanted(spec_of(accelerators)) == [*providers, (CPU, {})]


def test_on_the_cpu_nothing_is_added() -> None:
    assert wanted(spec_of(device=None)) == [(CPU, {})]
    parameters = {"cudnn_conv_algo_search": "1"}
    assert wanted(spec_of(device=None, parameters=parameters)) == [(CPU, {})]
    named: Accelerators = (("openvino", {"device_type": "CPU"}),)
    openvino = ("OpenVINOExecutionProvider", {"device_type": "CPU"})
    assert wanted(spec_of(named, device=None)) == [openvino, (CPU, {})]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"precision_mode": "FP32"}, {}),
        ({"precision_mode": "FP16"}, {"trt_fp16_enable": "1"}),
        ({"precision_mode": "BF16"}, {"trt_bf16_enable": "1"}),
        ({"precision_mode": "INT8"}, {"trt_int8_enable": "1"}),
        ({"max_workspace_size_bytes": "1073741824"}, {"trt_max_workspace_size": "1073741824"}),
        ({"int8_calibration_table_name": "t"}, {"trt_int8_calibration_table_name": "t"}),
        (
            {"int8_use_native_calibration_table": "1"},
            {"trt_int8_use_native_calibration_table": "1"},
        ),
        (
            {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/cache"},
            {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/cache"},
        ),
    ],
)
def test_tensorrt_has_the_parameters_of_triton(
    given: dict[str, str], meant: dict[str, str]
) -> None:
    (name, options), *_ = wanted(spec_of((("tensorrt", given),)))
    assert (name, options) == (TENSORRT, meant | DEVICE)


@pytest.mark.parametrize(
    ("parameters", "meant"),
    [
        ({"cudnn_conv_algo_search": "0"}, {"cudnn_conv_algo_search": "EXHAUSTIVE"}),
        ({"cudnn_conv_algo_search": "2"}, {"cudnn_conv_algo_search": "DEFAULT"}),
        ({"cudnn_conv_algo_search": "HEURISTIC"}, {"cudnn_conv_algo_search": "HEURISTIC"}),
        ({"gpu_mem_limit": "4294967200"}, {"gpu_mem_limit": "4294967200"}),
        ({"arena_extend_strategy": "1"}, {"arena_extend_strategy": "kSameAsRequested"}),
        ({"do_copy_in_default_stream": "0"}, {"do_copy_in_default_stream": "0"}),
        ({"do_copy_in_default_stream": "True"}, {"do_copy_in_default_stream": "1"}),
        ({"something else": "1"}, {}),
    ],
)
def test_cuda_options_may_lie_among_the_parameters(
    parameters: dict[str, str], meant: dict[str, str]
) -> None:
    assert wanted(spec_of(parameters=parameters)) == [(CUDA, meant | DEVICE), (CPU, {})]
    if meant:
        assert all(OnnxBackend().reads_parameter(name) for name in parameters)
        # They hold also where the accelerator says something else, as in Triton.
        other: Accelerators = (("cuda", {next(iter(meant)): "1", "use_tf32": "1"}),)
        (_, options), *_ = wanted(spec_of(other, parameters=parameters))
        assert options == meant | DEVICE | {"use_tf32": "1"}


@pytest.mark.parametrize(
    ("accelerators", "parameters", "path", "says"),
    [
        (
            (("tensorrt", {"precision_mode": "FP8"}),),
            {},
            f"{_FIELD}[0].parameters['precision_mode']",
            "unsupported precision mode 'FP8' is requested; there are FP32, FP16, BF16, INT8",
        ),
        (
            (("cuda", {}), ("tensorrt", {"precison": "FP16"})),
            {},
            f"{_FIELD}[1].parameters['precison']",
            "unknown parameter 'precison' is provided for TensorRT Execution Accelerator",
        ),
        (
            (("tensorrt", {"max_workspace_size_bytes": "1G"}),),
            {},
            f"{_FIELD}[0].parameters['max_workspace_size_bytes']",
            "expected a number of bytes, got '1G'",
        ),
        (
            (("cuda", {"gpu_mem_limit": str(1 << 64)}),), {},
            f"{_FIELD}[0].parameters['gpu_mem_limit']", "expected a number of bytes",
        ),
        (
            (),
            {"cudnn_conv_algo_search": "3"},
            "parameters['cudnn_conv_algo_search']",
            "unsupported cudnn_conv_algo_search value '3' is requested; expected 0 (EXHAUSTIVE),"
            " 1 (HEURISTIC), 2 (DEFAULT)",
        ),
        (
            (), {"cudnn_conv_algo_search": "0000000009"}, "parameters['cudnn_conv_algo_search']",
            "unsupported cudnn_conv_algo_search value '0000000009' is requested",
        ),
        (
            (),
            {"arena_extend_strategy": "-1"},
            "parameters['arena_extend_strategy']",
            "unsupported arena_extend_strategy value '-1' is requested; expected"
            " 0 (kNextPowerOfTwo), 1 (kSameAsRequested)",
        ),
    ],
)  # fmt: skip
def test_invalid_options_are_named(
    accelerators: Accelerators, parameters: dict[str, str], path: str, says: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        wanted_providers(spec_of(accelerators, parameters=parameters))
    assert caught.value.path == path
    assert caught.value.text.startswith(says)


def test_the_probe_of_a_gpu_is_a_valid_model() -> None:
    session = ort.InferenceSession(LEAST_MODEL, providers=[CPU])
    (result,) = session.run(None, {"x": np.ones(1, np.float32)})
    assert result.tolist() == [1]


@pytest.mark.skipif(not HAS_CUDA, reason="this ONNX Runtime is made for the CPU alone")
def test_a_build_for_gpus_works_or_says_why_not() -> None:
    assert missing_build() == OnnxBackend().gpu_obstacle(0) == ""
    says = cuda_obstacle()
    assert says == "" or says.startswith(f"execution provider {CUDA} cannot start on this machine:")


@pytest.mark.skipif(HAS_CUDA, reason="this ONNX Runtime is made for GPUs, too")
def test_a_cpu_build_names_the_package_to_install() -> None:
    assert missing_build().endswith("; install onnxruntime-gpu in place of onnxruntime")
    assert OnnxBackend().gpu_obstacle(1) == OnnxBackend().gpu_obstacle(0) == missing_build()
