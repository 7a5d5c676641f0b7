"""How many requests each door has answered, by operation and status.

A door holds the counts of an operation, a list by status, and adds one for each answer, which is
all that an answer pays. A front end counts for itself and hands on what has come every second.
Operations and statuses are those of the protocol: nothing that clients choose becomes a label.
"""

from collections.abc import Iterable, Iterator, Sequence

# Of gRPC, by number.
STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
INFER = "infer"
OTHER = "other"  # the operation of what belongs to none, such as an unknown path
_HTTP_STATUSES = 600

Sample = tuple[str, str, str, int]  # door, operation, status and how many
Grown = tuple[str, str, int, int]  # the same with the status as a number


class Answers:
    """Counts of answers by door, operation and status."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def of(self, door: str, operation: str) -> list[int]:
        """The counts of an operation by status, for the door ("http" or "grpc") to add to."""
        counts = self._counts.get((door, operation))
        if counts is None:
            counts = [0] * (len(STATUS_NAMES) if door == "grpc" else _HTTP_STATUSES)
            self._counts[door, operation] = counts
        return counts

    def take(self) -> list[Grown]:
        """What was counted since the last time, for the process that is told."""
        grown = [
            (*key, status, count)
            for key, counts in self._counts.items()
            if any(counts)
            for status, count in enumerate(counts)
            if count
        ]
        for door, operation, status, _ in grown:
            self._counts[door, operation][status] = 0
        return grown

    def add(self, grown: Iterable[Sequence[object]]) -> None:
        """Count what another process has taken; raises `ValueError` or `TypeError` for nonsense."""
        for door, operation, status, count in grown:
            if not (isinstance(status, int) and isinstance(count, int)):
                raise TypeError(f"expected numbers, got {status!r} and {count!r}")
            self.of(str(door), str(operation))[status] += count

    def samples(self) -> Iterator[Sample]:
        """All counts; of each operation at least that of good answers."""
        for (door, operation), counts in sorted(self._counts.items()):
            good = 0 if door == "grpc" else 200
            for status, count in enumerate(counts):
                if count or status == good:
                    name = STATUS_NAMES[status] if door == "grpc" else str(status)
                    yield door, operation, name, count
