"""What is known of the models that are loaded on request. Owned by the event-loop thread."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.core.errors import ServerError
from headrace.engine.model import Model
from headrace.engine.residency import Resident
from headrace.engine.version import ModelVersion
from headrace.repository.layout import ModelSource

Done = Callable[[ServerError | None], None]


class Waiter:
    """Somebody who waits for a model and is told once."""

    __slots__ = ("done", "timer")

    def __init__(self, done: Done) -> None:
        self.done = done
        self.timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model could not be loaded, and until when that is not tried again."""

    reason: str
    until: float
    delay: float


@dataclass(slots=True)
class Entry:
    """What is known of one model.

    `wanted` is what an operator waits for, in place of the model's source. While it is `coming`,
    the bytes that it is expected to take are `counted`, from when there is room for it. `expected`
    is what it took last, or may take as its files are, which have `size` bytes. It was `loaded` and
    last `asked` for at these times, in seconds. `off` is whether it is to stay unloaded, `problem`
    why it did not come the last time.
    """

    waiting: set[Waiter] = field(default_factory=set)
    wanted: ModelSource | None = None
    coming: bool = False
    counted: int = 0
    size: int = 0
    expected: int = 0
    loaded: float = 0.0
    asked: float = 0.0
    failure: Failure | None = None
    off: bool = False
    problem: str = ""

    def forget(self, waiter: Waiter) -> bool:
        """Tell this one nothing; whether it was the last."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        if waiter not in self.waiting:
            return False
        self.waiting.discard(waiter)
        return not self.waiting

    def tell(self, error: ServerError | None) -> None:
        """Tell all who wait."""
        waiting, self.waiting = self.waiting, set()
        for waiter in waiting:
            if waiter.timer is not None:
                waiter.timer.cancel()
            waiter.done(error)

    def resident(self, model: Model, pinned: bool) -> Resident | None:
        """The model as it counts for the budget; None if it is not in memory, nor to be."""
        versions = model.ready_versions()
        if not (versions or self.counted):
            return None
        nbytes = sum(version.memory_bytes for version in versions)
        if nbytes and not self.counted:
            self.expected = nbytes
        return Resident(
            model.name,
            max(nbytes or self.expected, self.counted),
            max(_last_run(versions), self.asked),
            self.loaded,
            pinned,
            busy=self.coming or model.loading is not None or any(v.busy for v in versions),
        )


def _last_run(versions: Iterable[ModelVersion]) -> float:
    return max((version.statistics.last_inference_ms for version in versions), default=0) / 1_000
