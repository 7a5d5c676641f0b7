"""The GPUs of this process, found when somebody first asks for them.

Looking takes a moment, as the driver has to start, and memory of nobody's: a server whose models
run on the CPU never looks. For any thread.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

from headrace.backends.cuda import Cuda, CudaDriver, CudaError
from headrace.backends.pinned import PinnedPool
from headrace.core.tensors import Array
from headrace.observability.machine import GrowthMeter
from headrace.observability.nvml import GpuReading, Nvml

log = logging.getLogger(__name__)


class Gpus:
    """What there is, and what of it is in use."""

    def __init__(
        self,
        pinned_bytes: int = 0,
        driver: Callable[[], Cuda] = CudaDriver,
        management: Callable[[], Nvml] = Nvml,
    ) -> None:
        """`pinned_bytes` of page-locked memory may be used, as soon as there is a GPU."""
        self._pinned_bytes = pinned_bytes
        self._driver = driver
        self._management = management
        self._lock = Lock()
        self._looked = False
        self._cuda: Cuda | None = None
        self._nvml: Nvml | None = None
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

    def cuda(self) -> Cuda | None:
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
        """What tells this GPU from all others; empty if it is not known."""
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
            log.info("nothing tells how the GPUs are: %s", error)
        log.info("GPUs: %s", ", ".join(self._names))


def _explained(error: Exception) -> str:
    """Why there are no GPUs, and what may be done about it."""
    if not isinstance(error, CudaError):
        driver = "it is part of NVIDIA's driver, which a container has to be given"
        return f"{error}; {driver}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(error) + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES is '{visible}'")


def _used_of(nvml: Nvml, name: str) -> Callable[[], int]:
    def used() -> int:
        try:
            return nvml.memory(name)[1]
        except OSError:
            return 0

    return used
