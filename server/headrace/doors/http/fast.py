"""The fast path: infer requests parsed and answered directly on the connection.

An infer request whose head is complete in the received bytes is handled here, without ASGI's scope,
task and events; everything else goes to uvicorn's parser and the application, and while that
handles anything of this connection, everything does. Answers keep the order of requests.

Clients repeat their heads, so a head is parsed once (by llhttp, the parser that uvicorn uses) and
then recognised by its bytes. Only heads with a fixed meaning are cached: HTTP/1.1, keep-alive, a
plain Content-Length, no upgrade and no expectation.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from time import perf_counter
from typing import Any

from headrace.core.blocks import BLOCKS
from headrace.core.call import NO_CONTEXT, NOBODY, Computed, Timing
from headrace.core.errors import ServerError, ServerExiting
from headrace.core.tensors import Buffer
from headrace.core.turns import LONG_READ
from headrace.doors.http.exchange import CLOSE, JSON, Answer, Exchange, plain_lines
from headrace.doors.http.head import Head, Heads
from headrace.doors.http.protocol import GONE, HEAD_LIMIT, BoundedProtocol, log_access
from headrace.engine.entrance import Entrance, memory_for
from headrace.engine.workbench import Deferred
from headrace.observability.statistics import INFER
from headrace.protocol.plain_json import HTTP_ANSWER, HTTP_REST, PlainJson
from headrace.protocol.v2_json import error_body

_END = b"\r\n\r\n"
_UNDER_WAY = 64  # concurrent requests per connection; further ones are not read
_COPIED = 4096  # bytes up to which a copy of a body costs less than a view of it
_DIRECT = 256 << 10  # missing body bytes from which on they are received in place
_AT_ONCE = 16  # pieces of an answer that are written together
_JOIN = 64 << 10  # bytes up to which an answer is sent as one buffer
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def _memory(head: Head, length: int) -> memoryview:
    """Memory for a body: where its model's workers read it, if its tensors are binary."""
    size = head.json_size
    if size is None or not (size.isdecimal() and len(size) < 20) or head.content_encoding:
        return BLOCKS.block(length)
    return memory_for(head.entrance, head.key, length, int(size)) or BLOCKS.block(length)


class BodyReader(asyncio.BufferedProtocol):
    """Replaces a connection's protocol until `place` is full."""

    def __init__(self, connection: "FastProtocol", place: memoryview) -> None:
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

    def __init__(self, connection: "FastProtocol", limit: int, head: Head) -> None:
        # Inlined `Exchange.__init__` and `begin`, to save Python calls per request.
        self.head = head
        self.account = connection.account
        self._engine = head.entrance
        self._limit = limit
        self.found = self._form = self.answer = self.body = self.json = None
        self.id = self._backend = ""
        self.nbytes = self.filled = self._answering = 0
        self._held = self.entered = self._consumed = self._again = self._timed = False
        self.context = NO_CONTEXT
        self.owner = NOBODY
        self.stages = self.held = None
        self.started = self.ended = False
        self.connection = connection
        self.begun = perf_counter() if connection.access_log else 0.0

    def respond_from(self, batch: Computed) -> None:
        """Answer with the call's part of `batch`, in one step if the call is plain."""
        json = self.json
        if json is not None and not (self._timed or self._backend):
            if batch.texts is None:
                calls = len(batch.calls)
                texts = json.write(batch.tensors, calls)
                rests: Sequence[bytes] = ()
                if texts and 1 < calls == batch.rows and not self.connection.access_log:
                    rests = json.encode_each(texts, batch.compute_ns, calls)
                batch.texts = texts, rests
            texts, _ = batch.texts
            if texts:
                if not self.connection.answer(self, json, batch):
                    timing = Timing(batch.started - self.arrived, batch.compute_ns, batch.rows)
                    body = json.encode(self.id, texts, self.first, self.rows)
                    self.end(Answer(200, plain_lines(timing), [body]))
                return
        self.respond(batch.response(self), True)

    @property
    def begun_ns(self) -> int:
        """Arrival of the first byte, in nanoseconds of the monotonic clock.

        0 if all came at once.
        """
        return int(self.connection.begun_reading * 1e9) if self.filled else 0

    def end(self, answer: Answer) -> None:
        """Answer once all earlier requests are answered."""
        self.answer = answer
        self.connection.flush()
        if self.entered:  # earlier requests are not answered yet
            self.account.count(answer.size)
            self.nbytes += answer.size


