"""NVML readings, by a library with its interface."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.plugins.nvml import Nvml, NvmlError
from tests.support.gpu_libraries import machine_with_gpus

ASKED = """
from headrace.observability.statistics import GpuReading
from headrace.plugins.nvml import Nvml, NvmlError

nvml = Nvml()
assert [nvml.name("0a"), nvml.name("0b")] == ["GPU-0a", "MIG-0b"]
assert nvml.memory("MIG-0b") == (2000, 100)
assert nvml.read("GPU-0a") == GpuReading("GPU-0a", 1000, 100, 0.25, 70.5, 300.0, 2**40 / 1000)
assert nvml.read("MIG-0b") == GpuReading("MIG-0b", 2000, 100)
try:
    nvml.name("0c")
except NvmlError as error:
    print(error)
"""


def test_a_gpu_and_a_mig_instance(tmp_path: Path) -> None:
    libraries = machine_with_gpus(tmp_path, devices=2)
    command = [sys.executable, "-c", ASKED]
    ended = subprocess.run(command, env=libraries, check=True, capture_output=True, text=True)
    assert ended.stdout == "nvmlDeviceGetHandleByUUID: Not Found\n"


def test_the_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match=r"pip install 'headrace\[gpu\]'"):
        Nvml()
