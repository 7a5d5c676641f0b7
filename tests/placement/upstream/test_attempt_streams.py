"""Attempts of streaming requests: choice of an upstream, retries and cancellation."""

import asyncio
from collections.abc import Callable, Set
from typing import cast

import numpy as np
import pytest

from headrace.core.call import Parameter
from headrace.core.errors import (
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    Unavailable,
)
from headrace.placement.upstream.attempt import Attempt, Lost, Policy, StreamAttempt
from headrace.placement.upstream.connection import RemoteRequest
from headrace.placement.upstream.upstream import Upstream
from headrace.protocol.status import Failure, late, lost, unsent
from headrace.protocol.v2_protobuf import RemoteAnswer
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.sequences import SequenceTable
from headrace.scheduling.upstreams import Pin
from tests.placement.upstream.fakes import Loop, Server, Stream

SILENCE = 10.0
REQUEST = RemoteRequest([], [], {})


class World:
    """Two upstreams and a request to one of them."""

    def __init__(
        self,
        silence: float = SILENCE,
        request: RemoteRequest = REQUEST,
        sequences: SequenceTable | None = None,
        bound: bool = False,
    ) -> None:
        """The first upstream has the state of a request that is `bound` to it."""
        self.loop = Loop()
        self.first, self.second = self.servers = [Server(), Server()]
        self.told: list[object] = []
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        self.policy = Policy("m", self.next, loop, silence, sequences=sequences)
        if bound:
            request = request._replace(target=self.first)
        self.attempt = StreamAttempt(self.policy, request, self)

    def begin(self) -> Stream:
        """Start the stream to the first upstream."""
        assert self.attempt.begin()
        return self.first.streams[0]

    def next(self, tried: Set[Upstream]) -> Upstream | None:
        left = [server for server in self.servers if server not in cast(Set[object], tried)]
        return cast(Upstream, left[0]) if left else None

    def received(self, answer: RemoteAnswer) -> None:
        assert answer.parameters == {"more": 1}
        self.told.append(int(np.asarray(answer.outputs["OUT"])[0]))

    def answered(self, answer: RemoteAnswer | None) -> None:
        self.told.append(
            "end" if answer is None else ("last", int(np.asarray(answer.outputs["OUT"])[0]))
        )

    def failed(self, error: Exception) -> None:
        self.told.append(error.failure.error if isinstance(error, Lost) else error)

    @property
    def error(self) -> object:
        """The last error, the only one of its kind."""
        return self.told[-1]


def begun() -> tuple[World, Stream]:
    """A request and its stream to the first upstream."""
    world = World()
    return world, world.begin()


@pytest.mark.parametrize("last", [None, 3])
def test_responses_up_to_the_last_one(last: int | None) -> None:
    world, stream = begun()
    stream.give(1)
    stream.give(2)
    stream.give(last, final=True)
    assert world.told == [1, 2, "end" if last is None else ("last", 3)]
    assert not world.first.notes
    stream.end()
    assert world.first.notes == ["succeeded"]
    assert not world.loop.armed


def test_responses_after_the_last_one_do_not_matter() -> None:
    world, stream = begun()
    stream.give(None, final=True)
    stream.give(9)
    stream.refuse("too late")
    stream.end(lost("m"))
    assert world.told == ["end"]
    assert world.first.notes == ["succeeded"]
    world, stream = begun()
    stream.give(1)
    stream.refuse("as asked")
    assert str(world.error) == "as asked"
    stream.give(None, final=True)
    stream.end()
    assert len(world.told) == 2
    assert world.first.notes == ["succeeded"]


def test_an_unfinished_stream_is_cancelled_at_the_end() -> None:
    world, stream = begun()
    world.attempt.hold(True)
    stream.give(None, final=True)
    assert stream.held == [True, False]
    world.loop.advance(60)
    assert stream.cancelled
    assert world.first.notes == ["succeeded"]
    assert not world.loop.armed
    world, stream = begun()
    stream.give(1)
    stream.end()
    assert world.told == [1, "end"]
    assert world.first.notes == ["succeeded"]


def test_an_unbegun_request_goes_to_another_upstream() -> None:
    world = World()
    world.begin().end(unsent("m"))
    [stream] = world.second.streams
    stream.give(1, final=True)
    stream.end()
    assert world.told == [("last", 1)]
    assert (world.first.notes, world.second.notes) == (["UNSENT"], ["succeeded"])


def test_a_refusal_is_not_a_response() -> None:
    world, stream = begun()
    world.attempt.hold(True)
    stream.refuse("Request for unknown model: 'm' version 1 is not at ready state")
    assert stream.cancelled
    [other] = world.second.streams
    assert other.held == [True]
    other.refuse("Request timeout expired")
    assert isinstance(world.error, Unavailable)
    assert (world.first.notes, world.second.notes) == (["REFUSED"], ["REFUSED"])
    assert not world.loop.armed


def test_no_reachable_upstream() -> None:
    world = World()
    world.begin().end(unsent("m"))
    world.second.streams[0].end(unsent("m"))
    assert isinstance(world.error, NotStarted)
    empty = World()
    empty.servers = []
    assert not empty.attempt.begin()


