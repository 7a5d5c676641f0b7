"""CUDA shared memory: GPU memory of clients, opened by its `cudaIpcMemHandle_t`."""

import logging
from collections.abc import Callable

from headrace.core.errors import InvalidRequest
from headrace.engine.shared_memory import Memory, Open, invalid_args
from headrace.placement.local.gpus import CudaDriver, CudaError

log = logging.getLogger(__name__)

_HANDLE_SIZE = 64  # bytes of a cudaIpcMemHandle_t


class CudaMemory:
    """GPU memory allocated by another process."""

    def __init__(self, cuda: CudaDriver, device: int, address: int) -> None:
        self._cuda = cuda
        self._device = device
        self._address = address

    def read(self, into: memoryview, offset: int) -> int:
        """Implements `Memory.read`."""
        self._cuda.to_host(self._device, self._address + offset, into)
        return len(into)

    def write(self, data: memoryview, offset: int) -> bool:
        """Implements `Memory.write`."""
        self._cuda.to_device(self._device, self._address + offset, data)
        return True

    def close(self) -> None:
        """Implements `Memory.close`."""
        self._cuda.close(self._device, self._address)


def opener(find: Callable[[], CudaDriver | None]) -> Open:
    """An opener of clients' CUDA shared memory, on the GPUs of the driver returned by `find`."""

    def opened(name: str, handle: bytes, device_id: int, byte_size: int) -> Memory:
        cuda = find()
        if cuda is None:
            raise InvalidRequest(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            )
        if len(handle) != _HANDLE_SIZE or device_id >= cuda.devices:
            raise invalid_args(name, "it has no handle of 64 bytes, or there is no such GPU")
        try:
            return CudaMemory(cuda, device_id, cuda.open(device_id, handle, byte_size))
        except CudaError as error:
            log.error("cannot open CUDA shared memory region %r: %s", name, error)
            raise invalid_args(name, "the handle cannot be opened, or has less") from None

    return opened
