"""Work that one client can cause, in turns of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

import uvloop

from headrace.core.turns import (
    CROWDED_SECS,
    PIECE_SECS,
    SHARE,
    SMALL,
    TASK_SECS,
    TurnQueue,
    Turns,
    fitting,
)
from tests.doors.fakes import until


def test_thousands_of_connections_end_in_turns() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        ended = list[int]()
        at_once = sum(not turns.end_later(lambda n=n: ended.append(n)) for n in range(1000))  # type: ignore[misc]
        assert 0 < at_once < 200
        seen = 0
        while len(ended) < 1000 - at_once:
            turn: asyncio.Future[None] = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn
            assert len(ended) - seen < 200
            seen = len(ended)
        assert ended == list(range(at_once, 1000))

    uvloop.run(scenario())


def test_long_reads_go_on_one_by_one_and_leave_others_their_share() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        share, read = turns.share, list[int]()
        for number in range(5):
            turns.read_later(lambda n=number: read.append(n))  # type: ignore[misc]
        while len(read) < 5:
            seen = len(read)
            turn: asyncio.Future[None] = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn
            assert len(read) <= seen + 2
            assert turns.share == share
        assert read == list(range(5))

    uvloop.run(scenario())


def test_shares_are_small_once_much_is_left_to_the_next_turn() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        while turns.taken < CROWDED_SECS:
            assert turns.begin(loop) == SHARE
            turns.expect(loop, TASK_SECS)
        assert turns.begin(loop) == SMALL
        turn: asyncio.Future[None] = loop.create_future()
        loop.call_soon(loop.call_soon, turn.set_result, None)
        await turn
        assert turns.begin(loop) == SHARE

    uvloop.run(scenario())


def test_shares_are_small_once_long_reads_have_taken_much_of_a_turn() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        shares = list[int]()

        def read() -> None:
            shares.append(turns.begin(loop))
            turns.taken += CROWDED_SECS / 2

        for _ in range(3):
            loop.call_soon(read)
        turn: asyncio.Future[None] = loop.create_future()
        loop.call_soon(loop.call_soon, turn.set_result, None)
        await turn
        assert shares[0] == shares[1] == turns.share
        assert 0 < shares[2] < turns.share
        assert turns.begin(loop) == turns.share

    uvloop.run(scenario())


def test_a_share_fits_into_the_time_of_a_piece() -> None:
    assert fitting(100, 5 * PIECE_SECS) == 20
    assert fitting(SHARE, 1_000 * PIECE_SECS) == fitting(SMALL, 2 * PIECE_SECS) == SMALL
    assert fitting(SHARE, 0.0) == SHARE
    grown = SMALL
    for _ in range(20):
        assert grown < (grown := fitting(grown, 0.0)) <= SHARE or grown == SHARE
    assert grown == SHARE


def test_long_work_is_put_off_in_smaller_pieces() -> None:
    async def scenario() -> None:
        turns, loop, shares = Turns(), asyncio.get_running_loop(), list[int]()

        def piece() -> None:
            shares.append(turns.share)
            until_then = perf_counter() + 4 * PIECE_SECS * turns.share / SHARE
            while perf_counter() < until_then:
                pass
            if len(shares) < 5:
                turns.put_off(piece)

        turns.put_off(piece)
        await until(lambda: len(shares) == 5)
        assert shares[0] == SHARE
        assert all(SMALL <= share <= SHARE // 2 for share in shares[1:])
        assert turns.begin(loop) < turns.share == SHARE

    uvloop.run(scenario())


def test_a_rest_that_fails_holds_up_no_other() -> None:
    async def scenario() -> None:
        turns, loop, done = Turns(), asyncio.get_running_loop(), list[int]()
        loop.set_exception_handler(lambda loop, context: done.append(-1))
        for number in range(3):
            turns.go_on_later(lambda n=number: done.append(1 // (n - 1)))  # type: ignore[misc]
        await until(lambda: len(done) == 3)
        assert done == [-1, -1, 1]

    uvloop.run(scenario())


def test_a_queue_is_processed_few_items_at_a_time() -> None:
    turns, processed, done = deque[Callable[[], None]](), list[int](), list[int]()

    def process(item: int) -> None:
        processed.append(item)
        if item == 20:
            queue.extend((1000, 1001))
        if item == 21:
            raise ValueError(item)

    queue = TurnQueue(process, turns.append, lambda: done.append(len(processed)), most=10)
    queue.process(range(5))
    assert (processed, turns, done) == ([*range(5)], deque(), [])
    queue.process(range(5, 50))
    queue.process((50,))  # behind the others
    while turns:
        assert len(turns) == 1
        before, held_up = len(processed), len(queue)
        try:
            turns.popleft()()
        except ValueError:
            assert processed[-1] == 21  # the others have their turn
        assert len(processed) - before <= 10
        assert bool(turns) is bool(queue)
        assert not held_up or len(processed) > before
    assert processed == [*range(51), 1000, 1001]
    assert done == [53]
    queue.extend(range(100))
    queue.clear()
    turns.popleft()()
    assert (len(processed), len(queue), len(turns)) == (53, 0, 0)


def test_a_queue_of_slow_items_has_less_of_a_turn() -> None:
    turns, processed = deque[Callable[[], None]](), list[int]()

    def process(item: int) -> None:
        until_then = perf_counter() + PIECE_SECS
        while perf_counter() < until_then:
            pass
        processed.append(item)

    queue = TurnQueue(process, turns.append)
    queue.extend(range(5))
    for number in range(5):
        turns.popleft()()
        assert processed == [*range(number + 1)]
    assert not turns


def test_a_connection_alone_ends_at_once() -> None:
    async def scenario() -> None:
        turns = Turns()
        for _ in range(1000):
            assert not turns.end_later(lambda: None)
            await asyncio.sleep(0)  # the next turn

    uvloop.run(scenario())


def test_long_reads_that_take_long_together_put_others_off() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        for _ in range(4):
            assert turns.begin(loop) > 0
            turns.spend(0.004)
            assert _reads(turns, 3) == 3
        turns.begin(loop)
        turns.spend(0.005)
        assert _reads(turns, 3) == 0
        await _turn()
        assert _reads(turns, 3) == 3

    uvloop.run(scenario())


async def _turn() -> None:
    """The next turn of the loop, behind what was scheduled before."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def _reads(turns: Turns, most: int, urgent: bool = False) -> int:
    """The number of `most` reads that find room."""
    loop, found = asyncio.get_running_loop(), 0
    for _ in range(most):
        turns.room -= 1
        found += not (turns.room < 0 and turns.full(loop, urgent))
    return found


