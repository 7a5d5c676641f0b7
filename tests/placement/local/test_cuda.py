"""What reaches the CUDA driver's library, shown by one of the same interface on plain memory."""

import ctypes
from pathlib import Path

import pytest

from headrace.placement.local.gpus import CudaDriver, CudaError
from tests.support.gpu_libraries import cuda_library


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


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    cuda = CudaDriver(cuda_library(tmp_path, devices=1))
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 gave the error 1"):
        cuda.open(0, handle(0, b"a"), 8)
    with pytest.raises(CudaError, match="57 bytes are more than there are"):
        cuda.open(0, handle(8), 57)
    with pytest.raises(CudaError):  # it was let go of
        cuda.close(0, 0)


def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="there is no GPU"):
        CudaDriver(cuda_library(tmp_path, devices=0))


def test_a_broken_driver_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=r"^cuInit gave the error 803 \(the driver is too old\)$"):
        CudaDriver(cuda_library(tmp_path, devices=1, init=803))


def test_page_locked_memory_is_for_all_gpus(tmp_path: Path) -> None:
    address = CudaDriver(cuda_library(tmp_path, devices=2)).pin(16)
    ctypes.memset(address, 1, 16)  # it can be written


def test_no_driver() -> None:
    with pytest.raises(OSError, match="libnothing"):
        CudaDriver("libnothing.so")
