"""The server's end of a worker's socket."""

import asyncio
import json
import socket
from time import perf_counter

import numpy as np
import pytest
import uvloop

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import FrameKind, FrameReader, Header, frame
from headrace.placement.worker.worker_process import WorkerSocket

_LINE = frame(FrameKind.LOG, json.dumps([20, "model", "text"]).encode())


def test_a_flood_is_processed_in_turns_and_frames_keep_their_order() -> None:
    def log(line: bytes) -> None:
        until = perf_counter() + 1e-4
        while perf_counter() < until:
            pass
        lines.append(line)

    lines = list[bytes]()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        answers = list[int]()
        done: asyncio.Future[None] = loop.create_future()

        def take(header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
            answers.append(len(lines))
            if len(answers) == 2:
                done.set_result(None)

        ours, theirs = socket.socketpair()
        link = WorkerSocket(ours.detach(), log, lambda *_: None)
        with theirs:
            answer = frame(FrameKind.ANSWER, b"{}")
            theirs.sendall(_LINE * 500 + answer + _LINE * 500 + answer)
            link.attach(loop, take)
            seen = 0
            while not done.done():
                turn: asyncio.Future[None] = loop.create_future()
                loop.call_soon(turn.set_result, None)
                await turn
                assert len(lines) - seen < 200
                seen = len(lines)
            assert answers == [500, 1000]
            theirs.sendall(_LINE)
            async with asyncio.timeout(60):
                while len(lines) < 1001:  # noqa: ASYNC110 - the socket is read by callbacks
                    await asyncio.sleep(0)
            link.close()

    uvloop.run(scenario())


def test_small_replies_are_sent_together_and_keep_their_order() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        link = WorkerSocket(ours.detach(), lambda _: None, lambda *_: None)
        with theirs:
            link.attach(loop, lambda *_: None)
            for number in range(3):
                link.send_loose(FrameKind.REPLY, {"call": number}, [])
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            large = np.zeros(1 << 20, np.uint8).tobytes()
            link.send_loose(FrameKind.REPLY, {"call": 3}, [[large]])  # those before it go first
            link.send_loose(FrameKind.REPLY, {"call": 4}, [])
            await asyncio.sleep(0)
            feed, found = FrameReader(FrameKind, 1 << 20, 1).feed, list[int]()
            while len(found) < 5:  # a read ends where a file was sent
                found += [json.loads(meta)["call"] for _, meta, _ in feed(theirs.recv(1 << 20))]
            assert found == [0, 1, 2, 3, 4]
            link.send_loose(FrameKind.REPLY, {"call": 5}, [])
            link.detach()  # which leaves nothing behind
            assert [json.loads(meta)["call"] for _, meta, _ in feed(theirs.recv(1 << 20))] == [5]
            link.close()

    uvloop.run(scenario())
