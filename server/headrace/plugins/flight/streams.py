"""Tables through a model: record batches in, record batches out, in order.

Each batch is a call, charged to its connection until it is computed; its answer is charged until it
is written. A few are in flight at a time: beyond them, and while the client does not read, nothing
is received, which HTTP/2 passes on to the client. The first error ends the stream, after the
answers before it.

DoPut leaves the answers in a `Parcel`, which one DoGet takes. Owned by the event-loop thread.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from headrace.api.gate import Gate
from headrace.core.call import Call, CallOptions, InferResponse, context_of
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelNotReady,
    NotFound,
    PayloadTooLarge,
    ServerError,
    ServerExiting,
)
from headrace.core.identity import Identity
from headrace.core.limits import Charge, Payer, uncharged
from headrace.core.signature import Signature
from headrace.doors.door import DoorCall
from headrace.doors.grpc.call import Message, Peer, StreamSession, check_call
from headrace.engine.admission import Account
from headrace.engine.entrance import Entrance
from headrace.engine.workbench import LARGE, Deferred, Job
from headrace.plugins.flight.wire import (
    data_of,
    put_result,
    read_data,
    read_descriptor,
    read_ticket,
)
from headrace.protocol.arrow import batch_of, described, needs_rows, schema_of, tensors_of
from headrace.protocol.arrow_ipc import BATCH, BatchReader, limited, outline
from headrace.protocol.compression import too_large
from headrace.protocol.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

_MOST_CALLS = 8  # in flight in a stream
_HEAD_BYTES = 1 << 20  # of a message, which is parsed on the event loop
_KEPT_SECS = 60.0  # that the answers of DoPut wait for their DoGet, or for its next read
_SEVERAL = "Flight does not support models with decoupled transaction policy"


def target_signature(engine: Entrance, name: str, version: str) -> Signature:
    """The signature of a model that takes tables; raises `ServerError`."""
    found = engine.find(name, version)
    if found.decoupled:
        raise InvalidRequest(_SEVERAL)
    if (signature := found.signature) is None:
        raise ModelNotReady(f"model '{name}' is not loaded yet, but by its first V2 request")
    needs_rows(signature)
    return signature


def output_schema(signature: Signature) -> Any:
    """The schema of a model's answers; its metadata has that of its inputs, serialised."""
    inputs = schema_of(described(signature.inputs)).serialize().to_pybytes()
    return schema_of(described(signature.outputs), {"inputs": inputs})


class Sink(Protocol):
    """The receiver of a stream's answers."""

    @property
    def congested(self) -> bool:
        """True if it takes no message now."""

    def send(self, message: Message) -> None:
        """Take a message; raises `ServerError`."""

    def finish(self, error: ServerError | None = None) -> None:
        """End, with status OK or an error."""


