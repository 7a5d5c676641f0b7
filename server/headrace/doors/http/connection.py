"""One connection of an HTTP client: socket, limits, and infer requests answered in place.

An infer request whose head is complete in the received bytes is handled here, without ASGI's scope,
task and events (the fast path). Everything else goes to the application, by `Requests` of
`headrace.doors.http.asgi`, and while that handles anything of this connection, everything does.
Answers keep the order of requests.

Clients repeat their heads, so a head is parsed once (by llhttp, which parses all other requests,
too) and then recognised by its bytes. Only heads with a fixed meaning are cached: HTTP/1.1,
keep-alive, a plain Content-Length, no upgrade and no expectation.

A connection reads nothing while it holds received bytes, or an application has enough of a body.
What a client can make it hold, or make it do in one turn of the event loop, is bounded; a client
without progress is disconnected. Owned by the event loop; the server calls `check` regularly.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter, perf_counter_ns
from typing import cast

from headrace.api.operations import HEALTH_PATHS
from headrace.core.blocks import BLOCKS
from headrace.core.call import NO_CONTEXT, NO_OPTIONS, NOBODY, Computed, Timing
from headrace.core.errors import ServerError, ServerExiting, Unavailable
from headrace.core.identity import NO_PEER
from headrace.core.limits import SLOWEST, Patience
from headrace.core.tensors import Buffer
from headrace.core.turns import LONG_READ
from headrace.doors.acceptor import undelivered
from headrace.doors.http.asgi import (
    ACCOUNT,
    GONE,
    HEAD_LIMIT,
    PEER,
    STATUS_LINES,
    AsgiApplication,
    Refusal,
    Requests,
    log_access,
)
from headrace.doors.http.exchange import CLOSE, JSON, Answer, Exchange, error_lines, plain_lines
from headrace.doors.http.head import END, Heads, InferHead
from headrace.doors.http.outgoing import Outgoing
from headrace.doors.listeners import client_of, peer_of
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.entrance import Progress, memory_for
from headrace.observability.statistics import INFER, OTHER
from headrace.protocol.plain_json import PlainJson
from headrace.protocol.status import STATUS
from headrace.protocol.v2_json import error_body

_LAST_SECS = 0.05  # that an idle connection stays open for a request in transit at shutdown
_HEADS = 1 << 10  # bytes for the application that are parsed at once: requests may have 18 bytes
_BODY = 16 << 10  # ... of a body
_HEALTH = tuple(f"GET {path}".encode() for path in HEALTH_PATHS)  # begins of requests
_PART_UNITS = 32  # of `Turns.share`, for either: a body may come in chunks of a byte
# A plain answer: milliseconds queued, and the rest: milliseconds executing, rows of the batch, body
# size, body.
PLAIN_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nserver-timing: queue;dur=%.3f%b"
)
_EACH = b', compute;dur=%.3f, batch;desc="%d"\r\ncontent-length: '
PLAIN_REST = _EACH + b"%d" + END + b"%b"
_LONG_READ = 128 << 10  # bytes read at once after which others have their turn
_UNDER_WAY = 64  # concurrent requests per connection; further ones are not read
_COPIED = 4096  # bytes up to which a copy of a body costs less than a view of it
_DIRECT = 256 << 10  # missing body bytes from which on they are received in place


@dataclass(slots=True, eq=False)
class FastPath:
    """Infer requests that connections answer in front of the application."""

    heads: Heads
    max_request_bytes: int
    access_log: bool


@dataclass(slots=True, eq=False)
class ServerState:
    """Settings and state that all connections of one server share.

    A client may take `patience_secs` for the next part of an unfinished request, and `read_secs` to
    read more of an answer. `admission` counts connections and what they hold. Without a `fast`
    path, the application gets all requests. Connections that are made while `retiring` close after
    an answer.
    """

    application: AsgiApplication
    admission: Admission
    keep_alive_secs: float
    patience_secs: float
    read_secs: float
    fast: FastPath | None = None
    connections: "set[Connection]" = field(default_factory=set)
    retiring: bool = False


def _memory(head: InferHead, length: int) -> memoryview:
    """Memory for a body: where its model's workers read it, if its tensors are binary."""
    size = head.json_size
    if size is None or not (size.isdecimal() and len(size) < 20) or head.content_encoding:
        return BLOCKS.block(length)
    return memory_for(head.entrance, head.key, length, int(size)) or BLOCKS.block(length)


