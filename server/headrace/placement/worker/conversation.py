"""The exchange with one worker process: its batches, open requests, and its model's calls.

A worker has slots, each for one batch in progress. A request may be answered after its batch,
individually and any number of times: it is open until its last response, even if its client has
disconnected: the model must be notified before its process ends. A model's call of another model
has a number, which its replies carry. Everything ends with the process.

Owned by the event-loop thread.
"""

import json
import logging
from collections.abc import Callable, Mapping
from operator import attrgetter
from time import monotonic_ns
from typing import Any, Protocol

import orjson

from headrace.core.call import Call, CallContext, CallOptions, InferResponse, InnerCall
from headrace.core.datatypes import BY_NAME
from headrace.core.errors import (
    Cancelled,
    ExecutionFailed,
    ModelNotReady,
    NotFound,
    ServerError,
    WorkerDied,
)
from headrace.core.limits import Pulse
from headrace.core.signature import Signature
from headrace.core.tensors import Tensor, raw_bytes
from headrace.core.texts import encodable
from headrace.ipc.elements import Buffer
from headrace.ipc.frames import (
    BACK,
    EXECUTE,
    INLINE,
    RESULT,
    BrokenFrame,
    FrameKind,
    Header,
    as_json,
    offsets,
    pack_request,
    unpack_numbers,
)
from headrace.placement.placement import ModelServices
from headrace.placement.worker.batch_frames import (
    ERRORS,
    BatchFrames,
    failed_to_process,
    one_answer,
    read_array,
)
from headrace.placement.worker.shared_blocks import Placed, SharedBlocks
from headrace.placement.worker.worker_process import WorkerProcess
from headrace.protocol.status import INTERNAL_TEXT
from headrace.scheduling.batch import Answer, Batch, Deferral, Instance, NotStarted, Outcome

log = logging.getLogger(__name__)

_MOST_UNSENT = 32  # frames queued for a worker above which other models' responses are paused

_NOT_DECOUPLED = (  # Triton's words
    "Model {} is using the decoupled. The current BLS request call doesn't support models using the"
    " decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or"
    " 'async_exec' calls for decoupled models."
)