class BatchCall(DoorCall):
    """One record batch, and its answer."""

    door = "FLIGHT"
    refusal = _SEVERAL

    def __init__(self, stream: "TableStream", *charged: Any) -> None:
        super().__init__(*charged)
        self.stream = stream
        self.named = stream.named
        self.message: Message | None = None
        self.error: ServerError | None = None
        self.size = 0  # bytes of the answer
        self._job: Job[Message] | None = None

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        return self.account

    def header(self, name: str) -> str:
        """Implements `Call.header`."""
        return self.stream.peer.metadata().get(name, "")

    def remaining(self) -> float:
        """Implements `Call.remaining`."""
        return self.stream.peer.remaining()

    def admit(self, identity: Identity, model: str, nbytes: int) -> None:
        """Charge the batch of a client to a model; raises `ServerError`."""
        self.context = context_of(identity)
        self.account = self.account.of(identity, model, self.named)
        self.account.enter(nbytes)
        self.nbytes, self._entered = nbytes, True

    def charge(self, nbytes: int) -> None:
        """Charge what the batch takes once it is decoded; raises `Overloaded`."""
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes

    def write(self, response: InferResponse) -> None:
        """Encode the answer, on a thread if it is large; raises `ServerError`."""
        self.inputs = {}
        nbytes, schema = response.nbytes, self.stream.schema
        self.account.check_answer(response.model_name, nbytes)
        self.size = nbytes
        self.account.count(nbytes)
        if nbytes > LARGE:
            bench = self.account.server.workbench
            self._job = bench.do(
                nbytes, lambda charge: _encoded(response, schema), self._take, uncharged, self.payer
            )
        else:
            self._take(_encoded(response, schema), None)

    def write_error(self, error: ServerError) -> None:
        """Note the error, in the answer's place."""
        if self.error is None:
            self.error = error.without_frames()
        self.stream.flush()

    def drop(self) -> None:
        """Give the call and its answer up, and release what they hold."""
        self.leave()
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self.release()

    def release(self) -> None:
        """Release the answer's charge: the transport charges the message, once it is written."""
        self.account.count(-self.size)
        self.size = 0

    def _take(self, message: Message | None, problem: Exception | None) -> None:
        self._job = None
        self.message = message
        if isinstance(problem, ServerError):
            self.error = problem
        elif problem is not None:
            log.error("bug while an answer was encoded", exc_info=problem)
            self.error = ExecutionFailed(INTERNAL_TEXT)
        self.stream.flush()


def _encoded(response: InferResponse, schema: Any) -> Message:
    return data_of(batch_of(response.outputs, schema).serialize())


