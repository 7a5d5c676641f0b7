"""Calls whose handlers are coroutines: each runs in a task of its own."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.transports.grpc.native.head import CallHead
from headrace.transports.grpc.native.rpc import Rpc

_INBOX = 16  # messages that wait for the handler before the client is asked to wait
CONGESTED = 1 << 20  # bytes that wait for the client before the handler waits


class TaskRpc(Rpc):
    """A unary call whose handler is awaited."""

    unary = True
    _data: Buffer | None = None
    _task: asyncio.Task[None] | None = None

    def message(self, data: Buffer) -> None:
        """Keep the one message until the client has closed its side."""
        if self._data is not None:
            raise InvalidRequest("the call takes one message, got another")
        self._data = data
        self.kept += len(data)

    def end(self) -> None:
        """Start the handler."""
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("the call takes one message, got none")
        if self.kept:
            self.on_keep()  # for as long as the handler has it
        if not self.finished:
            self._task = self._host.loop.create_task(self._guarded(data))

    def abandon(self) -> None:
        """Cancel the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _guarded(self, data: Buffer) -> None:
        try:
            await self._run(data)
        except Exception as error:
            if not self.finished:
                self.guard(error)
        finally:
            self._task = None

    async def _run(self, data: Buffer) -> None:
        handler: Any = self.head.handler
        answer = await handler(data, self)
        if not self.finished:
            self.write([answer])
            self.close()


class ServerStreamRpc(TaskRpc):
    """A call with one message and many answers; it never ends by itself, so a stop ends it."""

    def __init__(self, head: CallHead, number: int) -> None:
        super().__init__(head, number)
        self._room = asyncio.Event()
        self._host.endless.add(self)

    def on_sent(self) -> None:
        """The handler may go on."""
        if self.queued < CONGESTED:
            self._room.set()

    def _settle(self, status: int) -> None:
        self._host.endless.discard(self)
        super()._settle(status)

    async def _run(self, data: Buffer) -> None:
        await self._give(_one(data))

    async def _give(self, requests: AsyncIterator[Buffer]) -> None:
        handler: Any = self.head.handler
        answers = handler(requests, self)
        try:
            async for answer in answers:
                if self.finished:
                    return
                self.write([answer])
                if self.queued >= CONGESTED:
                    self._room.clear()
                    await self._room.wait()
            self.close()
        finally:
            await answers.aclose()


class BidiStreamRpc(ServerStreamRpc):
    """A call with many messages both ways."""

    unary = False
    _half_closed = False

    def __init__(self, head: CallHead, number: int) -> None:
        super().__init__(head, number)
        self._inbox: deque[Buffer] = deque()
        self._arrived = asyncio.Event()
        self._task = self._host.loop.create_task(self._guarded(b""))

    def message(self, data: Buffer) -> None:
        """Queue a message for the handler."""
        self._inbox.append(data)
        self.kept += len(data)
        self.keeps_window = len(self._inbox) >= _INBOX
        self._arrived.set()

    def end(self) -> None:
        """Let the handler see the end."""
        self._half_closed = True
        self._arrived.set()

    async def _run(self, data: Buffer) -> None:
        await self._give(self._requests())

    async def _requests(self) -> AsyncIterator[Buffer]:
        while True:
            if self._inbox:
                message = self._inbox.popleft()
                self.release(len(message))
                if self.keeps_window and len(self._inbox) < _INBOX:
                    self._link.http2.release(self)
                yield message
            elif self._half_closed:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()


async def _one(message: Buffer) -> AsyncIterator[Buffer]:
    yield message
