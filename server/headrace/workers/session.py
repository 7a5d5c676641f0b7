"""The exchange of frames between a model and its server while the model runs.

Frames are received by whichever thread waits for one: the thread that runs batches, for the next
batch, and threads of the model, for replies. If several wait, one reads for all of them. For
coroutines, the event loop reads as well, when the socket is readable.

Thread-safe. Invariant: `_reading` is set while a thread receives frames, and the state that a frame
changes is updated before other threads are notified.
"""

import itertools
import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.ipc.elements import Buffer
from headrace.ipc.frame_socket import Received
from headrace.ipc.frames import (
    EXECUTE,
    FrameKind,
    Header,
    frame,
    pack_header,
    unpack_numbers,
    unpack_request,
)
from headrace.workers.batches import tell_response, tell_tensors
from headrace.workers.channel import WorkerChannel
from headrace.workers.triton_calls import ResponseIterator, ServerCall
from headrace.workers.triton_requests import InferenceRequest, InferenceResponse, TritonError
from headrace.workers.triton_tensors import TritonModelException

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

NOT_NOW = (  # the first sentence is Triton's
    "BLS is only supported during the 'execute' function. Other models, and metrics' values, can be"
    " asked for only while the model executes; load_model, unload_model and is_model_ready also"
    " while it is initialized"
)
_EARLY = frozenset({"load", "unload", "ready"})  # operations allowed then
_MOST = 20_000  # remembered cancelled requests, and held ones


