"""ModelStreamInfer: one bidirectional stream with requests for any models.

Requests are submitted as they arrive and executed concurrently. Responses of ordinary models are
written in the order of their requests; those of decoupled models as they come. An error does not
end the stream: it is a message of its own, unless the client asked for real statuses with the
metadata `triton_grpc_error: true`. How many requests may be under way, and how many bytes may wait
for the client to read them, bounds what a client that does not read its responses can pile up. When
the server ends, so does the stream, as soon as all its requests are answered.
"""

from collections import deque

from headrace.core.errors import ServerError, ServerExiting
from headrace.core.requests import InferResponse, Ticket
from headrace.core.tensors import Buffer
from headrace.engine.doors import Entrance, Target
from headrace.transports.grpc.call import Message, Open, Peer, Session
from headrace.transports.grpc.service import SERVICE, check_size
from headrace.wire.grpc_messages import InferReader, InferWriter, stream_error, stream_response
from headrace.wire.timing import add_timing, wants_timing

_MAX_IN_FLIGHT = 1024
FINAL_PARAMETER = "triton_final_response"


class _Slot:
    """One request of a stream, and what came for it while it was not its turn. Its sink, too."""

    __slots__ = (
        "ended", "error", "executing", "found", "messages", "nbytes", "ordered", "request_id",
        "stream", "ticket", "timed",
    )  # fmt: skip

    def __init__(self, stream: "_StreamInfer") -> None:
        self.stream = stream
        self.request_id = ""
        self.found: Target | None = None
        self.nbytes = 0
        self.timed = False
        self.ordered = True
        self.ended = False
        self.executing = False  # counted in by admission, and submitted
        self.ticket: Ticket | None = None
        self.messages: deque[Message] | None = None
        self.error: ServerError | None = None

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response."""
        if self.timed:
            add_timing(response)
        response.parameters[FINAL_PARAMETER] = final
        self._add(stream_response(self.stream.writer.pieces(response)), final)

    def finish(self) -> None:
        """Take the end, with which no response comes."""
        self.ended = True
        self.stream.write()

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the request."""
        self.error = error
        found = self.found if self.executing else None
        names = ("", "") if found is None else (found.model, found.name)
        parameters = {} if found is None else {FINAL_PARAMETER: True}
        self._add([stream_error(str(error), self.request_id, *names, parameters)], True)

    def refuse(self, error: ServerError) -> None:
        """Take the error that the request was refused with."""
        self.stream.count_out(self)
        self.fail(error)

    def _add(self, message: Message, final: bool) -> None:
        if self.messages is None:
            self.messages = deque()
        self.messages.append(message)
        self.ended = self.ended or final
        self.stream.write()


class _StreamInfer:
    """One stream. `slots` are its requests in order of arrival, until they are answered."""

    def __init__(
        self, engine: Entrance, limit: int, reader: InferReader, writer: InferWriter, peer: Peer
    ) -> None:
        self.writer = writer
        self._engine = engine
        self._limit = limit
        self._reader = reader
        self._peer = peer
        self._real_errors = peer.metadata().get("triton_grpc_error") == "true"
        self._slots: deque[_Slot] = deque()
        self._half_closed = False
        self._holding = False
        self._over = False
        self._writing = False
        self._unordered = 0  # slots of decoupled models
        engine.admission.watch_close(self.write)

    # --- what the client does

    def receive(self, message: Buffer) -> None:
        """Submit a request."""
        slot = _Slot(self)
        self._slots.append(slot)
        self._submit(slot, message)
        if len(self._slots) >= _MAX_IN_FLIGHT and not self._over:
            self._holding = True
            self._peer.hold(True)

    def half_close(self) -> None:
        """End once everything is answered."""
        self._half_closed = True
        self.write()

    def sent(self) -> None:
        """Go on writing."""
        self.write()

    def closed(self) -> None:
        """Cancel what is still under way."""
        self._over = True
        admission = self._engine.admission
        admission.unwatch_close(self.write)
        slots, self._slots = self._slots, deque()
        for slot in slots:
            if slot.executing:
                admission.leave(slot.nbytes)
                if slot.ticket is not None and not slot.ended:
                    slot.ticket.cancel()

    # --- what the server does

    def count_out(self, slot: _Slot) -> None:
        """A request is not under way any more."""
        if slot.executing:
            slot.executing = False
            self._engine.admission.leave(slot.nbytes)

    def write(self) -> None:
        """Write what may be written now, and end the stream if it is time."""
        if self._writing or self._over:
            return
        self._writing = True
        try:
            self._write_messages()
        finally:
            self._writing = False
        self._go_on()

    def _go_on(self) -> None:
        """End the stream if it is time, or let more requests come."""
        if self._over:
            return
        if not self._slots and self._half_closed:
            self._finish(None)
        elif not self._slots and self._engine.exiting:
            self._finish(ServerExiting("Server exiting"))
        elif self._holding and len(self._slots) < _MAX_IN_FLIGHT // 2:
            self._holding = False
            self._peer.hold(False)

    def _finish(self, error: ServerError | None) -> None:
        """Write no more; what is left is dealt with when the stream is `closed`."""
        self._over = True
        self._peer.finish(error)

    def _write_messages(self) -> None:
        """Those of the first slot, and of others as far as order allows."""
        slots, peer = self._slots, self._peer
        while slots and not peer.congested:
            slot = slots[0]
            if not self._write_slot(slot):
                break
            if slot.ended:
                slots.popleft()
                self._unordered -= not slot.ordered
        if self._unordered and not self._over:
            self._write_unordered()

    def _write_slot(self, slot: _Slot) -> bool:
        """Write what a slot has; whether its turn is over, all being written."""
        peer = self._peer
        while slot.messages:
            if peer.congested:
                return False
            if self._real_errors and slot.error is not None and slot.executing:
                self._finish(slot.error)
                return False
            peer.send(slot.messages.popleft())
        if slot.ended:
            self.count_out(slot)
        return slot.ended

    def _write_unordered(self) -> None:
        """Decoupled models answer whenever they like."""
        blocked = False
        for slot in list(self._slots):
            if slot.ordered and blocked:
                continue
            ended = self._write_slot(slot)
            if self._over or self._peer.congested:
                return
            if ended:
                self._slots.remove(slot)
                self._unordered -= not slot.ordered
            elif slot.ordered:
                blocked = True

    def _submit(self, slot: _Slot, data: Buffer) -> None:
        admission = self._engine.admission
        try:
            nbytes = check_size(data, self._limit)
            admission.enter(nbytes)
            slot.nbytes = nbytes
            slot.executing = True
            message = self._reader.read(data)
            slot.request_id = message.id
            slot.found = found = self._engine.find(message.model_name, message.model_version)
            if found.decoupled:
                slot.ordered = False
                self._unordered += 1
            request = message.request(nbytes)
            slot.timed = wants_timing(request)
            slot.ticket = found.submit(request, slot)
        except ServerError as error:
            slot.refuse(error)


def stream_handlers(engine: Entrance, max_request_bytes: int) -> dict[str, Open]:
    """The streaming procedures by full path."""
    reader, writer = InferReader(), InferWriter()

    def open_stream(peer: Peer) -> Session:
        return _StreamInfer(engine, max_request_bytes, reader, writer, peer)

    return {f"/{SERVICE}/ModelStreamInfer": open_stream}
