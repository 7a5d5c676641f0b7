"""State of GPUs, by NVIDIA's management library.

The library comes with the driver and is called directly, so that no package has to be there. Its
calls may block for milliseconds, and belong on a thread.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A GPU at one moment; None is what it does not tell.

    Memory in bytes, `utilization` between 0 and 1, power in watts, `energy` in joules since the
    driver was loaded.
    """

    uuid: str
    memory_total: int
    memory_used: int
    utilization: float | None = None
    power_usage: float | None = None
    power_limit: float | None = None
    energy: float | None = None


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class NvmlError(OSError):
    """A call of the library that did not succeed."""


class Nvml:
    """The library, ready for use. Every method blocks and may be called on any thread."""

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises `OSError` where the library is not, or does not work."""
        self._library = ctypes.CDLL(library)
        try:
            for name, arguments in (
                ("nvmlInit_v2", ()),
                ("nvmlDeviceGetHandleByUUID", (c_char_p, POINTER(c_void_p))),
                ("nvmlDeviceGetMemoryInfo", (c_void_p, POINTER(_Memory))),
                ("nvmlDeviceGetUtilizationRates", (c_void_p, POINTER(_Utilization))),
                ("nvmlDeviceGetPowerUsage", (c_void_p, POINTER(c_uint))),
                ("nvmlDeviceGetPowerManagementLimit", (c_void_p, POINTER(c_uint))),
                ("nvmlDeviceGetTotalEnergyConsumption", (c_void_p, POINTER(c_ulonglong))),
            ):
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except AttributeError as error:
            raise NvmlError(f"{library} is too old: {error}") from None
        self._call("nvmlInit_v2")

    def name(self, uuid: str) -> str:
        """The name of a GPU, or of a part of one, by its UUID; raises `NvmlError`."""
        try:
            self._handle(f"GPU-{uuid}")
        except NvmlError:
            self._handle(f"MIG-{uuid}")
            return f"MIG-{uuid}"
        return f"GPU-{uuid}"

    def memory(self, name: str) -> tuple[int, int]:
        """Bytes in all, and in use by whatever process; raises `NvmlError`."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle(name), byref(memory))
        return memory.total, memory.used

    def read(self, name: str) -> GpuReading:
        """Read the state of a GPU; raises `NvmlError` if not even its memory is told."""
        total, used = self.memory(name)
        handle = self._handle(name)
        milliwatts = self._number("nvmlDeviceGetPowerUsage", handle, c_uint())
        limit = self._number("nvmlDeviceGetPowerManagementLimit", handle, c_uint())
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", handle, c_ulonglong())
        rates = _Utilization()
        busy: float | None = None
        if not self._library.nvmlDeviceGetUtilizationRates(handle, byref(rates)):
            busy = rates.gpu / 100
        return GpuReading(
            name,
            total,
            used,
            busy,
            None if milliwatts is None else milliwatts / 1000,
            None if limit is None else limit / 1000,
            None if millijoules is None else millijoules / 1000,
        )

    def _handle(self, name: str) -> c_void_p:
        handle = c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), byref(handle))
        return handle

    def _number(self, name: str, handle: c_void_p, result: Any) -> int | None:
        return None if getattr(self._library, name)(handle, byref(result)) else int(result.value)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise NvmlError(f"{name} gave the error {status}")
