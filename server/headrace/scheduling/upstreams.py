"""Choice of the upstream for a call or a sequence: pure decisions over values and time.

An upstream is reachable until a call finds no connection, or a health check fails; only a health
check makes it reachable again. One that keeps failing while reachable is ejected for a time that
doubles with each ejection; a success ends the doubling. If all reachable ones are ejected,
ejections are ignored: a poor upstream is better than none.

A sequence's requests go to the upstream that has received the first of them, since its state is
there. A request that may or may not have been run, or an upstream that is gone, makes the sequence
lost: continuing would compute from another state than its client believes. It can only be started
again.

Times are in seconds of one monotonic clock. Nothing here has a clock, a connection or state of its
own.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

FAILURES = 5  # consecutive failures after which an upstream is ejected
FIRST_EJECTION_SECS = 1.0
LONGEST_EJECTION_SECS = 30.0
FIRST_CHECK_SECS = 0.1  # until the first check of an unreachable upstream


@dataclass(slots=True)
class Condition:
    """The condition of an upstream; owned by its caller, and updated in place.

    `outstanding` is the number of calls in flight, `taken` that of all calls. `failures`,
    `ejections` and `misses` of health checks count consecutive ones.
    """

    reachable: bool = False
    outstanding: int = 0
    taken: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0
    misses: int = 0


def choose(conditions: Sequence[Condition], now: float, tried: Container[int] = ()) -> int | None:
    """The index of the upstream for the next call; None if there is none.

    The one with the fewest calls in flight, of several the one with the fewest in total; never one
    that was `tried`.
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
    """Count the start of a call."""
    condition.outstanding += 1
    condition.taken += 1


def succeed(condition: Condition) -> None:
    """Count a call with a healthy answer, even if it is an error of the request."""
    condition.outstanding -= 1
    condition.failures = condition.ejections = 0


def abandon(condition: Condition) -> None:
    """Count a call that was cancelled, which says nothing about the upstream."""
    condition.outstanding -= 1


def disconnect(condition: Condition) -> None:
    """Count a call that found no connection, or lost it."""
    condition.outstanding -= 1
    condition.reachable = False
    condition.misses = 0


def fail(condition: Condition, now: float) -> bool:
    """Count a call with an unhealthy answer; returns True if the upstream is ejected for it."""
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
    """Count a health check."""
    condition.reachable = healthy
    condition.misses = 0 if healthy else condition.misses + 1


def next_check(condition: Condition, interval: float) -> float:
    """Seconds until the next health check; shorter while the upstream may recover soon."""
    if condition.reachable:
        return interval
    return min(FIRST_CHECK_SECS * 2.0 ** min(condition.misses, 16), interval)


class Holder(Protocol):
    """An upstream that may have the state of sequences."""

    @property
    def usable(self) -> bool:
        """True if it can be called."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The location of a sequence's state: on `server`, or nowhere if it is `lost`."""

    server: Holder | None = None
    lost: bool = False


class Way(Enum):
    """The destination of a sequence's request."""

    PINNED = "the upstream with the state"
    ANY = "any upstream"
    NOWHERE = "none, since the sequence is lost"


class Ending(Enum):
    """The progress of a sequence's request at its end."""

    RUN = "an upstream has run it, or refused it as invalid"
    REFUSED = "no upstream has begun it"
    UNSURE = "the upstream is gone, or it is unknown whether it was run"


def way(pin: Pin | None, start: bool) -> Way:
    """The destination of a request.

    One that restarts an active sequence goes to its upstream as well, which so learns that the old
    sequence is over; any other will do if that is not usable.
    """
    if pin is not None and pin.server is not None and not pin.lost and pin.server.usable:
        return Way.PINNED
    return Way.ANY if start else Way.NOWHERE


def after(pin: Pin | None, server: Holder | None, end: bool, ending: Ending) -> Pin | None:
    """The pin of a sequence after a request of it that `server` has received.

    `pin` is the one before; None, also as the result, means no such sequence. A refused request
    changes nothing.
    """
    if ending is Ending.UNSURE:
        return Pin(lost=True)
    if ending is Ending.REFUSED:
        return pin
    return None if end else Pin(server)
