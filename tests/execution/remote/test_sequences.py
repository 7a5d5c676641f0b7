"""What is known of a sequence when nobody waits for one of its requests any more."""

import asyncio
from collections.abc import Callable, Set
from functools import partial
from typing import cast

import pytest

from headrace.core.call import Parameter
from headrace.execution.remote.connection import RemoteRequest
from headrace.execution.remote.member import Member
from headrace.execution.remote.sequences import SequenceCalls
from headrace.execution.remote.stream_errand import StreamErrand
from headrace.scheduling.sequences import SequenceTable
from headrace.scheduling.upstreams import Pin
from headrace.wire.remote_infer import RemoteAnswer
from tests.execution.remote.test_stream_errand import Loop, Server, Stream


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
        self.calls = SequenceCalls("m", self.table)
        loop = cast(asyncio.AbstractEventLoop, Loop())
        self.streams = self.calls.streams(partial(StreamErrand, model="m", loop=loop, silence=0))

    def next(self, tried: Set[Member]) -> Member | None:
        return cast(Member, self.server)

    def answered(self, answer: RemoteAnswer) -> None:
        self.told.append(answer)

    def received(self, answer: RemoteAnswer) -> None:
        self.told.append(answer)

    def finished(self, answer: RemoteAnswer | None) -> None:
        self.told.append(answer)

    def failed(self, error: Exception) -> None:
        self.told.append(error)


def request(*more: str) -> RemoteRequest:
    """The first one of the sequence."""
    parameters: dict[str, Parameter] = {"sequence_id": "a", "sequence_start": True}
    return RemoteRequest([], [], parameters | dict.fromkeys(more, True))


def test_a_call_that_is_cancelled_loses_its_sequence() -> None:
    world = World()
    errand = world.calls.errand(world, request(), world)
    assert errand.begin()
    errand.cancel()
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
    errand = world.streams(world, request(*more), world)
    assert errand.begin()
    [stream] = world.server.streams
    before(stream)
    errand.cancel()
    assert stream.cancelled
    pins = {"lost": Pin(lost=True), "there": Pin(world.server), "ended": None}
    assert world.table.pin("a") == pins[known]
