"""What reaches the CUDA driver's library, shown by one of the same interface on plain memory."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.engine.cuda import CudaDriver, CudaError

_LIBRARY = r"""
#include <string.h>
#include <stdint.h>
typedef struct { char reserved[64]; } Handle;
static char memory[2][64];
static int current = -1, opened = 0;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int number) { *device = number + 10; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(device + 100); return 0; }
int cuCtxSetCurrent(void *context) { current = (int)(uintptr_t)context - 110; return 0; }
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[63] != 'z') return 1;
    *address = (uintptr_t)memory[current] + handle.reserved[0]; opened++; return 0; }
int cuIpcCloseMemHandle(uint64_t address) { (void)address; return opened-- > 0 ? 0 : 400; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    (void)address; *base = (uintptr_t)memory[current]; *size = 64; return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, (void *)(uintptr_t)from, size); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    memcpy((void *)(uintptr_t)to, from, size); return 0; }
"""


def library(folder: Path, devices: int) -> str:
    """Build it; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, built = folder / "cuda.c", folder / f"cuda{devices}.so"
    source.write_text(_LIBRARY)
    command = [compiler, "-shared", "-fPIC", f"-DDEVICES={devices}", "-o", str(built), str(source)]
    subprocess.run(command, check=True)
    return str(built)


def handle(offset: int, last: bytes = b"z") -> bytes:
    return bytes([offset]) + bytes(62) + last


def test_memory_of_two_gpus(tmp_path: Path) -> None:
    cuda = CudaDriver(library(tmp_path, devices=2))
    assert cuda.devices == 2
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
    cuda = CudaDriver(library(tmp_path, devices=1))
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 gave the error 1"):
        cuda.open(0, handle(0, b"a"), 8)
    with pytest.raises(CudaError, match="57 bytes are more than there are"):
        cuda.open(0, handle(8), 57)
    with pytest.raises(CudaError):  # it was let go of
        cuda.close(0, 0)


def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="there is no GPU"):
        CudaDriver(library(tmp_path, devices=0))


def test_no_driver() -> None:
    with pytest.raises(OSError, match="libnothing"):
        CudaDriver("libnothing.so")
