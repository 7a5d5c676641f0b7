"""A call on a stream: messages out of DATA, a deadline, and one end.

Most calls are an `InferRpc` whose message comes in one frame, and whose answer goes out in one; see
`headrace.transports.grpc.native.infer`.

gRPC's messages have a prefix of five bytes: whether they are compressed, and their length. A
message that comes in one piece is taken out of the received bytes at once. A longer one is
gathered: the length is held against the limit, the bytes are counted with the connection's account
as they come, and they go to their place in memory that the system hands out as it is written to.
"""

import asyncio
import logging
from collections.abc import Callable
from struct import Struct
from time import perf_counter

from headrace.core.blocks import BLOCKS
from headrace.core.errors import InvalidRequest, PayloadTooLarge, ServerError
from headrace.core.limits import Patience
from headrace.core.tensors import Buffer
from headrace.engine.workbench import LARGE, Job
from headrace.transports.grpc.access import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    error_text,
    log_access,
    retry_details,
)
from headrace.transports.grpc.call import Message, Noted, noted_fields
from headrace.transports.grpc.native.head import RESPONSE_HEAD, CallHead, status_fields
from headrace.wire.compression import compress, decompress, decompress_small, too_large
from headrace.wire.elements import uncharged
from headrace.wire.http2.protocol import ErrorCode
from headrace.wire.http2.server_connection import OK_FIELDS
from headrace.wire.http2.stream import Fields, Stream
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS

log = logging.getLogger(__name__)

_PREFIX = 5
_OBJECTS = 1 << 10  # bytes that a call takes, besides what the client sends
_unpack_prefix = Struct(">BI").unpack_from
_pack_prefix = Struct(">BI").pack
_TRUNCATED = "the request ends within a message"


class _Gathering:
    """A message that is not here as a whole yet."""

    __slots__ = ("compressed", "filled", "length", "prefix", "view")

    def __init__(self) -> None:
        self.prefix = b""
        self.compressed = 0
        self.length = -1  # of the message, once the prefix is here
        self.view = memoryview(b"")
        self.filled = 0


