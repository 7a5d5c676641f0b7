"""gRPC connections of the native server: calls from head to status, and the socket layer.

Most calls are an `InferRpc` whose message arrives in one frame and whose answer is sent in one; see
`headrace.doors.grpc.native.calls`. The bytes of longer messages are charged to the
connection's account as they arrive.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from random import uniform
from sys import maxsize
from time import perf_counter

from headrace.api.header_rules import Key
from headrace.core.errors import ExecutionFailed, InvalidRequest, PayloadTooLarge, ServerError
from headrace.core.limits import Patience, undelivered
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import (
    Message,
    Noted,
    error_text,
    log_access,
    noted_fields,
    operation_of,
    retry_details,
    without_key,
)
from headrace.doors.grpc.options import INFERENCE, LEVELS, GrpcOptions
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.doors import Progress
from headrace.engine.workbench import LARGE, Job
from headrace.protocol.compression import (
    DEFAULT_LEVEL,
    compress,
    decompress,
    decompress_small,
    too_large,
)
from headrace.protocol.elements import uncharged
from headrace.protocol.grpc import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    PREFIX,
    RESPONSE_FIELDS,
    RESPONSE_HEAD,
    UNIMPLEMENTED,
    CallHead,
    Gathering,
    MessageStream,
    pack_prefix,
    refusal,
    status_fields,
)
from headrace.protocol.http2.asyncio_protocol import Http2Protocol
from headrace.protocol.http2.connection import ServerConnection
from headrace.protocol.http2.headers import Headers, literal
from headrace.protocol.http2.keep_alive import Due, Watch
from headrace.protocol.http2.protocol import ErrorCode, Limits
from headrace.protocol.http2.streams import OK_FIELDS, Fields
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT, STATUS

log = logging.getLogger(__name__)

_OBJECTS = 1 << 10  # bytes of objects per call, besides the client's data
_TRUNCATED = "the request ends within a message"
_FEW = 8  # calls of a connection below which heads are not counted
PREFACE_SECS = 20.0  # for the client's preface
_KEEP_ALIVE_PING = b"alive? \0"
_RETIRED = "max_age"  # GOAWAY text, as in gRPC's own servers
# Bytes read from one connection per turn: with 256 KiB, 20 clients with long messages delayed
# health checks by 0.2 s.
_BUFFER = 64 << 10


class RpcHead(CallHead):
    """The head of a call to one of this server's procedures: `kind` runs its `handler`."""

    def __init__(self, headers: Headers, context: "ServerContext", connection: "GrpcConnection"):
        super().__init__(headers)
        self.connection = connection
        self.kind, self.handler = context.procedures.get(self.path, (RefusedRpc, None))
        self.largest = context.sizes.get(self.path, context.max_message)
        # Counters by status for calls with this head.
        self.answers = context.admission.answers.of("grpc", operation_of(self.path))
        if context.level and self.path in INFERENCE:
            self.packing = self.packing or self.preferred
        if self.refusal is None:
            self.refusal = self._refused(context)
        if self.refusal is not None:
            self.kind = RefusedRpc

    def _refused(self, context: "ServerContext") -> Fields | None:
        if self.handler is None:
            return refusal(UNIMPLEMENTED, f"unknown method {self.path[:200]}")
        key = context.keys.get(self.path)
        error = None if key is None else without_key(key, self.metadata)
        return None if error is None else refusal(STATUS[type(error)].grpc, str(error))


