"""Discovery of GPUs, with fakes of the libraries' interfaces."""

import ctypes
import gc
from functools import partial
from pathlib import Path

import pytest

from headrace.placement.local.gpus import LEAST, CudaDriver, CudaError, Gpus, PinnedPool
from headrace.plugins.nvml import Nvml, NvmlError
from tests.support.gpu_libraries import NvmlOfTwo, cuda_library


def handle(offset: int, last: bytes = b"z") -> bytes:
    return bytes([offset]) + bytes(62) + last


def test_memory_of_two_gpus(tmp_path: Path) -> None:
    cuda = CudaDriver(cuda_library(tmp_path, devices=2))
    assert cuda.devices == 2
    assert cuda.uuids == (
        "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b",
    )  # fmt: skip
    first, second = cuda.open(0, handle(0), 64), cuda.open(1, handle(8), 56)
    cuda.to_device(0, first + 4, memoryview(b"first"))
    cuda.to_device(1, second, memoryview(b"second"))
    data = bytearray(6)
    cuda.to_host(1, second, memoryview(data))
    assert data == b"second"
    cuda.to_host(0, first + 3, memoryview(data))
    assert data == b"\0first"
    cuda.to_host(0, first, memoryview(bytearray()))
    cuda.close(0, first)
    cuda.close(1, second)
    with pytest.raises(CudaError, match="cuIpcCloseMemHandle gave the error 400"):
        cuda.close(1, second)


def test_libraries_that_cannot_be_opened(tmp_path: Path) -> None:
    cuda = CudaDriver(cuda_library(tmp_path, devices=1))
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 gave the error 1"):
        cuda.open(0, handle(0, b"a"), 8)
    with pytest.raises(CudaError, match="57 bytes are more than there are"):
        cuda.open(0, handle(8), 57)
    with pytest.raises(CudaError):  # it was released
        cuda.close(0, 0)


def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="there is no GPU"):
        CudaDriver(cuda_library(tmp_path, devices=0))
    with pytest.raises(CudaError, match=r"^cuInit gave the error 803 \(the driver is too old\)$"):
        CudaDriver(cuda_library(tmp_path, devices=1, init=803))
    with pytest.raises(OSError, match="libnothing"):
        CudaDriver("libnothing.so")
    # A working one gives page-locked memory for all GPUs.
    address = CudaDriver(cuda_library(tmp_path, devices=2)).pin(16)
    ctypes.memset(address, 1, 16)  # it can be written


WHOLE, PART = "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "MIG-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"


def test_two_gpus(tmp_path: Path) -> None:
    nvml = NvmlOfTwo()
    gpus = Gpus(1 << 20, partial(CudaDriver, cuda_library(tmp_path, devices=2)), lambda: nvml)
    before = gpus.pool
    assert before is None  # not queried
    assert gpus.count == 2
    assert gpus.problem == ""
    assert [gpus.uuid(0), gpus.uuid(1), gpus.uuid(2)] == [WHOLE, PART, ""]
    assert [reading.uuid for reading in gpus.readings()] == [WHOLE, PART]
    meter = gpus.meter(1)
    assert meter is not None
    with meter.measuring() as grown:
        nvml.used = 140
        assert grown() == 40
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


def test_hidden_gpus_and_gpus_that_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus = Gpus(0, partial(CudaDriver, cuda_library(tmp_path, devices=0)))
    assert gpus.problem == "there is no GPU; CUDA_VISIBLE_DEVICES is ''"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus = Gpus(0, partial(CudaDriver, cuda_library(tmp_path, devices=1, init=803)))
    assert gpus.count == 0
    assert gpus.problem == "cuInit gave the error 803 (the driver is too old)"


def test_a_missing_driver_is_searched_once_and_silently(caplog: pytest.LogCaptureFixture) -> None:
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


class Memory:
    """Gives memory and never takes it back."""

    def __init__(self) -> None:
        self.blocks: list[ctypes.Array[ctypes.c_ubyte]] = []
        self.broken = False

    def pin(self, size: int) -> int:
        if self.broken:
            raise OSError("no memory")
        self.blocks.append((ctypes.c_ubyte * size)())
        return ctypes.addressof(self.blocks[-1])

    @property
    def sizes(self) -> list[int]:
        return [len(block) for block in self.blocks]


def test_an_array_has_the_requested_size() -> None:
    memory = Memory()
    array = PinnedPool(memory.pin, 1 << 20).take(LEAST + 5)
    assert array is not None
    assert array.shape == (LEAST + 5,)
    array[:] = 7
    assert bytes(memory.blocks[0])[: LEAST + 6] == b"\7" * (LEAST + 5) + b"\0"
    assert memory.sizes == [2 * LEAST]


def test_a_block_is_reused_after_its_last_view() -> None:
    memory = Memory()
    pool = PinnedPool(memory.pin, 1 << 20)
    array = pool.take(LEAST)
    assert array is not None
    view = array.view("f4").reshape(2, -1)[1:]
    del array
    gc.collect()
    assert pool.used == pool.allocated == LEAST
    other = pool.take(LEAST)
    assert memory.sizes == [LEAST] * 2
    del view
    gc.collect()
    assert (pool.used, pool.allocated) == (LEAST, 2 * LEAST)
    again = pool.take(LEAST - 0)
    assert memory.sizes == [LEAST] * 2
    assert again is not None
    assert other is not None
    assert again.ctypes.data != other.ctypes.data


def test_arrays_without_a_block() -> None:
    memory = Memory()
    pool = PinnedPool(memory.pin, 4 * LEAST)
    assert pool.take(0) is None
    assert pool.take(LEAST - 1) is None
    assert pool.take(4 * LEAST + 1) is None
    kept = pool.take(3 * LEAST)
    assert kept is not None
    assert pool.take(LEAST) is None
    assert memory.sizes == [4 * LEAST]
    memory = Memory()
    memory.broken = True
    pool = PinnedPool(memory.pin, 1 << 20)
    assert pool.take(LEAST) is None
    assert (pool.used, pool.allocated, pool.limit) == (0, 0, 1 << 20)
