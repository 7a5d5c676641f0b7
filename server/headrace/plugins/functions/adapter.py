"""Adapters of decorated functions, classes and generators to the methods of Triton's models.

Requests become calls, calls become responses (`calls.py`). Exceptions of a function are passed on:
the server then runs a batch of several again in halves, until the failing request is alone.

Generators are decoupled models: each yielded value is a response, the generator's end the last one.
Plain ones run on threads of the model, each of which answers one request at a time; asynchronous
ones are tasks on the worker's event loop. Both wait while a client does not read. A generator whose
client has disconnected is closed at its next value.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Protocol

from headrace.plugins.functions.calls import Arguments, CallPlan, Calls, Request, refusal
from headrace.plugins.functions.configuration import check, complete
from headrace.plugins.functions.decorator import Declaration, declared
from headrace.plugins.functions.signature import CallMode
from headrace.plugins.functions.values import InvalidInput
from headrace.workers import triton_api as pb


class FunctionModel:
    """Base class of models that are functions or classes.

    `function` is called; a subclass determines the thread or loop.
    """

    declaration: ClassVar[Declaration]

    def __init__(self) -> None:
        self.calls = Calls(self.declaration.signature)
        self.function: Callable[..., Any] = self.declaration.target
        self._object: Any = None

    @classmethod
    def auto_complete_config(cls, config: pb.ModelConfig) -> pb.ModelConfig:
        """Complete the configuration from the annotations."""
        complete(cls.declaration.signature, config)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load; raises `Contradicted` if the configuration does not match the function."""
        check(self.declaration.signature, json.loads(args["model_config"]))
        if isinstance(self.declaration.target, type):
            self._object = self.declaration.target()
            if hasattr(self._object, "load"):
                self._object.load()
            self.function = self._object.predict

    def finalize(self) -> None:
        """Close."""
        if hasattr(self._object, "close"):
            self._object.close()


class PlainModel(FunctionModel):
    """A function that returns its result."""

    def execute(self, requests: Sequence[Request]) -> list[pb.InferenceResponse]:
        """Answer the requests of a batch; passes on the function's exceptions, or `ResultError`."""
        plan = self.calls.plan(requests)
        try:
            results = [self.function(**arguments) for arguments in plan.calls]
        except InvalidInput as error:
            return _refused(requests, error)
        return self.calls.responses(plan, results)


class CoroutineModel(FunctionModel):
    """A coroutine that returns its result; the calls of a batch run concurrently."""

    async def execute(self, requests: Sequence[Request]) -> list[pb.InferenceResponse]:
        """Answer the requests of a batch; passes on the function's exceptions, or `ResultError`."""
        plan = self.calls.plan(requests)
        try:
            results = await _together(self.function, plan.calls)
        except InvalidInput as error:
            return _refused(requests, error)
        return self.calls.responses(plan, results)


def _refused(requests: Sequence[Request], error: InvalidInput) -> list[pb.InferenceResponse]:
    """The responses when a function refuses its input; raises `error` for a batch."""
    if len(requests) > 1:
        raise error  # one of them is to blame, and the server will find it
    return [refusal(error)]


