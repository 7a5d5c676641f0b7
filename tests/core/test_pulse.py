"""For how long something counts as silent."""

from headrace.core.limits import Pulse


def test_a_worker_that_counts_is_never_silent() -> None:
    pulse = Pulse()
    assert [pulse.look((7, beats), 1.0) for beats in range(5)] == [0.0] * 5


def test_silence_adds_up_until_the_next_sign() -> None:
    pulse = Pulse()
    assert [pulse.look((7, beats), 1.0) for beats in (5, 5, 5, 6, 6)] == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_the_next_process_starts_afresh() -> None:
    pulse = Pulse()
    assert [pulse.look((pid, 5), 1.0) for pid in (7, 7, 8, 8)] == [0.0, 1.0, 0.0, 1.0]


def test_a_worker_that_has_never_counted_is_silent() -> None:
    pulse = Pulse()
    assert [pulse.look((7, 0), 1.0) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_pause_of_the_server_itself_is_not_held_against_a_worker() -> None:
    pulse = Pulse()
    assert [pulse.look((7, 5), elapsed) for elapsed in (1.0, 600.0)] == [0.0, 2.0]


def test_where_there_is_nothing_to_look_at_there_is_no_silence() -> None:
    pulse = Pulse()
    signs = [None, None, 1, 1, None, 1, 1]
    assert [pulse.look(sign, 1.0) for sign in signs] == [0, 0, 0, 1, 0, 0, 1]
