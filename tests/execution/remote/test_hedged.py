"""Two servers, of which the second is asked when the first takes long."""

import asyncio
from collections.abc import Awaitable, Callable, Set
from pathlib import Path

import pytest

from headrace.core.errors import InvalidRequest, RemoteLost, Unavailable
from headrace.execution.remote.connection import CallFailed, Receiver, RemoteRequest
from headrace.execution.remote.errand import Answer, Lost, Request
from headrace.execution.remote.hedged import HedgedCalls
from headrace.execution.remote.member import Member
from headrace.execution.remote.options import Endpoint, RemoteOptions
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.hedging import HedgeRules
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate

AT_ONCE = HedgeRules(seconds=1e-6, share=1.0)
NEVER = HedgeRules(seconds=3600.0)
FAILURES = {
    Fate.UNSENT: CallFailed(Failure(Fate.UNSENT, Unavailable("no connection")), "none"),
    Fate.REFUSED: CallFailed(Failure(Fate.REFUSED, Unavailable("full")), "full"),
    Fate.ANSWERED: CallFailed(Failure(Fate.ANSWERED, InvalidRequest("no")), "no"),
    Fate.UNCERTAIN: CallFailed(Failure(Fate.UNCERTAIN, RemoteLost("gone")), "gone"),
}


class Connection:
    """A call that is answered when told."""

    def __init__(self) -> None:
        self.receiver: Receiver | None = None
        self.cancelled = 0
        self.asked = asyncio.Event()

    def begin(self, request: Request, seconds: float, receiver: Receiver) -> "Connection":
        assert self.receiver is None
        self.receiver = receiver
        self.asked.set()
        return self

    def cancel(self) -> None:
        self.cancelled += self.receiver is not None
        self.receiver = None

    def answer(self, name: str) -> None:
        receiver, self.receiver = self.receiver, None
        assert receiver is not None
        receiver.answered(RemoteAnswer({}, {"by": name}))

    def fail(self, fate: Fate) -> None:
        receiver, self.receiver = self.receiver, None
        assert receiver is not None
        receiver.failed(FAILURES[fate])

    async def ready(self, seconds: float) -> bool:
        await asyncio.sleep(3600)
        return True

    async def close(self) -> None:
        """There is nothing to end."""


class Bench:
    """A pool of servers, and who waits."""

    def __init__(self, rules: HedgeRules, root: Path, servers: int = 2) -> None:
        loop = asyncio.get_running_loop()
        options = RemoteOptions.of(
            {"endpoints": "grpc://127.0.0.1", "hedge_after": "1"}, "m", 0, root
        )
        self.connections = [Connection() for _ in range(servers)]
        self.members = [
            Member(
                Endpoint(f"s{n}", "grpc", "127.0.0.1", n, "s"), connection, options, "m", loop,
                lambda: None, True,
            )
            for n, connection in enumerate(self.connections)
        ]  # fmt: skip
        self.ends: list[object] = []
        calls = HedgedCalls(rules, loop)
        self.errand = calls.errand(self, RemoteRequest([], [], {}), self)

    def next(self, tried: Set[Member]) -> Member | None:
        able = (m for m in self.members if m.condition.reachable and m not in tried)
        return next(able, None)

    def answered(self, answer: Answer) -> None:
        assert isinstance(answer, RemoteAnswer)
        self.ends.append(answer.parameters["by"])

    def failed(self, error: Exception) -> None:
        self.ends.append(error.failure.fate if isinstance(error, Lost) else type(error))

    async def until_hedged(self) -> None:
        await self.connections[1].asked.wait()

    @property
    def counts(self) -> list[tuple[int, tuple[int, int]]]:
        """Of each server, its calls, and how many were second ones and won."""
        found = [member.series() for member in self.members]
        return [(s.counts.requests, (s.counts.hedges, s.counts.wins)) for s in found]

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not any(m.condition.outstanding or c.receiver for m, c in zip(
            self.members, self.connections, strict=True))  # fmt: skip