class FastProtocol(BoundedProtocol):
    """One connection, with infer requests answered in front of the application."""

    def __init__(
        self,
        engine: Entrance,
        heads: Heads,
        max_request_bytes: int,
        access_log: bool,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self.access_log = access_log
        self._answers = self._admission.answers.of("http", INFER)
        self._engine = engine
        self._heads = heads
        self._limit = max_request_bytes
        self._requests: deque[HttpCall] = deque()  # unanswered, in order of arrival
        self._gathering: HttpCall | None = None  # the last of them, if its body is incomplete
        self._skip = 0  # bytes of a body to skip
        self._consuming = False
        self._closing = False
        self._deferring = False  # the last request is still being decoded; later ones wait
        self._unsent: deque[Buffer] | None = None  # written, but not passed to the transport yet
        self._ending = False  # the connection closes when all that is passed on

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent = None
        self.unsent = 0
        self._forget()
        super().connection_lost(exc)

    @property
    def begun_reading(self) -> float:
        """The loop's time when the current, or last, request began to arrive."""
        return self._begun

    @property
    def idle(self) -> bool:
        return not self._requests and not self._unsent and super().idle

    def shutdown(self) -> None:
        if self._requests or self._unsent:
            self._closing = True
            self._ending = not self._requests
        else:
            super().shutdown()

    def retire(self) -> None:
        super().retire()
        self._closing = True

    def resume_writing(self) -> None:
        self._resumed()
        self._pass_on()
        self._go_on()

    def check_time(self, now: float) -> None:
        if (request := self._gathering) is not None:
            if request.answer is None and (fault := self.lateness(now, request.filled)):
                request.end(Answer(408, JSON + CLOSE, [error_body(fault)]))
        elif not self._requests:
            super().check_time(now)

    def end_unfinished(self) -> None:
        request = self._gathering
        if request is None:
            super().end_unfinished()
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
            last = answer.closes or ((self._closing or self._engine.exiting) and not requests)
            self._write(answer, last)
            self._count_out(request, answer.status)
            if last:
                self._forget()  # later requests get no answer
                self._ending = True
                self._pass_on()
                return
        self._touched = self.loop.time()
        if self._held:
            self._go_on()

    def answer(self, request: HttpCall, json: PlainJson, batch: Computed) -> bool:
        """Write the plain answer to the only request in flight, if nothing else is pending."""
        requests = self._requests
        if (
            len(requests) != 1
            or self._closing
            or self.access_log
            or self.flow.write_paused
            or self._admission.exiting
        ):
            return False
        texts, rests = batch.texts
        if rests and not request.id and request.rows == 1:
            rest = rests[request.first]
        else:
            body = json.encode(request.id, texts, request.first, request.rows)
            rest = HTTP_REST % (batch.compute_ns / 1e6, batch.rows, len(body), body)
        requests.popleft()
        request.account.leave(request.nbytes)
        self.transport.write(HTTP_ANSWER % ((batch.started - request.arrived) / 1e6, rest))
        self._answers[200] += 1
        self._touched = self.loop.time()
        if self._held:
            self._go_on()
        return True

    def data_received(self, data: bytes, position: int = 0) -> None:
        """Process received, or held, bytes from `position` on, as far as possible now."""
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if self._held:
            self._held += data  # one piece may still arrive after reading was paused
            return
        self._consuming = True
        known, requests = self._heads.known, self._requests
        cycle: Any = self.cycle  # of the application's last request, if any
        turns, begun = self._admission.turns, 0.0
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
            elif self._in_message or (cycle is not None and self.answering):
                super().data_received(data, position)
                break
            elif len(requests) >= _UNDER_WAY or self.flow.write_paused or self._deferring:
                self._hold(data, position)
                break
            elif left <= 0:
                self._hold(data, position)
                turns.put_off(self._go_on)
                break
            else:
                start = data.find(_END, position, position + HEAD_LIMIT) + 4
                raw = data[position:start] if start > 3 else b""
                head = known.get(raw) or self._heads.read(raw)
                if head is None:
                    if requests:
                        self._hold(data, position)  # earlier answers come first
                    else:
                        super().data_received(data, position)
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
            turns.taken += perf_counter() - begun
        self._consuming = False

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
                request.account.enter(nbytes)
                request.nbytes = nbytes
                request.entered = True
                if (plain := direct.json.decode(body)) is not None:
                    request.json = direct.json
                    request.id, request.inputs, request.rows = plain
                    # Inlined `Call.ask`, to save a Python call per request.
                    request.model_name, request.model_version = head.key
                    request.outputs, request.parameters = (), {}
                    request.priority = request.timeout = request.sequence_id = 0
                    request.sequence_start = request.sequence_end = False
                    request.classes = request.shared = request.raw = None
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
            request.submit(body, self._submitted)
            self._deferring = type(request.owner) is Deferred
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
        except ServerError as error:
            request.end(request.failure(error))
            return position
        if request.body is None:
            request.body = _memory(request.head, length)
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
        assert request is not None, "a body without a request. This is a bug."
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

    def _may_go_on(self) -> bool:
        return not (self._consuming or self._deferring) and super()._may_go_on()

    def _write(self, answer: Answer, last: bool) -> None:
        lines, buffers = answer.lines, answer.buffers
        if last and not answer.closes:
            lines += CLOSE
        size = len(buffers[0]) if len(buffers) == 1 else answer.size
        head = b"%bcontent-length: %d\r\n\r\n" % (_STATUS_LINES[answer.status] + lines, size)
        if size <= _JOIN and not self._unsent:
            self.transport.write(b"".join([head, *buffers]))
        elif len(buffers) <= _AT_ONCE and not self._unsent:
            self.transport.writelines([head, *buffers])
        else:
            # The transport would keep all pieces until the last one is sent. Most connections have
            # none, and an empty deque takes 0.6 KB.
            self._unsent = self._unsent or deque()
            self._unsent += [head, *buffers]
            self.unsent += len(head) + size
            self._pass_on()
        if self.flow.write_paused:
            self._added += len(head) + size
            self.count_waiting()

    def _pass_on(self) -> None:
        """Pass pieces of answers to the transport until it has enough; close after the last one."""
        unsent = self._unsent
        while unsent and not self.flow.write_paused:
            piece = unsent.popleft()
            self.unsent -= len(piece)
            self.transport.write(piece)
        if self._ending and not unsent:
            self.transport.close()

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
        self._answers[status] += 1
        if self.access_log:
            client = self.client[0] if self.client else ""
            log_access(client, "POST", request.head.path, status, request.begun, request.fields())