class BodyReader(asyncio.BufferedProtocol):
    """Replaces a connection's protocol until `place` is full."""

    def __init__(self, connection: "Connection", place: memoryview) -> None:
        self._connection = connection
        self._place = place

    def get_buffer(self, sizehint: int) -> memoryview:
        """The rest of the place."""
        return self._place

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes received into the place."""
        self._place = self._place[nbytes:]
        if not self._connection.body_grew(nbytes):
            # The transport refers to its last reader for as long as the connection lives; that
            # reader must not keep the body alive.
            self._place = memoryview(b"")

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class HttpCall(Exchange):
    """One infer request of a connection; the exchange is the call."""

    __slots__ = ("answer", "begun", "body", "connection", "filled", "json")

    answer: Answer | None
    body: memoryview | None  # the body being received; `filled` bytes have arrived
    json: PlainJson | None  # decoded the body, and may encode the answer

    def __init__(self, connection: "Connection", limit: int, head: InferHead) -> None:
        # Inlined `Exchange.__init__` and `begin`, to save Python calls per request.
        self.head = head
        self.account = connection.account
        self._engine = head.entrance
        self._limit = limit
        self.found = self._form = self.answer = self.body = self.json = None
        self.id = self._backend = ""
        self.nbytes = self.filled = self._answering = 0
        self._held = self.entered = self._consumed = self._again = self._timed = False
        self.context = head.context
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False
        self.connection = connection
        self.begun = perf_counter_ns()

    def respond_from(self, batch: Computed) -> None:
        """Answer with the call's part of `batch`, in one step if the call is plain."""
        json = self.json
        if json is not None and not (self._timed or self._backend):
            encoded = batch.encoded.get(json)
            if encoded is None:
                calls = len(batch.calls)
                texts = json.write(batch.tensors, calls)
                rests: Sequence[bytes] = ()
                if texts and 1 < calls == batch.rows and not self.connection.access_log:
                    before = _EACH % (batch.compute_ns / 1e6, calls)
                    rests = json.encode_each(texts, before, END)
                encoded = batch.encoded[json] = texts, rests
            texts, _ = encoded
            if texts:
                if not self.connection.answer(self, json, batch):
                    timing = Timing(batch.started - self.arrived, batch.compute_ns, batch.rows)
                    body = json.encode(self.id, texts, self.first, self.rows)
                    self.end(Answer(200, plain_lines(timing), [body]))
                return
        self.respond(batch.response(self), True)

    @property
    def begun_ns(self) -> int:
        """Arrival of the first byte, in nanoseconds; of the whole request, if all came at once."""
        return int(self.connection.begun_reading * 1e9) if self.filled else self.begun

    def end(self, answer: Answer) -> None:
        """Answer once all earlier requests are answered."""
        self.answer = answer
        self.connection.flush()
        if self.entered:  # earlier requests are not answered yet
            self.account.count(answer.size)
            self.nbytes += answer.size


