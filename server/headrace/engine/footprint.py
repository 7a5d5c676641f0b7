"""What one instance has come to take of memory when it is loaded, begun and warmed up."""

from dataclasses import dataclass
from types import TracebackType

from headrace.backends.gpus import Gpus
from headrace.execution.local import LoadedModel
from headrace.observability.machine import Beginning, GrowthMeter, in_process_estimate, memory_of


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's memory, 0 if nothing tells; `uuid` is the GPU's."""

    device: int
    uuid: str
    nbytes: int


class Footprint:
    """A measurement, for as long as an instance is being loaded: `with Footprint(…) as footprint`.

    `here` says whether it is loaded into this process, and so grows it. On a GPU, it is what the
    GPU's memory in use has grown by, whoever has taken it. On a loading thread.
    """

    def __init__(
        self, meter: GrowthMeter, here: bool, gpus: Gpus | None = None, device: int | None = None
    ) -> None:
        """`device` is the GPU that the instance is on, None for the CPU."""
        self._growth = _Growth(meter if here else None)
        self._gpus = gpus
        self._device = device
        on_gpu = gpus.meter(device) if gpus is not None and device is not None else None
        self._gpu_growth = _Growth(on_gpu)

    def __enter__(self) -> "Footprint":
        self._growth.begin()
        self._gpu_growth.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._growth.end()
        self._gpu_growth.end()

    def of(self, model: LoadedModel) -> tuple[int, GpuMemory | None]:
        """Bytes that it takes, and what it takes of its GPU; the measurement ends with this."""
        on_gpu = None
        if self._gpus is not None and self._device is not None:
            grown = max(self._gpu_growth.end() or 0, 0)
            on_gpu = GpuMemory(self._device, self._gpus.uuid(self._device), grown)
        if model.pid:
            return memory_of(model.pid), on_gpu
        return in_process_estimate(model.file_bytes, self._growth.end()), on_gpu


class _Growth:
    """One measurement by one meter, or by none."""

    def __init__(self, meter: GrowthMeter | None) -> None:
        self._meter = meter
        self._beginning: Beginning | None = None

    def begin(self) -> None:
        if self._meter is not None:
            self._beginning = self._meter.begin()

    def end(self) -> int | None:
        beginning, self._beginning = self._beginning, None
        return self._meter.end(beginning) if self._meter and beginning is not None else None
