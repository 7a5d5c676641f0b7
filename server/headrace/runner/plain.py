"""The short way of plain calls from the program: arrays exactly as a model takes them.

A call by `model(name=array)` whose arrays have the declared datatypes and shapes, to a model whose
doors may submit directly, needs no conversion, no request of the client and no task. Anything else,
and every refusal, takes the complete way of `headrace.client`, whose results are the same.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np

from headrace.client import ConnectionFailed
from headrace.client.transport import Result
from headrace.core.call import InferResponse
from headrace.core.datatypes import NUMPY
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.tensors import Tensor, new_tensor
from headrace.runner.in_process import EngineCall, InProcessTransport, apart, late, status_error

_LOOK_SECS = 1.0  # between looks of a waiting thread at the event loop


class PlainCall(EngineCall):
    """A call that is answered to whoever waits for it."""

    __slots__ = ("_transport", "error", "over", "response")

    def __init__(self, transport: InProcessTransport) -> None:
        self._transport = transport
        self.response: InferResponse | None = None
        self.error: Exception | None = None
        self.over = False

    def submit(self, model: str, version: str, given: Mapping[str, Any]) -> bool:
        """Queue the call if it is plain, for a model that was called before.

        False for any other: nothing has happened then. Raises `StatusError`.
        """
        engine = self._transport.engine
        found = engine.known.get((model, version))
        if found is None or not found.ready or (direct := found.direct) is None:
            return False
        signature = direct.of[0]
        inputs: dict[str, Tensor] = {}
        nbytes = 0
        try:
            for name, array in given.items():
                datatype = signature.input(name).datatype
                if (
                    type(array) is not np.ndarray
                    or array.dtype is not NUMPY[datatype]
                    or array.dtype.hasobject
                    or not array.flags.c_contiguous
                ):
                    return False
                inputs[name] = new_tensor((name, datatype, array))
                nbytes += array.nbytes
            self.ask(model, version, "", inputs, nbytes=nbytes)
            self.rows = signature.check(self)
        except InvalidRequest:
            return False
        if self.rows > direct.most_rows:
            return False
        self.until = 0.0
        try:
            engine.admission.enter(nbytes)
            self._transport.under_way.add(self)
            try:
                direct.submit(self)
            except BaseException:
                self._leave()
                raise
        except ServerError as error:
            raise status_error(error) from None
        return True

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        self.response = response
        if self._leave():
            self.wake()

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        self.error = status_error(error)
        if self._leave():
            self.wake()

    def give_up(self) -> None:
        """Cancel the call, whose caller no longer waits."""
        if self._leave():
            self.cancel()

    def result(self) -> Result:
        """The response as the caller gets it; raises `StatusError`."""
        if (error := self.error) is not None:
            self.error = None
            try:
                raise error
            finally:
                del error  # which has this frame in its traceback
        assert self.response is not None
        return Result(apart(self.response, [tensor.array for tensor in self.inputs.values()]))

    def _leave(self) -> bool:
        """Release the submitted call; False if it was over before."""
        if self.over:
            return False
        self.over = True
        self._transport.under_way.discard(self)
        self._transport.engine.admission.leave(self.nbytes)
        return True

    def wake(self) -> None:
        """Let the caller go on: there is a response or an error."""
        raise NotImplementedError


class CoroutineCall(PlainCall):
    """A call that a coroutine waits for."""

    __slots__ = ("future",)

    def __init__(self, transport: InProcessTransport) -> None:
        super().__init__(transport)
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answered(self, seconds: float) -> Result:
        """The result of the submitted call, within so many seconds if not 0."""
        future = self.future
        expiry = future.get_loop().call_later(seconds, self.wake) if seconds else None
        try:
            await future
            if not self.over:
                raise late(self.model_name, seconds)
            return self.result()
        finally:
            if expiry is not None:
                expiry.cancel()
            self.give_up()

    def wake(self) -> None:
        """Implements `PlainCall.wake`."""
        if not self.future.done():
            self.future.set_result(None)


class ThreadCall(PlainCall):
    """A call that a thread waits for: a lock costs less than an event, or a future."""

    __slots__ = ("_answered",)

    def __init__(self, transport: InProcessTransport) -> None:
        super().__init__(transport)
        self._answered = Lock()
        self._answered.acquire()

    def answered(
        self, loop: asyncio.AbstractEventLoop, model: str, version: str, given: Mapping[str, Any],
        seconds: float,
    ) -> Result | None:  # fmt: skip
        """Submit the call on the engine's loop, and wait for its result, for seconds if not 0.

        None if it is not plain.
        """
        try:
            loop.call_soon_threadsafe(self._begin, model, version, given)
        except RuntimeError:  # the loop has ended: the complete way says so
            return None
        until = monotonic() + seconds if seconds else inf
        try:
            while not self._answered.acquire(
                timeout=min(max(until - monotonic(), 0.0), _LOOK_SECS)
            ):
                if loop.is_closed():
                    raise ConnectionFailed("the client was closed during the request")
                if monotonic() >= until:
                    raise late(model, seconds)
        except BaseException:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.give_up)
            raise
        return None if self.response is None and self.error is None else self.result()

    def _begin(self, model: str, version: str, given: Mapping[str, Any]) -> None:
        try:
            if self.submit(model, version, given):
                return
        except Exception as error:
            self.error = error
        self.over = True
        self.wake()

    def wake(self) -> None:
        """Implements `PlainCall.wake`."""
        self._answered.release()