class ServerContext:
    """State shared by the connections of a server.

    `procedures` maps each path to its kind of call and handler, `sizes` to the bytes of its largest
    message; `max_message` by default.
    """

    def __init__(
        self,
        procedures: Mapping[str, tuple[type["Rpc"], object]],
        keys: Mapping[str, Key],
        sizes: Mapping[str, int],
        admission: Admission,
        max_message: int,
        access_log: bool,
        options: GrpcOptions,
        limits: Limits,
    ) -> None:
        self.procedures = procedures
        self.keys = keys
        self.sizes = sizes
        self.loop = asyncio.get_running_loop()
        self.admission = admission
        self.nobody = ConnectionAccount(admission, "")  # for connections that were not admitted
        self.max_message = max_message
        self.access_log = access_log
        self.limits = limits
        self.keep_alive = options.keep_alive
        self.patience_secs = options.patience_secs
        self.idle_secs = options.idle_secs
        self.level = LEVELS[options.compression]
        # If the client leaves it to the server, a level that pays for tensors.
        self.compression_level = self.level or DEFAULT_LEVEL
        # Received bytes are processed at once, so one buffer serves all connections.
        self.buffer = memoryview(bytearray(_BUFFER))
        self.connections: set[GrpcConnection] = set()
        self.draining = False  # no more calls are accepted
        # Called when the last connection has closed.
        self.on_empty: Callable[[], object] | None = None

    def lost(self, connection: "GrpcConnection") -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        if not self.connections and self.on_empty is not None:
            self.on_empty()


