"""Health watch streams: notified of changes, without polling."""

import asyncio
from typing import Any, cast

from headrace.core.errors import ServerError, ServerExiting
from headrace.doors.grpc.call import Message
from headrace.doors.grpc.services import health_handlers
from headrace.engine.admission import Admission
from headrace.engine.entrance import Readiness
from headrace.protocol.pb import health_pb2 as pb

_STREAMS = 1000


class Server:
    """Counts its readiness checks."""

    def __init__(self) -> None:
        self.ready = False
        self.asked = 0

    def look(self) -> bool:
        self.asked += 1
        return self.ready


class Peer:
    """Records the messages of a stream."""

    congested = False

    def __init__(self, told: list[bool]) -> None:
        self.told = told
        self.finished = False

    def send(self, message: Message) -> None:
        status = pb.HealthCheckResponse.FromString(b"".join(message)).status
        self.told.append(status == pb.HealthCheckResponse.SERVING)

    def finish(self, error: ServerError | None = None) -> None:
        assert error is None
        self.finished = True


async def turns(count: int = 20) -> None:
    """Run the event loop until nothing is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


class Timers:
    """Counts pending timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        later = loop.call_at

        def call_at(*args: Any, **more: Any) -> asyncio.TimerHandle:
            self.count += 1
            return later(*args, **more)

        cast(Any, loop).call_at = call_at


async def test_a_thousand_streams_share_one_check_per_change() -> None:
    server, admission = Server(), Admission(0, 0)
    readiness = Readiness(server.look)
    _, watch = health_handlers(readiness, admission)
    told: list[bool] = []

    timers = Timers(asyncio.get_running_loop())
    peers = [Peer(told) for _ in range(_STREAMS)]
    streams = [watch(cast(Any, peer)) for peer in peers]
    for stream in streams:
        stream.receive(b"")
        stream.half_close()
    assert told == [False] * _STREAMS
    asked = server.asked
    await turns(1000)
    assert server.asked == asked
    readiness.may_have_changed()  # and has not
    await turns()
    assert server.asked == asked + 1
    server.ready = True
    for _ in range(100):
        readiness.may_have_changed()
    await turns(5)
    assert len(told) - _STREAMS < _STREAMS / 2  # not all in one turn of the loop
    await turns(_STREAMS // 10)
    assert told[_STREAMS:] == [True] * _STREAMS
    assert server.asked <= asked + 2 + _STREAMS
    server.ready = False
    admission.close()
    assert all(peer.finished for peer in peers)
    for stream in streams:
        stream.closed()
    assert told[2 * _STREAMS :] == [False] * _STREAMS
    assert timers.count == 0
    readiness.may_have_changed()  # no watcher


def test_a_stream_without_requests_ends_with_the_server() -> None:
    admission = Admission(0, 0)
    _, watch = health_handlers(Readiness(lambda: True), admission)
    ends: list[ServerError | None] = []

    class Silent(Peer):
        def finish(self, error: ServerError | None = None) -> None:
            ends.append(error)

    stream = watch(cast(Any, Silent([])))
    stream.sent()  # room without effect
    assert ends == []
    admission.close()
    assert [type(error) for error in ends] == [ServerExiting]
    stream.closed()


async def test_a_change_undone_in_the_same_turn_is_not_sent() -> None:
    server = Server()
    readiness = Readiness(server.look)
    told: list[bool] = []

    def tell() -> None:
        told.append(server.ready)

    readiness.watch(tell)
    server.ready = True
    readiness.may_have_changed()
    server.ready = False
    readiness.may_have_changed()
    await turns()
    assert told == []
    server.ready = True
    readiness.may_have_changed()
    await turns()
    assert told == [True]
    readiness.unwatch(tell)
    server.ready = False
    readiness.may_have_changed()
    await turns()
    assert told == [True]
