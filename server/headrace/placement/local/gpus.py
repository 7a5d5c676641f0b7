"""The GPUs of this process and their memory, through the CUDA driver library.

GPUs have CUDA's numbers: `CUDA_VISIBLE_DEVICES` selects and orders them. They are detected on first
use: that takes a moment, as the driver has to start, and some memory, so a server with CPU models
never does it. The driver library is called directly, without further packages.

`PinnedPool` is page-locked host memory, which a GPU accesses without the CPU's help. Allocating it
is slow, so blocks are kept and returned to the pool when their array is collected. Block sizes are
powers of two. Everything here is thread-safe.
"""

import ctypes
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from threading import Lock
from typing import Any, Protocol
from uuid import UUID
from weakref import finalize

import numpy as np

from headrace.core.errors import LoadFailed
from headrace.core.tensors import Array
from headrace.observability.machine import GrowthMeter
from headrace.observability.statistics import GpuReading

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1  # page-locked for every GPU


class CudaError(OSError):
    """A failed call of the driver."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class CudaDriver:
    """The GPUs of this machine, through the driver library.

    `devices` is the number of GPUs, `uuids` identifies them in order. Every method blocks, may be
    called on any thread, and raises `CudaError`.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises `OSError` without a driver or GPU."""
        self._library = ctypes.CDLL(library)
        for name, arguments in (
            ("cuInit", (c_uint,)),
            ("cuDeviceGetCount", (POINTER(c_int),)),
            ("cuGetErrorString", (c_int, POINTER(c_char_p))),
            ("cuDeviceGet", (POINTER(c_int), c_int)),
            ("cuDeviceGetUuid", (POINTER(_Uuid), c_int)),
            ("cuDevicePrimaryCtxRetain", (POINTER(c_void_p), c_int)),
            ("cuCtxSetCurrent", (c_void_p,)),
            ("cuIpcOpenMemHandle_v2", (POINTER(c_uint64), _Handle, c_uint)),
            ("cuIpcCloseMemHandle", (c_uint64,)),
            ("cuMemGetAddressRange_v2", (POINTER(c_uint64), POINTER(c_size_t), c_uint64)),
            ("cuMemcpyDtoH_v2", (c_void_p, c_uint64, c_size_t)),
            ("cuMemcpyHtoD_v2", (c_uint64, c_void_p, c_size_t)),
            ("cuMemHostAlloc", (POINTER(c_void_p), c_size_t, c_uint)),
        ):
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self._call("cuInit", 0)
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        self.devices = count.value
        if not self.devices:
            raise CudaError("there is no GPU")
        self.uuids = tuple(map(self._uuid, range(self.devices)))
        self._contexts: dict[int, c_void_p] = {}

    def _uuid(self, number: int) -> str:
        device, found = c_int(), _Uuid()
        self._call("cuDeviceGet", byref(device), number)
        self._call("cuDeviceGetUuid", byref(found), device)
        return str(UUID(bytes=bytes(found.bytes)))

    def open(self, device: int, handle: bytes, byte_size: int) -> int:
        """Open at least `byte_size` bytes of memory by handle; returns the address."""
        self._enter(device)
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, _LAZY_PEER_ACCESS)
        try:
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            if address.value + byte_size > base.value + size.value:
                raise CudaError(f"{byte_size} bytes are more than there are")
        except BaseException:
            self._call("cuIpcCloseMemHandle", address)
            raise
        return address.value

    def close(self, device: int, address: int) -> None:
        """Close opened memory."""
        self._enter(device)
        self._call("cuIpcCloseMemHandle", address)

    def to_host(self, device: int, address: int, into: memoryview) -> None:
        """Copy from a GPU."""
        self._enter(device)
        self._call("cuMemcpyDtoH_v2", _pointer(into), address, len(into))

    def to_device(self, device: int, address: int, data: memoryview) -> None:
        """Copy to a GPU."""
        self._enter(device)
        self._call("cuMemcpyHtoD_v2", address, _pointer(data), len(data))

    def pin(self, byte_size: int) -> int:
        """Allocate page-locked host memory, accessible to every GPU; returns the address."""
        self._enter(0)
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), byte_size, _PORTABLE)
        return int(address.value or 0)

    def _enter(self, device: int) -> None:
        """Make a GPU's context current on this thread."""
        context = self._contexts.get(device)
        if context is None:
            number, context = c_int(), c_void_p()
            self._call("cuDeviceGet", byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            says = f" ({text.value.decode(errors='replace')})" if text.value else ""
            raise CudaError(f"{name} gave the error {status}{says}")


def _pointer(data: memoryview) -> int:
    """The address of a buffer, which must stay alive during the copy."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


# The driver copies anything smaller through its own buffer, equally fast.
LEAST = 64 << 10


class PinnedPool:
    """Blocks of up to `limit` bytes in total."""

    def __init__(self, pin: Callable[[int], int], limit: int) -> None:
        """`pin` allocates bytes permanently and returns the address; it may raise."""
        self.limit = limit
        self.allocated = 0  # bytes
        self._pin = pin
        self._lock = Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        # The garbage collector may return a block while this thread holds the lock.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Array | None:
        """An array of bytes; None for small sizes, or if the pool is exhausted."""
        if not LEAST <= nbytes <= self.limit:
            return None
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            self._take_back()
            free = self._free[size]
            if free:
                address = free.pop()
            elif self.allocated + size <= self.limit:
                try:
                    address = self._pin(size)
                except OSError:
                    return None
                self.allocated += size
            else:
                return None
        block = (ctypes.c_ubyte * size).from_address(address)
        finalize(block, self._returned.append, (size, address)).atexit = False
        return np.frombuffer(memoryview(block), np.uint8, nbytes)

    @property
    def used(self) -> int:
        """Bytes of blocks in use."""
        with self._lock:
            self._take_back()
            return self.allocated - sum(size * len(free) for size, free in self._free.items())

    def _take_back(self) -> None:
        while self._returned:
            size, address = self._returned.popleft()
            self._free[size].append(address)


class GpuReader(Protocol):
    """A source of the state of GPUs. Every method may block, and raises `OSError`."""

    def name(self, uuid: str) -> str:
        """The name of a GPU, or of a part of one, by its UUID."""

    def memory(self, name: str) -> tuple[int, int]:
        """Total bytes, and bytes used by all processes."""

    def read(self, name: str) -> GpuReading:
        """Read the state of a GPU."""


class Gpus:
    """The GPUs, their readings, and page-locked memory for them."""

    def __init__(
        self,
        pinned_bytes: int = 0,
        driver: Callable[[], CudaDriver] = CudaDriver,
        management: Callable[[], GpuReader] | None = None,
    ) -> None:
        """`pinned_bytes` of page-locked memory may be used, once a GPU is found.

        `management` reads their state; without it there are no readings.
        """
        self._pinned_bytes = pinned_bytes
        self._driver = driver
        self._management = management
        self._lock = Lock()
        self._looked = False
        self._cuda: CudaDriver | None = None
        self._nvml: GpuReader | None = None
        self._problem = ""
        self._names: list[str] = []
        self._meters: list[GrowthMeter] = []
        self._pool: PinnedPool | None = None

    @property
    def count(self) -> int:
        """The number of GPUs."""
        cuda = self.cuda()
        return 0 if cuda is None else cuda.devices

    @property
    def problem(self) -> str:
        """The reason why there are no GPUs; "" if there are some."""
        self.cuda()
        return self._problem

    def cuda(self) -> CudaDriver | None:
        """The driver; None if there are no GPUs."""
        with self._lock:
            if not self._looked:
                self._look()
                self._looked = True
            return self._cuda

    def pinned(self, nbytes: int) -> Array | None:
        """Page-locked bytes; None if ordinary memory is as good, or the pool is exhausted."""
        return None if self.cuda() is None or self._pool is None else self._pool.take(nbytes)

    def uuid(self, device: int) -> str:
        """The UUID of a GPU; "" if unknown."""
        self.cuda()
        return self._names[device] if device < len(self._names) else ""

    def meter(self, device: int) -> GrowthMeter | None:
        """A meter for allocations on a GPU; None if it reports nothing."""
        self.cuda()
        return self._meters[device] if device < len(self._meters) else None

    def readings(self) -> Sequence[GpuReading]:
        """The current readings of the GPUs that provide them, in order of their numbers."""
        self.cuda()
        found = []
        if self._nvml is not None:
            for name in self._names:
                with suppress(OSError):
                    found.append(self._nvml.read(name))
        return found

    @property
    def pool(self) -> PinnedPool | None:
        """The page-locked memory, once a GPU was found; does not detect GPUs."""
        return self._pool

    def _look(self) -> None:
        try:
            self._cuda = self._driver()
        except (OSError, AttributeError) as error:
            self._problem = _explained(error)
            log.debug("no GPUs: %s", self._problem)
            return
        self._names = [f"GPU-{uuid}" for uuid in self._cuda.uuids]
        if self._pinned_bytes:
            self._pool = PinnedPool(self._cuda.pin, self._pinned_bytes)
        try:
            if self._management is not None:
                nvml = self._management()
                self._names = [nvml.name(uuid) for uuid in self._cuda.uuids]
                self._meters = [GrowthMeter(_used_of(nvml, name)) for name in self._names]
                self._nvml = nvml
        except (OSError, LoadFailed) as error:
            log.warning("no metrics of GPUs: %s", error)
        log.info("GPUs: %s", ", ".join(self._names))


def _explained(error: Exception) -> str:
    """The reason why there are no GPUs, with a hint."""
    if not isinstance(error, CudaError):
        driver = "it is part of NVIDIA's driver, which a container has to be given"
        return f"{error}; {driver}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(error) + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES is '{visible}'")


def _used_of(nvml: GpuReader, name: str) -> Callable[[], int]:
    def used() -> int:
        try:
            return nvml.memory(name)[1]
        except OSError:
            return 0

    return used
