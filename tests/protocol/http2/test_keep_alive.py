"""Keep-alive: when a connection is checked, pinged, closed and replaced."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.http2.keep_alive import KeepAlive, KeepAliveAction, KeepAliveWatch, Strikes
from headrace.protocol.http2.protocol import ACK, GOAWAY, PING, ErrorCode
from tests.protocol.http2.peer import Server, build, parse

RULES = KeepAlive(interval=10, timeout=3, pings_without_data=2)


def test_a_silent_peer_with_calls_is_pinged_then_closed() -> None:
    watch = KeepAliveWatch(RULES, 100, 0)
    assert watch.at == 110
    assert watch.look(110, heard=104, calls=True, sent=1) is KeepAliveAction.NOTHING
    assert watch.at == 114
    assert watch.look(114, 104, True, 1) is KeepAliveAction.PING
    assert watch.at == 117
    assert watch.look(116, 104, True, 1) is KeepAliveAction.NOTHING
    assert watch.look(117, 104, True, 1) is KeepAliveAction.GIVE_UP


def test_any_bytes_after_the_ping_keep_the_connection() -> None:
    watch = KeepAliveWatch(RULES, 100, 0)
    assert watch.look(110, 100, True, 1) is KeepAliveAction.PING
    assert watch.look(113, 111, True, 1) is KeepAliveAction.NOTHING
    assert watch.at == 121


def test_a_peer_without_calls_is_left_alone() -> None:
    watch = KeepAliveWatch(RULES, 100, 0)
    assert watch.look(110, 100, False, 1) is KeepAliveAction.NOTHING
    assert watch.at == 120
    permitted = KeepAliveWatch(KeepAlive(10, 3, without_calls=True), 100, 0)
    assert permitted.look(110, 100, False, 1) is KeepAliveAction.PING


def test_pings_without_data_slow_to_one_a_minute() -> None:
    watch = KeepAliveWatch(RULES, 0, 0)
    pinged = []
    for now in range(200):
        if watch.look(now, now - 10, True, sent=7 if now < 150 else 8) is KeepAliveAction.PING:
            pinged.append(now)
            assert watch.look(now, now, True, 7) is KeepAliveAction.NOTHING  # answered at once
    assert pinged == [0, 1, 61, 121, 150, 151]


def test_max_connection_age() -> None:
    watch = KeepAliveWatch(KeepAlive(age=50, grace=30), 100, 1)
    assert watch.at == pytest.approx(155)
    assert watch.look(154, 154, True, 1) is KeepAliveAction.NOTHING
    assert watch.look(156, 156, True, 1) is KeepAliveAction.RETIRE
    assert watch.at == 176
    assert watch.look(176, 176, True, 1) is KeepAliveAction.FINISH
    assert watch.at == 186
    assert watch.look(186, 186, True, 1) is KeepAliveAction.CUT


def test_max_connection_age_with_unlimited_grace() -> None:
    watch = KeepAliveWatch(KeepAlive(age=50), 100, -1)
    assert watch.at == pytest.approx(145)
    assert watch.look(146, 146, True, 1) is KeepAliveAction.RETIRE
    assert watch.look(166, 166, True, 1) is KeepAliveAction.FINISH
    assert watch.look(9_000, 8_999, True, 1) is KeepAliveAction.NOTHING


def test_a_dead_peer_is_closed_also_after_max_age() -> None:
    watch = KeepAliveWatch(KeepAlive(interval=10, timeout=3, age=5), 0, 0)
    assert watch.look(5, 0, True, 1) is KeepAliveAction.RETIRE
    assert watch.look(10, 0, True, 1) is KeepAliveAction.PING
    assert watch.look(13, 0, True, 1) is KeepAliveAction.GIVE_UP


@given(
    rules=st.builds(
        KeepAlive,
        interval=st.floats(0.001, 100),
        timeout=st.floats(0.001, 100),
        without_calls=st.booleans(),
        pings_without_data=st.integers(0, 3),
        age=st.floats(0, 100),
        grace=st.floats(0, 100),
    ),
    jitter=st.floats(-1, 1),
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), max_size=30),
)
def test_the_next_check_is_always_in_the_future(
    rules: KeepAlive, jitter: float, steps: list[tuple[bool, bool, int]]
) -> None:
    now = heard = 0.0
    watch = KeepAliveWatch(rules, now, jitter)
    still = 0
    for comes, calls, sent in steps:
        still = still + 1 if watch.at <= now else 0
        assert still <= 3
        now = max(now, watch.at)
        assert now < inf
        heard = now if comes else heard
        if watch.look(now, heard, calls, sent) in (KeepAliveAction.GIVE_UP, KeepAliveAction.CUT):
            return


# --- PINGs of the peer


def test_pings_that_come_too_soon_are_strikes() -> None:
    strikes = Strikes(KeepAlive(least_interval=10, strikes=2))
    assert [strikes.ping(now, True, 1) for now in (0, 10, 12, 14, 16)] == [False] * 4 + [True]


def test_data_between_pings_clears_strikes() -> None:
    strikes = Strikes(KeepAlive(least_interval=10, strikes=1))
    assert not any(strikes.ping(now, True, sent=now // 2) for now in range(100))


def test_a_peer_may_ping_while_it_reads_what_was_sent() -> None:
    """gRPC clients measure bandwidth by PINGs."""
    strikes = Strikes(KeepAlive(strikes=2))
    strikes.ping(0, True, 1)
    assert not any(strikes.ping(1 + n / 8, True, 2) for n in range(40))
    assert [strikes.ping(now, True, 2) for now in (7, 8, 9)] == [False, False, True]


def test_without_calls_the_interval_is_hours_unless_permitted() -> None:
    often = [hour * 3_600.0 for hour in range(5)]
    strikes = Strikes(KeepAlive(strikes=2))
    assert [strikes.ping(now, False, 1) for now in often] == [False] * 3 + [True] * 2
    permitted = Strikes(KeepAlive(without_calls=True))
    assert not any(permitted.ping(now, False, 1) for now in often)


def test_any_number_of_strikes() -> None:
    strikes = Strikes(KeepAlive(strikes=0))
    assert not any(strikes.ping(now, False, 1) for now in range(100))


def test_too_many_pings_end_with_goaway_too_many_pings() -> None:
    server = Server(keep_alive=KeepAlive(strikes=2))
    ping = build(PING, 0, 0, bytes(8))
    for _ in range(3):
        server.feed(ping)
        assert [frame.kind for frame in server.sent()] == [PING]
    server.feed(ping)
    [frame] = parse(server.output())
    assert frame.kind == GOAWAY
    assert frame.payload[4:] == ErrorCode.ENHANCE_YOUR_CALM.to_bytes(4) + b"too_many_pings"
    assert server.connection.closing


def test_answers_to_our_pings_are_no_strikes() -> None:
    server = Server(keep_alive=KeepAlive(strikes=1))
    for _ in range(10):
        server.feed(build(PING, ACK, 0, bytes(8)))
    assert server.sent() == []


def test_answers_between_pings_clear_strikes() -> None:
    """gRPC clients measure bandwidth by a PING after a response, also without further calls."""
    server = Server(keep_alive=KeepAlive(strikes=1))
    numbers = range(1, 20, 2)
    for number in numbers:
        server.feed(server.request(number, b"x"))
    for number in numbers:
        server.now += 10.0
        assert server.connection.answer(server.streams[number], [b"y"], b"")
        server.sent()
        server.feed(build(PING, 0, 0, bytes(8)))
        assert [frame.kind for frame in server.sent()] == [PING]


def test_calls_alone_clear_no_strikes() -> None:
    """A peer that opens calls has not been sent anything."""
    server = Server(keep_alive=KeepAlive(strikes=1))
    for number in range(1, 6, 2):
        server.now += 10.0
        server.feed(server.request(number, b"x"), build(PING, 0, 0, bytes(8)))
    assert server.goaway() is ErrorCode.ENHANCE_YOUR_CALM