def test_a_turn_has_room_for_some_hundred_reads() -> None:
    async def scenario() -> None:
        turns = Turns()
        for _ in range(3):
            assert 100 < _reads(turns, 2000) < 1000
            assert _reads(turns, 10) == 0
            assert _reads(turns, 10, urgent=True) == 10
            await _turn()
            await _turn()
        for _ in range(50):  # in turns of their own, however many
            assert _reads(turns, 50) == 50
            await _turn()
            await _turn()

    uvloop.run(scenario())


def test_a_turn_has_no_room_once_much_is_expected() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        for _ in range(3):
            turns.expect(loop, CROWDED_SECS)
            assert _reads(turns, 100) == 0
            assert _reads(turns, 100, urgent=True) == 100
            turns.expect(loop, 10 * CROWDED_SECS)
            assert _reads(turns, 100, urgent=True) == 0
            await _turn()
            await _turn()

    uvloop.run(scenario())


def test_pieces_put_off_run_few_in_a_turn() -> None:
    async def scenario() -> None:
        turns, loop, done = Turns(), asyncio.get_running_loop(), list[int]()

        def piece(number: int) -> None:
            turns.room -= 1
            assert turns.room >= 0  # for its own read
            turns.expect(loop, TASK_SECS)
            done.append(number)

        for number in range(500):
            turns.put_off(partial(piece, number))
        while len(done) < 500:
            before = len(done)
            await _turn()
            assert len(done) - before <= 3 * CROWDED_SECS / TASK_SECS
        assert done == list(range(500))

    uvloop.run(scenario())


def test_a_piece_that_fails_keeps_none_from_running() -> None:
    async def scenario() -> None:
        turns, done = Turns(), list[int]()
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        turns.put_off(lambda: done.append(1))
        turns.put_off(lambda: [][1])
        turns.put_off(lambda: done.append(2))
        await until(lambda: done == [1, 2])
        assert len(failures) == 1

    uvloop.run(scenario())
