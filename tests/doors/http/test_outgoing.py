"""Bytes for a client, on a transport that has room when the test says so."""

import asyncio
from collections.abc import Iterable

import pytest

from headrace.core.tensors import Buffer
from headrace.doors.http.outgoing import Outgoing
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.entrance import Progress


class Transport(asyncio.Transport):
    """Has room for `room` bytes; calls `pause` of what writes to it when they are used up."""

    def __init__(self, room: int = 1 << 30) -> None:
        super().__init__()
        self.room = room
        self.written: list[bytes] = []
        self.unread = 0
        self.closed = False
        self.writer: Outgoing | None = None

    def write(self, data: Buffer) -> None:  # type: ignore[override]
        assert not self.closed
        self.written.append(bytes(data))
        self.unread += len(data)
        if self.unread > self.room and self.writer is not None:
            self.writer.pause()

    def writelines(self, pieces: Iterable[Buffer]) -> None:  # type: ignore[override]
        self.write(b"".join(pieces))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def outgoing(room: int = 1 << 30) -> tuple[Transport, Outgoing]:
    transport = Transport(room)
    account = ConnectionAccount(Admission(0, 0), "")
    transport.writer = Outgoing(transport, Progress(account, 60))
    return transport, transport.writer


@pytest.mark.parametrize("pieces", [[b"head", b"body"], [b"head", bytes(1 << 20)], [b"x"] * 100])
def test_everything_is_written_in_order(pieces: list[Buffer]) -> None:
    transport, out = outgoing()
    out.write(pieces, sum(map(len, pieces)))
    out.write([b"next"], 4)
    assert b"".join(transport.written) == b"".join(pieces) + b"next"
    assert out.empty
    assert out.waiting == 0  # there is room


def test_many_pieces_are_passed_on_as_the_client_reads() -> None:
    transport, out = outgoing(room=1 << 20)
    piece = bytes(100_000)
    out.write([piece] * 100, 100 * len(piece))
    out.end()
    assert len(transport.written) == 11
    assert out.waiting == 100 * len(piece)
    assert (out.empty, out.closing, transport.closed) == (False, True, False)
    while not out.empty:
        transport.unread = 0
        out.resume()
        assert transport.unread <= (1 << 20) + len(piece)
    assert len(transport.written) == 100
    assert transport.closed


def test_writing_ends_at_once_if_nothing_waits() -> None:
    transport, out = outgoing()
    out.write([b"all"], 3)
    out.end()
    assert transport.closed


@pytest.mark.parametrize(("per_second", "lives"), [(0, False), (500, False), (2_000, True)])
def test_a_client_has_to_read(per_second: int, lives: bool) -> None:
    transport, out = outgoing(room=1_000)
    out.write([bytes(400_000)], 400_000)
    assert out.stalled
    answers = []
    for second in range(180):
        answers.append(out.reads(0, float(second)))
        transport.unread -= per_second
    assert answers[0]
    assert answers[-1] is lives
    transport.unread = 0
    out.resume()
    assert out.reads(0, 181.0)
    assert not out.stalled


@pytest.mark.parametrize("lost", [False, True])
async def test_waiting_for_room(lost: bool) -> None:
    transport, out = outgoing(room=10)
    await out.drain()
    out.write([bytes(20)], 20)
    waits = [asyncio.create_task(out.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waits)
    if lost:
        out.lose()
    else:
        transport.unread = 0
        out.resume()
    await asyncio.gather(*waits)
