"""A stream of requests to a server over gRPC, and of its responses."""

import logging
from typing import TYPE_CHECKING

from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import CallFailed, RemoteRequest, StreamReceiver
from headrace.execution.remote.grpc_channel import ChannelCall
from headrace.execution.remote.grpc_link import Link
from headrace.wire.grpc_call import End
from headrace.wire.http2.request_blocks import RequestHead

if TYPE_CHECKING:
    from headrace.execution.remote.grpc_calls import GrpcDialect

log = logging.getLogger(__name__)


class GrpcStream(ChannelCall):
    """`headrace.execution.remote.connection.RemoteStream`."""

    __slots__ = ("_dialect", "_early", "_early_size", "_finished", "_receiver")

    def __init__(
        self,
        dialect: "GrpcDialect",
        receiver: StreamReceiver,
        head: RequestHead,
        own: bytes,
        begun: float,
        seconds: float,
    ) -> None:
        """See `ChannelCall`."""
        super().__init__(head, own, begun, seconds, dialect.options.largest_response)
        self._dialect = dialect
        self._receiver = receiver
        self._early: list[Buffer] = []  # what was to be sent before there is a connection
        self._early_size = 0
        self._finished = False

    @property
    def waiting(self) -> int:
        """Bytes of requests that the server has not taken yet."""
        return self._early_size + self.queued

    def send(self, request: RemoteRequest) -> None:
        """One more request."""
        if self.over or self.local_closed:
            return
        message = self._dialect.request(request)
        size = sum(map(len, message))
        pieces = [self._dialect.packed.to_bytes() + size.to_bytes(4), *message]
        size += len(pieces[0])
        if self.connection is None:
            self._early += pieces
            self._early_size += size
        else:
            self.connection.sender.data(self, pieces, size)

    def finish(self) -> None:
        """No more requests."""
        self._finished = True
        if self.connection is not None and not self.over and not self.local_closed:
            self.connection.sender.finish(self)

    def hold(self, held: bool) -> None:
        """Have the server pause, or go on."""
        self.keeps_window = held
        if not held and self.connection is not None and not self.over:
            self.connection.release(self)

    def launch(self, link: Link) -> None:
        """Send what there is."""
        self.begin(link.http2)
        sender = link.http2.sender
        sender.open(self, self.head, self.own)
        if self._early:
            sender.data(self, self._early, self._early_size)
            self._early, self._early_size = [], 0
        if self._finished:
            sender.finish(self)

    def received(self, data: Buffer) -> None:
        """A response has come."""
        try:
            answer = self._dialect.stream_answer(data)
        except Exception as error:  # whatever it is, it belongs to this stream alone
            self.cancel()
            self._end(error if isinstance(error, CallFailed) else self._dialect.nonsense(error))
            return
        try:
            self._receiver.received(answer)
        except Exception:  # the connection has other calls as well
            log.exception("bug after a response")

    def closed(self, end: End | None) -> None:
        """There is no more."""
        self._end(None if end is None else self._dialect.failed(end))

    def _end(self, failed: CallFailed | None) -> None:
        try:
            self._receiver.ended(failed)
        except Exception:
            log.exception("bug after a stream")