class Rpc(Stream):
    """One call. Subclasses run it; exactly one of `on_gone` and the finishing methods ends it."""

    unary = False  # whether the client has to send all at once

    finished = False
    client = ""  # the client's address, where the access log wants it
    _begun = 0.0
    _charged = 0  # bytes of kept messages that the account has counted
    _patience: Patience | None = None
    _gathering: _Gathering | None = None
    _unpacking: tuple[Job[Buffer], int] | None = None  # and bytes that are counted for it
    _behind = b""  # what came since, which the client's window bounds
    _end_behind = False
    _head_sent = False
    _deadline = 0.0  # by the loop's clock; 0 for none
    _timer: asyncio.TimerHandle | None = None
    noted: Noted | None = None
    _trailing: Fields | None = None

    def __init__(self, head: CallHead, number: int) -> None:
        self.number = number
        self.head = head
        self._link = link = head.link
        self._host = host = link.host
        self.account = link.account
        self.expected = head.content_length
        if host.access_log:
            self._begun = perf_counter()
            self.client = link.peer
        if head.timeout is not None:
            self._deadline = host.loop.time() + head.timeout
            self._timer = host.loop.call_at(self._deadline, self._expire)

    # --- what handlers see

    def metadata(self) -> dict[str, str]:
        """`RpcContext.metadata`."""
        return self.head.metadata

    def remaining(self) -> float:
        """`RpcContext.remaining`."""
        # Not by the timer: uvloop's does not tell when a deadline is less than a millisecond away.
        deadline = self._deadline
        return max(deadline - self._host.loop.time(), 1e-6) if deadline else 0.0

    def set_trailing(self, name: str, value: str) -> None:
        """`RpcContext.set_trailing`."""
        field = name.encode()
        kept = [(known, v) for known, v in self._trailing or () if known != field]
        self._trailing = [*kept, (field, value.encode())]

    # --- for subclasses

    def message(self, data: Buffer) -> None:
        """Take a message. May raise `ServerError`."""
        raise NotImplementedError

    def end(self) -> None:
        """The client sends no more. May raise `ServerError`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Nobody waits for what is being done for this call any more."""
        raise NotImplementedError

    # --- answering

    def write(self, message: Message, packed: bytes | None = None) -> None:
        """Send a message, after the response's head if it is the first.

        `packed` is what `pack_later` has made of it.
        """
        packing = self.head.packing
        sender = self._link.sender
        if not self._head_sent:
            self._head_sent = True
            sender.head(self, [(b"grpc-encoding", packing.encode())] if packing else None)
        size = sum(map(len, message))
        compressed = 0
        if packing:
            packed = packed or self._pack(message)
            if len(packed) < size:
                message, size, compressed = [packed], len(packed), 1
        sender.data(self, [_pack_prefix(compressed, size), *message], size + _PREFIX)

    def _pack(self, message: Message) -> bytes:
        return compress(b"".join(message), self.head.packing, self._host.compression_level)

    def pack_later(
        self, message: Message, done: Callable[[bytes | None, Exception | None], None]
    ) -> Job[bytes] | None:
        """Have a large message that is to be compressed packed on a thread; None for any other."""
        size = sum(map(len, message))
        if not self.head.packing or size <= LARGE:
            return None
        bench = self._host.admission.workbench
        return bench.do(size, lambda charge: self._pack(message), done, uncharged)

    def close(self, status: int = 0, text: str = "", details: bytes = b"") -> None:
        """End the call with a status, of which there may be `details`."""
        if self.finished:
            return
        self._settle(status)
        fields = status_fields(status, text, details) if status else OK_FIELDS
        if self._trailing is not None:
            fields = fields + self._trailing
        sender = self._link.sender
        if self._head_sent:
            sender.trailers(self, fields)
        else:
            sender.refuse(self, 200, [*RESPONSE_HEAD, *fields])
        if self.local_closed:
            self._link.streams.sent_all(self)

    def fail(self, error: ServerError) -> None:
        """End the call with an error's status."""
        status, text = STATUS[type(error)].grpc, error_text(error)
        self.close(status, text, retry_details(error, status, text))

    def guard(self, error: Exception) -> None:
        """End the call with what a handler raised."""
        if isinstance(error, ServerError):
            self.fail(error)
        else:
            log.error("bug in %s", self.head.path, exc_info=error)
            self.close(INTERNAL.grpc, INTERNAL_TEXT)

    def _settle(self, status: int) -> None:
        """What every end has in common."""
        self.finished = True
        self.head.answers[status] += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._gathering is not None:
            self._stop_gathering()
        if self._charged:
            self.release(self._charged)
        host = self._host
        if self._unpacking is not None:
            job, counted = self._unpacking
            self._unpacking = None
            job.cancel()
            self.account.drop(counted)
        if host.access_log:
            log_access(self.client, self.head.path, status, self._begun, noted_fields(self.noted))

    def _expire(self) -> None:
        self._timer = None
        if not self.finished:
            self.abandon()
            self.close(DEADLINE_EXCEEDED, "Deadline Exceeded")

    # --- events of the stream

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Take messages out of received bytes."""
        try:
            if self._unpacking is not None:
                self._charge(stop - start)
                self._behind += view[start:stop]
                return
            if self._gathering is None:
                while stop - start >= _PREFIX:
                    compressed, length = _unpack_prefix(view, start)
                    begin = start + _PREFIX
                    after = begin + length
                    if after > stop or compressed or length > self._host.max_message:
                        break
                    self.message(view[begin:after].tobytes())
                    start = after
            while start < stop and not self.finished:
                start = self._gather(view, start, stop)
        except Exception as error:
            self.guard(error)

    def on_filled(self, nbytes: int) -> None:
        """More of the message that is being gathered is in its place."""
        part = self._gathering
        assert part is not None, "bytes of no message. This is a bug."
        try:
            self.account.grow(nbytes, part.filled)
            self._grew(part, nbytes)
        except Exception as error:
            self.guard(error)

    def on_keep(self) -> None:
        """Whole messages wait for more of the call: they count from now on."""
        nbytes, self.kept = self.kept, 0
        if self.finished:
            return
        try:
            self.account.grow(nbytes, 0)
            self._charged += nbytes
        except Exception as error:
            self.guard(error)

    def release(self, nbytes: int) -> None:
        """Kept messages go on."""
        nbytes = min(nbytes, self._charged)  # the last ones may not have been counted
        self._charged -= nbytes
        self.account.count(-nbytes)

    def look(self, now: float) -> None:
        """Give the call up if its client begins a message, and does not go on with it."""
        part = self._gathering
        if self.finished or self.remote_closed or self.keeps_window or not (self.unary or part):
            return
        if self._patience is None:
            self._patience = Patience(self._host.patience_secs)
        filled = 0 if part is None else len(part.prefix) + part.filled
        if not self._link.progress.sends(self._patience, part or self, filled, now):
            self.abandon()
            secs = self._host.patience_secs
            self.close(DEADLINE_EXCEEDED, f"no more of the request came for {secs:g} s")

    @property
    def head_size(self) -> int:
        """See `Stream.head_size`."""
        return _OBJECTS + sum(map(len, self.head.metadata.values()))

    def on_end(self) -> None:
        """No more DATA."""
        if self.finished:
            return
        if self._unpacking is not None:
            self._end_behind = True
            return
        try:
            if self._gathering is not None:
                raise InvalidRequest(_TRUNCATED)
            self.end()
        except Exception as error:
            self.guard(error)

    def on_gone(self, code: ErrorCode) -> None:
        """The client has cancelled the call, or is gone."""
        if not self.finished:
            self._settle(CANCELLED)
            self.abandon()

    # --- gathering

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Take part of a message; the position after it."""
        part = self._gathering
        if part is None:
            part = self._gathering = _Gathering()
        if part.length < 0:
            size = min(_PREFIX - len(part.prefix), stop - start)
            part.prefix += bytes(view[start : start + size])
            if len(part.prefix) == _PREFIX:
                self._begin_message(part, stop - start - size)
            start += size
        if part.length >= 0:
            size = min(part.length - part.filled, stop - start)
            if size:
                self.account.grow(size, part.filled)
                part.view[part.filled : part.filled + size] = view[start : start + size]
                start += size
            self._grew(part, size)
        return start

    def _grew(self, part: _Gathering, nbytes: int) -> None:
        """So much more of the message is in its place; take it if that is all of it."""
        part.filled += nbytes
        if part.filled < part.length:
            self.place = part.view[part.filled :]
            return
        if not part.compressed:
            self._stop_gathering()
            self.message(part.view)
        elif (small := decompress_small(part.view, self.head.encoding)) is not None:
            self._stop_gathering()
            self.message(small)
        else:
            self._unpack(part)

    def _begin_message(self, part: _Gathering, here: int) -> None:
        """The prefix is here: decide whether to take the message; raises `ServerError`."""
        compressed, length = _unpack_prefix(part.prefix)
        limit = self._host.max_message
        if length > limit:
            raise PayloadTooLarge(too_large("request message", limit, length))
        if compressed > 1 or (compressed and not self.head.encoding):
            raise InvalidRequest("a message is compressed, but grpc-encoding does not say how")
        self.account.begin(length)
        part.compressed = compressed
        part.length = length
        part.view = BLOCKS.block(length)
        if length > here:
            self._link.http2.data.expect(self, length - here)

    def _stop_gathering(self) -> None:
        part, self._gathering = self._gathering, None
        self.place = None
        if part is not None and part.length >= 0:
            self.account.drop(part.filled)

    def _unpack(self, part: _Gathering) -> None:
        """Decompress a message on a thread; what comes meanwhile waits, in the client's window."""
        self._gathering = self.place = None
        self.keeps_window = True
        encoding, limit = self.head.encoding, self._host.max_message
        job = self._host.admission.workbench.do(
            part.length << 3,  # it may become long, and mostly does
            lambda charge: decompress(part.view, encoding, limit, "request message", charge),
            self._unpacked,
            self._charge,
        )
        self._unpacking = job, part.filled

    def _charge(self, nbytes: int) -> None:
        """Count what the message becomes, or what comes behind it; raises `Overloaded`."""
        assert self._unpacking is not None, "bytes for nothing. This is a bug."
        job, counted = self._unpacking
        self.account.grow(nbytes, counted)
        self._unpacking = job, counted + nbytes

    def _unpacked(self, data: Buffer | None, problem: Exception | None) -> None:
        """Take a decompressed message, and what came behind it."""
        assert self._unpacking is not None, "a message of nobody. This is a bug."
        self.account.drop(self._unpacking[1])
        self._unpacking = None
        self.keeps_window = False
        behind, self._behind = self._behind, b""
        try:
            if data is None:
                raise problem or InvalidRequest(_TRUNCATED)
            self.message(data)
        except Exception as error:
            self.guard(error)
        if self.finished:
            return
        if behind:
            self.on_data(memoryview(behind), 0, len(behind))
        if self._end_behind and self._unpacking is None:
            self._end_behind = False
            self.on_end()
        if not self.keeps_window and not self.finished:
            self._link.http2.release(self)


class RefusedRpc(Rpc):
    """A call that its head alone has answered."""

    def __init__(self, head: CallHead, number: int) -> None:
        super().__init__(head, number)
        assert head.refusal is not None
        status, fields = head.refusal
        self._settle(int(dict(fields).get(b"grpc-status", b"2")))
        head.link.sender.refuse(self, status, fields)  # the connection sees that it has ended

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Of no interest."""
