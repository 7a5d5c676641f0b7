"""ModelInfer and ModelStreamInfer, from message bytes to message bytes.

ModelStreamInfer is a bidirectional stream with requests for any models. They are submitted as they
arrive and execute concurrently. Responses of ordinary models are written in the order of their
requests; those of decoupled models as they come. An error does not end the stream: it is a separate
message, unless the client asked for real statuses with the metadata `triton_grpc_error: true`. When
the server shuts down, the stream ends once all its requests are answered.

What a slow reader can pile up is bounded: by the number of requests in flight, and for decoupled
models by pausing requests whose messages are queued here. A request that goes on nevertheless is
ended eventually.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns

from headrace.api.gate import Gate
from headrace.core.call import Call, InferResponse, Parameter, context_of
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ServerError,
    ServerExiting,
    Unsupported,
)
from headrace.core.identity import Identity, PeerFacts
from headrace.core.limits import Payer
from headrace.core.tensors import Buffer, Tensor
from headrace.core.turns import SMALL
from headrace.doors.grpc.call import Message, Noted, Open, Peer, StreamSession, check_call
from headrace.engine.admission import Account, AccountedCall
from headrace.engine.entrance import (
    GIVE_UP_BYTES,
    GRPC_NOT_DECOUPLED,
    PAUSE_BYTES,
    Entrance,
    Target,
    memory_for,
    not_read,
)
from headrace.engine.workbench import Deferred
from headrace.observability.statistics import INFER
from headrace.protocol.compression import check_size
from headrace.protocol.grpc import CANCELLED, UNAVAILABLE
from headrace.protocol.parameters import add_timing, exact_timing, wants_timing
from headrace.protocol.status import BEGUN_PARAMETER, INTERNAL_TEXT, STATUS
from headrace.protocol.v2_protobuf import (
    InferMessage,
    InferReader,
    InferWriter,
    first_model,
    stream_message,
    stream_response,
)

BACKEND_METADATA = "headrace-backend"  # the backend that has answered, for a model with several


class MessageCall(AccountedCall):
    """A call made from a ModelInferRequest, unary or on a stream."""

    door = "GRPC"
    timed = False  # true if timings are requested among the parameters
    account: Account  # the connection's, until the client and the model are known

    @property
    def named_client(self) -> str:
        """The client's address in the words of a trusted proxy; "" for none."""
        return ""

    def charge_client(self, connection: Account, model: str, nbytes: int) -> None:
        """Charge the request to its client's account for a model; raises `ServerError`."""
        self.account = connection.of(self.context.identity, model, self.named_client)
        self.account.enter(nbytes)

    def decoded(self, message: InferMessage) -> None:
        """Called once the call has been filled from the message."""

    def submit(
        self,
        engine: Entrance,
        message: InferMessage,
        target: Target,
        told: Mapping[str, str],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Decode the message, on a thread if that takes long, and submit the call.

        `told` are parameters made from metadata. `after` is called once a thread has finished.
        """

        def submit(asked: Call) -> None:
            self.take(asked)
            self.decoded(message)
            if self.parameters:
                self.timed = wants_timing(self)
            self.parameters.update(told)
            found = target
            if message.long:  # find the model again: it may have been replaced
                found = engine.find(message.model_name, message.model_version)
                self.routed(found)
            found.submit(self)

        nbytes, signature, admission = self.nbytes, target.signature, engine.admission
        if message.long:
            self.charge(message.parsed)
            most = admission.max_object_bytes
            Deferred(
                admission.workbench, nbytes,
                lambda charge: message.request_long(nbytes, signature, charge, most), submit, self,
                self.charge, after,
            )  # fmt: skip
        else:
            submit(message.request(nbytes))


class InferCall(MessageCall):
    """One ModelInfer call; each transport derives its context and reply from it."""

    refusal = GRPC_NOT_DECOUPLED

    noted: Noted | None  # for the access log
    service: "InferenceService"
    entered = False  # true once it is charged to the account, with `nbytes`
    named = True  # the serving version is known before the answer

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        return self.account

    # --- for the transport

    @property
    def identity(self) -> Identity:
        raise NotImplementedError

    @property
    def peer_facts(self) -> PeerFacts:
        raise NotImplementedError

    def identify(self) -> Identity:
        raise NotImplementedError

    def metadata(self) -> Mapping[str, str]:
        raise NotImplementedError

    def set_trailing(self, name: str, value: str) -> None:
        raise NotImplementedError

    def answer(self, message: Message, timing: bytes) -> None:
        """Answer with a message, status OK, and `timing` as `server-timing`."""
        raise NotImplementedError

    # --- for the service

    def leave(self) -> None:
        """Release the request's charge, if any."""
        if self.entered:
            self.entered = False
            self.account.leave(self.nbytes)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Encode and send a response."""
        self.leave()
        if self.timed:
            add_timing(response)
        if not self.named:
            self.noted = response.model_name, response.model_version, response.id
        message = self.service.writer.pieces(response)
        try:
            self.account.check_answer(response.model_name, sum(map(len, message)))
        except ServerError as error:
            self.fail(error)
        else:
            self.answer(message, exact_timing(response.timing))

    def header(self, name: str) -> str:
        """A metadata value by lower-case name; "" if there is none."""
        return self.metadata().get(name, "")

    def routed(self, target: Target) -> None:
        """Note the target that serves the request."""
        self.noted = target.model, target.name, self.id

    def answered_by(self, backend: str) -> None:
        """Report the backend in the metadata."""
        self.set_trailing(BACKEND_METADATA, backend)

    def cancel(self) -> None:
        """Cancel the call: the client no longer waits."""
        super().cancel()
        self.leave()


class InferenceService:
    """ModelInfer; the streaming form is in `headrace.doors.grpc.inference`."""

    def __init__(self, engine: Entrance, max_request_bytes: int, gate: Gate | None = None) -> None:
        """The `gate` selects metadata that is forwarded to models."""
        self.writer = InferWriter()
        self.reader = InferReader()
        self.engine = engine
        self.gate = gate or Gate()
        self._limit = max_request_bytes

    def memory(self, length: int, first: memoryview) -> memoryview | None:
        """Memory for a message of `length` bytes that begins with `first`; None: any will do."""
        like = self.reader.like(length, first)
        if like is None:
            return None
        key, begin = like
        return memory_for(self.engine, key, length, begin)

    def __call__(self, data: Buffer, call: InferCall) -> None:
        """Answer ModelInfer; raises `ServerError`, after which the caller must `leave` the call."""
        nbytes = check_size(data, self._limit)
        call.begin()
        call.context = context_of(call.identity)
        connection, name = call.account, first_model(data)
        call.charge_client(connection, name, nbytes)
        call.entered, call.nbytes, call.service = True, nbytes, self
        asked = self.reader.read(data)
        if asked.model_name != name:
            call.leave()
            call.charge_client(connection, asked.model_name, nbytes)
            call.entered = True
        identity = call.context.identity
        check_call(self.gate, call, identity, asked.model_name, asked.model_version)
        found = self.engine.find(asked.model_name, asked.model_version)
        if found.decoupled:
            raise Unsupported(GRPC_NOT_DECOUPLED)
        call.noted = found.model, found.name, asked.id
        told: Mapping[str, str] = {}
        if (pattern := self.gate.pattern) is not None:
            told = pattern.parameters(call.metadata().items())
        # In a front end, or with traffic rules, the answer names the version.
        call.named = bool(found.name)
        call.submit(self.engine, asked, found, told)
        alike, direct = asked.alike, found.direct
        if alike and direct:
            direct.remember(alike, call.rows)


log = logging.getLogger(__name__)

FINAL_PARAMETER = "triton_final_response"
_MAX_IN_FLIGHT = 1024
_MESSAGE_SIZE = 640  # bytes of a queued message beside its own, most of them of its request
# Messages of a request, or fewer, are in a list: a deque takes a block of 600 bytes.
_FEW = 32
_NO_INPUTS: dict[str, Tensor] = {}  # of all refused requests; a dict of each is 64 bytes or more
_NO_PARAMETERS: dict[str, Parameter] = {}
_PAUSE_ALL_BYTES = 8 << 20  # queued in a stream above which all its requests are held


class StreamedCall(MessageCall):
    """One request of a stream, and its messages that are not written yet.

    `empty_final` has the model and version of the request, if it asked for an empty final response.
    """

    __slots__ = (
        "account", "answered", "charged_model", "empty_final", "error", "executing", "found",
        "messages", "ordered", "paused", "ready", "since", "stream", "waiting",
    )  # fmt: skip

    def __init__(self, stream: "StreamInfer") -> None:
        super().__init__("", "", "", {})
        self.stream = stream
        self.account = stream.account
        self.charged_model = ""  # by whose name the message was charged when it came
        self.found: Target | None = None
        self.empty_final: tuple[str, str] | None = None
        self.ordered = True
        self.answered = False  # no further messages follow the queued ones
        self.executing = False  # charged by admission, and submitted
        self.ready = False  # scheduled to write
        self.paused = False  # the model was asked to pause
        self.waiting = 0  # bytes of queued messages
        self.messages: list[Message] | deque[Message] = []  # many are a deque
        self.error: ServerError | None = None
        self.since = perf_counter_ns()

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        return self.account

    @property
    def named_client(self) -> str:
        """Implements `MessageCall.named_client`."""
        return self.stream.named_client

    def charge(self, nbytes: int) -> None:
        """Charge the decoded message; raises `Overloaded`."""
        self.stream.count_more(self, nbytes)
        self.nbytes += nbytes

    def decoded(self, message: InferMessage) -> None:
        """Note whether the client wants an empty final response."""
        if message.empty_final:
            self.empty_final = message.model_name, message.model_version

    def respond(self, response: InferResponse, final: bool) -> None:
        """Queue a response."""
        if self.timed:
            add_timing(response)
        response.parameters[FINAL_PARAMETER] = final
        message = stream_response(self.stream.writer.pieces(response))
        try:
            self.stream.check(response.model_name, message)
        except ServerError as error:
            if not (final or self.answered):
                self.cancel()
            self.fail(error)
        else:
            self._add(message, final)

    def finish(self) -> None:
        """Queue the end, which has no response."""
        if self.empty_final is not None:
            parameters = {FINAL_PARAMETER: True}
            message = stream_message("", self.id, *self.empty_final, parameters)
            self._add([message], True)
        elif not self.answered:
            self.stream.end(self)
            self.stream.came(self, None)

    def fail(self, error: ServerError) -> None:
        """Queue the error that ends the request."""
        found = self.found if self.executing else None
        names = ("", "") if found is None else (found.model, found.name)
        parameters = {} if found is None else {FINAL_PARAMETER: True}
        if STATUS[type(error)].grpc == UNAVAILABLE:
            parameters[BEGUN_PARAMETER] = self.started
        if not self.answered:
            self.error = error.without_frames()
        self._add([stream_message(str(error), self.id, *names, parameters)], True)

    def refuse(self, error: ServerError) -> None:
        """Queue the error that refused the request."""
        self.stream.count_out(self)
        # Nothing reads them, and the error may have to wait: a thousand do in each stream.
        self.inputs, self.parameters = _NO_INPUTS, _NO_PARAMETERS
        self.fail(error)

    def header(self, name: str) -> str:
        """A metadata value by lower-case name; "" if there is none."""
        return self.stream.metadata().get(name, "")

    def remaining(self) -> float:
        """Implements `RpcContext.remaining`."""
        return self.stream.remaining()

    def routed(self, target: Target) -> None:
        """Note the target that serves the request."""
        self.found = target

    def _add(self, message: Message, final: bool) -> None:
        if self.answered:
            return  # an error has ended it before its model did
        if final:
            self.stream.end(self)
        self.stream.came(self, message)


class StreamInfer(StreamSession):
    """One stream.

    Requests are in `_ordered`, in order of arrival, or in `_unordered`, until all their messages
    are written. `_ready` are those that may write now, each once: they take turns, message by
    message. `_kept` counts all queued bytes, `_charged` the part charged to the account, which
    covers messages that could not be written at once.
    """

    def __init__(
        self,
        engine: Entrance,
        limit: int,
        reader: InferReader,
        writer: InferWriter,
        peer: Peer,
        give_up_bytes: int,
        gate: Gate,
    ) -> None:
        self._gate = gate
        self._changes = gate.changes  # when the client was identified
        self._identity = peer.identity
        self._told: Mapping[str, str] = {}  # parameters for models, from metadata
        self._fault = ""  # reason for refusing every request
        if (pattern := gate.pattern) is not None:
            try:
                self._told = pattern.parameters(peer.metadata().items())
            except InvalidRequest as error:
                self._fault = str(error)
        self.writer = writer
        self._engine = engine
        self._limit = limit
        self._reader = reader
        self._peer = peer
        self._account = peer.account
        self.named_client = peer.account.named(peer.metadata())
        identity = peer.identity.kind
        self._answers = engine.admission.answers.of("grpc", INFER, identity=identity)
        self._give_up_bytes = give_up_bytes
        self.metadata = peer.metadata
        self.remaining = peer.remaining
        self._real_errors = peer.metadata().get("triton_grpc_error") == "true"
        # Lists: of at most `_MAX_IN_FLIGHT`, mostly few, and a deque takes a block of 600 bytes.
        self._ordered: list[StreamedCall] = []
        self._unordered: set[StreamedCall] = set()
        self._ready: list[StreamedCall] = []
        self._drained: list[StreamedCall] = []  # held slots whose messages are all written
        self._kept = self._charged = 0
        self._half_closed = False
        self._holding = False
        self._over = False
        self._writing = False
        self._deferring = False  # a request is being decoded; later ones are `_behind`
        self._behind: list[tuple[StreamedCall, Buffer]] = []
        engine.admission.watch_close(self.write)

    @property
    def account(self) -> Account:
        """The connection's account."""
        return self._account

    @property
    def idle(self) -> bool:
        """Implements `StreamSession.idle`."""
        return not self._under_way

    @property
    def _under_way(self) -> int:
        return len(self._ordered) + len(self._unordered)

    # --- from the client

    def receive(self, message: Buffer) -> None:
        """Submit a request, after those before it."""
        slot = StreamedCall(self)
        self._ordered.append(slot)
        if self._enter(slot, message):
            if self._deferring:
                self._behind.append((slot, message))
            else:
                self._submit(slot, message)
        self._hold_if_full()

    def refuse(self, error: ServerError) -> None:
        """Answer a request that was refused before its end, after those before it."""
        slot = StreamedCall(self)
        self._ordered.append(slot)
        slot.refuse(error)
        self._hold_if_full()

    def _hold_if_full(self) -> None:
        if self._under_way >= _MAX_IN_FLIGHT and not self._over:
            self._holding = True
            self._peer.hold(True)

    def half_close(self) -> None:
        """End the stream once everything is answered."""
        self._half_closed = True
        self.write()

    def sent(self) -> None:
        """Resume writing."""
        self.write()
        self._charge()

    def closed(self) -> None:
        """Cancel requests still in flight."""
        self._over = True
        self._kept = 0
        self._charge()
        self._engine.admission.unwatch_close(self.write)
        slots = [*self._ordered, *self._unordered]
        self._ordered.clear()
        self._unordered.clear()
        self._ready.clear()
        self._behind.clear()
        self._cancel_some(slots, SMALL)  # many streams may end in this turn

    def _cancel_some(self, slots: list[StreamedCall], most: int) -> None:
        """Cancel some requests now, and the others in turns of the loop."""
        turns = self._engine.admission.turns
        for slot in slots[:most]:
            if not slot.answered:
                self._answers.answered(CANCELLED, perf_counter_ns() - slot.since)
            if slot.executing:
                slot.account.leave(slot.nbytes)
                if not slot.answered:
                    slot.cancel()
        if later := slots[most:]:
            turns.put_off(lambda: self._cancel_some(later, turns.share))

    # --- from the engine

    def count_out(self, slot: StreamedCall) -> None:
        """Release the charge of a request that has ended."""
        if slot.executing:
            slot.executing = False
            slot.account.leave(slot.nbytes)

    def count_more(self, slot: StreamedCall, nbytes: int) -> None:
        """Charge further bytes of a request; raises `Overloaded`."""
        slot.account.grow(nbytes, slot.nbytes)

    def check(self, model: str, message: Message) -> None:
        """Raise `ServerError` for a response that is too large."""
        self._account.check_answer(model, sum(map(len, message)))

    def end(self, slot: StreamedCall) -> None:
        """Mark a request as answered; at most one message follows."""
        slot.answered = True
        status = 0 if slot.error is None else STATUS[type(slot.error)].grpc
        self._answers.answered(status, perf_counter_ns() - slot.since)

    def came(self, slot: StreamedCall, message: Message | None) -> None:
        """Queue a message of a request, or only its end."""
        if self._over:
            return
        if slot.ordered and slot.found is not None and slot.found.decoupled:
            self._ordered.remove(slot)
            self._leave_order(slot)
            self._offer_first()  # the first request may have changed
        if message is not None:
            self._keep(slot, message)
        if slot.ordered:
            self._offer_first()
        else:
            self._offer(slot)
        self.write()
        self._charge()
        if slot.waiting and not (slot.ordered or slot.answered or self._over):
            self._restrain(slot)

    def _keep(self, slot: StreamedCall, message: Message) -> None:
        if len(slot.messages) == _FEW:
            slot.messages = deque(slot.messages)
        slot.messages.append(message)
        nbytes = sum(map(len, message)) + _MESSAGE_SIZE
        slot.waiting += nbytes
        self._kept += nbytes

    def write(self) -> None:
        """Write what may be written now, and end the stream if due."""
        if self._writing or self._over:
            return
        self._writing = True
        try:
            ready, peer = self._ready, self._peer
            while ready and not peer.congested and self._write_one(ready.pop(0)):
                pass
        finally:
            self._writing = False
        drained, self._drained = self._drained, []
        for slot in drained:
            slot.paused = False
            if not slot.answered:
                slot.hold(False)
        self._go_on()

    def _charge(self) -> None:
        """Charge the queued bytes."""
        if change := self._kept - self._charged:
            self._charged = self._kept
            self._account.count(change)

    def _go_on(self) -> None:
        """End the stream if due, or resume receiving."""
        if self._over:
            return
        under_way = self._under_way
        if not under_way and self._half_closed:
            self._finish(None)
        elif not under_way and self._engine.exiting:
            self._finish(ServerExiting("Server exiting"))
        elif self._holding and under_way < _MAX_IN_FLIGHT // 2:
            self._holding = False
            self._peer.hold(False)

    def _finish(self, error: ServerError | None) -> None:
        """Stop writing; `closed` deals with the rest."""
        self._over = True
        self._peer.finish(error)

    # --- scheduling of writes

    def _offer(self, slot: StreamedCall) -> None:
        """Schedule a request that may write and has messages."""
        if not slot.ready and (slot.messages or slot.answered):
            slot.ready = True
            self._ready.append(slot)

    def _offer_first(self) -> None:
        """Schedule the first of the ordered requests."""
        ordered = self._ordered
        while ordered:
            slot = ordered[0]
            # In a front end this may have been unknown when the request was sent.
            if slot.found is None or not slot.found.decoupled:
                self._offer(slot)
                return
            self._leave_order(ordered.pop(0))

    def _leave_order(self, slot: StreamedCall) -> None:
        """Move a request out of the ordered ones, so that it can be answered at any time."""
        slot.ordered = False
        self._unordered.add(slot)
        self._offer(slot)

    def _write_one(self, slot: StreamedCall) -> bool:
        """Write one message of a request, or its end; returns True to go on."""
        slot.ready = False
        messages = slot.messages
        if messages:
            if (
                self._real_errors
                and slot.error is not None
                and slot.executing
                and len(messages) == 1  # messages before the error are still valid
            ):
                self._finish(slot.error)
                return False
            message = messages[0]
            del messages[0]
            nbytes = sum(map(len, message)) + _MESSAGE_SIZE
            slot.waiting -= nbytes
            self._kept -= nbytes
            self._peer.send(message)
        if messages:
            self._offer(slot)
        elif slot.answered:
            self._answered(slot)
        elif slot.paused:
            self._drained.append(slot)
        return True

    def _answered(self, slot: StreamedCall) -> None:
        """Remove a request whose messages are all written."""
        self.count_out(slot)
        if slot.ordered:
            self._ordered.pop(0)
            self._offer_first()
        else:
            self._unordered.discard(slot)

    def _restrain(self, slot: StreamedCall) -> None:
        """Bound the queue after a new message: hold the request, or end one."""
        if not slot.paused:
            if slot.waiting > PAUSE_BYTES or self._waits_beyond(_PAUSE_ALL_BYTES):
                slot.paused = True
                slot.hold(True)
        elif self._waits_beyond(self._give_up_bytes):
            self._give_up()

    def _waits_beyond(self, limit: int) -> bool:
        """True if more is queued for requests that are still answered, the only ones that grow."""
        # The sum takes long with many requests, and this is called for every message.
        return self._kept > limit and limit < sum(
            slot.waiting for slot in self._unordered if not slot.answered
        )

    def _give_up(self) -> None:
        """End the request with the most queued bytes: its model has not paused when asked."""
        held = [slot for slot in self._unordered if slot.paused and not slot.answered]
        slot = max(held, key=lambda slot: slot.waiting)
        slot.cancel()
        self._kept -= slot.waiting
        slot.waiting = 0
        slot.messages.clear()
        slot.fail(not_read())

    def _enter(self, slot: StreamedCall, data: Buffer) -> bool:
        """Charge a request; returns False if it is refused."""
        try:
            nbytes = check_size(data, self._limit)
            slot.context = context_of(self._client())
            slot.charged_model = first_model(data)
            slot.charge_client(self._account, slot.charged_model, nbytes)
        except ServerError as error:
            slot.refuse(error)
            return False
        slot.nbytes = nbytes
        slot.executing = True
        return True

    def _client(self) -> Identity:
        """The client, who may have changed; raises `ServerError`."""
        if self._changes != self._gate.changes:
            self._identity, self._changes = self._peer.identify(), self._gate.changes
        return self._identity

    def _submit(self, slot: StreamedCall, data: Buffer) -> None:
        try:
            message = self._reader.read(data)
            slot.id = message.id
            if message.model_name != slot.charged_model:
                self.count_out(slot)
                slot.charge_client(self._account, message.model_name, slot.nbytes)
                slot.executing = True
            if self._fault:
                raise InvalidRequest(self._fault)
            names = message.model_name, message.model_version
            check_call(self._gate, self._peer, self._client(), *names)
            slot.found = found = self._engine.find(*names)
            if found.decoupled:
                self._ordered.remove(slot)
                self._leave_order(slot)
            slot.submit(self._engine, message, found, self._told, self._submit_behind)
            self._deferring = message.long  # until `_submit_behind`, in a later turn
        except ServerError as error:
            slot.refuse(error)

    def _submit_behind(self) -> None:
        self._deferring = False
        while self._behind and not (self._deferring or self._over):
            slot, data = self._behind.pop(0)
            try:
                self._submit(slot, data)
            except Exception:
                log.exception("bug in a request of a stream")
                slot.refuse(ExecutionFailed(INTERNAL_TEXT))


def stream_opener(
    engine: Entrance,
    max_request_bytes: int,
    give_up_bytes: int = GIVE_UP_BYTES,
    gate: Gate | None = None,
) -> Open:
    """Create a factory of ModelStreamInfer sessions.

    A held request is ended once more than `give_up_bytes` are queued in its stream. The
    `gate` selects metadata that is forwarded to models.
    """
    reader, writer, passed = InferReader(), InferWriter(), gate or Gate()

    def open_stream(peer: Peer) -> StreamSession:
        return StreamInfer(engine, max_request_bytes, reader, writer, peer, give_up_bytes, passed)

    return open_stream