class Connection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_admission", "_answers", "_asgi", "_begun", "_consuming", "_deferring", "_gathering",
        "_heads", "_held", "_held_at", "_limit", "_lingers", "_out", "_paused", "_peer",
        "_progress", "_requests", "_retire_at", "_retired", "_sending", "_skip", "_state",
        "_touched", "access_log", "account", "client", "loop", "transport",
    )  # fmt: skip

    transport: asyncio.Transport
    account: ConnectionAccount
    _progress: Progress
    _out: Outgoing

    def __init__(self, state: ServerState) -> None:
        fast, admission = state.fast, state.admission
        self.loop = asyncio.get_running_loop()
        self.client: tuple[str, int] | None = None
        self._peer = NO_PEER
        self._state = state
        self._admission = admission
        self._sending = Patience(state.patience_secs)  # for the client's requests
        self._touched = self.loop.time()  # time of the last received byte or answer
        self._begun = self._touched  # start of the request being received
        self._retire_at = inf
        self._retired = False  # the connection closes after the next answer
        self._lingers = False  # all is written over TLS, and the client has not said that it ends
        self._held = b""  # received, but to be processed later, from `_held_at` on
        self._held_at = 0
        self._paused = False  # nothing is read
        self._asgi: Requests | None = None  # the requests for the application, from the first on
        # The fast path.
        self._heads = None if fast is None else fast.heads
        self._limit = 0 if fast is None else fast.max_request_bytes
        self.access_log = fast is not None and fast.access_log
        self._answers = admission.answers.of("http", INFER)
        self._requests: deque[HttpCall] = deque()  # unanswered, in order of arrival
        self._gathering: HttpCall | None = None  # the last of them, if its body is incomplete
        self._skip = 0  # bytes of a body to skip
        self._consuming = False
        self._deferring = False  # the last request is still being decoded; later ones wait

    # --- the life of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements `asyncio.Protocol`."""
        self.transport = stream = cast(asyncio.Transport, transport)
        self._state.connections.add(self)
        if self._state.retiring:
            self.retire()
        self._peer = peer_of(transport)
        if self.client is None:
            self.client = client_of(transport)
        else:  # by the PROXY protocol
            self._peer = self._peer._replace(address=self.client[0])
        if self._heads is not None:
            self._heads = self._heads.of(self._peer)
        refusal: ServerError | None = None
        try:
            self.account = self._admission.connect("http", self.client[0] if self.client else "")
        except Unavailable as error:
            self.account, refusal = ConnectionAccount(self._admission, ""), error
        self._progress = Progress(self.account, self._state.read_secs)
        self._out = Outgoing(stream, self._progress)
        if refusal is not None:
            status, lines = STATUS[type(refusal)].http, error_lines(refusal)
            self._refuse(status, str(refusal), lines, counted=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements `asyncio.Protocol`."""
        self._state.connections.discard(self)
        self._out.lose()
        self._forget()
        if self._heads is not None:
            self._heads.close()
        if self._asgi is not None:
            self._asgi.close()
            self._asgi = None
        self.account.close()

    def eof_received(self) -> bool:
        """Close the socket, as the transport does if this returns False."""
        if self._is_secure:
            return False
        return self._admission.turns.end_later(self.transport.close)

    def pause_writing(self) -> None:
        """Implements `asyncio.Protocol`."""
        self._out.pause()
        self._charge()

    def resume_writing(self) -> None:
        """Implements `asyncio.Protocol`."""
        self._out.resume()
        self._charge()
        self._go_on()

    @property
    def answering(self) -> bool:
        """True if the application has an unanswered request of this connection."""
        return self._asgi is not None and bool(self._asgi.cycles)

    @property
    def idle(self) -> bool:
        """True if no request on this connection is unanswered."""
        return not self._requests and self._out.empty and not self.answering

    @property
    def held(self) -> int:
        """Received bytes that wait to be processed, or for the rest of their head."""
        if self.transport.is_closing():
            return 0
        waiting = len(self._held) - self._held_at if self._held else 0
        return waiting + (0 if self._asgi is None else self._asgi.held)

    @property
    def begun_reading(self) -> float:
        """The loop's time when the current, or last, request began to arrive."""
        return self._begun

    def live_until(self, at: float) -> None:
        """Retire the connection at that time, or at the next `check` after it."""
        self._retire_at = at

    def awaited(self, since: float) -> bool:
        """True if the client was active since `since`, and nothing is unanswered."""
        return self.idle and self._touched > since and not self.transport.is_closing()

    def retire(self) -> None:
        """Close the connection after its next answer; an idle one waits for one more request.

        Closing it at once could lose a request in transit.
        """
        self._retired = True
        if self._asgi is not None:
            self._asgi.retired = True

    def shutdown(self) -> None:
        """Close the connection after its next answer; an idle one soon, after another read.

        A client whose request gets no answer may assume that it was executed.
        """
        self.retire()
        if self._asgi is not None and self._asgi.cycles:
            self._asgi.cycles[-1].keep_alive = False
        elif not self._requests:
            if self._out.empty:
                self.loop.call_later(_LAST_SECS, self._close_idle, 2)
            else:
                self._out.end()

    def _close_idle(self, turns: int) -> None:
        if turns:  # turns of the loop, one of which reads received bytes
            self.loop.call_soon(self._close_idle, turns - 1)
        elif self.idle and not self.transport.is_closing():
            self.transport.close()

    # --- clients without progress

    def check(self, now: float) -> None:
        """Close the connection if its client makes no progress; `now` as the loop's clock.

        An old connection closes after its next answer.
        """
        out = self._out
        if self.transport.is_closing() and self._is_secure:
            self._end_tls()
        if (out.stalled or out.waiting) and not out.reads(self.held, now):
            self.transport.abort()
        elif (request := self._gathering) is not None:
            if request.answer is None and (fault := self._late(now, self._begun, request.filled)):
                request.end(Answer(408, JSON + CLOSE, [error_body(fault)]))
        elif not (self._requests or out.closing):
            self._check_unfinished(now)
        if now >= self._retire_at:
            self.retire()

    @property
    def _is_secure(self) -> bool:
        return self.transport.get_extra_info("sslcontext") is not None

    def _end_tls(self) -> None:
        """Close the socket of a client that has got everything, and does not end TLS itself.

        Transports wait for that half a minute. They do not tell all that they have yet to send: so
        there has to be nothing at two checks.
        """
        delivered = not undelivered(self.transport)
        if delivered and self._lingers:
            self.transport.abort()
        self._lingers = delivered

    def _check_unfinished(self, now: float) -> None:
        """Close on a request that arrives too slowly, and a connection idle for too long."""
        asgi = self._asgi
        if asgi is not None and asgi.in_message:
            # While earlier requests are unanswered, it is this side that does not read.
            reading = not asgi.waiting and not (asgi.in_head and asgi.cycles)
            if reading and (fault := self._late(now, asgi.begun, asgi.size)):
                self._abandon(408, fault)
        elif self.idle and self._progress.idles(self._touched, now, self._state.keep_alive_secs):
            if now - self._touched > self._state.keep_alive_secs:
                self.transport.close()
            else:
                self.shutdown()

    def _late(self, now: float, begun: float, size: int) -> str:
        """The reason to stop waiting for the rest of a request; "" if there is none.

        It has `begun` at that time, and `size` bytes of it have arrived.
        """
        patience = self._sending
        if self._progress.sends(patience, begun, size, now):
            return ""
        if now - self._touched > patience.secs:
            return f"no more of the request came for {patience.secs:g} s"
        return f"the request comes more slowly than {SLOWEST} bytes/s"

    def _charge(self) -> None:
        """Charge unread and unprocessed bytes; closes the connection beyond its share."""
        if not self._out.within(self.held):
            self.transport.abort()

    def end_unfinished(self) -> None:
        """Abandon an incomplete request: the server is about to end."""
        request = self._gathering
        if request is None:
            if self._asgi is not None and self._asgi.in_message:
                self._abandon(503, "Server exiting")
        elif request.answer is None:
            answer = request.failure(ServerExiting("Server exiting"))
            answer.lines += CLOSE
            request.end(answer)

    def give_up(self) -> None:
        """Answer everything in flight with the shutdown error."""
        for request in list(self._requests):
            if request.answer is None:
                request.cancel()
                request.end(request.failure(ServerExiting("Server exiting")))

    def flush(self) -> None:
        """Write answers, in the order of requests."""
        requests = self._requests
        while requests and (answer := requests[0].answer) is not None:
            request = requests.popleft()
            if request is self._gathering:  # answered before its body arrived: skip the rest
                self._skip = (request.head.length or 0) - request.filled
                self._gathering = None
            exiting = request.head.entrance.exiting
            last = answer.closes or ((self._retired or exiting) and not requests)
            self._write(answer, last)
            self._count_out(request, answer.status)
            if last:
                self._forget()  # later requests get no answer
                self._out.end()
                return
        self._touched = self.loop.time()
        if self._held:
            self._go_on()

    def answer(self, request: HttpCall, json: PlainJson, batch: Computed) -> bool:
        """Write the plain answer to the only request in flight, if nothing else is pending."""
        requests = self._requests
        if (
            len(requests) != 1
            or self._retired
            or self.access_log
            or self._out.paused
            or self._admission.exiting
        ):
            return False
        texts, rests = batch.encoded[json]
        if rests and not request.id and request.rows == 1:
            rest = rests[request.first]
        else:
            body = json.encode(request.id, texts, request.first, request.rows)
            rest = PLAIN_REST % (batch.compute_ns / 1e6, batch.rows, len(body), body)
        requests.popleft()
        request.account.leave(request.nbytes)
        self.transport.write(PLAIN_ANSWER % ((batch.started - request.arrived) / 1e6, rest))
        answers = self._answers
        if request.context is not NO_CONTEXT:
            answers = answers.of_class(request.context.identity.kind)
        answers[200] += 1  # inlined `AnswerCounters.answered`
        took = perf_counter_ns() - request.begun
        answers.good.counts[bisect_left(answers.good.bounds, took)] += 1
        answers.good.total_ns += took
        self._touched = self.loop.time()
        if self._held:
            self._go_on()
        return True

    # --- received bytes

    def data_received(self, data: bytes, position: int = 0) -> None:
        """Process received, or held, bytes from `position` on, as far as possible now."""
        if self._held:
            self._held += data  # one piece may still arrive after reading was paused
            return
        turns = self._admission.turns
        turns.room -= 1
        if turns.room < 0 and turns.full(self.loop, data.startswith(_HEALTH, position)):
            self._hold(data, position)
            turns.put_off(self._go_on)
            return
        heads = self._heads
        if heads is None:
            self._to_application(data, position)
            return
        self._consuming = True
        known, requests, asgi = heads.known, self._requests, self._asgi
        begun = 0.0
        first, size, left = position, len(data), turns.share
        if size >= LONG_READ:
            left, begun = turns.begin(self.loop), perf_counter()
        while position < size and not (position > first and self.transport.is_closing()):
            if self._gathering is not None:
                position = self._gather(self._gathering, data, position)
            elif self._skip:
                self._touched = self.loop.time()
                passed = min(self._skip, size - position)
                self._skip -= passed
                position += passed
                self._let_others(passed)
            elif asgi is not None and (asgi.in_message or asgi.cycles):
                self._to_application(data, position)
                break
            elif len(requests) >= _UNDER_WAY or self._out.paused or self._deferring:
                self._hold(data, position)
                break
            elif left <= 0:
                self._hold(data, position)
                turns.put_off(self._go_on)
                break
            else:
                start = data.find(END, position, position + HEAD_LIMIT) + 4
                raw = data[position:start] if start > 3 else b""
                head = known.get(raw) or heads.read(raw)
                if head is None:
                    if requests:
                        self._hold(data, position)  # earlier answers come first
                    else:
                        self._to_application(data, position)
                    break
                request = HttpCall(self, self._limit, head)
                requests.append(request)
                length = head.length or 0
                left -= head.work
                if start + length <= size:
                    position = start + length
                    whole = memoryview(data) if length > _COPIED else data
                    self._begin(request, whole[start:position])
                else:
                    position = start
                    self._gathering = request
                    self._begun = self._touched = self.loop.time()
                    self._begin_message(request)
        if begun:
            turns.spend(perf_counter() - begun)
        self._consuming = False

    def _to_application(self, data: bytes, position: int) -> None:
        """Parse received bytes from `position` on, until a request waits for an earlier one.

        A read may have thousands of requests: they are parsed as they are answered. It may have
        a body in thousands of chunks: others have their turn in between.
        """
        asgi = self._asgi = self._asgi or self._application_side()
        turns = self._admission.turns
        size, left = len(data), turns.begin(self.loop)
        if turns.behind and not (asgi.in_message or data.startswith(_HEALTH, position)):
            left = 0
        while position < size and not self._out.closing:
            if asgi.waiting:
                self._hold(data, position)
                return
            if left <= 0:
                self._hold(data, position)
                turns.put_off(self._go_on)
                return
            if asgi.in_message and not asgi.in_head:
                # Heads may follow it, behind these bytes if it comes in chunks.
                found = data.find(END, position, position + _BODY)
                stop = position + _BODY if found < 0 else found + len(END)
                left -= 1 + (stop - position) * _PART_UNITS // _BODY
            else:
                # A whole head, since an upgrade is removed from whole ones only.
                end = data.find(END, position, position + HEAD_LIMIT) + len(END)
                stop = max(position + _HEADS, end)
                left -= _PART_UNITS
            self._parse(asgi, data[position:stop])
            position = stop

    def _application_side(self) -> Requests:
        """The requests of this connection for the application."""
        info = self.transport.get_extra_info
        base = {
            "server": _address(info("sockname")),
            "client": self.client,
            "scheme": "https" if self._is_secure else "http",
            ACCOUNT: self.account,
            PEER: self._peer,
        }
        asgi = Requests(
            self._state.application, base, self._out, self._admission.turns,
            self._set_reading, self._answered, self._abandon,
        )  # fmt: skip
        asgi.retired = self._retired
        return asgi

    def _parse(self, asgi: Requests, data: bytes) -> None:
        if not asgi.in_head:
            # The clock of a head is not reset: it has to arrive in time as a whole.
            self._touched = self.loop.time()
        try:
            asgi.feed(data)
        except Refusal as refusal:
            self._abandon(refusal.status, refusal.text)
            return
        if asgi.full:
            self._set_reading()
        self._charge()

    def _answered(self) -> None:
        """Go on after an answer of the application."""
        self._touched = self.loop.time()
        self._set_reading()
        self._charge()
        self._go_on()

    def _set_reading(self) -> None:
        """Read from the socket unless the connection, or an application, has enough."""
        paused = bool(self._held) or (self._asgi is not None and self._asgi.full)
        if paused is self._paused or self.transport.is_closing():
            return
        self._paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _let_others(self, nbytes: int) -> None:
        """Read on in a turn of its own, after `nbytes` of a body.

        A transport reads up to 32 times in a turn, 8 MB for each connection.
        """
        if nbytes >= _LONG_READ and not self.transport.is_closing():
            self.transport.pause_reading()
            self._admission.turns.read_later(self._read_on)

    def _read_on(self) -> None:
        if not (self._paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _hold(self, data: bytes, position: int) -> None:
        """Process received bytes from `position` on later."""
        self._held, self._held_at = data, position
        self._touched = self.loop.time()
        self._set_reading()
        self._charge()

    def _go_on(self) -> None:
        """Process held bytes if any of them can be processed now."""
        if self._consuming or self._deferring or not self._held:
            return
        if not (self._out.paused or self.transport.is_closing()):
            data, self._held = self._held, b""
            self.data_received(data, self._held_at)
            if not self._held:
                self._set_reading()
                self._charge()

    # --- infer requests

    def _begin(self, request: HttpCall, body: Buffer) -> None:
        """Charge a request whose body is complete, and submit it."""
        try:
            nbytes, head = len(body), request.head
            found = head.entrance.known.get(head.key)
            if found is None or not found.ready:
                found = head.entrance.find(head.model, head.version)
            request.found = found
            direct = found.direct
            if direct is None or not head.is_plain or nbytes > self._limit:
                request.open_whole(nbytes)
            else:
                limited = self._admission.clients is not None
                if limited:
                    identity = request.context.identity
                    request.account = self.account.of(identity, head.model, head.client)
                request.account.enter(nbytes)
                request.nbytes = nbytes
                request.entered = True
                json = direct.codecs.get(PlainJson) or direct.codec(PlainJson)
                if (plain := json.decode(body)) is not None:
                    request.json = json
                    request.id, request.inputs, request.rows = plain
                    # Inlined `Call.ask`, to save a Python call per request.
                    request.model_name, request.model_version = head.key
                    request.outputs, request.parameters = (), {}
                    request.options = NO_OPTIONS
                    if limited:
                        request.account.take_rows(request.rows)
                    direct.submit(request)
                    return
        except Exception as error:
            request.end(request.failure(error))
            return
        self._submit(request, body)

    def _begin_message(self, request: HttpCall) -> None:
        """Charge a request whose body is yet to arrive."""
        try:
            request.open()
        except Exception as error:
            request.end(request.failure(error))

    def _submit(self, request: HttpCall, body: Buffer) -> None:
        try:
            # Not for what a stage puts off: later requests need not wait for that.
            self._deferring = request.submit(body, self._submitted)
        except Exception as error:
            request.end(request.failure(error))

    def _submitted(self) -> None:
        """Continue after a request decoded on a thread has been queued or refused."""
        self._deferring = False
        self._go_on()

    def _gather(self, request: HttpCall, data: bytes, position: int) -> int:
        """Add received bytes to a body; returns the start of the next request."""
        self._touched = self.loop.time()
        length = request.head.length or 0
        begin = request.filled
        if request.answer is not None:  # answered early, it waits for earlier answers
            self._gathering = None
            self._skip = length - begin
            return position
        taken = min(length - begin, len(data) - position)
        try:
            request.grow(taken)
            if request.body is None:
                request.body = _memory(request.head, length)
        except Exception as error:  # also without memory
            request.end(request.failure(error))
            return position
        request.body[begin : begin + taken] = memoryview(data)[position : position + taken]
        request.filled = begin + taken
        if request.filled == length:
            self._complete(request)
        elif length - request.filled >= _DIRECT:
            self._switch(BodyReader(self, request.body[request.filled :]))
            self._let_others(taken)
        return position + taken

    def body_grew(self, nbytes: int) -> bool:
        """Process `nbytes` received into the body's buffer; returns True while more are missing."""
        self._touched = self.loop.time()
        request = self._gathering
        if request is None:  # answered early, and the connection ends once its client has read
            self._skip = max(self._skip - nbytes, 0)
            self._switch(self)
            return False
        request.filled += nbytes
        try:
            request.grow(nbytes)
        except ServerError as error:
            self._switch(self)
            request.end(request.failure(error))
            return False
        if request.filled < (request.head.length or 0):
            self._let_others(nbytes)
            return True
        self._switch(self)
        self._complete(request)
        return False

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        """Make `protocol` receive further bytes."""
        self.transport.pause_reading()  # the loop determines the reading mode when it resumes
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()

    def _complete(self, request: HttpCall) -> None:
        """Submit a request whose body is complete."""
        self._gathering = None
        body, request.body = request.body, None
        if request.answer is None and body is not None:
            self._submit(request, body)

    def _write(self, answer: Answer, last: bool) -> None:
        lines, buffers = answer.lines, answer.buffers
        if last and not answer.closes:
            lines += CLOSE
        size = len(buffers[0]) if len(buffers) == 1 else answer.size
        head = b"%bcontent-length: %d\r\n\r\n" % (STATUS_LINES[answer.status] + lines, size)
        self._out.write([head, *buffers], len(head) + size)
        if self._out.paused:
            self._charge()

    def _forget(self) -> None:
        """Drop held bytes and cancel unanswered requests."""
        self._held = b""
        requests, self._requests = self._requests, deque()
        self._gathering = None
        for request in requests:
            if request.answer is None:
                request.cancel()
            self._count_out(request, GONE)

    def _count_out(self, request: HttpCall, status: int) -> None:
        request.close()
        answers = self._answers.of_class(request.context.identity.kind)
        answers.answered(status, perf_counter_ns() - request.begun)
        if self.access_log:
            client = self.account.client(request.head.client)
            log_access(
                client, "POST", request.head.path, status, request.begun / 1e9, request.fields()
            )

    # --- requests without an answer

    def _abandon(self, status: int, text: str) -> None:
        """Refuse a request for the application, or hang up if its answer has begun."""
        if self._out.closing:  # one was, and the client has not read all that was written before
            return
        if self._asgi is not None and self._asgi.cycles and self._asgi.cycles[0].started:
            self._hang_up()
        else:
            self._refuse(status, text)

    def _refuse(self, status: int, text: str, lines: bytes = b"", counted: bool = True) -> None:
        """Answer a request with an error, and close the connection."""
        if counted and not self.answering:  # the application counts its own
            took = self.loop.time() - self._begun
            self._admission.answers.of("http", OTHER).answered(status, int(took * 1e9))
        body = error_body(text)
        head = b"%b%b%bcontent-length: %d\r\n%b\r\n" % (
            STATUS_LINES[status], JSON, lines, len(body), CLOSE,
        )  # fmt: skip
        self._out.write([head, body], len(head) + len(body))
        self._hang_up()

    def _hang_up(self) -> None:
        self._out.end()
        self._held = b""
        if self._asgi is not None:
            self._asgi.leave()


def _address(name: object) -> tuple[str, int] | None:
    """Host and port of an end of a connection; None for others than those of TCP."""
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    return None