async def _together(
    function: Callable[..., Awaitable[Any]], calls: Iterable[Arguments]
) -> list[Any]:
    """The results of concurrent calls; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(function(**arguments)) for arguments in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
log = logging.getLogger("model")


class ResponseSender(Protocol):
    """The sender of responses to a request; implemented by `triton_api`."""

    def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        """Send; blocks while the client does not read."""

    async def asend(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        """`send` for coroutines."""

    def is_cancelled(self) -> bool:
        """True if the request was cancelled."""


class StreamedRequest(Request, Protocol):
    """A request with any number of responses, as far as needed here."""

    def get_response_sender(self) -> ResponseSender:
        """The sender of its responses."""


class StreamModel(FunctionModel):
    """A generator, on a thread for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(self.declaration.max_streams, "stream")

    def execute(self, requests: Sequence[StreamedRequest]) -> None:
        """Start answering requests; those without a free thread wait for one."""
        for request in requests:
            answer = self._threads.submit(self._answer, request, request.get_response_sender())
            answer.add_done_callback(partial(_report, self.declaration.name))

    def finalize(self) -> None:
        """Start no more, and close."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().finalize()

    def _answer(self, request: Request, sender: ResponseSender) -> None:
        try:
            plan = self.calls.plan([request])
            if plan.calls and not sender.is_cancelled():
                self._stream(plan, sender)
            sender.send(plan.refused[0], FINAL)
        except Exception as error:
            _log(self.declaration.name, error)
            sender.send(refusal(error), FINAL)

    def _stream(self, plan: CallPlan, sender: ResponseSender) -> None:
        values = self.function(**plan.calls[0])
        try:
            for value in values:
                if sender.is_cancelled():
                    return
                sender.send(self.calls.response(value, plan.sizes[0]))
        finally:
            if hasattr(values, "close"):  # generators have it, other iterators may not
                values.close()


class AsyncStreamModel(FunctionModel):
    """An asynchronous generator, a task for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    async def execute(self, requests: Sequence[StreamedRequest]) -> None:
        """Start answering requests."""
        for request in requests:
            task = asyncio.ensure_future(self._answer(request, request.get_response_sender()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(_report, self.declaration.name))

    async def _answer(self, request: Request, sender: ResponseSender) -> None:
        try:
            plan = self.calls.plan([request])
            if plan.calls and not sender.is_cancelled():
                await self._stream(plan, sender)
            await sender.asend(plan.refused[0], FINAL)
        except Exception as error:
            _log(self.declaration.name, error)
            await sender.asend(refusal(error), FINAL)

    async def _stream(self, plan: CallPlan, sender: ResponseSender) -> None:
        values = self.function(**plan.calls[0])
        try:
            async for value in values:
                if sender.is_cancelled():
                    return
                await sender.asend(self.calls.response(value, plan.sizes[0]))
        finally:
            if hasattr(values, "aclose"):
                await values.aclose()


def _report(name: str, request: "Future[None] | asyncio.Future[None]") -> None:
    """Log an error that prevented a request from ending."""
    if not request.cancelled() and (error := request.exception()) is not None:
        log.error("%s could not end a request", name, exc_info=error)


def _log(name: str, error: Exception) -> None:
    if not isinstance(error, InvalidInput):
        log.error("%s has failed to answer a request", name, exc_info=error)


def find(module: ModuleType, wanted: str = "") -> Declaration | None:
    """The model of a module, or the one named `wanted`; None if there is none.

    Imported models only count if none is defined. Raises `LookupError` if there are several or none
    of that name, `SignatureError` for one that cannot be a model.
    """
    found: dict[int, Declaration] = {}
    for value in vars(module).values():
        declaration = declared(value)
        if declaration is not None:
            found[id(value)] = declaration
    models = list(found.values())
    own = [one for one in models if one.target.__module__ == module.__name__]
    models = own or models
    names = ", ".join(sorted(one.name for one in models)) or "none"
    if wanted:
        models = [one for one in models if one.name == wanted]
        if not models:
            raise LookupError(f"there is no @model called {wanted}; there are: {names}")
    if len(models) > 1:
        raise LookupError(
            f"expected one @model, found {names}; parameters['function'] in the config.pbtxt of a"
            " model repository says which one is meant, and a file that is served by itself has to"
            " be split"
        )
    return models[0] if models else None


def adapted(declaration: Declaration) -> type[FunctionModel]:
    """The declared model as a class with the methods of Triton's Python models."""
    signature = declaration.signature
    base: Any = CoroutineModel if signature.asynchronous else PlainModel
    if signature.mode is CallMode.STREAM:
        base = AsyncStreamModel if signature.asynchronous else StreamModel
    namespace = {
        "declaration": declaration,
        "reads_parameters": bool(signature.context),
        "wanted_instances": declaration.instances,
    }
    made: type[FunctionModel] = type(declaration.name, (base,), namespace)
    return made