class TableStream(StreamSession):
    """DoExchange, or DoPut if it is given parcels.

    `_slots` are the batches without a written answer, in order; `_behind` those of them, and
    dictionaries, that wait until one before them is decoded: a reader takes one at a time.
    """

    def __init__(self, engine: Entrance, gate: Gate, parcels: "Parcels | None", peer: Peer) -> None:
        self.peer = peer
        self._gate = gate
        self.schema: Any = None  # of the answers, once the model is known
        self._engine = engine
        self._parcels = parcels
        self._sink: Sink = peer
        self._account = peer.account
        self.named = peer.account.named(peer.metadata())  # as in `DoorCall`
        self._answers = engine.admission.answers.of("flight", "infer")
        self._model = ("", "")
        self._reader = BatchReader()
        self._kept = 0  # bytes of dictionaries that are charged
        self._slots: deque[BatchCall] = deque()
        self._behind: deque[tuple[Any, Any, BatchCall | None]] = deque()
        self._deferring = self._half_closed = self._holding = self._over = False
        engine.admission.watch_close(self.flush)

    @property
    def idle(self) -> bool:
        """Implements `StreamSession.idle`."""
        return not self._slots

    def receive(self, message: Any) -> None:
        """Take the schema, a dictionary or a batch; raises `ServerError`."""
        data = read_data(message)
        if len(data.descriptor):
            if self.schema is not None:
                raise InvalidRequest("the descriptor comes with the first message of a stream")
            self._model = read_descriptor(data.descriptor)
        if not len(data.head):
            return  # metadata of the application
        if len(data.head) > _HEAD_BYTES:
            raise InvalidRequest(f"the head of an Arrow message has more than {_HEAD_BYTES} bytes")
        if self.schema is None:
            self._begin(data.head, data.body)
            return
        slot, limit = None, self._engine.admission.max_request_bytes
        kind, _, size = outline(data.head, data.body)
        if size > limit:
            raise PayloadTooLarge(too_large("decompressed Arrow message", limit, size))
        if kind == BATCH:
            slot = BatchCall(self, self._account, self._answers, self._gate)
            self._slots.append(slot)
            try:
                slot.admit(self.peer.identify(), self._model[0], len(message))
            except ServerError as error:
                slot.fail(error)
                return
        self._behind.append((data.head, data.body, slot))
        self._decode_next()
        if len(self._slots) >= _MOST_CALLS and not self._over:
            self._holding = True
            self.peer.hold(True)

    def half_close(self) -> None:
        """End once everything is answered."""
        if self.schema is None:
            raise InvalidRequest("the stream has no schema")
        self._half_closed = True
        self.flush()

    def sent(self) -> None:
        """Implements `StreamSession.sent`."""
        self.flush()

    def closed(self) -> None:
        """Cancel what is in flight."""
        self._over = True
        self._engine.admission.unwatch_close(self.flush)
        self._account.count(-self._kept)
        self._kept = 0
        self._behind.clear()
        slots, self._slots = self._slots, deque()
        for slot in slots:
            slot.drop()
        if self._sink is not self.peer:
            self._sink.finish(InvalidRequest("the DoPut of these answers was not completed"))

    def flush(self) -> None:
        """Write the answers that are ready, in order; then receive more, or end."""
        if self._over:
            return
        slots, sink = self._slots, self._sink
        try:
            while slots and not sink.congested:
                slot = slots[0]
                if slot.error is not None:
                    raise slot.error
                if (message := slot.message) is None:
                    break
                slots.popleft().release()
                sink.send(message)
        except ServerError as error:
            self._finish(error)
            return
        if not slots and self._half_closed:
            self._finish(None)
        elif not slots and self._engine.exiting:
            self._finish(ServerExiting("Server exiting"))
        elif self._holding and len(slots) < _MOST_CALLS // 2:
            self._holding = False
            self.peer.hold(False)

    def _finish(self, error: ServerError | None) -> None:
        self._over = True
        if self._sink is not self.peer:
            self._sink.finish(error)
            self._sink = self.peer
        self.peer.finish(error)

    def _begin(self, head: Any, body: Any) -> None:
        """Take the schema of the client, and send that of the answers."""
        name, version = self._model
        if not name:
            raise InvalidRequest("the first message of a stream needs a descriptor of the model")
        check_call(self._gate, self.peer, self.peer.identify(), name, version)
        signature = target_signature(self._engine, name, version)
        self._reader.read(head, body)
        self.schema = output_schema(signature)
        if self._parcels is not None:
            ticket, self._sink = self._parcels.open(self._account)
            self.peer.send(put_result(ticket))
        self._sink.send(data_of(self.schema.serialize()))

    def _charge_kept(self, nbytes: int) -> None:
        self._account.grow(nbytes, 0)
        self._kept += nbytes

    def _decode_next(self) -> None:
        """Decode batches, on a thread if that takes long, and submit them."""
        while self._behind and not (self._deferring or self._over):
            head, body, slot = self._behind.popleft()
            try:
                if slot is None:  # a dictionary, which stays until the end of the stream
                    self._charge_kept(len(body))
                    self._reader.read(head, body, self._charge_kept)
                else:
                    self._decode_one(head, body, slot)
            except ServerError as error:
                if slot is None:
                    self._finish(error)
                else:
                    slot.fail(error)

    def _decode_one(self, head: Any, body: Any, slot: BatchCall) -> None:
        admission, reader = self._engine.admission, self._reader
        signature = target_signature(self._engine, *self._model)
        most, (name, version) = admission.max_object_bytes, self._model
        identity = self.peer.identify()  # still
        check_call(self._gate, self.peer, identity, name, version)
        slot.context = context_of(identity)

        def decode(charge: Charge) -> Call:
            counted = limited(charge, most)
            inputs = tensors_of(reader.read(head, body, counted), signature, counted)
            return Call(name, version, "", inputs, options=CallOptions(table=True))

        def submit(asked: Call) -> None:
            slot.take(asked)
            self._engine.find(name, version).submit(slot)

        def after() -> None:
            self._deferring = False
            self._decode_next()

        nbytes = len(body) + reader.kept
        if nbytes > LARGE:
            self._deferring = True
            Deferred(admission.workbench, nbytes, decode, submit, slot, slot.charge, after)
        else:
            submit(decode(slot.charge))