class Rpc(MessageStream):
    """One call. Subclasses run it; exactly one of `on_gone` and the finishing methods ends it."""

    unary = False  # true if the client sends exactly one message

    client = ""  # the client's address, if the access log is on
    _begun = 0.0
    _charged = 0  # bytes of kept messages charged to the account
    _patience: Patience | None = None
    _unpacking: tuple[Job[Buffer], int] | None = None  # the job, and the bytes charged for it
    _packing: Job[bytes] | None = None  # compresses a message
    _behind = b""  # data received meanwhile, bounded by the client's window
    _end_behind = False
    _head_sent = False
    _deadline = 0.0  # by the loop's clock; 0 for none
    _timer: asyncio.TimerHandle | None = None
    noted: Noted | None = None
    _trailing: Fields | None = None

    def __init__(self, head: RpcHead, number: int) -> None:
        self.number = number
        self.head = head
        self._connection = connection = head.connection
        self._context = context = connection.context
        self.account = connection.account
        self.expected = head.content_length
        if context.access_log:
            self._begun = perf_counter()
            self.client = connection.peer
        if head.timeout is not None:
            self._deadline = context.loop.time() + head.timeout
            self._timer = context.loop.call_at(self._deadline, self._expire)

    # --- for handlers

    def metadata(self) -> dict[str, str]:
        """Implements `RpcContext.metadata`."""
        return self.head.metadata

    def remaining(self) -> float:
        """Implements `RpcContext.remaining`."""
        # Not by the timer: uvloop's does not know deadlines of less than a millisecond.
        deadline = self._deadline
        return max(deadline - self._context.loop.time(), 1e-6) if deadline else 0.0

    def set_trailing(self, name: str, value: str) -> None:
        """Implements `RpcContext.set_trailing`."""
        field = name.encode()
        kept = [(known, v) for known, v in self._trailing or () if known != field]
        self._trailing = [*kept, (field, value.encode())]

    # --- for subclasses

    def end(self) -> None:
        """The client has finished sending. May raise `ServerError`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Stop working on the call: the client no longer waits."""
        raise NotImplementedError

    # --- answering

    def write(self, message: Message, packed: bytes | None = None) -> None:
        """Send a message, preceded by the response's head if it is the first.

        `packed` is its compressed form, if any.
        """
        packing = self.head.packing
        sender = self._connection.sender
        if not self._head_sent:
            self._head_sent = True
            own = literal(b"grpc-encoding", packing.encode()) if packing else b""
            sender.head(self, RESPONSE_HEAD + own)
        size = sum(map(len, message))
        compressed = 0
        if packing:
            packed = packed or self._pack(message)
            if len(packed) < size:
                message, size, compressed = [packed], len(packed), 1
        sender.data(self, [pack_prefix(compressed, size), *message], size + PREFIX)

    def _pack(self, message: Message) -> bytes:
        return compress(b"".join(message), self.head.packing, self._context.compression_level)

    def pack_later(self, message: Message, sent: Callable[[], None]) -> bool:
        """Compress a large message on a thread, write it and call `sent`.

        Returns False for a message that is small, or sent uncompressed.
        """
        size = sum(map(len, message))
        if not self.head.packing or size <= LARGE:
            return False

        def packed(data: bytes | None, problem: Exception | None) -> None:
            self._packing = None
            if data is None:
                self.guard(problem or ExecutionFailed("no message"))
                return
            self.write(message, data)
            sent()

        bench = self._context.admission.workbench
        self._packing = bench.do(size, lambda charge: self._pack(message), packed, uncharged)
        return True

    def close(self, status: int = 0, text: str = "", details: bytes = b"") -> None:
        """End the call with a status and optional `details`."""
        if self.finished:
            return
        self._settle(status)
        fields = status_fields(status, text, details) if status else OK_FIELDS
        if self._trailing is not None:
            fields = fields + self._trailing
        if not self._head_sent:
            fields = [*RESPONSE_FIELDS, *fields]
        self._connection.sender.finish(self, fields)
        if self.local_closed:
            self._connection.streams.sent_all(self)

    def fail(self, error: ServerError) -> None:
        """End the call with an error's status."""
        status, text = STATUS[type(error)].grpc, error_text(error)
        self.close(status, text, retry_details(error, status, text))

    def guard(self, error: Exception) -> None:
        """End the call with an exception raised by a handler."""
        if isinstance(error, ServerError):
            self.fail(error)
        else:
            log.error("bug in %s", self.head.path, exc_info=error)
            self.close(INTERNAL.grpc, INTERNAL_TEXT)

    def _settle(self, status: int) -> None:
        """Update accounts, counters and log when the call ends, in whatever way."""
        self.finished = True
        self.head.answers[status] += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.stop_gathering()
        if self._charged:
            self.release(self._charged)
        context = self._context
        if self._unpacking is not None:
            job, counted = self._unpacking
            self._unpacking = None
            job.cancel()
            self.account.drop(counted)
        if self._packing is not None:
            self._packing.cancel()
            self._packing = None
        if context.access_log:
            log_access(self.client, self.head.path, status, self._begun, noted_fields(self.noted))

    def _expire(self) -> None:
        self._timer = None
        if not self.finished:
            self.abandon()
            self.close(DEADLINE_EXCEEDED, "Deadline Exceeded")

    # --- events of the stream

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Split received bytes into messages."""
        try:
            if self._unpacking is None:
                super().on_data(view, start, stop)
            else:
                self._gather(view, start, stop)
        except Exception as error:
            self.guard(error)

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        if self._unpacking is None:
            return super()._gather(view, start, stop)
        self._charge(stop - start)  # data behind a message being unpacked is queued
        self._behind += view[start:stop]
        return stop

    def on_filled(self, nbytes: int) -> None:
        """Account for bytes received into the gathered message's buffer."""
        try:
            super().on_filled(nbytes)
        except Exception as error:
            self.guard(error)

    def on_keep(self) -> None:
        """Charge whole messages that wait for more of the call."""
        nbytes, self.kept = self.kept, 0
        if self.finished:
            return
        try:
            self.account.grow(nbytes, 0)
            self._charged += nbytes
        except Exception as error:
            self.guard(error)

    def release(self, nbytes: int) -> None:
        """Return the charge of kept messages that are processed now."""
        nbytes = min(nbytes, self._charged)  # the last ones may not have been charged
        self._charged -= nbytes
        self.account.count(-nbytes)

    def look(self, now: float) -> None:
        """Fail the call if its client does not continue a message that it has begun."""
        part = self._gathering
        if self.finished or self.remote_closed or self.keeps_window or not (self.unary or part):
            return
        if self._patience is None:
            self._patience = Patience(self._context.patience_secs)
        filled = 0 if part is None else len(part.prefix) + part.filled
        if not self._connection.progress.sends(self._patience, part or self, filled, now):
            self.abandon()
            secs = self._context.patience_secs
            self.close(DEADLINE_EXCEEDED, f"no more of the request came for {secs:g} s")

    @property
    def head_size(self) -> int:
        """The approximate memory of the call besides its messages."""
        return _OBJECTS + sum(map(len, self.head.metadata.values()))

    def on_end(self) -> None:
        """The client has ended its side."""
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
        """The client has cancelled the call, or disconnected."""
        if not self.finished:
            self._settle(CANCELLED)
            self.abandon()

    # --- messages

    @property
    def largest(self) -> int:
        """The largest request message in bytes."""
        return self.head.largest

    @property
    def _fixed(self) -> bool:
        """True if the operation has a limit of its own."""
        return self.head.largest != self._context.max_message

    def begin_message(self, compressed: int, length: int, more: int) -> None:
        """Accept or refuse a message by its prefix; raises `ServerError`."""
        limit = self.head.largest
        if length > limit:
            raise PayloadTooLarge(too_large("request message", limit, length, self._fixed))
        if compressed > 1 or (compressed and not self.head.encoding):
            raise InvalidRequest("a message is compressed, but grpc-encoding does not say how")
        self.account.begin(length)
        if more > 0:
            self._connection.http2.data.expect(self, more)

    def count(self, nbytes: int, before: int) -> None:
        """Charge received bytes; raises `Overloaded`."""
        self.account.grow(nbytes, before)

    def gathered(self, part: Gathering) -> None:
        """Receive a message, which is unpacked first if it is compressed."""
        data: Buffer | None = part.view
        if part.compressed:
            data = decompress_small(part.view, self.head.encoding)
        if data is None:
            self._unpack(part)
        else:
            self.stop_gathering()
            self.message(data)

    def stop_gathering(self) -> None:
        """Drop the gathered message and its charge."""
        part = self._gathering
        super().stop_gathering()
        if part is not None and part.length >= 0:
            self.account.drop(part.filled)

    def _unpack(self, part: Gathering) -> None:
        """Decompress a message on a thread.

        Data received meanwhile waits, bounded by the window.
        """
        self._gathering = self.place = None
        self.keeps_window = True
        encoding, limit, fixed = self.head.encoding, self.head.largest, self._fixed
        job = self._context.admission.workbench.do(
            part.length << 3,  # an estimate of the decompressed size
            lambda charge: decompress(
                part.view, encoding, limit, "request message", charge, fixed=fixed
            ),
            self._unpacked,
            self._charge,
        )
        self._unpacking = job, part.filled

    def _charge(self, nbytes: int) -> None:
        """Charge the message's decompressed size, or data behind it; raises `Overloaded`."""
        assert self._unpacking is not None, "bytes for nothing. This is a bug."
        job, counted = self._unpacking
        self.account.grow(nbytes, counted)
        self._unpacking = job, counted + nbytes

    def _unpacked(self, data: Buffer | None, problem: Exception | None) -> None:
        """Receive a decompressed message, and the data that arrived since."""
        assert self._unpacking is not None, "a message without a call. This is a bug."
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
            self._connection.http2.release(self)


