"""Calls without a task that have one message and one answer, and those that get none."""

from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ExecutionFailed, InvalidRequest, ServerError
from headrace.core.requests import Timing
from headrace.core.tensors import Buffer
from headrace.transports.grpc.call import Message
from headrace.transports.grpc.native.head import CallHead
from headrace.transports.grpc.native.rpc import Rpc
from headrace.wire.timing import TIMING, exact_timing, time_of

if TYPE_CHECKING:
    from headrace.transports.grpc.native.link import Link


class RefusedRpc(Rpc):
    """A call that its head alone has answered."""

    __slots__ = ()

    def __init__(self, link: "Link", number: int, head: CallHead) -> None:
        super().__init__(link, number, head)
        assert head.refusal is not None
        status, fields = head.refusal
        self._settle(int(dict(fields).get(b"grpc-status", b"2")))
        link.sender.refuse(self, status, fields)  # the connection sees that it has ended

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Of no interest."""


class DirectRpc(Rpc):
    """A unary call whose handler is called in the turn of the loop in which the message came."""

    __slots__ = ("_data", "_ticket")

    unary = True

    def __init__(self, link: "Link", number: int, head: CallHead) -> None:
        super().__init__(link, number, head)
        self._data: Buffer | None = None
        self._ticket: Any = None

    def message(self, data: Buffer) -> None:
        """Keep the one message until the client has closed its side."""
        if self._data is not None:
            raise InvalidRequest("a unary call has one message, got another")
        self._data = data
        self.kept += len(data)

    def end(self) -> None:
        """Call the handler."""
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("a unary call has one message, got none")
        if self._charged:
            self.release(self._charged)  # the handler counts it
        handler: Any = self.head.handler
        ticket = handler(data, self)
        if not self.finished:
            self._ticket = ticket

    def respond(self, message: Message, timing: Timing) -> None:
        """`Reply.respond`."""
        if self.finished:
            return
        self._ticket = None
        told = exact_timing(timing)
        if (
            self._trailing is None
            and not self.head.packing
            and self._link.sender.answer(self, message, sum(map(len, message)), told)
        ):
            self._settle(0)
            link = self._link
            link.streams.sent_all(self)
            if link.streams.open:
                link.sender.rouse()  # the others' answers may come in the same turn of the loop
            else:
                link.flush()
            return
        self.set_trailing(TIMING, told.decode())
        self._ticket = self.pack_later(message, partial(self._packed, message))
        if self._ticket is None:
            self.write(message)
            self.close()

    def _packed(self, message: Message, packed: bytes | None, problem: Exception | None) -> None:
        self._ticket = None
        if packed is None:
            self.guard(problem or ExecutionFailed("no message"))
            return
        self.write(message, packed)
        self.close()

    def fail(self, error: ServerError) -> None:
        """`Reply.fail`."""
        self._ticket = None
        self.set_trailing(TIMING, exact_timing(time_of(error)).decode())
        super().fail(error)

    def abandon(self) -> None:
        """Cancel the request."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()
