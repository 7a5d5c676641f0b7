"""How long a peer's progress is waited for."""

from headrace.core.limits import PRESSED_SECS, SLOWEST, Patience


def looks(patience: Patience, *moved: int, pressed: bool = False) -> list[bool]:
    """A look a second at one subject, of which so many bytes have moved by then."""
    return [patience.look("it", n, now, pressed) for now, n in enumerate(moved)]


def test_nothing_comes() -> None:
    assert looks(Patience(3), 0, 0, 0, 0) == [True, True, True, False]


def test_bytes_earn_time() -> None:
    fast_enough = [second * SLOWEST for second in range(100)]
    assert all(looks(Patience(3), *fast_enough))


def test_what_came_at_once_buys_nothing_later() -> None:
    assert looks(Patience(3), 0, 1 << 30, 1 << 30, 1 << 30, 1 << 30)[-2:] == [True, False]


def test_a_trickle_is_not_enough() -> None:
    half = [second * SLOWEST // 2 for second in range(100)]
    assert looks(Patience(3), *half).index(False) == 6


def test_another_subject_begins_anew() -> None:
    patience = Patience(3)
    assert [patience.look(second // 2, 0, second) for second in range(20)] == [True] * 20


def test_time_in_which_nobody_looked_is_not_the_peers() -> None:
    """Such as while this side did not read."""
    patience = Patience(5)
    assert patience.look("it", 0, 0.0)
    assert patience.look("it", 0, 1000.0)
    assert patience.look("it", 0, 1002.0)
    assert not patience.look("it", 0, 1003.0)


def test_there_is_little_time_while_the_server_is_pressed() -> None:
    found = looks(Patience(60), *[0] * 20, pressed=True)
    assert found.index(False) == PRESSED_SECS
