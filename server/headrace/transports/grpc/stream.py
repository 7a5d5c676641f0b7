"""ModelStreamInfer: one bidirectional stream with requests for any models.

Requests are read and executed concurrently. Responses of ordinary models are written in the order
of their requests; those of decoupled models as they come. An error does not end the stream: it is a
message of its own, unless the client asked for real statuses with the metadata `triton_grpc_error:
true`. How many requests may be under way bounds what a client that does not read its responses can
pile up. When the server ends, so does the stream, as soon as all its requests are answered.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.core.errors import ServerError, ServerExiting
from headrace.core.requests import InferRequest, InferResponse, Ticket
from headrace.engine.engine import Engine
from headrace.engine.version import ModelVersion
from headrace.transports.grpc.call import Call, Stream
from headrace.transports.grpc.service import SERVICE, add_timing, check_size, wants_timing
from headrace.wire.grpc_infer import decode_infer, encode_infer, parse_infer, set_parameter
from headrace.wire.pb import grpc_service_pb2 as pb

_MAX_IN_FLIGHT = 1024
FINAL_PARAMETER = "triton_final_response"


@dataclass(slots=True, eq=False)
class _Slot:
    """One request of the stream, and what came for it so far. It is the sink of its request."""

    stream: "_StreamState"
    request_id: str = ""
    found: ModelVersion | None = None
    request: InferRequest | None = None
    nbytes: int = 0
    timed: bool = False
    ordered: bool = True
    ended: bool = False
    executing: bool = False
    ticket: Ticket | None = None
    messages: deque[pb.ModelStreamInferResponse] = field(default_factory=deque)
    error: ServerError | None = None

    def respond(self, response: InferResponse, final: bool) -> None:
        """Queue a response."""
        if self.found is not None and self.request is not None:
            try:
                self.found.classify(self.request, response)
            except ServerError as error:
                self.fail(error)
                return
        if self.timed:
            add_timing(response)
        message = encode_infer(response)
        set_parameter(message, FINAL_PARAMETER, final)
        self.messages.append(pb.ModelStreamInferResponse(infer_response=message))
        self._end_if(final)

    def fail(self, error: ServerError) -> None:
        """Queue the error that ends the request."""
        self.error = error
        message = pb.ModelStreamInferResponse(error_message=str(error))
        message.infer_response.id = self.request_id
        if self.executing and self.found is not None:
            message.infer_response.model_name = self.found.model
            message.infer_response.model_version = self.found.name
            set_parameter(message.infer_response, FINAL_PARAMETER, True)
        self.messages.append(message)
        self._end_if(True)

    def _end_if(self, final: bool) -> None:
        self.ended = self.ended or final
        self.stream.changed.set()


class _StreamState:
    """The requests of one stream in order of arrival."""

    def __init__(self) -> None:
        self.slots: deque[_Slot] = deque()
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.half_closed = False
        self.failure: Exception | None = None

    def ready(self) -> _Slot | None:
        """The first slot with a message that may be written now."""
        blocked = False
        for slot in self.slots:
            if slot.messages and not (slot.ordered and blocked):
                return slot
            blocked = blocked or (slot.ordered and not slot.ended)
        return None


def stream_handlers(engine: Engine, max_request_bytes: int) -> dict[str, Stream]:
    """The streaming procedures by full path."""

    async def stream_infer(requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        state = _StreamState()
        real_errors = call.metadata().get("triton_grpc_error") == "true"
        reader = asyncio.create_task(_read(engine, max_request_bytes, requests, state))
        engine.admission.watch_close(state.changed.set)
        try:
            while True:
                state.changed.clear()
                while (slot := state.ready()) is not None:
                    if real_errors and slot.error is not None and slot.executing:
                        raise slot.error
                    message = slot.messages.popleft()
                    if slot.ended and not slot.messages:
                        _forget(engine, state, slot)
                    yield message.SerializeToString()
                if state.failure is not None:
                    raise state.failure
                if state.half_closed and not state.slots:
                    return
                if engine.exiting and not state.slots:
                    raise ServerExiting("Server exiting")
                if not state.changed.is_set():
                    await state.changed.wait()
        finally:
            engine.admission.unwatch_close(state.changed.set)
            reader.cancel()
            for slot in list(state.slots):
                if slot.ticket is not None:
                    slot.ticket.cancel()
                _forget(engine, state, slot)

    return {f"/{SERVICE}/ModelStreamInfer": stream_infer}


async def _read(
    engine: Engine, limit: int, requests: AsyncIterator[bytes], state: _StreamState
) -> None:
    """Take requests in until the client closes its side."""
    try:
        async for data in requests:
            while len(state.slots) >= _MAX_IN_FLIGHT:
                state.room.clear()
                await state.room.wait()
            _submit(engine, limit, data, state)
    except Exception as error:  # the stream's other half raises it
        state.failure = error
    state.half_closed = True
    state.changed.set()


def _submit(engine: Engine, limit: int, data: bytes, state: _StreamState) -> None:
    slot = _Slot(state)
    state.slots.append(slot)
    try:
        nbytes = check_size(data, limit)
        engine.admission.enter(nbytes)
        slot.nbytes = nbytes
        slot.executing = True  # counted in; `_forget` counts it out
        message = parse_infer(data)
        slot.request_id = message.id
        slot.found = found = engine.find(message.model_name, message.model_version)
        slot.ordered = not found.decoupled
        slot.request = request = decode_infer(message, nbytes)
        slot.timed = wants_timing(request)
        slot.ticket = found.submit(request, slot)
    except ServerError as error:
        entered, slot.executing = slot.executing, False
        if entered:
            engine.admission.leave(slot.nbytes)
        slot.fail(error)


def _forget(engine: Engine, state: _StreamState, slot: _Slot) -> None:
    state.slots.remove(slot)
    if slot.executing:
        engine.admission.leave(slot.nbytes)
    state.room.set()