@pytest.mark.parametrize("failure", [lost("m"), unsent("m"), None])
def test_a_begun_request_is_not_sent_again(failure: Failure | None) -> None:
    world, stream = begun()
    stream.give(1)
    if failure is None:
        stream.refuse("Request timeout expired")
        assert isinstance(world.error, RemoteUnavailable)
    else:
        stream.end(failure)
        assert str(world.error) == str(failure.error)
    assert world.told[0] == 1
    assert not isinstance(world.error, Unavailable)  # otherwise another backend would run it again
    assert not world.second.streams


@pytest.mark.parametrize(("failure", "error"), [(lost, RemoteLost), (late, RemoteTimeout)])
def test_a_possibly_begun_request_is_not_sent_again(
    failure: Callable[[str], Failure], error: type[Exception]
) -> None:
    world, stream = begun()
    stream.end(failure("m"))
    assert isinstance(world.error, error)
    assert not world.second.streams


@pytest.mark.parametrize("silence", [SILENCE, 0])
def test_a_silent_upstream_is_abandoned_if_limited(silence: float) -> None:
    world = World(silence)
    stream = world.begin()
    for _ in range(3):
        world.loop.advance(SILENCE - 1)
        stream.give(1)
    world.loop.advance(SILENCE + 1 if silence else 1e6)
    assert stream.cancelled is bool(silence)
    assert world.first.notes == ["LATE"] * bool(silence)
    assert isinstance(world.error, RemoteTimeout) is bool(silence)
    assert not world.second.streams


def test_a_paused_upstream_is_not_silent() -> None:
    world, stream = begun()
    world.attempt.hold(True)
    world.loop.advance(5 * SILENCE)
    world.attempt.hold(False)
    world.loop.advance(SILENCE - 1)
    assert world.told == []
    assert stream.held == [True, False]
    world.loop.advance(2)
    assert isinstance(world.error, RemoteTimeout)


@pytest.mark.parametrize("by_response", [False, True])
def test_cancelled(by_response: bool) -> None:
    """Also by a response that breaks the signature."""
    world, stream = begun()

    class Cancelling(list[object]):
        def append(self, value: object) -> None:
            super().append(value)
            world.attempt.cancel()

    if by_response:
        world.told = Cancelling()
    stream.give(1)
    world.attempt.cancel()
    world.attempt.cancel()
    assert stream.cancelled
    assert world.told == [1]
    assert world.first.notes == ["abandoned"]
    assert not world.loop.armed


def sequence(*more: str) -> tuple[SequenceTable, RemoteRequest]:
    """A table that knows the sequence `a`, and the first request of it."""
    table = SequenceTable(10**9, lambda: 0)
    table.wake("a")
    parameters: dict[str, Parameter] = {"sequence_id": "a", "sequence_start": True}
    return table, RemoteRequest([], [], parameters | dict.fromkeys(more, True))


def test_a_call_that_is_cancelled_loses_its_sequence() -> None:
    table, request = sequence()
    world = World(request=request, sequences=table)
    attempt = Attempt(world.policy, request, world)
    assert attempt.begin()
    attempt.cancel()
    assert world.first.call.cancelled
    assert table.pin("a") == Pin(lost=True)


@pytest.mark.parametrize(
    ("answered", "more", "known"),
    [(False, [], "lost"), (True, [], "there"), (True, ["sequence_end"], "ended")],
)
def test_a_stream_that_is_cancelled_loses_its_sequence_unless_a_response_has_come(
    answered: bool, more: list[str], known: str
) -> None:
    table, request = sequence(*more)
    world = World(request=request, sequences=table)
    stream = world.begin()
    if answered:
        stream.give(1)
    world.attempt.cancel()
    assert stream.cancelled
    pins = {"lost": Pin(lost=True), "there": Pin(cast(Upstream, world.first)), "ended": None}
    assert table.pin("a") == pins[known]


FOLLOWS = RemoteRequest([], [], {"sequence_id": "a"})


def test_a_request_of_a_sequence_is_sent_to_the_server_with_its_state_alone() -> None:
    table, _ = sequence()
    world = World(request=FOLLOWS, sequences=table, bound=True)
    world.servers.reverse()  # it would not be chosen
    world.begin().end(unsent("m"))
    assert isinstance(world.error, RemoteLost)
    assert not world.second.streams
    assert table.pin("a") == Pin(lost=True)
    later = World(request=FOLLOWS, sequences=table, bound=True)
    later.first.usable = False
    with pytest.raises(Lost, match="sequence a of model 'm' is lost"):
        later.attempt.begin()


@pytest.mark.parametrize("usable", [True, False])
def test_a_sequence_that_begins_anew_may_move(usable: bool) -> None:
    table, request = sequence()
    world = World(request=request, sequences=table, bound=True)
    world.first.usable = usable
    if usable:
        world.begin().end(unsent("m"))
    else:
        world.servers.reverse()
        assert world.attempt.begin()
    [stream] = world.second.streams
    stream.give(1, final=True)
    assert table.pin("a") == Pin(cast(Upstream, world.second))
