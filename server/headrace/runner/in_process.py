"""The client's transport to an engine in this process: no bytes, and no copies."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from headrace.api.handlers import BareCall, unary_handlers
from headrace.api.operations import Document, Operation
from headrace.client import ClientError, StatusError, TimedOut
from headrace.client.documents import answer_document, request_message
from headrace.client.transport import InferRequest, Responses, flat_json
from headrace.client.values import ModelSignature
from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError, ServerExiting, Unsupported
from headrace.core.tensors import Tensor, TensorArray
from headrace.engine.engine import Engine
from headrace.protocol.generate import decode_generate, encode_generate
from headrace.protocol.parameters import add_timing, call_options, split_parameters, wants_timing
from headrace.protocol.status import STATUS
from headrace.scheduling.lending import ThreadedCall

_SEVERAL = "the model may answer any number of times: call stream"
_NOTHING: frozenset[str] = frozenset()
_LEAST_PAUSE = 0.005  # seconds between looks at the calls under way


class _Forks:
    """The number of forks between the first process and this one: cheaper to read than its id."""

    count = 0

    def forked(self) -> None:
        """Note that this process has been forked."""
        self.count += 1


FORKS = _Forks()
os.register_at_fork(after_in_child=FORKS.forked)


class EngineCall(ThreadedCall):
    """A call of this process, with a deadline by the monotonic clock, 0 for none."""

    __slots__ = ("until",)

    door = "ENGINE"

    def __init__(self, asked: Call, seconds: float) -> None:
        self.begin()
        self.take(asked)
        self.nbytes = asked.nbytes
        self.until = monotonic() + seconds if seconds else 0.0

    def remaining(self) -> float:
        """Implements `Call.remaining`."""
        return max(self.until - monotonic(), 1e-3) if self.until else 0.0

    def expire(self, seconds: float) -> None:
        """End a call of the short way in time; others are ended by who has begun them."""


class _SingleCall(EngineCall):
    """A call with exactly one response."""

    __slots__ = ("future",)

    refusal = _SEVERAL

    def __init__(self, asked: Call, seconds: float) -> None:
        super().__init__(asked, seconds)
        self.future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        if not self.future.done():
            self.future.set_result(response)

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        if not self.future.done():
            self.future.set_exception(status_error(error))


class _StreamedCall(EngineCall):
    """A call with any number of responses, which an iterator takes."""

    __slots__ = ("over", "responses")

    def __init__(self, asked: Call, seconds: float) -> None:
        super().__init__(asked, 0)
        self.over = False
        self.responses: Responses[InferResponse] = Responses(
            self._restrain, seconds, late(asked.model_name, seconds)
        )

    def _restrain(self, held: bool) -> None:
        if not self.over:
            self.hold(held)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        self.responses.put(response)
        if final:
            self.finish()

    def finish(self) -> None:
        """Implements `Call.finish`."""
        self.over = True
        self.responses.end()

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        self.over = True
        self.responses.end(status_error(error))


class Expiry:
    """One timer for all calls of an engine that end in time, nearly all of them."""

    def __init__(self, calls: set[EngineCall]) -> None:
        self._calls = calls
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = 0.0

    def after(self, seconds: float) -> float:
        """The moment after so many seconds, when the call that is about to begin expires."""
        if self._timer is None:
            self._seconds = seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)
        return monotonic() + seconds

    def _look(self) -> None:
        self._timer = None
        now = monotonic()
        left = inf
        for call in list(self._calls):
            if call.until:
                if call.until <= now:
                    call.expire(self._seconds)
                else:
                    left = min(left, call.until - now)
        if left < inf:
            pause = max(left, _LEAST_PAUSE)
            self._timer = asyncio.get_running_loop().call_later(pause, self._look)


class InProcessTransport:
    """Implements `headrace.client.transport.Transport` by an engine, on its event loop.

    Arrays of requests and responses are those that models take and give; neither is written.
    """

    def __init__(self, engine: Engine, max_request_bytes: int) -> None:
        self.engine = engine
        self.forks = FORKS.count
        self.loop = asyncio.get_running_loop()
        self.under_way = set[EngineCall]()
        self.expiry = Expiry(self.under_way)
        self._emptied: asyncio.Event | None = None
        self._unary = unary_handlers(engine, max_request_bytes)

    async def ask(
        self,
        operation: Operation,
        given: Document | None,
        parts: Mapping[str, str],
        seconds: float,
    ) -> Any:
        """The answer of an operation, in the form of the client over gRPC."""
        answer = self._unary.get(operation.procedure)
        if answer is None:
            raise ClientError(f"{operation.name} is an operation of servers")
        message = request_message(operation, given or {}, parts)
        await asyncio.sleep(0)  # calls that have just been answered are counted by then
        try:
            async with asyncio.timeout(seconds or None):
                return answer_document(operation, await answer(message, BareCall()))
        except ServerError as error:
            raise status_error(error) from None
        except TimeoutError:
            raise late(operation.name, seconds) from None

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """The response to a request."""
        call = _SingleCall(_asked(request), seconds)
        if not call.options.sequence_id:  # a request of any number of rows is divided
            call.options = call.options._replace(table=True)
        with self._submitted(call):
            try:
                async with asyncio.timeout(seconds or None):
                    response = await call.future
            except TimeoutError:
                raise late(request.model, seconds) from None
            finally:
                if not call.future.done() or call.future.cancelled():
                    call.cancel()
        return apart(response, call.inputs)

    async def stream(
        self, request: InferRequest, signature: ModelSignature, seconds: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request."""
        call = _StreamedCall(_asked(request), seconds)
        with self._submitted(call):
            try:
                async for response in call.responses:
                    yield apart(response, call.inputs)
            finally:
                if not call.over:
                    call.cancel()

    async def generate(
        self, model: str, version: str, document: Document, seconds: float
    ) -> AsyncGenerator[Document, None]:
        """The responses to a request of flat JSON."""
        body = flat_json(document)
        try:
            await self.engine.bring(model, version)
            signature = self.engine.find_version(model, version).chain.signature
            asked = decode_generate(signature, model, version, body)
        except ServerError as error:
            raise status_error(error) from None
        timed = wants_timing(asked)
        call = _StreamedCall(asked, seconds)
        with self._submitted(call):
            try:
                async for response in call.responses:
                    if timed:
                        add_timing(response)
                    yield json.loads(encode_generate(response))  # which may have NaN
            except ServerError as error:  # an output that has no JSON form
                raise status_error(error) from None
            finally:
                if not call.over:
                    call.cancel()

    async def fetch(self, path: str, seconds: float) -> bytes:
        """Raise `ClientError`: paths are a server's."""
        raise ClientError(f"{path} is a path of servers")

    def left(self, call: EngineCall) -> None:
        """Note that a call is over."""
        self.under_way.discard(call)
        if self._emptied is not None and not self.under_way:
            self._emptied.set()

    async def emptied(self) -> None:
        """Wait until no call is under way."""
        if self.under_way:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    async def close(self) -> None:
        """End the calls that are still under way."""
        for call in list(self.under_way):
            call.cancel()
            call.fail(ServerExiting("the engine was closed"))

    @contextmanager
    def _submitted(self, call: EngineCall) -> Iterator[None]:
        """Submit a call, and charge it until it is over."""
        admission = self.engine.admission
        try:
            admission.enter(call.nbytes)
        except ServerError as error:
            raise status_error(error) from None
        self.under_way.add(call)
        try:
            found = self.engine.find(call.model_name, call.model_version)
            if found.decoupled and call.refusal:
                raise Unsupported(call.refusal)
            found.submit(call)
            yield
        except ServerError as error:
            raise status_error(error) from None
        finally:
            self.left(call)
            admission.leave(call.nbytes)


