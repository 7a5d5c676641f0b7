"""Frames between a model and its server while the model runs.

Frames are taken in by whoever waits for one: the thread that runs batches waits for the next, and a
thread of the model for a reply. Of several that wait, one reads for all of them. Where the model is
a coroutine, the event loop reads as well, when something has come.

Any thread may call anything here. Invariant: `_reading` is set while a thread takes frames in, and
whatever changes by a frame changes before the others are notified.
"""

import itertools
import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.workers.batches import tell_response, tell_tensors
from headrace.workers.channel import Received, WorkerChannel
from headrace.workers.elements import Buffer
from headrace.workers.frames import EXECUTE, Header, Kind, frame, pack_header, unpack_request
from headrace.workers.triton_calls import Call, ResponseIterator
from headrace.workers.triton_requests import InferenceRequest, InferenceResponse, TritonError
from headrace.workers.triton_tensors import TritonModelException

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

NOT_NOW = (
    "other models, and metrics' values, can be asked for only while the model executes; load_model,"
    " unload_model and is_model_ready also while it is initialized"
)
_EARLY = frozenset({"load", "unload", "ready"})  # what may be asked for then
_MOST = 20_000  # requests that are remembered as cancelled, and as held


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
        self._waiting = 0  # threads, for another one to read
        self._reading = False
        self.batches: deque[Received] = deque()  # and questions between them
        self.stopped = False  # nothing more comes
        self.open = False  # whether the model may call for anything, as while it executes
        self._wake: Callable[[], object] | None = None
        self.cancelled: dict[int, None] = {}
        self.held: dict[int, None] = {}
        self._watching: set[Callable[[], object]] = set()
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self.runner = 0  # the thread that runs a batch, of a model that is no coroutine
        self.inside = False  # whether that has asked for something
        self._loop: AbstractEventLoop | None = None
        self._watchers: dict[AbstractEventLoop, int] = {}

    # --- taking frames in

    def next(self) -> Received | None:
        """Wait for the next batch or question, and take it; None at the end."""
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
        """Take frames in until `there` is true, or the server has gone."""
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
        """Take in what has come already, unless another thread is about to."""
        with self._lock:
            if self._reading or self.stopped:
                return
            self._reading = True
        with suppress(BlockingIOError):
            self._read(wait=False)

    def fileno(self) -> int:
        """The socket, for an event loop that calls `poll` when something has come."""
        return self._link.fileno()

    def _read(self, wait: bool = True) -> None:
        """Take in what one read gives, for the thread that has set `_reading`."""
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
        except BaseException:  # nonsense, or the server's end is gone: no one reads any more
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

    def _take(self, header: Header[Kind], meta: bytes, data: Buffer) -> None:
        kind = header.kind
        if kind is Kind.EXECUTE or kind is Kind.ASK:
            self.batches.append((header, meta, data))
            if self.inside:
                self._give_back()
        elif kind is Kind.FORM:
            self._on_form(json.loads(meta))
        elif kind is Kind.STOP:
            self.stopped = True
        elif kind is Kind.CANCEL:
            _remember(self.cancelled, unpack_request(meta)[0])
            self._changed()
        elif kind is Kind.HOLD:
            number, held = unpack_request(meta)
            if held:
                _remember(self.held, number)
            else:
                self.held.pop(number, None)
            self._changed()
        elif kind is Kind.REPLY:
            told = json.loads(meta)
            call = self._calls.get(told["call"])
            if call is not None:
                if told["final"]:
                    del self._calls[told["call"]]
                call.take(told, data, header.data)

    def _changed(self) -> None:
        for callback in list(self._watching):
            with suppress(RuntimeError):  # that loop is closed: nobody waits
                callback()

    # --- waiting on an event loop

    def run_on(self, loop: "AbstractEventLoop", wake: Callable[[], object]) -> None:
        """The model's coroutines run on `loop`, which calls `poll` when something has come.

        `wake` is called there when there is a batch or the end.
        """
        self._loop = loop
        self._wake = partial(loop.call_soon_threadsafe, wake)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the running event loop take frames in meanwhile, whichever it is."""
        import asyncio  # who calls this has it already

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

    # --- what the model is doing

    def _give_back(self) -> None:
        """Let other instances run what waits here: the batch under way may be waiting for it."""
        waiting = [self.batches.popleft() for _ in range(len(self.batches))]
        for received in waiting:
            header = received[0]
            if header.kind is Kind.EXECUTE:
                self._link.send(pack_header(Kind.BACK, 0, header.number, 0, 0))
            else:
                self.batches.append(received)

    # --- requests of clients

    def is_cancelled(self, number: int) -> bool:
        """True if nobody waits for a request any more."""
        if number not in self.cancelled:
            self.poll()
        return number in self.cancelled

    def wait_for_room(self, number: int) -> None:
        """Wait while the client does not read its responses."""
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
        return number in self.held and number not in self.cancelled

    def respond(
        self, number: int, response: InferenceResponse | None, final: bool, wanted: Sequence[str]
    ) -> None:
        """Send a response to a request, the last one if it is `final`, or only the end."""
        if number in self.cancelled:
            if not final:
                return
            response = None
        told: dict[str, Any] = {"request": number, "final": final}
        blocks: list[list[Buffer]] = []
        if response is not None:
            told["response"] = tell_response(response, wanted, self._declared, blocks)
        if final:
            self.forget(number)
        self._link.send_loose(Kind.RESPONSE, told, blocks)

    def drop(self, number: int, error: TritonError) -> None:
        """End a request with an error, from wherever the interpreter finds out that it is lost."""
        self.forget(number)
        told = {
            "request": number, "final": True, "sizes": [],
            "response": {"error": [error.code(), error.message()]},
        }  # fmt: skip
        self._link.send_soon(frame(Kind.RESPONSE, json.dumps(told).encode()))

    def forget(self, number: int) -> None:
        """A request is answered."""
        self.cancelled.pop(number, None)
        self.held.pop(number, None)

    def forget_answered(self, requests: Sequence[InferenceRequest]) -> None:
        """A batch is done with: forget those of its requests that no sender answers later."""
        for request in requests:
            if request._answering is None or request._answering.closed:
                self.forget(request._number)

    # --- requests of the model

    def exec(self, request: InferenceRequest, decoupled: bool) -> Any:
        """Run another model, and wait."""
        responses = ResponseIterator(self._call(request, decoupled))
        return responses if decoupled else responses.only()

    def async_exec(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Any]:
        """Run another model, while other coroutines go on."""
        call = self._call(request, decoupled)
        responses = ResponseIterator(call)

        async def result() -> Any:
            if not decoupled:
                return await responses.only_async()
            # As in Triton: a `for` over the responses holds the event loop until the next one, so
            # other coroutines get to begin their calls before this one may do that.
            await call.come()
            return responses

        return result()

    def control(self, document: Mapping[str, Any]) -> Any:
        """Call for something else of the server, and wait for the result."""
        call = self.begin({**document}, [])
        told = call.next()
        if told is None or "error" in told[0]:
            text = told[0]["error"][1] if told is not None else "the server has gone"
            raise TritonModelException(text)
        return told[0]["value"]

    def register(self, document: Mapping[str, Any]) -> None:
        """Make a family of metrics."""
        self.control({"op": "family", **document})

    def tell(self, document: Mapping[str, Any]) -> None:
        """Send a change of a metric to the server, without waiting."""
        self._link.send(frame(Kind.METRIC, json.dumps(document).encode()))

    def _call(self, request: InferenceRequest, decoupled: bool) -> Call:
        blocks: list[list[Buffer]] = []
        name, version = request._target
        document = {
            "op": "infer", "model": name, "version": version, "decoupled": decoupled,
            "id": request.request_id(), "outputs": request.requested_output_names(),
            "inputs": tell_tensors(request._inputs, blocks), **request._extras,
        }  # fmt: skip
        return self.begin(document, blocks)

    def begin(self, document: dict[str, Any], blocks: list[list[Buffer]]) -> Call:
        """Ask the server for something; raises `TritonModelException` where a model must not."""
        if not self.open and (self.stopped or document["op"] not in _EARLY):
            raise TritonModelException(NOT_NOW)
        inside = self.runner == threading.get_ident()
        number = next(self._numbers)
        call = self._calls[number] = Call(self, number)
        if inside:  # until it has its answer, nothing else is begun here
            self.inside = True
            self._give_back()
        told = {**document, "call": number, "inside": inside}
        self._link.send_loose(Kind.CALL, told, blocks)
        return call

    def hold_call(self, number: int, held: bool) -> None:
        """Pause the replies to a call, or let them go on."""
        told = {"call": number, "held": held}
        self._link.send_soon(frame(Kind.HOLD_CALL, json.dumps(told).encode()))

    def cancel_call(self, number: int) -> None:
        """Call off what a call asks for."""
        if number in self._calls:
            self._link.send_soon(frame(Kind.DROP_CALL, json.dumps({"call": number}).encode()))

    def drop_call(self, number: int) -> None:
        """Want no more replies."""
        self.cancel_call(number)
        self._calls.pop(number, None)


def _remember(requests: dict[int, None], number: int) -> None:
    """Add a request; what came too late for its request is dropped some time."""
    if len(requests) >= _MOST:
        for oldest in sorted(requests)[: _MOST // 2]:
            requests.pop(oldest, None)
    requests[number] = None
