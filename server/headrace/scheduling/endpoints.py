"""Which of several servers of one model gets the next batch: decisions over values and time.

A server is called by its endpoint. It is reachable until a call finds no connection, or a health
check says otherwise; only health checks make it so again. One that goes on failing while it is
reachable is ejected for a time that doubles from one ejection to the next; the last success ends
the doubling. If all that are reachable are ejected, that is held against none of them: something
that takes requests badly is better than nothing.

Times are in seconds of one monotonic clock. Nothing here has a clock, a connection or a state.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

FAILURES = 5  # in a row, for which an endpoint is ejected
FIRST_EJECTION_SECS = 1.0
LONGEST_EJECTION_SECS = 30.0
FIRST_CHECK_SECS = 0.1  # after which an endpoint is looked at again that is not reachable


@dataclass(frozen=True, slots=True)
class Condition:
    """What is known of an endpoint.

    `outstanding` calls are under way, `taken` were ever begun. `failures` came in a row, and so did
    `ejections`, and `misses` of health checks.
    """

    reachable: bool = False
    outstanding: int = 0
    taken: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0
    misses: int = 0


def choose(conditions: Sequence[Condition], now: float, tried: Container[int] = ()) -> int | None:
    """The index of the endpoint for the next call, None if there is none.

    That with the fewest calls under way, of several the one that has had the fewest at all; never
    one that is `tried`.
    """
    candidates = [
        (now < one.ejected_until, one.outstanding, one.taken, index)
        for index, one in enumerate(conditions)
        if one.reachable and index not in tried
    ]
    return min(candidates)[-1] if candidates else None


def begun(condition: Condition) -> Condition:
    """A call is under way."""
    return replace(condition, outstanding=condition.outstanding + 1, taken=condition.taken + 1)


def succeeded(condition: Condition) -> Condition:
    """A call has ended with what a healthy server says, be it an error of the request."""
    return replace(condition, outstanding=condition.outstanding - 1, failures=0, ejections=0)


def abandoned(condition: Condition) -> Condition:
    """A call has ended because nobody wanted its answer any more, which says nothing."""
    return replace(condition, outstanding=condition.outstanding - 1)


def disconnected(condition: Condition) -> Condition:
    """A call has found no connection, or has lost it."""
    return replace(condition, outstanding=condition.outstanding - 1, reachable=False, misses=0)


def failed(condition: Condition, now: float) -> Condition:
    """A call has ended with what a healthy server would not say."""
    ended = replace(condition, outstanding=condition.outstanding - 1)
    if ended.failures + 1 < FAILURES:
        return replace(ended, failures=ended.failures + 1)
    seconds = min(FIRST_EJECTION_SECS * 2.0 ** min(ended.ejections, 16), LONGEST_EJECTION_SECS)
    return replace(ended, failures=0, ejections=ended.ejections + 1, ejected_until=now + seconds)


def checked(condition: Condition, healthy: bool) -> Condition:
    """A health check has ended."""
    return replace(condition, reachable=healthy, misses=0 if healthy else condition.misses + 1)


def next_check(condition: Condition, interval: float) -> float:
    """Seconds until the next health check; sooner while it may come back at any moment."""
    if condition.reachable:
        return interval
    return min(FIRST_CHECK_SECS * 2.0 ** min(condition.misses, 16), interval)