class Session:
    """Frames from and to the server, from a model's start to its end."""

    def __init__(
        self,
        link: WorkerChannel,
        on_form: Callable[[dict[str, Any]], None],
        declared: Container[str] = frozenset(),
    ) -> None:
        """`declared` are the names of the model's outputs."""
        self._link = link
        self._declared = declared
        self._on_form = on_form
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # threads waiting for another one to read
        self._reading = False
        self.batches: deque[Received] = deque()  # batches, and readiness requests in between
        self.stopped = False  # no more frames arrive
        self.open = False  # true while the model may call the server, as during execution
        self._wake: Callable[[], object] | None = None
        self.cancelled: dict[int, None] = {}
        self._called_off: dict[int, None] = {}  # those of them whose responses are still taken
        self.held: dict[int, None] = {}
        self._watching: set[Callable[[], object]] = set()
        self._calls: dict[int, ServerCall] = {}
        self._numbers = itertools.count(1)
        self.runner = 0  # the thread that runs a batch, for models without coroutines
        self.inside = False  # true while that thread waits for a call
        # That of the batch which a coroutine runs for; -1 elsewhere.
        self.slot: ContextVar[int] = ContextVar("slot", default=-1)
        self._loop: AbstractEventLoop | None = None
        self._watchers: dict[AbstractEventLoop, int] = {}

    # --- receiving frames

    def next(self) -> Received | None:
        """Wait for and take the next batch or readiness request; None at the end."""
        batches = self.batches
        while not batches and not self.stopped:
            with self._lock:
                if self._reading:
                    self._wait_for_reader()
                    continue
                self._reading = True
            self._read()
        return batches.popleft() if batches else None

    def wait(self, there: Callable[[], object]) -> None:
        """Receive frames until `there` is true, or the server is gone."""
        while not self.stopped:
            with self._lock:
                while self._reading and not there():
                    self._wait_for_reader()
                if there():
                    return
                self._reading = True
            self._read()
            if there():
                return

    def _wait_for_reader(self) -> None:
        self._waiting += 1
        self._condition.wait()
        self._waiting -= 1

    def poll(self) -> None:
        """Process frames that have arrived, unless another thread is about to."""
        with self._lock:
            if self._reading or self.stopped:
                return
            self._reading = True
        with suppress(BlockingIOError):
            self._read(wait=False)

    def fileno(self) -> int:
        """The socket's descriptor, for an event loop that calls `poll` when it is readable."""
        return self._link.fileno()

    def _read(self, wait: bool = True) -> None:
        """Process the frames of one read, for the thread that has set `_reading`."""
        try:
            received = self._link.receive(wait)
            if received is None:
                self.stopped = True
            else:
                for one in received:
                    if one[0].kind is EXECUTE and not self.inside:  # as mostly
                        self.batches.append(one)
                    else:
                        self._take(*one)
        except BlockingIOError:
            raise
        except BaseException:  # malformed, or the server's end is closed: reading ends
            self.stopped = True
            raise
        finally:
            with self._lock:
                self._reading = False
                if self._waiting:
                    self._condition.notify_all()
            if self._wake is not None and (self.batches or self.stopped):
                with suppress(RuntimeError):  # the loop is closed: the worker is ending
                    self._wake()

    def _take(self, header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        kind = header.kind
        if kind is FrameKind.EXECUTE or kind is FrameKind.ASK:
            self.batches.append((header, meta, data))
            if self.inside:
                self._give_back()
        elif kind is FrameKind.FORM:
            self._on_form(json.loads(meta))
        elif kind is FrameKind.SHARED:
            self._link.shared.add(header.number, data)
        elif kind is FrameKind.DROP_SHARED:
            self._link.shared.drop(unpack_numbers(meta))
        elif kind is FrameKind.STOP:
            self.stopped = True
        elif kind is FrameKind.CANCEL:
            number, answers = unpack_request(meta)
            _remember(self.cancelled, number)
            if answers:
                _remember(self._called_off, number)
            else:
                self._called_off.pop(number, None)
            self._changed()
        elif kind is FrameKind.HOLD:
            number, held = unpack_request(meta)
            if held:
                _remember(self.held, number)
            else:
                self.held.pop(number, None)
            self._changed()
        elif kind is FrameKind.REPLY:
            told = json.loads(str(meta, "utf-8"))  # whose encoding is not looked for
            call = self._calls.get(told["call"])
            if call is not None:
                if told["final"]:
                    del self._calls[told["call"]]
                call.take(told, data, header.data)

    def _changed(self) -> None:
        for callback in list(self._watching):
            with suppress(RuntimeError):  # the loop is closed: nothing waits
                callback()

    # --- waiting on an event loop

    def run_on(self, loop: "AbstractEventLoop", wake: Callable[[], object]) -> None:
        """Run the model's coroutines on `loop`, which calls `poll` when the socket is readable.

        `wake` is called there when there is a batch or the end.
        """
        self._loop = loop
        self._wake = partial(loop.call_soon_threadsafe, wake)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the running event loop receive frames within `with`."""
        import asyncio  # already imported by the caller

        loop = asyncio.get_running_loop()
        if loop is self._loop:
            yield
            return
        self._watchers[loop] = self._watchers.get(loop, 0) + 1
        loop.add_reader(self.fileno(), self.poll)
        try:
            yield
        finally:
            self._watchers[loop] -= 1
            if not self._watchers[loop]:
                del self._watchers[loop]
                loop.remove_reader(self.fileno())

    # --- state of the model

    def _give_back(self) -> None:
        """Give queued batches back: the current one may be waiting for another instance's."""
        waiting = [self.batches.popleft() for _ in range(len(self.batches))]
        for received in waiting:
            header = received[0]
            if header.kind is FrameKind.EXECUTE:
                self._link.send(pack_header(FrameKind.BACK, 0, header.number, 0, 0))
            else:
                self.batches.append(received)

    # --- clients' requests

    def is_cancelled(self, number: int) -> bool:
        """True if a request was cancelled."""
        if number not in self.cancelled:
            self.poll()
        return number in self.cancelled

    def wait_for_room(self, number: int) -> None:
        """Block while the client does not read its responses."""
        self.poll()
        if self._is_held(number):
            self.wait(lambda: not self._is_held(number))

    async def room(self, number: int) -> None:
        """`wait_for_room` for coroutines."""
        self.poll()
        if not self._is_held(number):
            return
        import asyncio  # who calls this has it already

        changed = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        self._watching.add(wake)
        try:
            with self.watched():
                while self._is_held(number) and not self.stopped:
                    await changed.wait()
                    changed.clear()
        finally:
            self._watching.discard(wake)

    def _is_held(self, number: int) -> bool:
        return number in self.held and not self._is_unwanted(number)

    def _is_unwanted(self, number: int) -> bool:
        return number in self.cancelled and number not in self._called_off

    def respond(
        self, number: int, response: InferenceResponse | None, final: bool, wanted: Sequence[str]
    ) -> None:
        """Send a response to a request, `final` for the last one, or only the end."""
        if self._is_unwanted(number):
            if not final:
                return
            response = None
        told: dict[str, Any] = {"request": number, "final": final}
        blocks: list[list[Buffer]] = []
        if response is not None:
            told["response"] = tell_response(response, wanted, self._declared, blocks)
        if final:
            self.forget(number)
        self._link.send_loose(FrameKind.RESPONSE, told, blocks)

    def drop(self, number: int, error: TritonError) -> None:
        """End a request with an error; called wherever the interpreter frees its sender."""
        self.forget(number)
        told = {
            "request": number, "final": True, "sizes": [],
            "response": {"error": [error.code(), error.message()]},
        }  # fmt: skip
        self._link.send_soon(frame(FrameKind.RESPONSE, json.dumps(told).encode()))

    def forget(self, number: int) -> None:
        """Drop the state of an answered request."""
        self.cancelled.pop(number, None)
        self._called_off.pop(number, None)
        self.held.pop(number, None)

    def forget_answered(self, requests: Sequence[InferenceRequest]) -> None:
        """Drop the state of a finished batch's requests, except those with open senders."""
        for request in requests:
            if request._answering is None or request._answering.closed:
                self.forget(request._number)

    # --- the model's calls

    def exec(self, request: InferenceRequest, decoupled: bool) -> Any:
        """Run another model, and wait for the responses."""
        responses = ResponseIterator(self._call(request, decoupled))
        return responses if decoupled else responses.only()

    def async_exec(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Any]:
        """Run another model without blocking other coroutines."""
        call = self._call(request, decoupled)
        responses = ResponseIterator(call)

        async def result() -> Any:
            if not decoupled:
                return await responses.only_async()
            # As in Triton: a `for` over the responses blocks the event loop until the next one, so
            # other coroutines may begin their calls before this one does so.
            await call.come()
            return responses

        return result()

    def control(self, document: Mapping[str, Any]) -> Any:
        """Run a control operation of the server, and wait for the result."""
        call = self.begin({**document}, [])
        told = call.next()
        if told is None or "error" in told[0]:
            text = told[0]["error"][1] if told is not None else "the server has gone"
            raise TritonModelException(text)
        return told[0]["value"]

    def register(self, document: Mapping[str, Any]) -> None:
        """Create a family of metrics."""
        self.control({"op": "family", **document})

    def tell(self, document: Mapping[str, Any]) -> None:
        """Send an update of a metric, without waiting."""
        self._link.send(frame(FrameKind.METRIC, json.dumps(document).encode()))

    def _call(self, request: InferenceRequest, decoupled: bool) -> ServerCall:
        blocks: list[list[Buffer]] = []
        name, version = request._target
        document = {
            "op": "infer", "model": name, "version": version, "decoupled": decoupled,
            "id": request.request_id(), "outputs": request.requested_output_names(),
            "inputs": tell_tensors(request._inputs, blocks), **request._extras,
        }  # fmt: skip
        return self.begin(document, blocks)

    def begin(self, document: dict[str, Any], blocks: list[list[Buffer]]) -> ServerCall:
        """Start a call of the server; raises `TritonModelException` where a model must not."""
        if not self.open and (self.stopped or document["op"] not in _EARLY):
            raise TritonModelException(NOT_NOW)
        inside = self.runner == threading.get_ident()
        number = next(self._numbers)
        call = self._calls[number] = ServerCall(self, number)
        if inside:  # no other batch is started until the answer arrives
            self.inside = True
            self._give_back()
        told = {**document, "call": number, "inside": inside, "slot": self.slot.get()}
        self._link.send_loose(FrameKind.CALL, told, blocks)
        return call

    def hold_call(self, number: int, held: bool) -> None:
        """Pause or resume the replies to a call."""
        told = {"call": number, "held": held}
        self._link.send_soon(frame(FrameKind.HOLD_CALL, json.dumps(told).encode()))

    def cancel_call(self, number: int, answers: bool = True) -> None:
        """Cancel a call; with `answers`, its replies go on until the other model ends them."""
        if number in self._calls:
            told = {"call": number, "answers": answers}
            self._link.send_soon(frame(FrameKind.DROP_CALL, json.dumps(told).encode()))

    def drop_call(self, number: int) -> None:
        """Drop further replies to a call."""
        self.cancel_call(number, answers=False)
        self._calls.pop(number, None)


def _remember(requests: dict[int, None], number: int) -> None:
    """Add a request to a bounded memory; entries that arrived too late are dropped eventually."""
    if len(requests) >= _MOST:
        for oldest in sorted(requests)[: _MOST // 2]:
            requests.pop(oldest, None)
    requests[number] = None
