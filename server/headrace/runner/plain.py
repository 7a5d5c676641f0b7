"""The short way of plain calls from the program: arrays exactly as a model takes them.

A call by `model(name=array)` whose arrays have the declared datatypes and shapes, to a model whose
doors may submit directly, needs no conversion, no request of the client and no task. A thread may
even run it itself: see `headrace.scheduling.lending`. Anything else, and every refusal, takes the
complete way of `headrace.client`, whose results are the same.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from headrace.client import ConnectionFailed
from headrace.client.transport import Result
from headrace.core.call import Call, Computed, InferResponse, Submit, Timing
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest, ServerError, ServerExiting
from headrace.core.tensors import Tensor, TensorArray, new_tensor
from headrace.engine.entrance import Direct
from headrace.protocol.arrow import NULLS
from headrace.runner.in_process import EngineCall, InProcessTransport, apart, late, status_error
from headrace.scheduling.lending import Lender

_LOOK_SECS = 1.0  # between looks of a waiting thread at the event loop


class KnownInputs(NamedTuple):
    """Inputs that a version has taken: calls with the same need no further check."""

    direct: Direct
    inputs: tuple[tuple[str, Datatype, "np.dtype[Any]", tuple[int, ...]], ...]
    rows: int
    key: object


class _Whole(NamedTuple):
    """Facts about a batch that its results share, without its calls and their inputs."""

    model: str
    version: str
    datatypes: dict[str, Datatype]
    started: int
    compute_ns: int
    rows: int
    gather_ns: int
    masked: bool  # an output marks the missing values of another


class PartResult(Result):
    """The result of one call of a batch: views of its rows, and the response if that is asked for.

    Few look at datatypes and times, and it takes 0.6 µs less without.
    """

    __slots__ = ("_arrived", "_whole")

    def __init__(self, arrays: dict[str, TensorArray], whole: _Whole, arrived: int) -> None:
        self._named = arrays
        self._response = None
        self._whole, self._arrived = whole, arrived

    @property
    def response(self) -> InferResponse:
        """Implements `Result.response`."""
        if self._response is None:
            whole = self._whole
            tensors = [
                Tensor(name, whole.datatypes[name], array) for name, array in self._arrays.items()
            ]
            timing = Timing(
                whole.started - self._arrived, whole.compute_ns, whole.rows, whole.gather_ns
            )
            self._response = InferResponse(whole.model, whole.version, "", tensors, timing)
        return self._response

    @classmethod
    def of(cls, batch: Computed, call: Call) -> Result:
        """The result of one of several calls of a batch, which ask for all outputs."""
        whole = batch.encoded.get(cls)
        if whole is None:
            datatypes = {tensor.name: tensor.datatype for tensor in batch.tensors}
            whole = batch.encoded[cls] = _Whole(
                call.model_name, batch.version, datatypes, batch.started, batch.compute_ns,
                batch.rows, batch.gather_ns, any(name.endswith(NULLS) for name in datatypes),
            )  # fmt: skip
        if whole.masked:
            return Result(batch.response(call))
        first = call.first
        end = first + call.rows
        arrays = {}
        for name, _, array in batch.tensors:
            arrays[name] = array[first:end]
        return cls(arrays, whole, call.arrived)


class PlainCall(EngineCall):
    """A call that is answered to whoever waits for it."""

    __slots__ = ("_seconds", "_transport", "error", "found", "over", "queued", "whole")

    def __init__(self, transport: InProcessTransport, seconds: float) -> None:
        """To be answered within so many seconds, if not 0, once it is submitted."""
        self._transport, self._seconds = transport, seconds
        self.found: Result | None = None
        self.error: Exception | None = None
        self.queued = self.over = self.whole = False

    def fill(
        self, model: str, version: str, given: Mapping[str, Any], known: KnownInputs | None
    ) -> KnownInputs | None:
        """Take the inputs of a plain call, for a model that was called before; None for others.

        `known` is the layout of the caller's last call.
        """
        found = self._transport.engine.known.get((model, version))
        if found is None or not found.ready or (direct := found.direct) is None:
            return None
        if known is not None and known.direct is direct and len(given) == len(known.inputs):
            inputs: dict[str, Tensor] = {}
            for name, datatype, dtype, shape in known.inputs:
                array = given.get(name)
                if (
                    type(array) is not np.ndarray
                    or array.dtype is not dtype
                    or array.shape != shape
                    or not array.flags.c_contiguous
                ):
                    break
                inputs[name] = new_tensor((name, datatype, array))
            else:
                # What a batch needs; 0.3 µs less than `complete`.
                self.model_name, self.model_version, self.id = model, version, ""
                self.inputs, self.outputs = inputs, ()
                self.ended = self.whole = False
                self.rows, self.key = known.rows, known.key
                return known
        return self._check(model, version, given, direct)

    def _check(
        self, model: str, version: str, given: Mapping[str, Any], direct: Direct
    ) -> KnownInputs | None:
        signature = direct.of[0]
        inputs: dict[str, Tensor] = {}
        try:
            for name, array in given.items():
                datatype = signature.input(name).datatype
                if (
                    type(array) is not np.ndarray
                    or array.dtype is not NUMPY[datatype]
                    or array.dtype.hasobject
                    or not array.flags.c_contiguous
                ):
                    return None
                inputs[name] = new_tensor((name, datatype, array))
            self.model_name, self.model_version, self.inputs = model, version, inputs
            self.whole = False
            self.complete()
            self.rows = signature.check(self)
        except InvalidRequest:
            return None
        if self.rows > direct.most_rows:
            return None
        self.key = None if signature.uniform else signature.batch_key(self)
        layout = tuple((t.name, t.datatype, t.array.dtype, t.array.shape) for t in inputs.values())
        return KnownInputs(direct, layout, self.rows, self.key)

    def complete(self) -> None:
        """Implements `JoinedCall.complete`."""
        if not self.whole:
            self.whole = True
            nbytes = sum([tensor.array.nbytes for tensor in self.inputs.values()])
            self.ask(self.model_name, self.model_version, "", self.inputs, nbytes=nbytes)

    def queue(self, submit: Submit) -> None:
        """Implements `JoinedCall.queue`."""
        try:
            self.submit(submit)
        except Exception as error:
            self.error = error
            self.over = True
            self.wake()

    def submit(self, submit: Submit) -> None:
        """Queue the filled call; raises `StatusError`.

        It is charged to nobody: its arrays are the program's.
        """
        self.complete()
        transport = self._transport
        self.until = transport.expiry.after(self._seconds) if self._seconds else 0.0
        transport.under_way.add(self)
        self.queued = True
        try:
            if transport.engine.admission.exiting:
                raise ServerExiting("Server exiting")
            submit(self)
        except BaseException as error:
            self._leave()
            if isinstance(error, ServerError):
                raise status_error(error) from None
            raise

    def respond_from(self, batch: Computed) -> None:
        """Implements `Call.respond_from`."""
        if self._leave():
            self.found = self._found(batch)
            self.wake()

    def _found(self, batch: Computed) -> Result:
        if len(batch.calls) > 1:  # their inputs were copied into the batch
            return PartResult.of(batch, self)
        return Result(apart(batch.response(self), self.inputs))

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        if self._leave():
            self.found = Result(apart(response, self.inputs))
            self.wake()

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        if self._leave():
            self.error = status_error(error)
            self.wake()

    def expire(self, seconds: float) -> None:
        """End the call, which has taken so many seconds."""
        if self._leave():
            self.cancel()
            self.error = late(self.model_name, seconds)
            self.wake()

    def give_up(self) -> None:
        """Cancel the call, whose caller no longer waits."""
        if self._leave():
            if self.whole:
                self.cancel()
            self.ended = True

    def result(self) -> Result:
        """The response as the caller gets it; raises `ClientError`."""
        if (error := self.error) is not None:
            self.error = None
            try:
                raise error
            finally:
                del error  # which has this frame in its traceback
        assert self.found is not None
        return self.found

    def _leave(self) -> bool:
        """Release the call; False if it was over before."""
        if self.over:
            return False
        self.over = True
        if self.queued:
            self._transport.left(self)
        return True

    def wake(self) -> None:
        """Let the caller go on: there is a response or an error."""
        raise NotImplementedError


class CoroutineCall(PlainCall):
    """A call that a coroutine waits for: `future`, if any, is done once it is answered."""

    __slots__ = ("future",)

    future: asyncio.Future[None] | None

    def __init__(self, transport: InProcessTransport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self.found = self.error = self.future = None
        self.queued = self.over = self.whole = False

    def respond_from(self, batch: Computed) -> None:
        """Implements `Call.respond_from`, by what `PlainCall` does; 0.4 µs less in one function."""
        if self.over:
            return
        self.over = True
        if self.queued:
            self._transport.left(self)
        self.found = PartResult.of(batch, self) if len(batch.calls) > 1 else self._found(batch)
        if (future := self.future) is not None and not future.done():
            future.set_result(None)

    def wake(self) -> None:
        """Implements `PlainCall.wake`."""
        if (future := self.future) is not None and not future.done():
            future.set_result(None)


class ThreadCall(PlainCall):
    """A call that a thread waits for: a lock costs less than an event, or a future."""

    __slots__ = ("_again", "_answered", "_given", "_loop", "layout")

    def __init__(
        self, transport: InProcessTransport, seconds: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(transport, seconds)
        self.instance = None
        self.layout: KnownInputs | None = None
        self._loop = loop
        self._again = False
        self._answered: Lock | None = None  # while nobody waits

    def answered(
        self, model: str, version: str, given: Mapping[str, Any], known: KnownInputs | None
    ) -> Result | None:
        """Run the call, or have it run, and return its result; None if it is not plain.

        `known` and `layout` are as in `fill`.
        """
        seconds = self._seconds
        self.until = monotonic() + seconds if seconds else 0.0
        self._given = model, version, given
        try:
            while not self.over:
                self._again = False
                self.layout = self.fill(model, version, given, known)
                lender = None if self.layout is None else self.layout.direct.lender
                if lender is not None and lender.enter(self):
                    self._take_turn(lender, seconds)
                elif not self._hand_on(seconds):
                    return None
                if not self._again:
                    break
        except BaseException:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.give_up)
            raise
        return None if self.found is None and self.error is None else self.result()

    def prepare(self) -> None:
        """Implements `ThreadedCall.prepare`."""
        if self._answered is None:
            self._answered = Lock()
            self._answered.acquire()

    def wake(self) -> None:
        """Implements `PlainCall.wake`."""
        if self._answered is not None:
            self._answered.release()

    def hand_over(self) -> None:
        """Implements `ThreadedCall.hand_over`."""
        if not self.over:
            self._begin()

    def _take_turn(self, lender: Lender, seconds: float) -> None:
        try:
            if self.instance is None:
                self._wait(seconds)
            if self.instance is not None:
                lender.run(self)
                if not self.over:  # the batch has failed
                    self._wait(seconds)
        except BaseException:
            lender.leave(self)
            raise
        if self.instance is not None:
            lender.leave(self)

    def _hand_on(self, seconds: float) -> bool:
        """Pass the call to the event loop, and wait; False if it has ended."""
        self.prepare()
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:  # the complete way says so
            return False
        self._wait(seconds)
        return True

    def _wait(self, seconds: float) -> None:
        """Wait until the call is answered, or it is its turn."""
        assert self._answered is not None, "a wait without a lock. This is a bug."
        acquire, until = self._answered.acquire, self.until or inf
        while not acquire(timeout=min(max(until - monotonic(), 0.0), _LOOK_SECS)):
            if self._loop.is_closed():
                raise ConnectionFailed("the client was closed during the request")
            if monotonic() >= until:
                raise late(self._given[0], seconds)
            if self.instance is not None:
                return

    def _begin(self) -> None:
        """Lend the model's instances to threads, or submit the call."""
        try:
            layout = self.fill(*self._given, None)
            if layout is not None:
                lender = layout.direct.lend(self._loop.call_soon_threadsafe)
                if lender is None:
                    self.submit(layout.direct.submit)
                    return
                layout.direct.lender = lender
                self._again = True
        except Exception as error:
            self.error = error
        self.over = not self._again
        self.wake()
