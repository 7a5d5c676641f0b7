"""Counting requests in and out against the server's limits."""

import pytest

from headrace.core.errors import Overloaded, ServerExiting
from headrace.engine.admission import Admission


def test_counts_go_up_and_down() -> None:
    admission = Admission(10, 1000)
    admission.enter(100)
    admission.enter(0)
    admission.grow(50)
    assert (admission.requests, admission.bytes) == (2, 150)
    admission.leave(100)
    admission.leave(50)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_more_requests_than_allowed() -> None:
    admission = Admission(2, 0)
    admission.enter(1)
    admission.enter(1)
    with pytest.raises(Overloaded, match="limit of 2 requests"):
        admission.enter(1)
    assert (admission.requests, admission.bytes, admission.refused) == (2, 2, 1)
    admission.leave(1)
    admission.enter(1)


@pytest.mark.parametrize("how", ["enter", "grow"])
def test_more_bytes_than_allowed(how: str) -> None:
    admission = Admission(0, 100)
    admission.enter(60)
    admission.enter(40)
    with pytest.raises(Overloaded, match="limit of 100 bytes"):
        getattr(admission, how)(1)
    assert (admission.requests, admission.bytes, admission.refused) == (2, 100, 1)


def test_a_request_alone_may_be_of_any_size() -> None:
    admission = Admission(0, 100)
    admission.enter(150)
    admission.leave(150)
    admission.enter(10)
    admission.grow(140)  # the same, where its size is found out as it is read
    with pytest.raises(Overloaded):
        admission.enter(1)
    admission.leave(150)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_no_limits() -> None:
    admission = Admission(0, 0)
    for _ in range(1000):
        admission.enter(1 << 40)
    assert admission.requests == 1000


def test_nothing_is_admitted_after_closing() -> None:
    admission = Admission(0, 0)
    told: list[str] = []
    admission.enter(5)
    admission.watch_close(lambda: told.append("first"))
    second = told.clear
    admission.watch_close(second)
    admission.unwatch_close(second)
    admission.close()
    assert told == ["first"]
    with pytest.raises(ServerExiting):
        admission.enter(1)
    admission.grow(3)  # what has entered may go on
    admission.leave(8)
    assert admission.bytes == 0


def test_told_when_empty() -> None:
    admission = Admission(0, 0)
    told: list[int] = []
    admission.enter(1)
    admission.enter(1)
    admission.when_empty(lambda: told.append(admission.requests))
    admission.leave(1)
    assert told == []
    admission.leave(1)
    assert told == [0]


def test_told_at_once_when_empty_already() -> None:
    told: list[str] = []
    Admission(0, 0).when_empty(lambda: told.append("empty"))
    assert told == ["empty"]


def test_announced_bytes_must_fit_and_do_not_count() -> None:
    admission = Admission(0, 100)
    admission.enter(60)
    with pytest.raises(Overloaded, match="limit of 100 bytes"):
        admission.begin(41)
    admission.begin(40)
    admission.enter(40)
    assert admission.bytes == 100
