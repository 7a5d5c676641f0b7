"""Choice of the upstream for a call or a sequence: pure decisions over values and time.

An upstream is reachable until a call finds no connection, or a health check says otherwise; only
health checks make it so again. One that goes on failing while it is reachable is ejected for a time
that doubles from one ejection to the next; the last success ends the doubling. If all that are
reachable are ejected, that is held against none of them: something that takes requests badly is
better than nothing.

A sequence's requests go to the upstream that has taken the first of them, since its state is there.
A request that may or may not have been run, or an upstream that is gone, leaves a sequence lost:
what went on from there would be computed from another state than its client believes. It can only
be begun again.

Times are in seconds of one monotonic clock. Nothing here has a clock, a connection or a state of
its own.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum

FAILURES = 5  # in a row, for which an upstream is ejected
FIRST_EJECTION_SECS = 1.0
LONGEST_EJECTION_SECS = 30.0
FIRST_CHECK_SECS = 0.1  # after which an upstream is looked at again that is not reachable


@dataclass(slots=True)
class Condition:
    """The condition of an upstream; owned by whoever calls it, and changed in place.

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
    """The index of the upstream for the next call, None if there is none.

    That with the fewest calls under way, of several the one that has had the fewest at all; never
    one that is `tried`.
    """
    chosen = None
    least = (False, 0, 0)
    for index, one in enumerate(conditions):
        if one.reachable and index not in tried:
            rank = (now < one.ejected_until, one.outstanding, one.taken)
            if chosen is None or rank < least:
                chosen, least = index, rank
    return chosen


def begin(condition: Condition) -> None:
    """A call is under way."""
    condition.outstanding += 1
    condition.taken += 1


def succeed(condition: Condition) -> None:
    """A call has ended with what a healthy server says, be it an error of the request."""
    condition.outstanding -= 1
    condition.failures = condition.ejections = 0


def abandon(condition: Condition) -> None:
    """A call has ended because nobody wanted its answer any more, which says nothing."""
    condition.outstanding -= 1


def disconnect(condition: Condition) -> None:
    """A call has found no connection, or has lost it."""
    condition.outstanding -= 1
    condition.reachable = False
    condition.misses = 0


def fail(condition: Condition, now: float) -> bool:
    """A call has ended with what a healthy server would not say; whether it is ejected for that."""
    condition.outstanding -= 1
    condition.failures += 1
    if condition.failures < FAILURES:
        return False
    seconds = FIRST_EJECTION_SECS * 2.0 ** min(condition.ejections, 16)
    condition.failures = 0
    condition.ejections += 1
    condition.ejected_until = now + min(seconds, LONGEST_EJECTION_SECS)
    return True


def check(condition: Condition, healthy: bool) -> None:
    """A health check has ended."""
    condition.reachable = healthy
    condition.misses = 0 if healthy else condition.misses + 1


def next_check(condition: Condition, interval: float) -> float:
    """Seconds until the next health check; sooner while it may come back at any moment."""
    if condition.reachable:
        return interval
    return min(FIRST_CHECK_SECS * 2.0 ** min(condition.misses, 16), interval)


@dataclass(frozen=True, slots=True)
class Pin:
    """Where the state of a sequence is: on `server`, or nowhere any more if it is `lost`."""

    server: object = None
    lost: bool = False


class Way(Enum):
    """Where a request of a sequence is to go."""

    PINNED = "to the server that has the state"
    ANY = "to whichever server is best"
    NOWHERE = "the sequence is lost"


class Ending(Enum):
    """How far a request of a sequence has come when it has ended."""

    RUN = "a server has run it, or has said what is wrong with it"
    REFUSED = "no server has begun it"
    UNSURE = "the server is gone, or nobody knows whether it has run it"


def way(pin: Pin | None, start: bool, usable: bool) -> Way:
    """Where a request goes; `usable` is whether the server of its pin can be asked.

    One that begins a sequence anew which is under way goes to the server of that as well, which so
    learns that the old one is over; but any other will do.
    """
    if pin is not None and not pin.lost and usable:
        return Way.PINNED
    return Way.ANY if start else Way.NOWHERE


def after(pin: Pin | None, server: object, end: bool, ending: Ending) -> Pin | None:
    """The pin of a sequence after a request of it that `server` was sent.

    `pin` is what was known before, None as the result is that there is no such sequence. A request
    that was refused has changed nothing.
    """
    if ending is Ending.UNSURE:
        return Pin(lost=True)
    if ending is Ending.REFUSED:
        return pin
    return None if end else Pin(server)
