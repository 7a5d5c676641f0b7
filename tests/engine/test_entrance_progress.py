"""Patience with clients: one rule for every door, as a pure function."""

import gc

from headrace.core.limits import PRESSED_SECS, SLOWEST, Patience, Shares
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.entrance import Progress

_LIMIT = 1000 << 20


def connection(share: int = 50) -> tuple[Progress, ConnectionAccount]:
    """A connection whose client may read nothing for three seconds."""
    account = Admission(0, _LIMIT, Shares(connection=share)).connect("http")
    assert account is not None
    return Progress(account, 3.0), account


def test_slow_readers_are_aborted_and_steady_ones_are_not() -> None:
    progress, account = connection()
    assert [progress.reads(100, 0, 0, now) for now in range(4)] == [True, True, True, False]
    assert (account.server.aborted, account.unread) == ({"unread": 1}, 100)
    progress, account = connection()
    assert all(progress.reads(100, 0, now * SLOWEST, now) for now in range(10))
    assert progress.reads(0, 7, 0, 10)
    assert (account.unread, account.kept, account.bytes) == (0, 7, 7)
    assert [progress.reads(100, 0, 0, 10 + now) for now in range(4)] == [True, True, True, False]


def test_a_progress_is_freed_without_the_garbage_collector() -> None:
    account = connection()[1]  # the server's account, which it refers to, lives on
    progress = Progress(account, 3.0)
    assert progress.reads(100, 0, 0, 0)
    gc.collect()
    del progress
    assert gc.collect() == 0


def test_more_than_the_share_aborts_at_once() -> None:
    progress, account = connection(share=10)
    assert progress.within(_LIMIT // 10)
    assert not progress.within(_LIMIT // 10, 1)
    assert not progress.reads(_LIMIT // 10 + 1, 0, 0, 0)
    assert account.server.aborted == {"unread": 2}


def test_slow_senders_are_aborted() -> None:
    progress, account = connection()
    patience = Patience(2.0)
    assert [progress.sends(patience, "it", 0, now) for now in range(3)] == [True, True, False]
    assert account.server.aborted == {"unsent": 1}


def test_idle_connections_have_less_time_under_pressure() -> None:
    progress, account = connection()
    secs = PRESSED_SECS + 1
    assert not progress.idles(0, secs, 60)
    assert progress.idles(0, 61, 60)
    account.server.count(_LIMIT)
    assert progress.idles(0, secs, 60)
    assert progress.idles(0, 3, 2)