class Parcel(Sink):
    """The answers of a DoPut, until a DoGet has taken them; charged to the connection of DoPut."""

    congested = False

    def __init__(self, account: Account, forget: Callable[[], object]) -> None:
        """`forget` is called at the end."""
        self.over = False
        self.error: ServerError | None = None
        self.messages: deque[Message] = deque()
        self.changed: Callable[[], None] | None = None  # set by the DoGet
        self._account = account
        self._forget = forget
        self._timer = asyncio.get_running_loop().call_later(_KEPT_SECS, self.drop)

    def attach(self, changed: Callable[[], None]) -> None:
        """Start to take messages; `changed` is called when there are more, or at the end."""
        self._timer.cancel()
        self.changed = changed

    def send(self, message: Message) -> None:
        """Implements `Sink.send`; raises `Overloaded` at the limits of admission."""
        if self.over:
            raise self.error or NotFound("nobody reads the answers")
        self._account.grow(sum(map(len, message)), 0)
        self.messages.append(message)
        if self.changed is not None:
            self.changed()

    def finish(self, error: ServerError | None = None) -> None:
        """Implements `Sink.finish`."""
        if not self.over:
            self.over, self.error = True, error
            if self.changed is not None:
                self.changed()

    def take(self) -> Message:
        """Remove the first message."""
        message = self.messages.popleft()
        self._account.count(-sum(map(len, message)))
        return message

    def drop(self) -> None:
        """Release everything that was not taken, and take no more."""
        self._timer.cancel()
        self.changed = None
        while self.messages:
            self.take()
        self.finish(NotFound(f"the answers were not read within {_KEPT_SECS:g} s"))
        self._forget()


class Parcels:
    """The parcels of a door by ticket, which cannot be guessed."""

    def __init__(self) -> None:
        self._found: dict[bytes, Parcel] = {}

    def open(self, account: Account) -> tuple[bytes, Parcel]:
        """A ticket, and its new parcel."""
        ticket = secrets.token_urlsafe(16).encode()
        parcel = self._found[ticket] = Parcel(account, partial(self._found.pop, ticket, None))
        return ticket, parcel

    def find(self, ticket: bytes) -> Parcel:
        """The parcel of a ticket that no other DoGet has; raises `NotFound`."""
        parcel = self._found.get(ticket)
        if parcel is None or parcel.changed is not None:
            raise NotFound(
                "no answers for this ticket: a ticket comes from DoPut, and can be used once,"
                f" within {_KEPT_SECS:g} s"
            )
        return parcel

    def close(self) -> None:
        """Drop all of them."""
        for parcel in list(self._found.values()):
            parcel.drop()


class Pickup(StreamSession):
    """DoGet: the answers in a parcel, as the client reads them."""

    idle = False

    def __init__(self, parcels: Parcels, peer: Peer) -> None:
        self._parcels, self._peer = parcels, peer
        self._parcel: Parcel | None = None

    def receive(self, message: Any) -> None:
        """Take the ticket; raises `NotFound`."""
        if self._parcel is not None:
            raise InvalidRequest("DoGet takes one ticket, got another")
        self._parcel = self._parcels.find(read_ticket(message))
        self._parcel.attach(self.sent)
        self.sent()

    def half_close(self) -> None:
        """Raise `InvalidRequest` without a ticket."""
        if self._parcel is None:
            raise InvalidRequest("DoGet needs a ticket")

    def sent(self) -> None:
        """Send what is there."""
        parcel, peer = self._parcel, self._peer
        if parcel is None:
            return
        while parcel.messages and not peer.congested:
            peer.send(parcel.take())
        if parcel.over and not parcel.messages:
            self._parcel = None
            parcel.drop()
            peer.finish(parcel.error)

    def closed(self) -> None:
        """Drop what was not read."""
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            parcel.drop()
