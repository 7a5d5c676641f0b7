"""The last batches of a scheduler: when their requests came, why they closed, how long they took.

A batcher has no such log unless somebody asks: a batch then costs the test for one. With a log, a
batch costs a call and the copy of a few numbers; the log ends some time after it was last asked
for. Times are in nanoseconds of the batcher's clock. Owned by the event-loop thread.
"""

from collections import deque
from typing import NamedTuple, TypeAlias

from headrace.observability.statistics import Closed
from headrace.scheduling.batch import Aimed, Batch, Outcome

MOST_BATCHES = 512
MOST_REQUESTS = 2048  # in all batches of a log
_KEPT_NS = 600 * 10**9  # from the last question on


class LoggedRequest(NamedTuple):
    """A request as a policy sees it, of a priority level from 1, the most urgent.

    `targeted` ones may only run on some instances. `begun` is when a door began to receive it, 0 if
    that is not known.
    """

    arrived: int
    rows: int
    key: object
    targeted: bool = False
    deadline: int | None = None
    level: int = 1
    begun: int = 0


LoggedRequests: TypeAlias = tuple[LoggedRequest, ...]


class LoggedBatch(NamedTuple):
    """A batch that has succeeded, with all of its requests.

    `closed` is None for one that was not formed from a queue: it is part of an earlier one. From
    `free` on an instance could have run it. `ended` is the moment after its requests were given
    their rows, and `answered` that after the doors had taken the answers.
    """

    requests: LoggedRequests
    closed: Closed | None
    free: int
    started: int
    gathered: int
    computed: int
    ended: int
    answered: int

    @property
    def rows(self) -> int:
        """The rows of all requests."""
        return sum(request.rows for request in self.requests)


class BatchLog:
    """The last `MOST_BATCHES` batches, or fewer with `MOST_REQUESTS`, in the order of their end."""

    def __init__(self, now: int, has_levels: bool = False) -> None:
        """A log from `now` on; `has_levels` is true if the queue has several priority levels."""
        self.since = now
        self._has_levels = has_levels
        self._asked = now
        self._batches: deque[LoggedBatch] = deque()
        self._requests = 0

    def read(self, now: int) -> list[LoggedBatch]:
        """The batches, the oldest first; the log goes on for some time from `now`."""
        self._asked = now
        return list(self._batches)

    def requests_of(self, batch: Batch) -> LoggedRequests:
        """The requests of a batch, for `add`; to be called before they are answered."""
        by_level = self._has_levels  # calls that were in no queue have no level
        return tuple(
            LoggedRequest(
                call.arrived, call.rows, call.key, type(call.key) is Aimed, None,
                call.level if by_level else 1, call.begun_ns,
            )
            for call in batch.calls
        )  # fmt: skip

    def add(
        self,
        requests: LoggedRequests,
        batch: Batch,
        outcome: Outcome,
        ended: int,
        answered: int,
    ) -> bool:
        """Add a batch; False if nobody has asked for so long that the log should end."""
        if ended - self._asked > _KEPT_NS:
            return False
        times = batch.free, outcome.started, outcome.gathered, outcome.computed, ended, answered
        self._batches.append(LoggedBatch(requests, batch.closed, *times))
        self._requests += len(requests)
        while len(self._batches) > MOST_BATCHES or self._requests > MOST_REQUESTS:
            self._requests -= len(self._batches.popleft().requests)
        return True
