"""The GPUs of this process and their memory, through the CUDA driver's own library.

GPUs have the numbers that CUDA gives them: `CUDA_VISIBLE_DEVICES` says which there are, and in
which order. They are found when somebody first asks for them: looking takes a moment, as the driver
has to start, and memory of nobody's, so that a server whose models run on the CPU never looks. The
driver's library is called directly, and no package has to be there.

`PinnedPool` is page-locked memory of the host, which a GPU copies from and to without the
processor's help. Getting it from the driver takes long, so blocks are kept: one goes back when the
array made of it is gone, by itself. Blocks have sizes that are powers of two. All of it is for any
thread.
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

from headrace.core import plugins
from headrace.core.tensors import Array
from headrace.observability.machine import GrowthMeter
from headrace.observability.statistics import GpuReading

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1  # page-locked for every GPU


class CudaError(OSError):
    """A call of the driver that did not succeed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class CudaDriver:
    """The GPUs of this machine, through the driver's library.

    `devices` is how many there are, `uuids` tell each of them from all others, in the order of
    their numbers. Every method blocks, may be called on any thread, and raises `CudaError`.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises `OSError` where there is no driver, or no GPU."""
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
        """Open memory by its handle, at least `byte_size` bytes of it; its address."""
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
        """Close memory that was opened."""
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
        """The address of page-locked memory of the host, which every GPU reads and writes."""
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
    """Where bytes lie, which must stay as long as they are copied."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


# What is smaller, the driver copies by way of memory of its own, as quickly.
LEAST = 64 << 10


class PinnedPool:
    """Blocks of up to `limit` bytes in all."""

    def __init__(self, pin: Callable[[int], int], limit: int) -> None:
        """`pin` gives the address of so many bytes, which are never given back; it may raise."""
        self.limit = limit
        self.allocated = 0  # bytes
        self._pin = pin
        self._lock = Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        # A block may come back while this thread holds the lock: by the garbage collector.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Array | None:
        """An array of bytes; None for a small one, or if there is no room: use any other memory."""
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
        """Bytes of blocks that arrays are made of."""
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
        """Bytes in all, and in use by whatever process."""

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
        """`pinned_bytes` of page-locked memory may be used, as soon as there is a GPU."""
        self._pinned_bytes = pinned_bytes
        self._driver = driver
        self._management = management or plugins.find(plugins.GPUS, "nvml").load()
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
        """How many there are."""
        cuda = self.cuda()
        return 0 if cuda is None else cuda.devices

    @property
    def problem(self) -> str:
        """Why there are none; empty if there are some."""
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
        """Page-locked bytes; None if other memory is as good, or there is none of it left."""
        return None if self.cuda() is None or self._pool is None else self._pool.take(nbytes)

    def uuid(self, device: int) -> str:
        """The unique name of a GPU; empty if it is not known."""
        self.cuda()
        return self._names[device] if device < len(self._names) else ""

    def meter(self, device: int) -> GrowthMeter | None:
        """Measures what is allocated on a GPU; None where nothing tells."""
        self.cuda()
        return self._meters[device] if device < len(self._meters) else None

    def readings(self) -> Sequence[GpuReading]:
        """How each of them is now, of those that tell; in the order of their numbers."""
        self.cuda()
        found = []
        if self._nvml is not None:
            for name in self._names:
                with suppress(OSError):
                    found.append(self._nvml.read(name))
        return found

    @property
    def pool(self) -> PinnedPool | None:
        """The page-locked memory, once a GPU was found; does not look for one."""
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
            nvml = self._management()
            self._names = [nvml.name(uuid) for uuid in self._cuda.uuids]
            self._meters = [GrowthMeter(_used_of(nvml, name)) for name in self._names]
            self._nvml = nvml
        except OSError as error:
            log.warning("no metrics of GPUs: %s", error)
        log.info("GPUs: %s", ", ".join(self._names))


def _explained(error: Exception) -> str:
    """Why there are no GPUs, and what may be done about it."""
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
