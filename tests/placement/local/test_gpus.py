"""What a machine has of GPUs, with libraries of the real ones' interface in their place."""

from functools import partial
from pathlib import Path

import pytest

from headrace.placement.local.gpus import CudaDriver, Gpus
from headrace.plugins.nvml import Nvml, NvmlError
from tests.support.gpu_libraries import NvmlOfTwo, cuda_library

WHOLE, PART = "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "MIG-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"


def test_two_gpus(tmp_path: Path) -> None:
    gpus = Gpus(
        1 << 20,
        partial(CudaDriver, cuda_library(tmp_path, devices=2)),
        NvmlOfTwo,
    )
    before = gpus.pool
    assert before is None  # nobody has looked
    assert gpus.count == 2
    assert gpus.problem == ""
    assert [gpus.uuid(0), gpus.uuid(1), gpus.uuid(2)] == [WHOLE, PART, ""]
    assert [reading.uuid for reading in gpus.readings()] == [WHOLE, PART]
    meter = gpus.meter(1)
    assert meter is not None
    assert meter.begin().resident == 100
    assert gpus.meter(2) is None
    array = gpus.pinned(1 << 17)
    assert array is not None
    assert gpus.pinned(8) is None
    assert gpus.pool is not None
    assert (gpus.pool.limit, gpus.pool.used) == (1 << 20, 1 << 17)


def test_a_driver_alone_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> Nvml:
        raise NvmlError("no package")

    caplog.set_level("INFO")
    gpus = Gpus(
        0,
        partial(CudaDriver, cuda_library(tmp_path, devices=1)),
        failing,
    )
    assert gpus.count == 1
    assert gpus.uuid(0) == WHOLE
    assert gpus.meter(0) is None
    assert list(gpus.readings()) == []
    assert gpus.pinned(1 << 17) is None
    assert [record.message for record in caplog.records] == [
        "no metrics of GPUs: no package", f"GPUs: {WHOLE}",
    ]  # fmt: skip


def test_gpus_may_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus = Gpus(0, partial(CudaDriver, cuda_library(tmp_path, devices=0)))
    assert gpus.problem == "there is no GPU; CUDA_VISIBLE_DEVICES is ''"


def test_no_driver_is_looked_for_once_and_quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    looked = []

    def driver() -> CudaDriver:
        looked.append(True)
        return CudaDriver("libnothing.so")

    gpus = Gpus(1 << 20, driver)
    assert gpus.count == 0
    assert "libnothing.so: cannot open shared object file" in gpus.problem
    assert (gpus.cuda(), gpus.pool, gpus.meter(0), gpus.pinned(1 << 20)) == (None,) * 4
    assert list(gpus.readings()) == []
    assert len(looked) == 1
    assert caplog.records == []


def test_a_driver_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(0, partial(CudaDriver, cuda_library(tmp_path, devices=1, init=803)))
    assert gpus.count == 0
    assert gpus.problem == "cuInit gave the error 803 (the driver is too old)"
