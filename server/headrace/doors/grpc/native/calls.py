"""Calls whose handlers are coroutines, each in a task of its own, or sessions, without one."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Message, Session
from headrace.doors.grpc.native.connection import Rpc, RpcHead, UnaryRpc

_CONGESTED = 1 << 20  # bytes that wait for the client before a session is to wait


class TaskRpc(UnaryRpc):
    """A unary call whose handler is awaited."""

    _task: asyncio.Task[None] | None = None

    def run(self, data: Buffer) -> None:
        """Start the handler."""
        if self.kept:
            self.on_keep()  # for as long as the handler has it
        if not self.finished:
            self._task = self._context.loop.create_task(self._run(data))

    def abandon(self) -> None:
        """Cancel the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self, data: Buffer) -> None:
        handler: Any = self.head.handler
        try:
            answer = await handler(data, self)
            if not self.finished:
                self.write([answer])
                self.close()
        except Exception as error:
            if not self.finished:
                self.guard(error)
        finally:
            self._task = None


class SessionRpc(Rpc):
    """A call with many messages both ways, and the client's end of it for the session.

    While the session holds, messages wait here, and the client's window stays as it is: it bounds
    how much can come.
    """

    _half_closed = False

    def __init__(self, head: RpcHead, number: int) -> None:
        super().__init__(head, number)
        self._inbox: deque[Buffer] = deque()
        self._outbox: deque[Callable[[], None]] = deque()
        handler: Any = head.handler
        self._session: Session | None = handler(self)

    # --- for the session

    @property
    def congested(self) -> bool:
        """`Peer.congested`."""
        return self.queued >= _CONGESTED or self._packing is not None

    def send(self, message: Message) -> None:
        """`Peer.send`."""
        if self._packing is not None:
            self._outbox.append(partial(self.send, message))
        elif self.finished:
            return
        elif not self.head.packing or not self.pack_later(message, self._send_waiting):
            self.write(message)

    def _send_waiting(self) -> None:
        """Send what waits behind a message that was compressed on a thread."""
        while self._outbox and self._packing is None:
            self._outbox.popleft()()
        self.on_sent()

    def finish(self, error: ServerError | None = None) -> None:
        """`Peer.finish`."""
        if self._packing is not None:
            self._outbox.append(partial(self.finish, error))
        elif error is None:
            self.close()
        else:
            self.fail(error)

    def hold(self, held: bool) -> None:
        """`Peer.hold`."""
        if held:
            self.keeps_window = True
            return
        self.keeps_window = False
        try:
            self._hand_on()
        except Exception as error:
            self.guard(error)
        if not self.keeps_window and not self.finished:
            self._connection.http2.release(self)

    # --- for the call

    def message(self, data: Buffer) -> None:
        """Hand a message on, or keep it."""
        if self.keeps_window or self._inbox:
            self._inbox.append(data)
            self.kept += len(data)
        elif self._session is not None:
            self._session.receive(data)

    def end(self) -> None:
        """Hand the end on, behind the messages."""
        self._half_closed = True
        self._hand_on()

    def abandon(self) -> None:
        """`closed` is told by `_settle`, as for every other end."""

    def on_sent(self) -> None:
        """Wake the session: there is room."""
        if self._session is not None and not self.congested:
            try:
                self._session.sent()
            except Exception as error:
                self.guard(error)

    def _hand_on(self) -> None:
        while self._inbox and not self.keeps_window and self._session is not None:
            message = self._inbox.popleft()
            self.release(len(message))
            self._session.receive(message)
        if self._half_closed and not self._inbox and self._session is not None:
            self._half_closed = False
            self._session.half_close()

    def _settle(self, status: int) -> None:
        super()._settle(status)
        self._inbox.clear()
        self._outbox.clear()
        session, self._session = self._session, None
        if session is not None:
            session.closed()