class ModelCall(InnerCall):
    """A call made by a model, in the name of the client of the `first` request of its batch."""

    def __init__(
        self, calls: "ModelCalls", number: int, decoupled: bool, asked: Call, first: Call | None
    ) -> None:
        """`decoupled` is true if the calling model accepts any number of responses."""
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.execution = None  # it may be called off before a scheduler has it
        self.charged = None
        if first is not None:
            self.charged = first.payer
            self.context = self.context._replace(identity=first.context.identity)
        self._calls = calls
        self._number = number
        self.refusal = "" if decoupled else _NOT_DECOUPLED.format(asked.model_name)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Pass a response on."""
        blocks: list[list[Buffer]] = []
        outputs = []
        for tensor in response.outputs:
            outputs.append((tensor.name, tensor.datatype, tensor.array.shape))
            blocks.append([raw_bytes(tensor.array)])
        told = {"outputs": outputs, "parameters": response.parameters}
        # 8 times as fast, but without NaN, which parameters may have.
        encode = as_json if response.parameters else orjson.dumps
        self._calls.reply(self._number, final, {"response": told}, blocks, encode)

    def finish(self) -> None:
        """Pass the end on."""
        self._calls.reply(self._number, True, {"response": None})

    def fail(self, error: ServerError) -> None:
        """Pass the error on."""
        self._calls.reply(self._number, True, {"response": {"error": _told(error)}})

    def refuse(self, error: ServerError) -> None:
        """Pass the refusal on."""
        self._calls.refuse(self._number, self.model_name, error)


class ModelCalls:
    """The calls of one worker process."""

    def __init__(self, process: WorkerProcess, host: ModelServices) -> None:
        self.moves = 0  # calls that were begun, and replies
        self._process = process
        self._host = host
        self._calls: dict[int, Call] = {}
        self._within: dict[int, Batch] = {}  # batches that wait for calls
        self._held: set[int] = set()  # calls whose replies are paused
        self._paused = False
        process.link.on_empty = self._go_on

    def begin(
        self, document: Mapping[str, Any], data: Buffer, size: int, batch: Batch | None
    ) -> None:
        """Start a call from a batch, None if that is not known, which may wait for the answer.

        Malformed documents raise any exception.
        """
        number, inside = int(document["call"]), bool(document["inside"])
        self.moves += 1
        if document["op"] != "infer":
            self._control(number, document)
            return
        try:
            asked = _request(document, data, size)
            first = batch.calls[0] if batch else None
            call = ModelCall(self, number, bool(document["decoupled"]), asked, first)
            self._submit(call, inside and batch is not None)
        except ServerError as error:
            self.refuse(number, str(document["model"]), error)
            return
        self._calls[number] = call
        if inside and batch is not None:
            self._within[number] = batch
        if self._paused:
            call.hold(True)

    def _submit(self, call: Call, inside: bool) -> None:
        """Submit a call; raises `ServerError`, also for a bug, which is not the worker's fault."""
        try:
            self._host.submit(call, inside)
        except ServerError:
            raise
        except Exception as error:
            log.exception("bug while submitting a model's call of model '%s'", call.model_name)
            raise ExecutionFailed(INTERNAL_TEXT) from error

    def _control(self, number: int, document: Mapping[str, Any]) -> None:
        def answer(value: object, error: ServerError | None) -> None:
            told = {"value": value} if error is None else {"error": _told(error)}
            self.reply(number, True, told)

        self._host.control(document, answer)

    def reply(
        self,
        number: int,
        final: bool,
        told: dict[str, Any],
        blocks: list[list[Buffer]] | None = None,
        encode: Callable[[object], bytes] = as_json,
    ) -> None:
        """Send a reply."""
        self.moves += 1
        if final:
            self._forget(number)
        try:
            document = {"call": number, "final": final, **told}
            self._process.link.send_loose(FrameKind.REPLY, document, blocks or [], encode)
        except OSError as error:  # no memory for the data
            self._cancel(number)
            failed = {"error": _told(ExecutionFailed(f"the response cannot be passed on: {error}"))}
            self._process.link.send_loose(
                FrameKind.REPLY, {"call": number, "final": True, "response": failed}, []
            )
        if self._process.link.unsent > _MOST_UNSENT and not self._paused:
            self._paused = True
            self._tell_all()

    def refuse(self, number: int, model: str, error: ServerError) -> None:
        """End a call that `model` has not begun, in Triton's words."""
        code, text = _told(error)
        if isinstance(error, NotFound | ModelNotReady):
            text = f"Failed for execute the inference request. Model '{model}' is not ready: {text}"
        text = f"Model {model} - Error when running inference: {text}"
        self.reply(number, True, {"response": {"error": (code, text)}})

    def call_off(self, number: int) -> None:
        """Notify the called model of a cancellation; its responses go on, as in Triton."""
        call = self._calls.get(number)
        if call is None or (call.started and call.execution is None):
            return  # it cannot be stopped, and its answer is not far
        if call.execution is None or not call.execution.call_off(call):
            self.drop(number)

    def drop(self, number: int) -> None:
        """Cancel a call for the model, which may wait for the confirming reply."""
        self._cancel(number)
        gone = Cancelled("the model that has asked for this has called it off")
        self.reply(number, True, {"response": {"error": _told(gone)}})

    def hold(self, number: int, held: bool) -> None:
        """Pause or resume a called model that answers faster than its answers are taken."""
        call = self._calls.get(number)
        if call is None:
            return
        (self._held.add if held else self._held.discard)(number)
        if not self._paused:
            call.hold(held)

    def abandon(self, batch: Batch) -> None:
        """End the calls of an abandoned batch, so that it can end."""
        for number, other in list(self._within.items()):
            if other is batch:
                self._cancel(number)
                gone = Cancelled("the request that made this call was cancelled")
                self.reply(number, True, {"response": {"error": _told(gone)}})

    def end(self) -> None:
        """End all calls: the process is gone."""
        for number in list(self._calls):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if (call := self._forget(number)) is not None:
            call.cancel()

    def _forget(self, number: int) -> Call | None:
        self._within.pop(number, None)
        self._held.discard(number)
        return self._calls.pop(number, None)

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._tell_all()

    def _tell_all(self) -> None:
        for number, call in list(self._calls.items()):
            call.hold(self._paused or number in self._held)


