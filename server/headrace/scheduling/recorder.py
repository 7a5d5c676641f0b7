"""Where the scheduler counts what happened."""

from collections.abc import Sequence
from typing import Protocol

from headrace.observability.statistics import Closed


class Recorder(Protocol):
    """Where the scheduler counts what happened; see `headrace.observability.statistics`."""

    @property
    def batches_closed(self) -> dict[Closed, int]:
        """How many batches closed why; the scheduler counts in it."""

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
        """A batch ran and every request in it has its answer."""

    def batch_opened(self, batch_rows: int, started: int, gathered: int, computed: int) -> None:
        """A batch ran, but its requests are answered later."""

    def request_completed(
        self, arrived: int, rows: int, started: int, ended: int, paused: bool = False
    ) -> None:
        """A request that was answered later than its batch has had its last response.

        `paused`: its client read so slowly that the model was asked to pause.
        """

    def request_failed(self, reason: str, duration_ns: int, fault: bool = False) -> None:
        """A request that had been accepted ended without an answer.

        `fault`: the version's own, as `headrace.scheduling.rollback.is_fault` has it.
        """
