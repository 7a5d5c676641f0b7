"""What NVML tells, by a library of its interface."""

from pathlib import Path

import pytest

from headrace.observability.nvml import GpuReading, Nvml, NvmlError
from tests.support.gpu_libraries import cuda_library, nvml_library


def test_a_gpu_and_a_part_of_one(tmp_path: Path) -> None:
    nvml = Nvml(nvml_library(tmp_path))
    assert [nvml.name("0a"), nvml.name("0b")] == ["GPU-0a", "MIG-0b"]
    assert nvml.memory("MIG-0b") == (2000, 100)
    assert nvml.read("GPU-0a") == GpuReading("GPU-0a", 1000, 100, 0.25, 70.5, 300.0, 2**40 / 1000)
    assert nvml.read("MIG-0b") == GpuReading("MIG-0b", 2000, 100)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID gave the error 6"):
        Nvml(nvml_library(tmp_path)).name("0c")
    with pytest.raises(NvmlError, match="nvmlInit_v2 gave the error 9"):
        Nvml(nvml_library(tmp_path, init=9))
    with pytest.raises(OSError, match="libnothing"):
        Nvml("libnothing.so")
    with pytest.raises(NvmlError, match=r"is too old: .*nvmlInit_v2"):
        Nvml(cuda_library(tmp_path, devices=1))
