"""Calls on a stream: ModelInfer, coroutines, each in a task of its own, and sessions, without one.

A ModelInfer like an earlier one, for a model whose version was found and has checked such a message
before, is queued by `InferRpc` itself: its `__init__`, `take_last` and `respond_from` are its whole
cost in the transport. Any other goes to the `InferenceService`, as on the other transport.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

from headrace.core.call import NO_CONTEXT, Computed
from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.core.turns import TASK_SECS
from headrace.doors.grpc.call import Message, StreamSession, check_call
from headrace.doors.grpc.inference import InferCall, InferenceService
from headrace.doors.grpc.native.connection import SESSION_SIZE, Rpc, RpcHead, UnaryRpc
from headrace.engine.entrance import Direct
from headrace.protocol.grpc import PREFIX, unpack_prefix
from headrace.protocol.parameters import EXACT_TIMING, TIMING, exact_timing, time_of
from headrace.protocol.status import BEGUN, begun_field
from headrace.protocol.v2_protobuf import PlainWriter

T = TypeVar("T")

_CONGESTED = 1 << 20  # bytes queued for the client above which a session must wait

_TASK_UNITS = 8  # of `Turns.share`, for a call that gets a task
_TASK_SIZE = 5 << 10  # bytes of a handler that waits: 32 000 loads of one model took 190 MB


class TaskRpc(UnaryRpc):
    """A unary call whose handler is a coroutine."""

    _task: asyncio.Task[None] | None = None

    def run(self, data: Buffer) -> None:
        """Start the handler."""
        # Without a message, as of health checks, nothing is charged or refused.
        if self.kept or self._charged:
            self.kept += _TASK_SIZE
            self.on_keep()  # charged while the handler runs
        if self.finished:
            return
        context = self._context
        context.admission.turns.expect(context.loop, TASK_SECS)
        self._connection.streams.spent += _TASK_UNITS
        self._task = context.loop.create_task(self._run(data))

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
    """A bidirectional call, and the client's side of it for the session.

    While the session holds, data waits, and the client's window is not replenished, which bounds
    the data.
    """

    _receiving = False  # a message is being passed on

    def __init__(self, head: RpcHead, number: int) -> None:
        super().__init__(head, number)
        self._outbox: list[Callable[[], None]] = []  # mostly empty, and a deque takes 600 bytes
        self._active = self._connection.streams.now  # time of the last sign of activity
        self._used = False  # a message has come
        handler: Any = head.handler
        self._session: StreamSession | None = handler(self)
        self._connection.hold(SESSION_SIZE)

    # --- for the session

    @property
    def congested(self) -> bool:
        """Implements `Peer.congested`."""
        return self.queued >= _CONGESTED or self._packing is not None

    def send(self, message: Message) -> None:
        """Implements `Peer.send`."""
        if self._packing is not None:
            self._outbox.append(partial(self.send, message))
        elif self.finished:
            return
        elif not self.head.packing or not self.pack_later(message, self._send_waiting):
            self.write(message)

    def _send_waiting(self) -> None:
        """Send messages queued behind one that was compressed on a thread."""
        while self._outbox and self._packing is None:
            self._outbox.pop(0)()
        self.on_sent()

    def finish(self, error: ServerError | None = None) -> None:
        """Implements `Peer.finish`."""
        if self._packing is not None:
            self._outbox.append(partial(self.finish, error))
        elif error is None:
            self.close()
        else:
            self.fail(error)

    def hold(self, held: bool) -> None:
        """Implements `Peer.hold`."""
        self._on_hold = held
        if held:
            self.waits = self.keeps_window = True
        elif self._receiving:
            self.waits = self.keeps_window = False
        elif not self._queued:  # else what waits for a turn comes first
            self.go_on()

    # --- for the call

    def message(self, data: Buffer) -> None:
        """Pass a message to the session."""
        if self._session is not None:
            self._pass_on(self._session.receive, data)

    def refused(self, error: ServerError) -> None:
        """Pass the refusal of a message to the session, which may raise it."""
        if self._session is not None:
            self._pass_on(self._session.refuse, error)

    def _pass_on(self, receive: Callable[[T], None], given: T) -> None:
        self._used = True
        self._active = self._connection.streams.now
        self._receiving = True
        try:
            receive(given)
        finally:
            self._receiving = False

    def end(self) -> None:
        """Pass the client's end of stream to the session, after its messages."""
        if self._session is not None:
            self._session.half_close()

    def look(self, now: float) -> bool:
        """End a stream whose client neither sends a request nor waits for an answer."""
        session = self._session
        if not super().look(now) or session is None:
            return False
        if not session.idle or self.waits:
            self._active = now
        elif self._gathering is None:
            secs = self._connection.idle_secs(self._used)
            if now - self._active > secs:
                self.give_up(f"the stream had no request for {secs:g} s")
        return not self.finished

    def abandon(self) -> None:
        """Do nothing: `_settle` calls `closed`, as for every other end."""

    def on_sent(self) -> None:
        """Notify the session that there is room."""
        if self._session is not None and not self.congested:
            try:
                self._session.sent()
            except Exception as error:
                self.guard(error)

    def _settle(self, status: int) -> None:
        super()._settle(status)
        self._outbox.clear()
        self._connection.hold(-SESSION_SIZE)
        session, self._session = self._session, None
        if session is not None:
            session.closed()


