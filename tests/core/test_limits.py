"""Patience with a peer's progress, detection of silence, and the pace of looking."""

import pytest

from headrace.core.limits import PRESSED_SECS, SLOWEST, ExecutionLimits, Patience, Pulse, pace_for


def looks(patience: Patience, *moved: int, pressed: bool = False) -> list[bool]:
    """One check per second of a subject; `moved` are its bytes so far."""
    return [patience.look("it", n, now, pressed) for now, n in enumerate(moved)]


def test_bytes_earn_time() -> None:
    assert looks(Patience(3), 0, 0, 0, 0) == [True, True, True, False]
    assert all(looks(Patience(3), *[second * SLOWEST for second in range(100)]))
    trickle = [second * SLOWEST // 2 for second in range(100)]
    assert looks(Patience(3), *trickle).index(False) == 6
    # Early progress buys no time later.
    assert looks(Patience(3), 0, 1 << 30, 1 << 30, 1 << 30, 1 << 30)[-2:] == [True, False]


def test_another_subject_starts_over() -> None:
    patience = Patience(3)
    assert [patience.look(second // 2, 0, second) for second in range(20)] == [True] * 20


def test_unchecked_time_is_not_charged_to_the_peer() -> None:
    """For example while this side did not read."""
    patience = Patience(5)
    found = [patience.look("it", 0, now) for now in (0.0, 1000.0, 1002.0, 1003.0)]
    assert found == [True, True, True, False]


def test_under_pressure_patience_is_short() -> None:
    assert looks(Patience(60), *[0] * 20, pressed=True).index(False) == PRESSED_SECS


@pytest.mark.parametrize(
    ("signs", "silent"),
    [
        ([(7, beats) for beats in range(5)], [0, 0, 0, 0, 0]),
        ([(7, beats) for beats in (5, 5, 5, 6, 6)], [0, 1, 2, 0, 1]),
        ([(pid, 5) for pid in (7, 7, 8, 8)], [0, 1, 0, 1]),  # the next process starts afresh
        ([(7, 0)] * 3, [0, 1, 2]),  # it has never incremented
        ([None, None, 1, 1, None, 1, 1], [0, 0, 0, 1, 0, 0, 1]),  # nothing to check
    ],
)  # fmt: skip
def test_silence_adds_up_until_the_next_sign(signs: list[object], silent: list[float]) -> None:
    pulse = Pulse()
    assert [pulse.look(sign, 1.0) for sign in signs] == silent


def test_a_pause_of_the_server_itself_is_not_held_against_a_worker() -> None:
    pulse = Pulse()
    assert [pulse.look((7, 5), elapsed) for elapsed in (1.0, 600.0)] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("limit", "pace"), [(0.0, 0.05), (0.01, 0.05), (0.5, 0.25), (2.0, 1.0), (60.0, 1.0)]
)
def test_the_pace_of_looking_fits_a_limit(limit: float, pace: float) -> None:
    assert pace_for(limit) == pace


@pytest.mark.parametrize(
    ("limits", "pace"), [((0, 0), 1.0), ((0.5, 0), 0.25), ((0, 0.2), 0.1), ((0.5, 0.2), 0.1)]
)
def test_the_pace_of_looking_fits_the_shortest_limit(
    limits: tuple[float, float], pace: float
) -> None:
    assert ExecutionLimits(*limits).pace == pace
