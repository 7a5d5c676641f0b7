"""The server's end of a worker's socket."""

import asyncio
import json
import socket
from time import perf_counter

import uvloop

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import FrameKind, Header, frame
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
            async with asyncio.timeout(10):
                while len(lines) < 1001:  # noqa: ASYNC110 - the socket is read by callbacks
                    await asyncio.sleep(0)
            link.close()

    uvloop.run(scenario())
