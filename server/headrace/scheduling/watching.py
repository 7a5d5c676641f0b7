"""Counting, with an eye on single requests: when each of them was computed."""

from collections.abc import Callable, Sequence

from headrace.observability.statistics import Closed
from headrace.scheduling.recorder import Recorder

Computed = Callable[[int, int, int, int], None]  # started, gathered, computed, ended


class WatchingRecorder:
    """Hands everything on to another recorder, and tells of the requests that are watched.

    They are known by when they arrived; who arrived at the same moment is told of one another, too.
    In place only while any is watched, so that the others cost nothing.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._watched: dict[int, list[Computed]] = {}

    @property
    def batches_closed(self) -> dict[Closed, int]:
        """`Recorder.batches_closed`."""
        return self.recorder.batches_closed

    @property
    def idle(self) -> bool:
        """Whether nobody is watched."""
        return not self._watched

    def watch(self, arrived: int, tell: Computed) -> None:
        """Tell when the request that arrived then is computed."""
        self._watched.setdefault(arrived, []).append(tell)

    def unwatch(self, arrived: int, tell: Computed) -> None:
        """Tell no more of it."""
        others = [each for each in self._watched.pop(arrived, ()) if each != tell]
        if others:
            self._watched[arrived] = others

    def batch_succeeded(
        self,
        arrived: Sequence[int],
        inferences: int,
        batch_rows: int,
        started: int,
        gathered: int,
        computed: int,
        ended: int,
    ) -> None:
        """`Recorder.batch_succeeded`."""
        self.recorder.batch_succeeded(
            arrived, inferences, batch_rows, started, gathered, computed, ended
        )
        for moment in arrived:
            for tell in self._watched.get(moment, ()):
                tell(started, gathered, computed, ended)

    def batch_opened(self, batch_rows: int, started: int, gathered: int, computed: int) -> None:
        """`Recorder.batch_opened`."""
        self.recorder.batch_opened(batch_rows, started, gathered, computed)

    def request_completed(
        self, arrived: int, rows: int, started: int, ended: int, paused: bool = False
    ) -> None:
        """`Recorder.request_completed`."""
        self.recorder.request_completed(arrived, rows, started, ended, paused)
        for tell in self._watched.get(arrived, ()):
            tell(started, started, ended, ended)

    def request_failed(self, reason: str, duration_ns: int, fault: bool = False) -> None:
        """`Recorder.request_failed`."""
        self.recorder.request_failed(reason, duration_ns, fault)