def _request(document: Mapping[str, Any], data: Buffer, size: int) -> Call:
    sizes = document["sizes"]
    inputs: dict[str, Tensor] = {}
    for (name, datatype, shape), start, nbytes in zip(
        document["inputs"], offsets(sizes, size), sizes, strict=True
    ):
        kind = BY_NAME[datatype]
        inputs[str(name)] = Tensor(
            str(name), kind, read_array(kind, tuple(shape), data, start, nbytes)
        )
    flags, version = int(document["flags"]), int(document["version"])
    call = Call(
        str(document["model"]),
        "" if version < 0 else str(version),
        str(document["id"]),
        inputs,
        tuple(map(str, document["outputs"])),
        dict(document["parameters"]),
        CallOptions(
            timeout=max(int(document["timeout"]), 0),
            sequence_id=document["correlation_id"],
            sequence_start=bool(flags & 1),
            sequence_end=bool(flags & 2),
        ),
        size,
    )
    if "trace" in document:
        call.context = CallContext(trace=str(document["trace"]))
    return call


def _told(error: ServerError) -> tuple[int, str]:
    """The code of `TritonError` for an error, and its text."""
    codes = [code for code, kind in enumerate(ERRORS) if isinstance(error, kind)]
    return (codes or [ERRORS.index(ExecutionFailed)])[0], str(error)


Done = Callable[[Instance, Batch, Outcome], None]
Give = Callable[[Call, Answer | None, bool], None]


class SlotOwner(Protocol):
    """The owner of a worker's slots."""

    talk: "Conversation"

    def not_sent(self, slot: "Slot", error: Exception) -> None:
        """End the batch of a slot, which could not be sent, later in this turn."""

    def close(self) -> None:
        """End the worker."""


