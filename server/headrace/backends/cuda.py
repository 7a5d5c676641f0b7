"""The GPUs that this process may use, and their memory, through the CUDA driver's own library.

GPUs have the numbers that CUDA gives them: `CUDA_VISIBLE_DEVICES` says which there are, and in
which order.

The driver's library is called directly, so that no package has to be there. Not tested on hardware:
what is tested is that the calls reach a library of this interface as they are meant.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Protocol
from uuid import UUID

import numpy as np

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1  # page-locked for every GPU


class CudaError(OSError):
    """A call of the driver that did not succeed."""


class Cuda(Protocol):
    """The GPUs of this machine. Every method blocks and may be called on any thread.

    All raise `CudaError`.
    """

    @property
    def devices(self) -> int:
        """How many there are."""

    @property
    def uuids(self) -> Sequence[str]:
        """What tells each of them from all others, in the order of their numbers."""

    def open(self, device: int, handle: bytes, byte_size: int) -> int:
        """The address of the memory of a handle, of which there must be `byte_size` bytes."""

    def close(self, device: int, address: int) -> None:
        """Let go of memory that was opened."""

    def to_host(self, device: int, address: int, into: memoryview) -> None:
        """Copy from a GPU."""

    def to_device(self, device: int, address: int, data: memoryview) -> None:
        """Copy to a GPU."""

    def pin(self, byte_size: int) -> int:
        """The address of page-locked memory of the host, which every GPU copies from and to by
        itself.
        """


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class CudaDriver:
    """`Cuda` by the driver's library."""

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
        """`Cuda.open`."""
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
        """`Cuda.close`."""
        self._enter(device)
        self._call("cuIpcCloseMemHandle", address)

    def to_host(self, device: int, address: int, into: memoryview) -> None:
        """`Cuda.to_host`."""
        self._enter(device)
        self._call("cuMemcpyDtoH_v2", _pointer(into), address, len(into))

    def to_device(self, device: int, address: int, data: memoryview) -> None:
        """`Cuda.to_device`."""
        self._enter(device)
        self._call("cuMemcpyHtoD_v2", address, _pointer(data), len(data))

    def pin(self, byte_size: int) -> int:
        """`Cuda.pin`."""
        self._enter(0)
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), byte_size, _PORTABLE)
        return int(address.value or 0)

    def _enter(self, device: int) -> None:
        """Have this thread speak to a GPU."""
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
