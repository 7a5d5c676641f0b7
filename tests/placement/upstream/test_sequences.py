"""What is known of a sequence when nobody waits for one of its requests any more."""

import asyncio
from collections.abc import Callable, Set
from typing import cast

import pytest

from headrace.core.call import Parameter
from headrace.placement.upstream.attempt import Attempt, Policy, StreamAttempt
from headrace.placement.upstream.connection import RemoteRequest
from headrace.placement.upstream.upstream import Upstream
from headrace.protocol.v2_protobuf import RemoteAnswer
from headrace.scheduling.sequences import SequenceTable
from headrace.scheduling.upstreams import Pin
from tests.placement.upstream.test_stream_attempt import Loop, Server, Stream


class Call:
    """A call that is under way."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class OneCall(Server):
    """A server with one call."""

    def __init__(self) -> None:
        super().__init__()
        self.call = Call()

    def begin(self, request: RemoteRequest, receiver: object) -> Call:
        return self.call


class World:
    """A server, and the sequence `a`, of which a request has come."""

    def __init__(self) -> None:
        self.server = OneCall()
        self.table = SequenceTable(10**9, lambda: 0)
        self.table.wake("a")
        self.told: list[object] = []
        loop = cast(asyncio.AbstractEventLoop, Loop())
        self.policy = Policy("m", self.next, loop, sequences=self.table)

    def next(self, tried: Set[Upstream]) -> Upstream | None:
        return cast(Upstream, self.server)

    def received(self, answer: RemoteAnswer) -> None:
        self.told.append(answer)

    def answered(self, answer: RemoteAnswer | None) -> None:
        self.told.append(answer)

    def failed(self, error: Exception) -> None:
        self.told.append(error)


def request(*more: str) -> RemoteRequest:
    """The first one of the sequence."""
    parameters: dict[str, Parameter] = {"sequence_id": "a", "sequence_start": True}
    return RemoteRequest([], [], parameters | dict.fromkeys(more, True))


def test_a_call_that_is_cancelled_loses_its_sequence() -> None:
    world = World()
    attempt = Attempt(world.policy, request(), world)
    assert attempt.begin()
    attempt.cancel()
    assert world.server.call.cancelled
    assert world.table.pin("a") == Pin(lost=True)


@pytest.mark.parametrize(
    ("before", "more", "known"),
    [
        (lambda stream: None, [], "lost"),
        (lambda stream: stream.give(1), [], "there"),
        (lambda stream: stream.give(1), ["sequence_end"], "ended"),
    ],
)
def test_a_stream_that_is_cancelled_loses_its_sequence_unless_a_response_has_come(
    before: Callable[[Stream], None], more: list[str], known: str
) -> None:
    world = World()
    attempt = StreamAttempt(world.policy, request(*more), world)
    assert attempt.begin()
    [stream] = world.server.streams
    before(stream)
    attempt.cancel()
    assert stream.cancelled
    pins = {"lost": Pin(lost=True), "there": Pin(world.server), "ended": None}
    assert world.table.pin("a") == pins[known]
