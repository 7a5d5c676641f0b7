"""What one instance has come to take of memory when it is loaded, begun and warmed up."""

from types import TracebackType

from headrace.execution.python_backend import LoadedWorker
from headrace.execution.runner import LoadedModel
from headrace.observability.memory import Beginning, GrowthMeter, in_process_estimate, memory_of


class Footprint:
    """A measurement, for as long as an instance is being loaded: `with Footprint(…) as footprint`.

    `here` says whether it is loaded into this process, and so grows it. On a loading thread.
    """

    def __init__(self, meter: GrowthMeter, here: bool) -> None:
        self._meter = meter
        self._here = here
        self._beginning: Beginning | None = None

    def __enter__(self) -> "Footprint":
        if self._here:
            self._beginning = self._meter.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._growth()

    def of(self, model: LoadedModel) -> int:
        """Bytes that it takes; the measurement ends with this."""
        if isinstance(model, LoadedWorker):
            return memory_of(model.process.pid)
        return in_process_estimate(model.file_bytes, self._growth())

    def _growth(self) -> int | None:
        beginning, self._beginning = self._beginning, None
        return self._meter.end(beginning) if beginning is not None else None