def _asked(request: InferRequest) -> Call:
    """The call for a request; raises `StatusError`."""
    try:
        reserved, custom = split_parameters(dict(request.parameters), _NOTHING)
    except ServerError as error:
        raise status_error(error) from None
    return Call(
        request.model, request.version, request.id, {t.name: t for t in request.inputs},
        tuple(request.outputs), custom, call_options(reserved, request.classes),
        sum(t.array.nbytes for t in request.inputs),
    )  # fmt: skip


def apart(response: InferResponse, inputs: Mapping[str, Tensor]) -> InferResponse:
    """A response whose outputs are not in the caller's arrays, which may change from now on."""
    for place, tensor in enumerate(response.outputs):
        array = tensor.array
        for given in inputs.values():
            if _shared(array, given.array):
                response.outputs[place] = Tensor(tensor.name, tensor.datatype, array.copy())
    return response


def _shared(array: TensorArray, given: TensorArray) -> bool:
    both = isinstance(array, np.ndarray) and isinstance(given, np.ndarray)
    return both and np.may_share_memory(array, given)


def status_error(error: ServerError) -> StatusError:
    """An engine's error as a client sees it."""
    status = STATUS[type(error)]
    return StatusError(status.http, str(error), status.grpc)


def late(what: str, seconds: float) -> TimedOut:
    """The error of a request that was not answered in time."""
    return TimedOut(f"no answer of {what} within {seconds:g} s")
