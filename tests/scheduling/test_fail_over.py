"""The choice of a backend, as a pure function."""

from math import inf

import pytest

from headrace.core.errors import (
    Cancelled,
    ExecutionFailed,
    InvalidRequest,
    QueueTimeout,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    Unavailable,
    WorkerDied,
)
from headrace.scheduling.batch import Answer, Deferral, NotStarted, Outcome, Part
from headrace.scheduling.fail_over import (
    FAILURES,
    LONGEST_PAUSE_SECS,
    STEADY_SECS,
    Standing,
    Verdict,
    choose,
    ended,
    found,
    lost,
    next_look,
    verdict,
)

ABLE = Standing(able=True)
GONE = Standing()
LATER = Standing(able=True, trusted_from=5.0)


@pytest.mark.parametrize(
    ("standings", "chosen"),
    [
        ([], None),
        ([GONE, GONE], None),
        ([ABLE, ABLE], 0),
        ([GONE, ABLE, ABLE], 1),
        ([LATER, ABLE], 1),  # it has to stay for a while first
        ([LATER, GONE], 0),  # something is better than nothing
        ([LATER, LATER], 0),
    ],
)
def test_the_first_able_backend_is_chosen(standings: list[Standing], chosen: int | None) -> None:
    assert choose(standings, 1.0) == chosen


def test_time_of_the_next_check() -> None:
    assert next_look([ABLE, GONE], 1.0) is None
    assert next_look([LATER, ABLE], 1.0) == 5.0
    assert next_look([LATER, ABLE], 5.0) is None
    assert choose([LATER, ABLE], 5.0) == 0


def test_a_recovered_backend_is_used_at_once() -> None:
    first = found(GONE, 0.0)
    assert choose([first], 0.0) == 0
    back = found(lost(first, 1.0), 2.0)
    assert back.trusted_from == 2.0


def test_a_flapping_backend_waits_longer_each_time() -> None:
    standing, now, pauses = found(GONE, 0.0), 1.0, []
    for _ in range(8):
        standing = found(lost(standing, now), now + 0.1)
        pauses.append(round(standing.trusted_from - now - 0.1, 6))
        now = standing.trusted_from + 0.5
    assert pauses == [0, 1, 2, 4, 8, 16, LONGEST_PAUSE_SECS, LONGEST_PAUSE_SECS]
    now = standing.trusted_from + STEADY_SECS
    assert found(lost(standing, now), now).trusted_from == now


def test_a_failing_backend_is_skipped_for_a_while() -> None:
    standing = found(GONE, 0.0)
    for _ in range(FAILURES - 1):
        standing = ended(standing, Verdict.FAILED, 1.0)
    assert standing.trusted_from == -inf
    assert ended(standing, Verdict.SERVED, 1.0).failures == 0
    assert ended(standing, Verdict.NOTHING, 1.0) == standing
    standing = ended(standing, Verdict.REFUSED, 1.0)
    assert (standing.trusted_from, standing.failures) == (2.0, 0)
    for _ in range(FAILURES):
        standing = ended(standing, Verdict.REFUSED, 2.5)
    assert standing.trusted_from == 4.5


PART = Part({}, {})
REFUSED = NotStarted(Unavailable("full"))
BUSY = Unavailable("full")  # a model may say so, too


@pytest.mark.parametrize(
    ("error", "parts", "expected"),
    [
        (None, None, Verdict.SERVED), (None, [PART, InvalidRequest("no")], Verdict.SERVED),
        (ValueError("no"), None, Verdict.SERVED), (ExecutionFailed("no"), None, Verdict.SERVED),
        (WorkerDied("it ended"), None, Verdict.SERVED), (None, [Deferral.AGAIN], Verdict.SERVED),
        (NotStarted(), None, Verdict.NOTHING), (Cancelled("gone"), None, Verdict.NOTHING),
        (None, [Cancelled("gone"), Deferral.AGAIN], Verdict.NOTHING),
        (REFUSED, None, Verdict.REFUSED), (NotStarted(QueueTimeout("late")), None, Verdict.REFUSED),
        (BUSY, None, Verdict.SERVED), (QueueTimeout("late"), None, Verdict.SERVED),
        (None, [BUSY, Deferral.AGAIN], Verdict.SERVED), (None, [BUSY, PART], Verdict.SERVED),
        (None, [RemoteLost("gone")], Verdict.FAILED),
        (None, [RemoteTimeout("late"), Deferral.AGAIN], Verdict.FAILED),
        (None, [RemoteUnavailable("not today")], Verdict.FAILED),
    ],
)  # fmt: skip
def test_outcomes_that_count_as_failures(
    error: Exception | None, parts: list[Answer] | None, expected: Verdict
) -> None:
    assert verdict(Outcome((), error, 0, 0, 0, parts)) is expected