class InferRpc(UnaryRpc, InferCall):
    """One ModelInfer call."""

    _direct: Direct | None = None  # for plain calls

    def __init__(self, head: RpcHead, number: int) -> None:
        connection = head.connection
        context = connection.context
        self.started = False  # it may be refused before its message is complete
        if context.access_log or head.timeout is not None:
            Rpc.__init__(self, head, number)
            return
        # Inlined `Rpc.__init__`, to save a Python call per request.
        self.number = number
        self.head = head
        self._begun = perf_counter_ns()
        self._connection = connection
        self._context = context
        self.account = connection.account
        self.expected = head.content_length
        # Class attributes, copied since looking them up takes longer than setting them.
        self.place = self._gathering = self._unpacking = self._data = None
        self._trailing = self._timer = None
        self.remote_closed = self.finished = False

    @property
    def begun_ns(self) -> int:
        """Arrival of the call's headers, in nanoseconds of the monotonic clock."""
        return self._begun

    def take_last(self, view: memoryview, start: int, stop: int) -> bool:
        """Queue the message if the call is plain."""
        begin = start + PREFIX
        if (
            begin > stop
            or self.finished
            or self._gathering is not None
            or self._unpacking is not None
            or self._data is not None
        ):
            return False
        compressed, length = unpack_prefix(view, start)
        if compressed or begin + length != stop or length > self._context.max_message:
            return False
        self.remote_closed = True
        service: Any = self.head.handler
        data = view[begin:stop].tobytes()
        try:
            plain = service.gate.pattern is None and service.engine.known
            template = service.reader.fill(self, data) if plain else None
            if template is None or not self._submit(service, template, length):
                service(data, self)
        except Exception as error:
            self.guard(error)
        return True

    @property
    def named_client(self) -> str:
        """Implements `MessageCall.named_client`."""
        return self.head.client

    def memory(self, length: int, first: memoryview) -> memoryview:
        """Memory for the message: where its model's workers read it, if it is like earlier ones."""
        service: Any = self.head.handler
        return service.memory(length, first) or super().memory(length, first)

    def run(self, data: Buffer) -> None:
        """Pass the message to the service."""
        if self._charged:
            self.release(self._charged)  # the service charges it
        service: Any = self.head.handler
        service(data, self)

    def _submit(self, service: InferenceService, template: object, nbytes: int) -> bool:
        """Queue the call if its version knows matching calls; raises `ServerError`."""
        key = self.model_name, self.model_version
        found = service.engine.known.get(key)
        if found is None or not found.ready:
            return False
        self.context = context = self.head.context
        if context is not NO_CONTEXT:
            check_call(service.gate, self, context.identity, *key)
        direct = found.direct
        if direct is None or (rows := direct.known.get(template)) is None:
            return False
        if limited := self._context.admission.clients is not None:
            named = self.head.client
            self.account = self.account.of(context.identity, self.model_name, named)
        self.account.enter(nbytes)
        self.nbytes = nbytes
        self.entered = True
        if limited:
            self.account.take_rows(rows)
        self.noted = self.model_name, found.name, self.id
        self._direct, self.service = direct, service
        self.rows = rows
        direct.submit(self)
        return True

    def respond_from(self, batch: Computed) -> None:
        """Send the call's part of `batch`."""
        direct = self._direct
        if direct is None:
            super().respond_from(batch)
            return
        self.account.leave(self.nbytes)
        self.entered = False
        writer = direct.codecs.get(PlainWriter) or direct.codec(PlainWriter)
        message = writer.pieces(batch, self)
        if message is None:
            message = self.service.writer.pieces(batch.response(self))
        timing = batch.started - self.arrived, batch.compute_ns, batch.rows
        self.answer(message, EXACT_TIMING % timing)

    def answer(self, message: Message, timing: bytes) -> None:
        """Send the answer, in one step if it is plain and fits."""
        if self.finished:
            return
        head, connection = self.head, self._connection
        if (
            self._trailing is not None
            or head.packing
            or not connection.http2.answer(self, message, timing)
        ):
            try:
                self.account.check_answer(self.model_name, sum(map(len, message)))
            except ServerError as error:
                self.fail(error)
                return
            self.inputs = {}  # no longer needed, and the answer may wait long for its client
            self.set_trailing(TIMING, timing.decode())
            if not self.pack_later(message, self.close):
                self.write(message)
                self.close()
            return
        if self._timer is None and not self._context.access_log:  # inlined `_settle`
            self.finished = True
            answers = head.answers  # inlined `AnswerCounters.answered`
            answers[0] += 1
            took = perf_counter_ns() - self._begun
            answers.good.counts[bisect_left(answers.good.bounds, took)] += 1
            answers.good.total_ns += took
        else:
            self._settle(0)
        if not connection.streams.open:
            connection.flush()
        elif not connection.sender.awake:
            connection.sender.rouse()  # other answers may follow in the same turn of the loop

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.leave()
        self.set_trailing(TIMING, exact_timing(time_of(error)).decode())
        if begun := begun_field(self, error):
            self.set_trailing(BEGUN, begun)
        super().fail(error)

    def guard(self, error: Exception) -> None:
        """End the call with an exception raised by a handler."""
        self.leave()
        super().guard(error)

    def abandon(self) -> None:
        """Cancel the request."""
        if self.entered:
            self.cancel()
