"""Which of several backends of one model gets its requests: decisions over values and time.

Backends have an order. The first that can run anything gets all requests. One that comes back gets
them again at once; if it is lost again soon, it has to be there for a while first, which doubles
from one time to the next. A backend that goes on failing although it is there is passed over as if
it were lost. What has to wait is used all the same if there is nothing else.

Times are in seconds of one monotonic clock. Nothing here has a clock, an instance or a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from headrace.core.call import Call
from headrace.core.errors import (
    Cancelled,
    ExecutionTimeout,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    Unavailable,
    WorkerDied,
)
from headrace.scheduling.batch import Batch, Deferral, NotStarted, Outcome

_LOST = (RemoteLost, RemoteTimeout, RemoteUnavailable)
FAILURES = 5  # in a row, for which a backend is passed over
STEADY_SECS = 10.0  # what has run for so long is not one that comes and goes
FIRST_PAUSE_SECS = 1.0
LONGEST_PAUSE_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Health of a backend: whether it can run requests, and its recent failures.

    `able` is whether any of its instances can run something. It gets requests from the time
    `trusted_from` on. `setbacks` came in a row, each soon after it had got requests again, and so
    did `failures` of batches.
    """

    able: bool = False
    trusted_from: float = -inf
    setbacks: int = 0
    failures: int = 0


class Verdict(Enum):
    """The meaning of a batch's end for the backend that had it."""

    SERVED = "it has done what it should, be it that the model has failed"
    REFUSED = "it has not begun it, and any other backend may run it"
    FAILED = "it has lost it, or has not answered in time"
    NOTHING = "the batch was given back, or nobody wanted it any more"


def choose(standings: Sequence[Standing], now: float) -> int | None:
    """The index of the backend that gets requests now, None if there is none."""
    able = [index for index, one in enumerate(standings) if one.able]
    trusted = (index for index in able if standings[index].trusted_from <= now)
    return next(trusted, able[0] if able else None)


def next_look(standings: Sequence[Standing], now: float) -> float | None:
    """When `choose` may say something else although nothing has happened."""
    return min((one.trusted_from for one in standings if one.able and one.trusted_from > now),
               default=None)  # fmt: skip


def lost(standing: Standing, now: float) -> Standing:
    """None of its instances can run anything any more."""
    setbacks = _setbacks(standing, now)
    return replace(standing, able=False, failures=0, setbacks=setbacks, trusted_from=now)


def found(standing: Standing, now: float) -> Standing:
    """One of its instances can run something, at first or again."""
    if standing == Standing():  # it has never been lost
        return replace(standing, able=True)
    return replace(standing, able=True, failures=0, trusted_from=now + _pause(standing.setbacks))


def ended(standing: Standing, verdict: Verdict, now: float) -> Standing:
    """A batch has ended."""
    if verdict is Verdict.NOTHING:
        return standing
    if verdict is Verdict.SERVED:
        return replace(standing, failures=0) if standing.failures else standing
    if standing.failures + 1 < FAILURES:
        return replace(standing, failures=standing.failures + 1)
    setbacks = max(_setbacks(standing, now), 1)
    return replace(standing, failures=0, setbacks=setbacks, trusted_from=now + _pause(setbacks))


def verdict(outcome: Outcome) -> Verdict:
    """The verdict on an outcome."""
    if isinstance(outcome.error, NotStarted | Cancelled):
        return Verdict.NOTHING
    answers = [outcome.error] if outcome.error is not None else outcome.parts or ()
    errors = [answer for answer in answers if answer is not Deferral.AGAIN]
    if errors and all(isinstance(error, Unavailable) for error in errors):
        return Verdict.REFUSED
    if any(isinstance(error, _LOST) for error in errors):
        return Verdict.FAILED
    if errors and all(isinstance(error, Cancelled) for error in errors):
        return Verdict.NOTHING
    return Verdict.SERVED


def answered(batch: Batch, outcome: Outcome) -> list[Call]:
    """The requests of a batch that are answered by what has become of it."""
    waiting = [call for call in batch.calls if not call.ended]
    if outcome.error is not None:
        whole = isinstance(outcome.error, WorkerDied | ExecutionTimeout)
        alone = len(batch.calls) == 1 or whole
        return waiting if alone else []
    if outcome.parts is None:
        return waiting
    parts = zip(batch.calls, outcome.parts, strict=True)
    return [p for p, part in parts if not (p.ended or isinstance(part, Deferral))]


def _setbacks(standing: Standing, now: float) -> int:
    """How many there are in a row, with one that happens now."""
    return standing.setbacks + 1 if now - standing.trusted_from < STEADY_SECS else 0


def _pause(setbacks: int) -> float:
    """Seconds that a backend has to be there before it gets requests."""
    if not setbacks:
        return 0.0
    return min(FIRST_PAUSE_SECS * 2.0 ** min(setbacks - 1, 16), LONGEST_PAUSE_SECS)
