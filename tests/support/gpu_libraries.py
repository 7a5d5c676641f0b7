"""Fakes of the CUDA driver's library and of NVML, over plain memory.

They record calls to the real ones, and simulate machines with GPUs where only numbers matter.
They prove nothing about hardware.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.observability.statistics import GpuReading
from headrace.plugins.nvml import Nvml

_CUDA = r"""
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
typedef struct { char reserved[64]; } Handle;
static char memory[2][64];
static int current = -1, opened = 0;
int cuInit(unsigned flags) { return INIT + flags; }
int cuGetErrorString(int error, const char **text) {
    *text = error == 803 ? "the driver is too old" : 0; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int number) { *device = number + 10; return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return 0; }
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
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    if (flags != 1 || current != 0) return 1;
    *address = malloc(size); return *address ? 0 : 2; }
"""

_NVML = r"""
#include <stdint.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
int nvmlInitWithFlags(unsigned flags) { return flags; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!strncmp(uuid, "GPU-0a", 6)) { *device = (void *)1; return 0; }
    if (!strncmp(uuid, "MIG-0b", 6)) { *device = (void *)2; return 0; }
    return 6; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 1000 * (uintptr_t)device; memory->used = 100; memory->free = 0; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = 25; return device == (void *)1 ? 0 : 3; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 70500; return device == (void *)1 ? 0 : 3; }
int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *milliwatts) {
    *milliwatts = 300000; return device == (void *)1 ? 0 : 3; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = 1ull << 40; return device == (void *)1 ? 0 : 3; }
"""


def cuda_library(folder: Path, devices: int, init: int = 0) -> str:
    """The driver's library with `devices` GPUs; `init` is its error at initialization."""
    return _built(folder, f"cuda{devices}_{init}", _CUDA, {"DEVICES": devices, "INIT": init})


class NvmlOfTwo(Nvml):
    """NVML with a GPU and a MIG instance of another one, without any library."""

    def __init__(self) -> None:
        self.used = 100

    def name(self, uuid: str) -> str:
        return f"GPU-{uuid}" if uuid.startswith("0a") else f"MIG-{uuid}"

    def memory(self, name: str) -> tuple[int, int]:
        return 1000, self.used

    def read(self, name: str) -> GpuReading:
        return GpuReading(name, *self.memory(name))


def machine_with_gpus(folder: Path, devices: int) -> dict[str, str]:
    """Environment variables with which a process loads these libraries instead of real ones."""
    for built, name in (
        (cuda_library(folder, devices), "libcuda.so.1"),
        # A GPU, and a MIG instance of another one, which reports its memory only.
        (_built(folder, "nvml", _NVML, {}), "libnvidia-ml.so.1"),
    ):
        Path(built).rename(folder / name)
    return {"LD_LIBRARY_PATH": str(folder)}


def _built(folder: Path, name: str, text: str, constants: dict[str, int]) -> str:
    """Build a library; skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, built = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(text)
    defined = [f"-D{key}={value}" for key, value in constants.items()]
    command = [compiler, "-shared", "-fPIC", *defined, "-o", str(built), str(source)]
    subprocess.run(command, check=True)
    return str(built)
