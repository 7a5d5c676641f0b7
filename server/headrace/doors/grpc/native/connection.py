"""gRPC connections of the native server: calls from head to status, and the socket layer.

Most calls are an `InferRpc` whose message arrives in one frame and whose answer is sent in one; see
`headrace.doors.grpc.native.calls`. The bytes of longer messages are charged to the
connection's account as they arrive.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from random import uniform
from sys import maxsize
from time import perf_counter_ns

from headrace.core.call import NO_CONTEXT, context_of
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    QuotaExceeded,
    ServerError,
    ServerExiting,
)
from headrace.core.identity import NO_PEER, Identity, PeerFacts
from headrace.core.limits import PRESSED_SECS, Patience, uncharged
from headrace.core.tensors import Buffer
from headrace.doors.acceptor import undelivered
from headrace.doors.grpc.call import (
    Handlers,
    Message,
    Noted,
    error_text,
    log_access,
    noted_fields,
    retry_details,
)
from headrace.doors.grpc.options import INFERENCE, LEVELS, GrpcOptions
from headrace.doors.listeners import client_of, peer_of
from headrace.engine.admission import Account, Admission, ConnectionAccount
from headrace.engine.entrance import Progress
from headrace.engine.workbench import LARGE, Job
from headrace.protocol.compression import (
    DEFAULT_LEVEL,
    compress,
    decompress,
    decompress_small,
    too_large,
)
from headrace.protocol.grpc import (
    ANSWER_TRAILERS,
    CANCELLED,
    DEADLINE_EXCEEDED,
    OK_FIELDS,
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
from headrace.protocol.http2.keep_alive import KeepAliveAction, KeepAliveWatch
from headrace.protocol.http2.protocol import ErrorCode, Limits
from headrace.protocol.http2.streams import Fields
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT, STATUS, error_fields

log = logging.getLogger(__name__)

_STREAM_SIZE = 2 << 10  # bytes of an open call that has begun a message
SESSION_SIZE = 512  # ... and further bytes of one with a session
_OWN_SIZE = 16 << 10  # bytes of calls that are not charged, for each connection
_HEAD_SIZE = 1 << 10  # bytes of a head without its metadata
WAITS_SECS = 5.0  # between two looks at a call that waits for its client
_MOST_LOOKS = 128  # ... of one connection
_TRUNCATED = "the request ends within a message"
PREFACE_SECS = 20.0  # for the client's preface
# A connection beyond a quota is kept for so long, and so many at once, to tell its calls why.
_REFUSED_SECS, _MOST_REFUSED = 1.0, 64
_HEAD_SECS = 1e-4  # to decode the head of a call, unless it is like an earlier one
_KEEP_ALIVE_PING = b"alive? \0"
_RETIRED = "max_age"  # GOAWAY text, as in gRPC's own servers
# Bytes that a transport reads at once, up to 32 times in a turn: with 256 KiB, 20 clients with long
# messages delayed health checks by 0.2 s.
_BUFFER = 64 << 10


class RpcHead(CallHead):
    """The head of a call to one of this server's procedures: `kind` runs its `handler`.

    `context` has the client. A request is checked when its model is known, unless the
    client may do everything.
    """

    context = NO_CONTEXT

    def __init__(self, headers: Headers, context: "ServerContext", connection: "GrpcConnection"):
        self.connection = connection
        self._size = 0
        context.admission.turns.expect(context.loop, _HEAD_SECS)
        super().__init__(headers)
        self._size = _HEAD_SIZE + sum(map(len, self.metadata.values()))
        connection.hold(self._size)
        self.client = ""  # the address that a trusted proxy names
        if context.admission.proxies is not None:
            self.client = connection.account.named(self.metadata)
        self.kind, self.handler = context.procedures.get(self.path, (RefusedRpc, None))
        self.largest = context.handlers.limits.get(self.path, context.max_message)
        if context.level and self.path in INFERENCE:
            self.packing = self.packing or self.preferred
        if self.refusal is None:
            self.refusal = self._refused(context)
        if self.refusal is not None:
            self.kind = RefusedRpc
        counted, identity = context.handlers.counted(self.path), self.context.identity.kind
        self.answers = context.admission.answers.of(context.door, counted, True, identity)

    def __del__(self) -> None:
        # Calls and the cache of header blocks share a head. Counting those that still need it would
        # be a step of every call.
        self.connection.hold(-self._size)

    def _refused(self, context: "ServerContext") -> Fields | None:
        if self.handler is None:
            return refusal(UNIMPLEMENTED, f"unknown method {self.path[:200]}")
        if (known := self.connection.refused) is not None:
            return _refusal(known)
        try:
            self.context = context_of(self.identify())
        except ServerError as error:
            return _refusal(error)
        return None

    def identify(self) -> Identity:
        """The client, if it passes the gate; raises as `Gate.enter`."""
        peer = self.connection.peer_facts
        return self.connection.context.handlers.enter(self.path, self.metadata, peer)


def _refusal(error: ServerError) -> Fields:
    """A response that consists of an error."""
    status, text = STATUS[type(error)].grpc, error_text(error)
    more = [(name.encode(), value.encode()) for name, value in error_fields(error)]
    details = retry_details(error, status, text)
    return [*RESPONSE_FIELDS, *status_fields(status, text, details), *more]


class ServerContext:
    """State shared by the connections of a server.

    `procedures` maps each path to its kind of call and its handler of `handlers`.
    """

    def __init__(
        self,
        procedures: Mapping[str, tuple[type["Rpc"], object]],
        handlers: Handlers,
        admission: Admission,
        max_message: int,
        access_log: bool,
        options: GrpcOptions,
        limits: Limits,
        door: str = "grpc",
    ) -> None:
        """`door` is the name by which connections and calls are counted."""
        self.door = door
        self.procedures = procedures
        self.handlers = handlers
        self.loop = asyncio.get_running_loop()
        self.admission = admission
        self.nobody = ConnectionAccount(admission, "")  # for connections that were not admitted
        self.max_message = max_message
        self.access_log = access_log
        self.limits = limits
        self.keep_alive = options.keep_alive
        self.patience_secs = options.patience_secs
        self.idle_secs = options.idle_secs
        self.stream_idle_secs = options.stream_idle_secs
        self.level = LEVELS[options.compression]
        # If the client leaves it to the server, a level that pays for tensors.
        self.compression_level = self.level or DEFAULT_LEVEL
        # Received bytes are processed at once, so one buffer serves all connections.
        self.buffer = memoryview(bytearray(_BUFFER))
        self.connections: set[GrpcConnection] = set()
        self.refused = 0  # of them: beyond a quota
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

    client = ""  # the client's address, if the access log is on
    _begun: int  # nanoseconds of `perf_counter_ns`
    _charged = 0  # bytes of kept messages charged to the account
    _patience: Patience | None = None
    _unpacking: tuple[Job[Buffer], int] | None = None  # the job, and the bytes charged for it
    _packing: Job[bytes] | None = None  # compresses a message
    _on_hold = False  # the handler takes no messages for now
    # Data that waits, and the position of its first byte; bounded by the client's window. It waits
    # while a message is being unpacked, on hold, and for a turn of the loop.
    _behind: bytearray | None = None
    _behind_at = 0
    _end_behind = False
    _queued = False  # for a turn of the loop
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
        self.account: Account = connection.account
        self.expected = head.content_length
        self._begun = perf_counter_ns()
        if context.access_log:
            self.client = head.client or connection.peer
        if head.timeout is not None:
            self._deadline = context.loop.time() + head.timeout
            self._timer = context.loop.call_at(self._deadline, self._expire)

    # --- for handlers

    @property
    def identity(self) -> Identity:
        """Implements `RpcContext.identity`."""
        return self.head.context.identity

    @property
    def peer_facts(self) -> PeerFacts:
        """Implements `RpcContext.peer_facts`."""
        return self._connection.peer_facts

    def identify(self) -> Identity:
        """Implements `RpcContext.identify`."""
        return self.head.identify()

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
        self._packing = bench.do(
            size, lambda charge: self._pack(message), packed, uncharged, self.account
        )
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
        self.head.answers.answered(status, perf_counter_ns() - self._begun)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.stop_gathering()
        if self._charged:
            self.release(self._charged)
        self._behind = None
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
            log_access(
                self.client, self.head.path, status, self._begun / 1e9, noted_fields(self.noted)
            )

    def _expire(self) -> None:
        self._timer = None
        if not self._context.admission.turns.end_later(self._time_out):
            self._time_out()

    def _time_out(self) -> None:
        if not self.finished:
            self.abandon()
            self.close(DEADLINE_EXCEEDED, "Deadline Exceeded")

    # --- events of the stream

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Split received bytes into messages, as many as the turn of the loop allows."""
        try:
            if not self.waits:
                streams = self._connection.streams
                start, streams.work = self.split(view, start, stop, streams.work)
            if self._behind is None:
                start = self.skip(start, stop)
            if start < stop and not self.finished:
                self._keep(view, start, stop)
        except Exception as error:
            self.guard(error)

    def _keep(self, view: memoryview, start: int, stop: int) -> None:
        """Charge data that has to wait, and keep it; raises `Overloaded`."""
        nbytes = stop - start
        self.account.grow(nbytes)
        self._charged += nbytes
        if self._behind is None:
            self._behind = bytearray()
        self._behind += view[start:stop]
        self.place = None  # what is received next must not overtake it
        if not self.waits:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self.waits = self.keeps_window = True
        if not self._queued:
            self._queued = True
            self._context.admission.turns.put_off(self._on_turn)

    def _on_turn(self) -> None:
        self._queued = False
        self.go_on()

    def go_on(self) -> None:
        """Process data that has waited, as much as one turn of the loop allows."""
        if self.finished or self._on_hold or self._unpacking is not None:
            return
        behind = self._behind
        self.waits = False
        try:
            if behind is not None:
                start, size = self._behind_at, len(behind)
                share = self._context.admission.turns.share
                with memoryview(behind) as view:
                    after, _ = self.split(view, start, size, share)
                self._behind_at = after
                self.release(after - start)
                if after < size:
                    if not self.waits:
                        self._wait_for_turn()
                    return
                self._behind, self._behind_at = None, 0
            if self.waits or self.finished:
                return
            self.keeps_window = False
            if self._end_behind:
                self._end_behind = False
                self.on_end()
        except Exception as error:
            self.guard(error)
        self._return_window()

    def _return_window(self) -> None:
        if not (self.finished or self.remote_closed):
            self._connection.http2.release(self)

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

    def look(self, now: float) -> bool:
        """Fail the call if its client does not continue a message, or is idle for too long.

        Returns false once the client has finished sending.
        """
        if self.finished or self.remote_closed:
            return False
        part = self._gathering
        if not self.waits and (self.unary or part is not None):
            if self._patience is None:
                self._patience = Patience(self._context.patience_secs, 2 * WAITS_SECS)
            filled = 0 if part is None else len(part.prefix) + part.filled
            if not self._connection.progress.sends(self._patience, part or self, filled, now):
                self.give_up(f"no more of the request came for {self._context.patience_secs:g} s")
        return not self.finished

    def give_up(self, text: str) -> None:
        """End the call, since its client does not go on."""
        self.abandon()
        self.close(DEADLINE_EXCEEDED, text)

    def on_end(self) -> None:
        """The client has ended its side."""
        if self.finished:
            return
        if self._unpacking is not None or self._behind is not None:
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
            try:
                data = decompress_small(part.view, self.head.encoding)
            except ServerError as error:
                self._drop(error, 0)
                return
        if data is None:
            self._unpack(part)
        else:
            self.stop_gathering()
            self.message(data)

    def stop_gathering(self) -> None:
        """Drop the gathered message and its charge."""
        part = self._gathering
        super().stop_gathering()
        if part is not None and part.length >= 0 and not part.dropped:
            self.account.drop(part.filled)

    def _unpack(self, part: Gathering) -> None:
        """Decompress a message on a thread; data received meanwhile waits."""
        self._gathering = self.place = None
        self.waits = self.keeps_window = True
        encoding, limit, fixed = self.head.encoding, self.head.largest, self._fixed
        job = self._context.admission.workbench.do(
            part.length << 3,  # an estimate of the decompressed size
            lambda charge: decompress(
                part.view, encoding, limit, "request message", charge, fixed=fixed
            ),
            self._unpacked,
            self._charge,
            self.account,
        )
        self._unpacking = job, part.filled

    def _charge(self, nbytes: int) -> None:
        """Charge the message's decompressed size; raises `Overloaded`."""
        assert self._unpacking is not None, "bytes for nothing. This is a bug."
        job, counted = self._unpacking
        self.account.grow(nbytes, counted)
        self._unpacking = job, counted + nbytes

    def _unpacked(self, data: Buffer | None, problem: Exception | None) -> None:
        """Receive a decompressed message, and the data that arrived since."""
        assert self._unpacking is not None, "a message without a call. This is a bug."
        self.account.drop(self._unpacking[1])
        self._unpacking = None
        try:
            if data is not None:
                self.message(data)
            elif isinstance(problem, ServerError):
                self.refused(problem)
            else:
                raise problem or InvalidRequest(_TRUNCATED)
        except Exception as error:
            self.guard(error)
        self.go_on()


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

    def end_unfinished(self) -> None:
        """Refuse the call unless its client has sent everything: the server is about to end."""
        if not (self.finished or self.remote_closed):
            self.fail(ServerExiting("Server exiting"))


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

    account: ConnectionAccount
    context: ServerContext
    http2: ServerConnection
    peer: str

    def __init__(self, context: ServerContext) -> None:
        http2 = ServerConnection(
            lambda headers: RpcHead(headers, context, self), RESPONSE_HEAD, ANSWER_TRAILERS,
            lambda: context.loop.call_soon(self.flush), context.limits, context.keep_alive,
            self._reserve,
        )  # fmt: skip
        super().__init__(http2, context.loop, context.buffer, context.admission.turns)
        self.context = context
        self.client: tuple[str, int] | None = None  # as the PROXY protocol names it
        self.peer = ""  # the client's address, without its port
        self.peer_facts = NO_PEER
        self.refused: QuotaExceeded | None = None  # the error of all calls
        self.account = context.nobody  # until the connection is admitted
        self.progress = Progress(self.account, context.patience_secs)
        self._last = 0  # the last stream at the previous idle check
        self._size = 0  # bytes of calls besides their messages: heads, streams, sessions
        self._looked = 0  # the last stream at the previous look for calls that wait
        self._waiting: deque[tuple[float, int]] = deque()  # when to look at which stream
        self._idle_since = 0.0
        self._look_secs = min(WAITS_SECS, context.patience_secs / 4)
        self.opened = 0.0  # time of connection; in seconds of the loop's clock
        self._watch: KeepAliveWatch | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio callbacks

    def admit(self) -> bool:
        """Count the connection if it is within the limit."""
        context = self.context
        client = self.client or client_of(self._transport)
        self.peer = client[0] if client else ""
        self.peer_facts = peer_of(self._transport)._replace(address=self.peer)
        try:
            self.account = context.admission.connect(context.door, self.peer)
        except Overloaded:
            return False
        except QuotaExceeded as error:
            if context.refused >= _MOST_REFUSED:
                return False
            context.refused += 1
            self.refused = error.without_frames()
            self.account = ConnectionAccount(context.admission, "")
            context.loop.call_later(_REFUSED_SECS, self._turn_away)
        self.http2.limit_answers(context.admission.max_response_bytes or maxsize)
        self.progress = Progress(self.account, context.patience_secs)
        self.opened = self._idle_since = self._now()
        context.connections.add(self)
        self._watch = KeepAliveWatch(context.keep_alive, self.opened, uniform(-1, 1))
        self._timer = context.loop.call_at(self._watch.at, self._look)
        return True

    def _turn_away(self) -> None:
        """End a connection beyond a quota, whose calls were told so."""
        if not self._lost:
            self.http2.fail(ErrorCode.NO_ERROR, str(self.refused))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        super().connection_made(transport)
        if self._watch is not None and self.context.draining:
            self.http2.drain()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel all calls."""
        if self._timer is not None:
            self._timer.cancel()
        http2 = self.http2
        super().connection_lost(error)
        self._waiting.clear()
        self._release(http2.reserved)
        if http2.failure and self._watch is not None:
            log.debug("hung up on %s: %s", self.peer, http2.failure)
        self.context.lost(self)
        if self.refused is not None:
            self.context.refused -= 1
        self.account.close()

    def let_go(self) -> None:
        """Drop what refers to the connection, and what waited: freed now, not by the collector."""
        super().let_go()
        del self.http2, self.sender, self.streams, self._receive, self._data

    def pause_writing(self) -> None:
        """Stop reading: the client does not keep up."""
        super().pause_writing()
        self._transport.pause_reading()
        self.unread()

    def resume_writing(self) -> None:
        """Resume reading."""
        super().resume_writing()
        if not self._waits:
            self.read_on()

    def read_on(self) -> None:
        """Resume reading, unless the client does not keep up."""
        if not self._paused:
            self._transport.resume_reading()

    # --- accounting

    def hold(self, nbytes: int) -> None:
        """Charge memory of calls besides their messages, or release it."""
        before, self._size = self._size, self._size + nbytes
        if charge := max(self._size, _OWN_SIZE) - max(before, _OWN_SIZE):
            self.account.count(charge)

    def _reserve(self, streams: int) -> bool:
        if not self.context.admission.reserve(streams):
            return False
        self.hold(streams * _STREAM_SIZE)
        return True

    def _release(self, streams: int) -> None:
        if streams:
            self.context.admission.release(streams)
            self.hold(-streams * _STREAM_SIZE)

    def idle_secs(self, used: bool) -> float:
        """Seconds that a stream may be idle, less if it is in others' way, or was never used."""
        most = self.context.stream_idle_secs or inf
        if self.context.admission.pressed:
            return min(most, self.context.patience_secs if used else PRESSED_SECS)
        return most

    # --- time

    def _look(self) -> None:
        """Perform the keep-alive action that is due, and schedule the next check."""
        watch, http2, now = self._watch, self.http2, self._now()
        assert watch is not None, "a connection that was not made. This is a bug."
        # While reading is paused because the client does not read, no PING answer can arrive
        # either.
        heard = now if self._paused else max(http2.streams.now, self.opened)
        due = watch.look(now, heard, bool(self.streams.open), http2.sent)
        if due is KeepAliveAction.GIVE_UP:
            log.debug("gave %s up: it does not answer a PING", self.peer)
            self.abort()
            return
        if due is KeepAliveAction.PING:
            self.sender.ping(_KEEP_ALIVE_PING)
        elif due is KeepAliveAction.RETIRE:
            http2.drain(_RETIRED)
        elif due is KeepAliveAction.FINISH:
            http2.finish_drain()
        elif due is KeepAliveAction.CUT:
            http2.fail(ErrorCode.NO_ERROR, _RETIRED)
            return  # or it would be due in each turn of the loop, until the client has read
        self._timer = self.context.loop.call_at(watch.at, self._look)

    def end_unfinished(self) -> None:
        """Refuse calls that are not complete; streams end by themselves, with their requests."""
        for call in list(self.streams.open.values()):
            if isinstance(call, UnaryRpc):
                call.end_unfinished()

    def check_progress(self, now: float) -> None:
        """End calls whose clients make no progress in sending or reading."""
        if self._lost:
            return
        if not self.http2.settled and self.opened < now - PREFACE_SECS:
            self.abort()
            return
        if not self._reads(now):
            log.debug("gave %s up: it does not read", self.peer)
            self.abort()
            return
        if not (self._paused or self._waits):  # while reading is paused, no data can arrive
            self._look_at_calls(now)
        self._release(self.http2.spare_room())
        self._check_idle(now)

    def _look_at_calls(self, now: float) -> None:
        """Apply time limits to calls that wait for their client: to each of them now and then."""
        opened, waiting = self.streams.open, self._waiting
        for number in reversed(opened):
            if number <= self._looked:
                break
            waiting.append((now + self._look_secs, number))
        self._looked = self.streams.last
        for _ in range(min(len(waiting), _MOST_LOOKS)):
            due, number = waiting[0]
            if due > now:
                break
            waiting.popleft()
            call = opened.get(number)
            if call is not None and call.look(now):
                waiting.append((now + self._look_secs, number))

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
        """True if the client reads what is queued for it."""
        unread = self._unread
        if not (unread or self.account.unread):
            return True
        moved = self.sender.pumped - undelivered(self._transport)
        return self.progress.reads(unread, 0, moved, now)

    @property
    def _unread(self) -> int:
        """Bytes that the client has not read."""
        waiting: int = self.sender.queued + self._transport.get_write_buffer_size()
        return waiting

    def unread(self) -> None:
        """Charge the bytes that the client has not read."""
        if not self.progress.within(self._unread):
            self.abort()
