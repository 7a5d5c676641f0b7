"""State of GPUs, from NVIDIA's management library through the package nvidia-ml-py.

The library comes with the driver, the package with the extra `gpu`. Calls may block for
milliseconds: use a thread.
"""

from collections.abc import Callable
from typing import Any

from headrace.observability.statistics import GpuReading


class NvmlError(OSError):
    """A failed call of the library."""


class Nvml:
    """NVIDIA's management library, ready for use.

    Every method blocks and may be called on any thread.
    """

    def __init__(self) -> None:
        """Raises `NvmlError` if the package or the library is missing or does not work."""
        try:
            import pynvml
        except ImportError:
            raise NvmlError("nvidia-ml-py is missing: pip install 'headrace[gpu]'") from None
        self._library = pynvml
        self._call("nvmlInit")

    def name(self, uuid: str) -> str:
        """The name of a GPU, or of a part of one, by its UUID; raises `NvmlError`."""
        try:
            self._handle(f"GPU-{uuid}")
        except NvmlError:
            self._handle(f"MIG-{uuid}")
            return f"MIG-{uuid}"
        return f"GPU-{uuid}"

    def memory(self, name: str) -> tuple[int, int]:
        """Total bytes, and bytes used by all processes; raises `NvmlError`."""
        memory = self._call("nvmlDeviceGetMemoryInfo", self._handle(name))
        return memory.total, memory.used

    def read(self, name: str) -> GpuReading:
        """Read the state of a GPU; raises `NvmlError` if not even its memory is available."""
        total, used = self.memory(name)
        handle = self._handle(name)

        def told(getter: str, convert: Callable[[Any], float]) -> float | None:
            try:
                return convert(self._call(getter, handle))
            except NvmlError:
                return None

        return GpuReading(
            name,
            total,
            used,
            told("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100),
            told("nvmlDeviceGetPowerUsage", _from_thousandths),
            told("nvmlDeviceGetPowerManagementLimit", _from_thousandths),
            told("nvmlDeviceGetTotalEnergyConsumption", _from_thousandths),
        )

    def _handle(self, name: str) -> Any:
        return self._call("nvmlDeviceGetHandleByUUID", name)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, name)(*arguments)
        except self._library.NVMLError as error:
            raise NvmlError(f"{name}: {error}") from None


def _from_thousandths(number: int) -> float:
    return number / 1000