class UnaryRpc(Rpc):
    """A call with one message, which runs once the client has ended its side."""

    unary = True
    _data: Buffer | None = None

    def run(self, data: Buffer) -> None:
        """Run the call. May raise `ServerError`."""
        raise NotImplementedError

    def message(self, data: Buffer) -> None:
        """Keep the one message."""
        if self._data is not None:
            raise InvalidRequest("a unary call has one message, got another")
        self._data = data
        self.kept += len(data)

    def end(self) -> None:
        """Run the call."""
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("a unary call has one message, got none")
        self.run(data)


class RefusedRpc(Rpc):
    """A call that is answered by its head alone."""

    def __init__(self, head: RpcHead, number: int) -> None:
        super().__init__(head, number)
        assert head.refusal is not None
        self._settle(int(dict(head.refusal).get(b"grpc-status", b"2")))
        self._connection.sender.finish(self, head.refusal)  # the connection notices the end

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Ignore data: the call is answered."""


class GrpcConnection(Http2Protocol):
    """One client's connection.

    Reading pauses while the client does not read, which bounds what is queued.
    """

    http2: ServerConnection

    def __init__(self, context: ServerContext) -> None:
        http2 = ServerConnection(
            lambda headers: RpcHead(headers, context, self), RESPONSE_HEAD,
            lambda: context.loop.call_soon(self.flush), context.limits, context.keep_alive,
        )  # fmt: skip
        super().__init__(http2, context.loop, context.buffer)
        self.context = context
        self.peer = ""  # the client's address, without its port
        self.account = context.nobody  # until the connection is admitted
        self.progress = Progress(self.account, context.patience_secs)
        self._last = 0  # the last stream at the previous idle check
        self._idle_since = 0.0
        self.opened = 0.0  # time of connection; in seconds of the loop's clock
        self._watch: Watch | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio callbacks

    def admit(self) -> bool:
        """Count the connection if it is within the limit."""
        context = self.context
        name = self._transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else str(name)
        account = context.admission.connect("grpc", self.peer)
        if account is None:
            return False
        self.account = account
        self.http2.largest_answer = context.admission.max_response_bytes or maxsize
        self.progress = Progress(account, context.patience_secs)
        self.opened = self._idle_since = self._now()
        context.connections.add(self)
        self._watch = Watch(context.keep_alive, self.opened, uniform(-1, 1))
        self._timer = context.loop.call_at(self._watch.at, self._look)
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        super().connection_made(transport)
        if self._watch is not None and self.context.draining:
            self.http2.drain()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel all calls."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)
        if self.http2.failure and self._watch is not None:
            log.debug("hung up on %s: %s", self.peer, self.http2.failure)
        self.context.lost(self)
        self.account.close()
        # These refer to the connection, and to what waited: freed at once, not by the collector.
        del self.http2, self.sender, self.streams, self._receive

    def pause_writing(self) -> None:
        """Stop reading: the client does not keep up."""
        super().pause_writing()
        self._transport.pause_reading()
        self.unread()

    def resume_writing(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()
        super().resume_writing()

    # --- time

    def _look(self) -> None:
        """Perform the keep-alive action that is due, and schedule the next check."""
        watch, http2, now = self._watch, self.http2, self._now()
        assert watch is not None, "a connection that was not made. This is a bug."
        # While reading is paused because the client does not read, no PING answer can arrive
        # either.
        heard = now if self._paused else max(http2.streams.now, self.opened)
        due = watch.look(now, heard, bool(self.streams.open), http2.sent)
        if due is Due.GIVE_UP:
            log.debug("gave %s up: it does not answer a PING", self.peer)
            self.abort()
            return
        if due is Due.PING:
            self.sender.ping(_KEEP_ALIVE_PING)
        elif due is Due.RETIRE:
            http2.drain(_RETIRED)
        elif due is Due.FINISH:
            http2.finish_drain()
        elif due is Due.CUT:
            http2.fail(ErrorCode.NO_ERROR, _RETIRED)
        self._timer = self.context.loop.call_at(watch.at, self._look)

    def check_progress(self, now: float) -> None:
        """End calls whose clients make no progress in sending or reading."""
        if not self.http2.settled and self.opened < now - PREFACE_SECS:
            self.abort()
            return
        if not self._reads(now):
            log.debug("gave %s up: it does not read", self.peer)
            self.abort()
            return
        if not self._paused:  # while reading is paused, no data can arrive
            for call in list(self.streams.open.values()):
                call.look(now)
        self._check_idle(now)

    def _check_idle(self, now: float) -> None:
        """Close a connection that has had no calls for long, in the way clients expect."""
        if self.streams.open or self.streams.last != self._last:
            self._last, self._idle_since = self.streams.last, now
            return
        most = self.context.idle_secs or inf
        if self.progress.idles(self._idle_since, now, most):
            self.http2.drain("max_idle")
        if self.progress.idles(self._idle_since + PREFACE_SECS, now, most):
            self.http2.finish_drain()  # even without the client's acknowledgement

    def _reads(self, now: float) -> bool:
        """True if the client reads what is queued for it, including heads of its calls."""
        unread, heads = self._unread, 0
        if len(self.streams.open) > _FEW:
            heads = sum(call.head_size for call in self.streams.open.values())
        if not (unread or heads or self.account.unread or self.account.kept):
            return True
        moved = self.sender.pumped - undelivered(self._transport)
        return self.progress.reads(unread, heads, moved, now)

    @property
    def _unread(self) -> int:
        """Bytes that the client has not read."""
        waiting: int = self.sender.queued + self._transport.get_write_buffer_size()
        return waiting

    def unread(self) -> None:
        """Charge the bytes that the client has not read."""
        if not self.progress.within(self._unread, self.account.kept):
            self.abort()