def run(
    root: Path, scenario: Callable[[Bench], Awaitable[None]], rules: HedgeRules, servers: int = 2
) -> Bench:
    async def whole() -> Bench:
        bench = Bench(rules, root, servers)
        assert bench.errand.begin()
        await scenario(bench)
        assert bench.idle
        for member in bench.members:
            await member.close()
        return bench

    return asyncio.run(whole())


def test_a_quick_answer_needs_no_second_server(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.connections[0].answer("first")

    bench = run(tmp_path, scenario, NEVER)
    assert (bench.ends, bench.counts) == (["first"], [(1, (0, 0)), (0, (0, 0))])


@pytest.mark.parametrize("winner", [0, 1])
def test_the_first_answer_counts_and_the_other_call_is_cancelled(
    tmp_path: Path, winner: int
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.until_hedged()
        bench.connections[winner].answer(str(winner))

    bench = run(tmp_path, scenario, AT_ONCE)
    assert bench.ends == [str(winner)]
    assert bench.counts == [(1, (0, 0)), (1, (1, winner))]
    assert [c.cancelled for c in bench.connections] == [winner, 1 - winner]


@pytest.mark.parametrize("fate", [Fate.UNSENT, Fate.REFUSED, Fate.UNCERTAIN])
@pytest.mark.parametrize("loser", [0, 1])
def test_a_call_that_fails_leaves_it_to_the_other(tmp_path: Path, fate: Fate, loser: int) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.until_hedged()
        bench.connections[loser].fail(fate)
        assert not bench.ends
        bench.connections[1 - loser].answer("other")

    assert run(tmp_path, scenario, AT_ONCE).ends == ["other"]


@pytest.mark.parametrize(
    ("fates", "end"),
    [
        ((Fate.UNSENT, Fate.UNSENT), NotStarted),
        ((Fate.REFUSED, Fate.REFUSED), Fate.REFUSED),
        ((Fate.UNCERTAIN, Fate.UNSENT), Fate.UNCERTAIN),
        ((Fate.REFUSED, Fate.UNCERTAIN), Fate.UNCERTAIN),
    ],
)
def test_when_both_fail(tmp_path: Path, fates: tuple[Fate, Fate], end: object) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.until_hedged()
        for connection, fate in zip(bench.connections, fates, strict=True):
            connection.fail(fate)

    assert run(tmp_path, scenario, AT_ONCE).ends == [end]


def test_an_error_of_the_model_is_an_answer(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.until_hedged()
        bench.connections[1].fail(Fate.ANSWERED)

    bench = run(tmp_path, scenario, AT_ONCE)
    assert (bench.ends, bench.connections[0].cancelled) == ([Fate.ANSWERED], 1)


def test_what_was_not_begun_goes_to_another_server(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.connections[0].fail(Fate.REFUSED)
        assert not bench.ends
        bench.connections[1].answer("second")

    bench = run(tmp_path, scenario, NEVER)
    assert (bench.ends, bench.counts) == (["second"], [(1, (0, 0)), (1, (0, 0))])


def test_what_may_have_been_executed_does_not(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.connections[0].fail(Fate.UNCERTAIN)

    assert run(tmp_path, scenario, NEVER).ends == [Fate.UNCERTAIN]


def test_without_another_server_nothing_is_hedged(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await asyncio.sleep(0.01)
        bench.connections[0].answer("only")

    bench = run(tmp_path, scenario, AT_ONCE, servers=1)
    assert (bench.ends, bench.counts) == (["only"], [(1, (0, 0))])


def test_both_calls_end_when_nobody_waits(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.until_hedged()
        bench.errand.cancel()

    bench = run(tmp_path, scenario, AT_ONCE)
    assert (bench.ends, [c.cancelled for c in bench.connections]) == ([], [1, 1])