class Slot:
    """One of the concurrent batches of a worker; an instance for the scheduler."""

    load = property(attrgetter("owner.talk.load"))  # without a Python call
    name = property(attrgetter("owner.name"))

    def __init__(self, owner: SlotOwner, number: int) -> None:
        self.owner = owner
        self.number = number
        self.batch: Batch | None = None
        self.done: Done
        self.sent = 0
        self.first = 0  # number of the batch's first request
        self.responses = 0  # responses received within batches
        self.placed: Placed | None = None  # where the batch's inputs are in shared memory
        self.pulse = Pulse()

    def execute(self, batch: Batch, done: Done) -> None:
        """Send `batch` to the worker; see `headrace.scheduling.batch.Instance`."""
        talk, calls = self.owner.talk, batch.calls
        self.batch, self.done = batch, done
        self.sent = sent = monotonic_ns()
        self.first = number = talk.requests + 1
        try:
            if talk.process.ended:
                raise NotStarted
            meta, pieces, total = talk.frames.pack(batch, number)
            if total > INLINE and talk.shared is not None:
                self.placed = talk.place(batch, total)
            if (placed := self.placed) is None:
                talk.process.link.send_data(EXECUTE, self.number, meta, pieces, total)
            else:
                talk.process.link.send_placed(EXECUTE, self.number, placed.meta + meta)
        except Exception as error:  # for example no memory for its file: concerns this batch alone
            self.owner.not_sent(self, error)
            return
        talk.requests += len(calls)
        talk.under_way[self.number] = self
        talk.load += 1
        for call in calls:
            call.execution = talk
            call.run_number = number
            call.began = sent
            number += 1
            if call.held:
                talk.hold(call, True)

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`: the target of all its slots is the worker."""
        return target is self.owner

    def close(self) -> None:
        """End the worker with the first of its slots."""
        self.owner.close()

    def end(self, outcome: Outcome) -> None:
        """Report the batch's outcome."""
        batch, self.batch = self.batch, None
        assert batch is not None
        if self.placed is not None:
            self.give_back()
        self.done(self, batch, outcome)

    def give_back(self) -> None:
        """End the use of shared memory by the batch."""
        placed, self.placed = self.placed, None
        if placed is not None and (shared := self.owner.talk.shared) is not None:
            shared.give_back(placed)


class Conversation:
    """One process while it runs; `Slot.execute` sends it batches.

    `give` receives individual responses to requests.

    `report` receives errors of the model: the requests of its batch, one line, the traceback.
    """

    def __init__(
        self,
        process: WorkerProcess,
        signature: Signature,
        concurrent: bool,
        give: Give,
        report: Callable[[Batch, str, str], None],
        host: ModelServices,
        shared: SharedBlocks | None = None,
    ) -> None:
        """`shared` is memory that requests are received in."""
        self.under_way: dict[int, Slot] = {}  # in the order of execution
        self.load = 0  # their number
        self.requests = 0  # sent to the process, numbered from 1 on
        self.process = process
        self._signature = signature
        # True if it runs all batches at once; otherwise one after the other.
        self._concurrent = concurrent
        self._give = give
        self._report = report
        self.frames = BatchFrames(signature, lambda form: process.send(FrameKind.FORM, form))
        self.shared = shared
        self._calls = ModelCalls(process, host)
        self._open: dict[int, Call] = {}
        # Requests of current batches whose last response has arrived.
        self._finals: set[int] = set()

    @property
    def idle(self) -> bool:
        """True if no request for the model is waiting."""
        return not self.under_way and all(call.ended for call in self._open.values())

    @property
    def open(self) -> bool:
        """True if the model has requests to answer after their batch."""
        return bool(self._open)

    @property
    def executing(self) -> list[Slot]:
        """Slots whose batches the model has started, as far as known."""
        slots = list(self.under_way.values())
        return slots if self._concurrent else slots[:1]

    def sign(self, slot: Slot) -> object:
        """A value that changes with each sign of progress on a slot's batch.

        None while the model waits for a slow reader.
        """
        assert slot.batch is not None
        for calls in (slot.batch.calls, self._open.values()):
            if any(call.held and not call.ended for call in calls):
                return None
        # It is unknown which coroutine calls another model.
        return slot.sent, slot.responses, self._calls.moves

    @property
    def abandoned(self) -> bool:
        """True if the model executes something whose requests have all been abandoned.

        Batches queued behind it in the worker can move to another one.
        """
        executing = self.executing
        return bool(executing) and all(
            call.ended
            for calls in (self._open.values(), *(s.batch.calls for s in executing if s.batch))
            for call in calls
        )

    # --- to the worker

    def place(self, batch: Batch, size: int) -> Placed | None:
        """Lend the worker the memory in which a batch of `size` bytes was received, if shared."""
        assert self.shared is not None
        placed = self.shared.place(batch.calls, self.frames.inputs(batch), size)
        if placed is not None and self.shared.lend(placed, self.process.link):
            return placed
        return None

    def cancel(self, call: Call) -> None:
        """Notify the model of a cancelled request."""
        self.process.send(FrameKind.CANCEL, pack_request(call.run_number))
        slot = self._slot_of(call.run_number)
        batch = slot.batch if slot is not None else None
        if batch is not None and all(other.ended for other in batch.calls):
            self._calls.abandon(batch)  # otherwise the batch might never end

    def call_off(self, call: Call) -> bool:
        """Implements `Execution.call_off`."""
        self.process.send(FrameKind.CANCEL, pack_request(call.run_number, True))
        return True

    def hold(self, call: Call, held: bool) -> None:
        """Pause or resume the responses to a request."""
        self.process.send(FrameKind.HOLD, pack_request(call.run_number, held))

    # --- from the worker

    def take(self, kind: FrameKind, meta: bytes, data: Buffer, size: int) -> None:
        """Process a frame that does not end a batch; malformed frames raise any exception."""
        if kind is FrameKind.KEPT_SHARED:
            if self.shared is not None:
                self.shared.keep(unpack_numbers(meta))  # unknown numbers are ignored
            return
        document: dict[str, Any]
        try:
            document = orjson.loads(meta)
        except orjson.JSONDecodeError:  # NaN in a parameter, or malformed
            document = json.loads(meta)
        if kind is FrameKind.FORM:
            self.frames.learn(document)
        elif kind is FrameKind.RESPONSE:
            self._on_response(document, data, size)
        elif kind is FrameKind.CALL:
            running = next(iter(self.under_way.values()), None)  # for a thread of the model's
            begun = self.under_way.get(int(document["slot"]), running)
            self._calls.begin(document, data, size, begun.batch if begun else None)
        elif kind is FrameKind.HOLD_CALL:
            self._calls.hold(int(document["call"]), bool(document["held"]))
        elif kind is FrameKind.DROP_CALL:
            stop = self._calls.call_off if document["answers"] else self._calls.drop
            stop(int(document["call"]))
        else:
            raise BrokenFrame(f"a frame of kind {kind.name}")

    def finish(self, header: Header[FrameKind], meta: bytes, data: Buffer) -> Outcome:
        """End a batch by its result, or by its return; gives the outcome.

        Malformed frames raise any exception.
        """
        kind, _, number, _, size = header
        under_way = self.under_way
        slot = under_way.get(number)
        batch = slot.batch if slot is not None else None
        if slot is None or batch is None:
            raise BrokenFrame("an answer to no batch")
        if kind is BACK:  # the batch before it waits for another model
            outcome = Outcome((), NotStarted(), slot.sent, slot.sent, monotonic_ns())
        elif not self._concurrent and number != next(iter(under_way)):
            raise BrokenFrame("an answer to a batch before that to an earlier one")
        elif kind is RESULT:
            outcome = self.frames.result(slot.sent, batch, meta, data, size)
        elif kind is FrameKind.RESPONSES:
            outcome = self.frames.responses(slot.sent, batch, json.loads(meta), data, size)
            for call, part in zip(batch.calls, outcome.parts or (), strict=True):
                if part is Deferral.LATER and call.run_number not in self._finals:
                    self._open[call.run_number] = call
        else:
            outcome = self._broken(slot, batch, json.loads(meta))
        del under_way[number]
        self.load -= 1
        if self._finals:
            self._finals.difference_update(call.run_number for call in batch.calls)
        slot.batch = None
        if slot.placed is not None:
            slot.give_back()
        slot.done(slot, batch, outcome)
        return outcome

    def _broken(self, slot: Slot, batch: Batch, document: dict[str, Any]) -> Outcome:
        """The outcome if the model raised, or returned anything but responses."""
        text = encodable(document["text"])
        self._report(batch, text, encodable(document["traceback"]))
        error = failed_to_process(encodable(document["name"]), text)
        return Outcome((), error, slot.sent, slot.sent, monotonic_ns())

    def _on_response(self, document: dict[str, Any], data: Buffer, size: int) -> None:
        """Process an individual response, or the end, of a request."""
        number, final = int(document["request"]), bool(document["final"])
        call = self._find(number)
        if final and self._open.pop(number, None) is None and call is not None:
            self._finals.add(number)
        if call is None or call.ended:
            if not final:  # the model may not know of the cancellation yet
                self.process.send(FrameKind.CANCEL, pack_request(number))
            elif call is not None:
                self._give(call, None, True)  # the next request of its sequence may wait for it
            return
        answer = one_answer(document, data, size) if "response" in document else None
        self._give(call, answer, final)

    def _find(self, number: int) -> Call | None:
        """The request with this number, in a batch or open."""
        call = self._open.get(number)
        if call is None and (slot := self._slot_of(number)) is not None:
            slot.responses += 1
            assert slot.batch is not None
            call = slot.batch.calls[number - slot.first]
        return call

    def _slot_of(self, number: int) -> Slot | None:
        """The slot whose batch has the request with this number."""
        for slot in self.under_way.values():
            if slot.batch is not None and 0 <= number - slot.first < len(slot.batch.calls):
                return slot
        return None

    # --- its end

    def end(self, how: str, abandoned: bool = False) -> None:
        """Handle the end of the process: started batches fail, others are given back.

        If it was ended for `abandoned` work, nothing fails, and no input is blamed.
        """
        now = monotonic_ns()
        if self.shared is not None:
            self.shared.forget(self.process.link)
        self._calls.end()
        died = WorkerDied(
            f"the worker process of model '{self._signature.model}' {how} while it executed the"
            " request"
        )
        under_way, self.under_way = list(self.under_way.values()), {}
        self.load = 0
        open_requests, self._open = list(self._open.values()), {}
        for call in open_requests:
            if not (abandoned and call.ended):
                self._give(call, died, True)
        for index, slot in enumerate(under_way):
            begun = (self._concurrent or not index) and not abandoned
            error = died if begun else NotStarted()
            slot.end(Outcome((), error, slot.sent, slot.sent, now))
