"""Work off the event loop: in order, charged by the loop, dropped when cancelled."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.core.call import Call
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from headrace.core.limits import Charge, uncharged
from headrace.core.turns import PIECE_SECS
from headrace.engine.workbench import Deferred, Expected, Workbench, run_in_pool
from tests.placement.threads import no_threads
from tests.support.scrape import until

LONG = 64 << 20


class Outcomes:
    """Results of jobs, and an event after the last one."""

    def __init__(self, count: int) -> None:
        self.found: list[tuple[Any, Exception | None]] = []
        self.all = asyncio.Event()
        self._count = count

    def done(self, result: Any, problem: Exception | None) -> None:
        self.found.append((result, problem))
        if len(self.found) == self._count:
            self.all.set()


async def test_work_runs_on_another_thread_in_order() -> None:
    bench, outcomes = Workbench(), Outcomes(20)
    loop_thread = threading.get_ident()

    def work(number: int) -> Callable[[Charge], int]:
        def run(charge: Charge) -> int:
            assert threading.get_ident() != loop_thread
            return number

        return run

    for number in range(20):
        bench.do(1, work(number), outcomes.done, uncharged, None)
    await outcomes.all.wait()
    assert outcomes.found == [(number, None) for number in range(20)]


async def test_short_work_does_not_wait_for_long() -> None:
    bench, long, short = Workbench(), Outcomes(1), Outcomes(1)
    gate = threading.Event()
    bench.do(LONG, lambda charge: gate.wait(), long.done, uncharged, None)
    bench.do(1, lambda charge: "short", short.done, uncharged, None)
    await short.all.wait()
    assert long.found == []
    gate.set()
    await long.all.wait()


async def test_work_is_refused_while_its_thread_cannot_be_started() -> None:
    bench, refused, later = Workbench(), Outcomes(1), Outcomes(1)
    with no_threads():
        bench.do(1, lambda charge: "refused", refused.done, uncharged, None)
        assert refused.found == []
        await refused.all.wait()
    [(result, problem)] = refused.found
    assert (result, type(problem)) == (None, Unavailable)
    bench.do(1, lambda charge: "done", later.done, uncharged, None)
    await later.all.wait()
    assert later.found == [("done", None)]


async def test_work_of_a_pool_is_refused_while_no_thread_can_be_started() -> None:
    """Also while others of its threads are busy; a later one does not do the work."""
    begun, go, done = threading.Event(), threading.Event(), list[str]()
    with ThreadPoolExecutor(2) as pool:

        def hold() -> str:
            begun.set()
            assert go.wait(30)
            return "held"

        held = run_in_pool(pool, hold)
        assert begun.wait(30)
        with no_threads(), pytest.raises(Unavailable, match=r"^the server cannot do this"):
            run_in_pool(pool, lambda: done.append("refused"))
        go.set()
        assert await held == "held"
        await run_in_pool(pool, lambda: done.append("later"))
    assert done == ["later"]


class Client:
    """A connection from an address."""

    requests = 1
    weight = 1.0

    def __init__(self, origin: str = "") -> None:
        self.origin = origin

    def take_rows(self, rows: int) -> None:
        """Without quotas."""


async def test_addresses_take_turns_however_many_connections_they_have() -> None:
    bench, ended, gate, order = Workbench(), Outcomes(22), threading.Event(), []

    def add(payer: Client) -> None:
        def work(charge: Charge) -> None:
            gate.wait()
            order.append(payer.origin)

        bench.do(1, work, ended.done, uncharged, payer)

    for _ in range(20):
        add(Client("many"))
    one = Client("one")
    add(one)
    add(one)
    gate.set()
    await ended.all.wait()
    assert order[:5].count("one") == 2


@pytest.mark.parametrize("kind", ["decoded", "other"])
async def test_clients_take_turns(kind: str) -> None:
    bench, ended = Workbench(), asyncio.Event()
    gate, order = threading.Event(), []
    greedy, other = Client(), Client()

    def add(payer: Client, name: str, after: Callable[[], None] | None = None) -> None:
        def decode(charge: Charge) -> None:
            gate.wait()
            order.append(name)

        if kind == "decoded":
            Deferred(bench, 1, decode, lambda result: None, KeptCall(payer), uncharged, after)
        else:
            bench.do(1, decode, lambda *_: after() if after else None, uncharged, payer)

    for number in range(4):
        add(greedy, f"greedy {number}", ended.set if number == 3 else None)
    add(other, "other 0")
    add(other, "other 1")
    gate.set()
    await ended.wait()
    assert order.index("other 0") <= 2
    assert order.index("other 1") <= 4
    assert sorted(order, key=str.split) == [
        *(f"greedy {n}" for n in range(4)),
        "other 0",
        "other 1",
    ]


async def test_the_ends_of_work_have_a_turn_each() -> None:
    """Other clients are served between the ends of requests that take long."""
    bench, outcomes, loop = Workbench(), Outcomes(100), asyncio.get_running_loop()
    worked = threading.Event()
    most = before = 0

    def look() -> None:
        nonlocal most, before
        most, before = max(most, len(outcomes.found) - before), len(outcomes.found)
        loop.call_soon(look)

    def end(result: Any, problem: Exception | None) -> None:
        began = time.perf_counter()
        while time.perf_counter() < began + PIECE_SECS:
            pass
        outcomes.done(result, problem)

    for _ in range(99):
        bench.do(1, lambda charge: None, end, uncharged, None)
    bench.do(1, lambda charge: worked.set(), end, uncharged, None)
    worked.wait()  # without the loop
    look()
    await outcomes.all.wait()
    assert most <= 2


async def test_work_that_outgrows_its_estimate_makes_way() -> None:
    bench, long, short = Workbench(), Outcomes(1), Outcomes(1)
    gate = threading.Event()
    charged: list[int] = []
    runs: list[str] = []

    def work(charge: Charge) -> str:
        runs.append(threading.current_thread().name)
        for _ in range(8):
            charge(1 << 20)
        gate.wait()
        return "long"

    bench.do(1, work, long.done, charged.append, None)
    bench.do(1, lambda charge: "short", short.done, uncharged, None)
    await short.all.wait()
    assert long.found == []
    gate.set()
    await long.all.wait()
    assert long.found == [("long", None)]
    assert sum(charged) == 8 << 20  # once, though it has begun twice
    assert runs == ["workbench", "workbench-long"]


async def test_large_work_has_more_time() -> None:
    bench, outcomes = Workbench(most_secs=0), Outcomes(1)

    def work(charge: Charge) -> None:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            charge(0)

    bench.do(LONG, work, outcomes.done, uncharged, None)
    await outcomes.all.wait()
    assert outcomes.found == [(None, None)]


@pytest.mark.parametrize("nbytes", [1, pytest.param(5 << 20, marks=pytest.mark.slow)])
async def test_work_that_takes_too_long_is_refused(nbytes: int) -> None:
    bench, outcomes = Workbench(most_secs=0.05), Outcomes(1)

    def work(charge: Charge) -> None:
        while True:
            charge(0)

    bench.do(nbytes, work, outcomes.done, uncharged, None)
    await outcomes.all.wait()
    [(_, problem)] = outcomes.found
    assert isinstance(problem, InvalidRequest)


async def test_the_loop_charges_and_may_refuse() -> None:
    bench, outcomes = Workbench(), Outcomes(1)
    loop_thread, charged = threading.get_ident(), []

    def charge(nbytes: int) -> None:
        assert threading.get_ident() == loop_thread
        charged.append(nbytes)
        if len(charged) == 3:
            raise Overloaded("as asked")

    def work(charge: Charge) -> None:
        for nbytes in range(1, 10):
            charge(nbytes)

    bench.do(1, work, outcomes.done, charge, None)
    await outcomes.all.wait()
    assert charged == [1, 2, 3]
    [(result, problem)] = outcomes.found
    assert result is None
    assert isinstance(problem, Overloaded)


async def test_cancelled_work_does_not_begin_and_ends_at_its_next_charge() -> None:
    bench, outcomes, last = Workbench(), Outcomes(1), Outcomes(1)
    begun, gate = threading.Event(), threading.Event()
    charged: list[int] = []
    steps: list[str] = []

    def work(charge: Charge) -> None:
        begun.set()
        gate.wait()
        charge(1)
        steps.append("went on")

    first = bench.do(1, work, outcomes.done, charged.append, None)
    second = bench.do(1, lambda charge: steps.append("begun"), outcomes.done, uncharged, None)
    await asyncio.to_thread(begun.wait)
    first.cancel()
    second.cancel()
    gate.set()
    bench.do(1, lambda charge: None, last.done, uncharged, None)
    await last.all.wait()
    assert (steps, charged, outcomes.found) == ([], [], [])


async def test_refused_work_is_freed_at_once() -> None:
    class Data:
        pass

    def refuse(nbytes: int) -> None:
        raise Overloaded("as asked")

    def wrong(charge: Charge) -> None:
        raise InvalidRequest("as asked")

    def large(charge: Charge) -> None:
        charge(1)

    for work in (wrong, large):
        bench, call, after = Workbench(), KeptCall(), asyncio.Event()
        data = Data()
        freed = weakref.ref(data)

        def decode(charge: Charge, data: Data = data, work: Callable[..., None] = work) -> None:
            work(charge)

        Deferred(bench, 1, decode, lambda result: None, call, refuse, after.set)
        del data, decode
        await after.wait()
        assert isinstance(call.refused.pop(), InvalidRequest | Overloaded)
        # The thread ends its part after it has called the loop.
        await asyncio.to_thread(await_freed, freed)


async def test_refused_work_keeps_no_data_until_its_turn_of_the_loop() -> None:
    class Data:
        pass

    found, ended = list[weakref.ref[Data]](), list[BaseException | None]()
    over = asyncio.Event()

    def wrong(charge: Charge) -> None:
        data = Data()
        found.append(weakref.ref(data))
        raise InvalidRequest("as asked")

    def done(result: None, problem: Exception | None) -> None:
        ended.append(problem)
        assert found[0]() is None
        over.set()

    Workbench().do(1, wrong, done, uncharged, None)
    await asyncio.wait_for(over.wait(), 30)
    assert [str(problem) for problem in ended] == ["as asked"]


def await_freed(freed: "weakref.ref[Any]") -> None:
    until(lambda: freed() is None, "freed data")


class KeptCall(Call):
    """Records its refusal."""

    def __init__(self, payer: Client | None = None) -> None:
        super().__init__("m", "", "", {})
        self.refused: list[ServerError] = []
        self._payer = payer

    @property
    def payer(self) -> Client | None:
        return self._payer

    def refuse(self, error: ServerError) -> None:
        self.refused.append(error)


async def test_a_deferred_request_is_submitted_with_later_changes() -> None:
    call, after = KeptCall(), asyncio.Event()
    given: list[tuple[str, bool | None]] = []

    def submit(decoded: str) -> None:
        given.append((decoded, call.held))

    Deferred(Workbench(), 1, lambda charge: "decoded", submit, call, uncharged, after.set)
    call.hold(True)
    await after.wait()
    assert (given, call.refused) == ([("decoded", True)], [])


@pytest.mark.parametrize("where", ["decode", "submit"])
@pytest.mark.parametrize("error", [InvalidRequest("wrong"), ValueError("bug")])
async def test_errors_are_delivered_to_the_call(where: str, error: Exception) -> None:
    call, after = KeptCall(), asyncio.Event()

    def fail(_: object) -> Any:
        raise error

    decode = fail if where == "decode" else lambda charge: None
    submit = fail if where == "submit" else lambda decoded: None
    Deferred(Workbench(), 1, decode, submit, call, uncharged, after.set)
    await after.wait()
    [found] = call.refused
    assert found is error or isinstance(found, ExecutionFailed)
    assert "bug" not in str(found)


async def test_a_cancelled_request_is_neither_submitted_nor_refused() -> None:
    bench, call, last = Workbench(), KeptCall(), Outcomes(1)
    gate = threading.Event()
    submitted: list[object] = []

    Deferred(bench, 1, lambda charge: gate.wait(), submitted.append, call, uncharged)
    call.cancel()
    gate.set()
    bench.do(1, lambda charge: None, last.done, uncharged, None)
    await last.all.wait()
    assert (submitted, call.refused) == ([], [])


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_call_is_expected_until_it_is_submitted_or_cancelled(cancelled: bool) -> None:
    bench, call, last = Workbench(), KeptCall(), Outcomes(1)
    expected, submitted = list[int](), list[str]()
    Expected(bench, 1, lambda charge: "done", submitted.append, call, expected.append)
    assert expected == [1]
    if cancelled:
        call.cancel()
    bench.do(1, lambda charge: None, last.done, uncharged, None)
    await last.all.wait()
    assert (expected, submitted) == ([1, -1], [] if cancelled else ["done"])
