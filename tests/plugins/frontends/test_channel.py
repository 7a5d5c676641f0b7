"""Two ends of a link in one event loop, over a real socket pair."""

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import pytest

from headrace.core.tensors import Buffer
from headrace.ipc.frames import IN_FILE, INLINE, Header, frame, pack_header
from headrace.plugins.frontends.channel import FrameChannel
from headrace.plugins.frontends.link_infer import LinkKind
from tests.placement.threads import no_threads


class End:
    """A channel that records its frames."""

    def __init__(
        self, sock: socket.socket, on_waiting: Callable[[int], object] | None = None
    ) -> None:
        self.frames: list[tuple[LinkKind, int, bytes, bytes]] = []
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self.channel = FrameChannel(sock, self._take, self.lost.set_result, on_waiting)

    def _take(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        self.frames.append((header.kind, header.number, meta, bytes(rest)))
        self._news.set()

    async def has(self, count: int) -> None:
        """Wait for `count` frames."""
        async with asyncio.timeout(20):
            while len(self.frames) < count:
                self._news.clear()
                await self._news.wait()


def files() -> int:
    """Number of unnamed files that this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += "memfd:headrace" in os.readlink(entry)
        except FileNotFoundError:
            continue
    return count


async def test_both_ways() -> None:
    ours, theirs = map(End, socket.socketpair())
    for number in range(1000):
        ours.channel.send(LinkKind.CANCEL, number)
        theirs.channel.send_parts(LinkKind.ANSWER, 0, number, b"meta", [b"r", memoryview(b"est")])
    await theirs.has(1000)
    await ours.has(1000)
    assert [number for _, number, _, _ in theirs.frames] == list(range(1000))
    assert ours.frames[7] == (LinkKind.ANSWER, 7, b"meta", b"rest")
    ours.channel.close()
    assert await theirs.lost == "the other end has closed"


async def test_long_frames_keep_their_place() -> None:
    before = files()
    ours, theirs = map(End, socket.socketpair())
    long = os.urandom(INLINE * 3)
    for number in range(0, 400, 2):
        ours.channel.send_parts(LinkKind.ANSWER, 0, number, b"m", [long[:number], b"", long])
        ours.channel.send(LinkKind.ANSWER, number + 1)
    await theirs.has(400)
    assert [number for _, number, _, _ in theirs.frames] == list(range(400))
    assert theirs.frames[398] == (LinkKind.ANSWER, 398, b"m", long[:398] + long)
    ours.channel.close()
    await theirs.lost
    theirs.frames.clear()
    assert files() == before


async def test_urgent_frames_overtake_all_that_are_queued() -> None:
    sock, other = socket.socketpair()
    ours = End(sock)
    for number in range(200):
        ours.channel.send(LinkKind.ANSWER, number, bytes(INLINE))
    await asyncio.sleep(0)  # the socket is full now
    ours.channel.send_first(LinkKind.CALL, 1_000, b"now")
    ours.channel.send_first(LinkKind.CALL, 1_001, b"then")
    theirs = End(other)
    await theirs.has(202)
    order = [number for _, number, _, _ in theirs.frames]
    assert order.index(1_001) == order.index(1_000) + 1 < 100
    assert [number for number in order if number < 1_000] == list(range(200))
    assert ours.channel.waiting == 0
    ours.channel.close()
    await theirs.lost


async def test_frames_whose_files_are_written_on_a_thread() -> None:
    """Requests keep their order, and so does an exchange; other frames do not wait for a file."""
    before = files()
    ours, theirs = map(End, socket.socketpair())
    longest = os.urandom(3 << 20)
    for number in range(0, 30, 3):
        ours.channel.send(LinkKind.INFER, number)
        ours.channel.send_parts(LinkKind.INFER, 0, number + 1, b"m", [longest[:number], longest])
        ours.channel.send_parts(LinkKind.INFER, 0, number + 2, b"m", [longest[: INLINE * 2]])
    for number in (40, 41):
        ours.channel.send_parts(LinkKind.ANSWER, 0, number, b"m", [longest])
        ours.channel.send(LinkKind.ANSWER, number)
    ours.channel.send(LinkKind.CALL, 42)
    # The first file is being written on a thread, and nothing behind it is sent.
    await asyncio.sleep(0)
    assert ours.channel.waiting > len(longest)
    await theirs.has(35)
    found: dict[LinkKind, list[int]] = {}
    for kind, number, _, _ in theirs.frames:
        found.setdefault(kind, []).append(number)
    assert list(found) == [LinkKind.INFER, LinkKind.CALL, LinkKind.ANSWER]
    assert found[LinkKind.INFER] == list(range(30))
    assert sorted(found[LinkKind.ANSWER]) == found[LinkKind.ANSWER] == [40, 40, 41, 41]
    assert theirs.frames[1][0] == LinkKind.CALL
    assert (LinkKind.INFER, 28, b"m", longest[:27] + longest) in theirs.frames
    assert ours.channel.waiting == 0
    # Closing meanwhile leaves nothing behind.
    ours.channel.send_parts(LinkKind.ANSWER, 0, 30, b"m", [longest])
    await asyncio.sleep(0)
    ours.channel.close()
    await theirs.lost
    theirs.frames.clear()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert files() == before


async def test_frames_for_whose_files_there_is_no_thread() -> None:
    before = files()
    ours, theirs = map(End, socket.socketpair())
    longest = os.urandom(3 << 20)
    with no_threads():
        for number in range(3):
            ours.channel.send_parts(LinkKind.INFER, 0, number, b"m", [longest[number:]])
        await theirs.has(3)
    ours.channel.send_parts(LinkKind.INFER, 0, 3, b"m", [longest])
    await theirs.has(4)
    assert [frame[1:] for frame in theirs.frames] == [
        (number, b"m", longest[number % 3 :]) for number in range(4)
    ]
    assert ours.channel.waiting == 0
    ours.channel.close()
    await theirs.lost
    theirs.frames.clear()
    assert files() == before


async def test_unread_frames_wait() -> None:
    ours, theirs = socket.socketpair()
    waits: list[int] = []
    end = End(ours, waits.append)
    for number in range(200):
        end.channel.send_parts(LinkKind.ANSWER, 0, number, b"", [bytes(INLINE)])
    await asyncio.sleep(0)
    # While so much is queued, nothing more is read from the other end.
    theirs.sendall(frame(LinkKind.CANCEL, number=1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not end.frames
    other = End(theirs)
    await other.has(200)
    await end.has(1)
    assert [number for _, number, _, _ in other.frames] == list(range(200))
    assert waits[-1] == 0
    assert max(waits) > 100 * INLINE
    end.channel.close()
    other.channel.close()


async def test_files_wait_until_they_are_received() -> None:
    ours, theirs = socket.socketpair()
    waits: list[int] = []
    end, other = End(ours, waits.append), End(theirs)
    size = INLINE + 1
    going = partial(end.channel.send, LinkKind.CANCEL, 1)
    end.channel.send_parts(LinkKind.ANSWER, 0, 2, b"", [bytes(size)], going)
    await other.has(2)
    assert [kind for kind, _, _, _ in other.frames] == [LinkKind.CANCEL, LinkKind.ANSWER]
    assert (end.channel.waiting, waits[-1]) == (size, size)
    room: list[int] = []
    end.channel.when_room(0, lambda: room.append(1))
    end.channel.taken(size)
    assert (end.channel.waiting, waits[-1], room) == (0, 0, [1])
    for number, pieces in ((3, [bytes(3 << 20)]), (4, [b"short"])):
        going = partial(end.channel.send, LinkKind.ANSWERS, number)
        end.channel.send_parts(LinkKind.INFER, 0, number, b"", pieces, going)
    await other.has(6)
    assert [(kind, number) for kind, number, _, _ in other.frames[2:]] == [
        (LinkKind.ANSWERS, 3), (LinkKind.INFER, 3), (LinkKind.ANSWERS, 4), (LinkKind.INFER, 4),
    ]  # fmt: skip
    end.channel.close()
    other.channel.close()


async def test_a_closed_channel_queues_nothing() -> None:
    ours, theirs = socket.socketpair()
    waits: list[int] = []
    end = End(ours, waits.append)
    end.channel.send_parts(LinkKind.ANSWER, 0, 1, b"", [bytes(INLINE + 1)])
    end.channel.close()  # in the turn in which it was sent
    await asyncio.sleep(0)
    assert waits == []
    theirs.close()


@pytest.mark.parametrize(("data", "reason"), [
    (b"GET / HTTP/1.1\r\n\r\n\r\n\r\n\r\n", "a frame of kind 71"),
    (pack_header(LinkKind.INFER, IN_FILE, 1, 0, 1 << 20), "a file that has not come"),
    (b"", "the other end has closed"),
], ids=["nonsense", "no file", "nothing"])  # fmt: skip
async def test_a_broken_link_is_closed(data: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    theirs.sendall(data)
    if not data:
        theirs.close()
    assert await end.lost == reason
    assert end.channel.closed
    theirs.close()


async def test_an_exception_ends_the_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        raise KeyError("x")

    channel = FrameChannel(theirs, take, lost.set_result)
    other = End(ours)
    for number in range(3):
        other.channel.send(LinkKind.CANCEL, number)
    assert await asyncio.wait_for(lost, 20) == "a bug"
    assert await asyncio.wait_for(other.lost, 20)
    assert channel.closed
    assert [record.message for record in caplog.records] == ["bug while taking a frame"]


async def test_a_system_error_while_receiving_ends_the_link() -> None:
    """Also one that a socket raises without data."""
    ours, theirs = socket.socketpair()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        raise BlockingIOError("too much is locked")

    channel = FrameChannel(theirs, take, lost.set_result)
    other = End(ours)
    other.channel.send(LinkKind.CANCEL)
    assert await asyncio.wait_for(lost, 20) == "too much is locked"
    assert channel.closed
    other.channel.close()


def work(secs: float) -> None:
    """Use the processor for so long."""
    until = perf_counter() + secs
    while perf_counter() < until:
        pass


async def test_many_frames_are_handed_on_in_turns() -> None:
    """A front end encodes the response of each, and has others to serve."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    numbers: list[int] = []

    def take(header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        work(1e-4)
        numbers.append(header.number)
        if len(numbers) == 1000:
            done.set_result(None)

    channel = FrameChannel(theirs, take, print)
    ours.sendall(b"".join(frame(LinkKind.CANCEL, number=number) for number in range(1000)))
    most = seen = 0
    while not done.done():
        turn: asyncio.Future[None] = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn
        most, seen = max(most, len(numbers) - seen), len(numbers)
    assert numbers == list(range(1000))
    assert most < 200
    channel.close()
    ours.close()


async def test_frames_left_for_another_turn_are_dropped_with_the_channel() -> None:
    ours, theirs = socket.socketpair()
    numbers: list[int] = []

    def take(header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        work(1e-2)
        numbers.append(header.number)
        asyncio.get_running_loop().call_soon(channel.close)

    channel = FrameChannel(theirs, take, print)
    ours.sendall(b"".join(frame(LinkKind.CANCEL, number=number) for number in range(3)))
    async with asyncio.timeout(20):
        while not channel.closed:  # noqa: ASYNC110 - closed by a callback
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert numbers == [0]
    ours.close()
