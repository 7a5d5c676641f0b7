"""Calls from a model to its server, and the functions that control models."""

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

from headrace.workers.elements import Buffer
from headrace.workers.encoding import read_response
from headrace.workers.triton_responses import InferenceResponse, TritonError
from headrace.workers.triton_server import connected

Reply = tuple[dict[str, Any], Buffer, int]


class Caller(Protocol):
    """What takes replies in while somebody waits for them."""

    def wait(self, there: Callable[[], object]) -> None:
        """Wait until `there` is true, or the server has gone."""

    def drop_call(self, number: int) -> None:
        """Want no more replies to a call."""


class Call:
    """Something that the server was asked for, and its replies: one, or any number."""

    def __init__(self, caller: Caller, number: int) -> None:
        self._caller = caller
        self._number = number
        self._replies: deque[Reply] = deque()
        self._ended = False
        self._wake: Callable[[], object] | None = None

    def take(self, told: dict[str, Any], data: Buffer, size: int) -> None:
        """A reply has come; called on any thread."""
        self._replies.append((told, data, size))
        self._ended = self._ended or told["final"]
        wake = self._wake
        if wake is not None:
            wake()

    def next(self) -> Reply | None:
        """Wait for the next reply; None after the last."""
        self._caller.wait(self._there)
        return self._replies.popleft() if self._replies else None

    async def next_async(self) -> Reply | None:
        """The same for coroutines."""
        loop = asyncio.get_running_loop()
        come = asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(come.set)
        while not self._there():
            await come.wait()
            come.clear()
        return self._replies.popleft() if self._replies else None

    def drop(self) -> None:
        """Want no more replies."""
        if not self._ended:
            self._ended = True
            self._caller.drop_call(self._number)

    def _there(self) -> bool:
        return bool(self._replies) or self._ended


class ResponseIterator:
    """The responses of another model, as they come; for `for` and, in coroutines, `async for`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        response = None if self._over else self._response(self._call.next())
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = None if self._over else self._response(await self._call.next_async())
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Want no more of them."""
        self._over = True
        self._call.drop()

    def __del__(self) -> None:
        self._call.drop()

    def only(self) -> InferenceResponse:
        """The one response of an ordinary model."""
        return next(self, _lost())

    async def only_async(self) -> InferenceResponse:
        """The same for coroutines."""
        return await anext(self, _lost())

    def _response(self, reply: Reply | None) -> InferenceResponse | None:
        """A reply as a response; None if nothing more comes."""
        if reply is None:
            return None
        told, data, size = reply
        self._over = told["final"]
        if told["response"] is None:
            return InferenceResponse([])  # as in Triton, the end may come with nothing
        return read_response(told["response"], told["sizes"], data, size)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Have the server load a model, with another configuration (JSON) or other files if given.

    Raises `TritonModelException` if it cannot, or may not.
    """
    encoded = {name: base64.b64encode(data).decode() for name, data in (files or {}).items()}
    connected().control({"op": "load", "model": model_name, "config": config, "files": encoded})


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Have the server unload a model; raises `TritonModelException` if it cannot, or may not."""
    connected().control(
        {"op": "unload", "model": model_name, "dependents": bool(unload_dependents)}
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether the server would take requests for a model."""
    document = {"op": "ready", "model": model_name, "version": str(model_version)}
    return bool(connected().control(document))


def _lost() -> InferenceResponse:
    return InferenceResponse(
        error=TritonError("the other model has given no response", TritonError.INTERNAL)
    )
