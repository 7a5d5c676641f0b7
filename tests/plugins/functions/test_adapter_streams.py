"""Generators answering requests, over a recording sender."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace import InvalidInput, model
from headrace.plugins.functions.adapter import FINAL
from headrace.workers import triton_api as pb
from tests.plugins.functions.requests import Request, started, values

SECONDS = 10.0
INVALID, INTERNAL = pb.TritonError.INVALID_ARG, pb.TritonError.INTERNAL


class Sender:
    """Records responses; the client disconnects after `patience` of them."""

    def __init__(self, patience: int = 99) -> None:
        self.told: list[Any] = []
        self.patience = patience
        self.ended = Event()

    def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        assert response is not None or flags
        assert not self.ended.is_set()
        if response is not None:
            self.told.append(values(response))
        if flags == FINAL:
            self.ended.set()

    async def asend(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        await asyncio.sleep(0)
        self.send(response, flags)

    def is_cancelled(self) -> bool:
        return len(self.told) >= self.patience


class Streamed(Request):
    """A request with a sender."""

    def __init__(self, sender: Sender | None = None, **inputs: Any) -> None:
        super().__init__(**inputs)
        self.sender = sender or Sender()

    def get_response_sender(self) -> Sender:
        return self.sender


closed: list[str] = []


@model
def counted(text: str, count: int = 3) -> Iterator[tuple[str, int]]:
    if text == "wrong":
        raise InvalidInput("this text is wrong")
    try:
        for number in range(count):
            if text == "fail" and number == 1:
                raise RuntimeError("a line\nand another")
            yield text, "no number" if text == "type" else number  # type: ignore[misc]
    finally:
        closed.append(text)


@model
async def counted_async(text: str, count: int = 3) -> AsyncIterator[tuple[str, int]]:
    for one in counted(text, count):
        await asyncio.sleep(0)
        yield one


@model
def handed_on(text: str, count: int = 3) -> Iterator[tuple[str, int]]:
    return iter([(text, number) for number in range(count)])


def run(function: Any, *requests: Streamed) -> None:
    """Run requests to their ends."""
    ready = started(function)
    if asyncio.iscoroutinefunction(ready.execute):

        async def all_ended() -> None:
            assert await ready.execute(requests) is None
            async with asyncio.timeout(SECONDS):
                while others := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(others)

        asyncio.run(all_ended())
    else:
        assert ready.execute(requests) is None
    assert all(request.sender.ended.wait(SECONDS) for request in requests)
    ready.finalize()


def said(text: str, numbers: range) -> list[dict[str, Any]]:
    return [{"output0": [text], "output1": [number]} for number in numbers]


BOTH = pytest.mark.parametrize("function", [counted, counted_async], ids=["thread", "task"])


@pytest.mark.parametrize("function", [counted, counted_async, handed_on])
def test_each_value_is_a_response(function: Any) -> None:
    first, second = Streamed(text=["a"]), Streamed(text=["b"], count=np.array([1]))
    run(function, first, second)
    assert first.sender.told == said("a", range(3))
    assert second.sender.told == said("b", range(1))


@BOTH
def test_no_responses(function: Any) -> None:
    request = Streamed(text=["a"], count=np.array([0]))
    run(function, request)
    assert request.sender.told == []


@BOTH
def test_a_generator_is_closed_when_its_client_disconnects(function: Any) -> None:
    closed.clear()
    request = Streamed(Sender(patience=2), text=["gone"], count=np.array([1_000_000]))
    run(function, request)
    assert request.sender.told == said("gone", range(2))
    assert closed == ["gone"]


@BOTH
def test_a_cancelled_request_is_not_begun(function: Any) -> None:
    closed.clear()
    run(function, Streamed(Sender(patience=0), text=["early"]))
    assert closed == []


@BOTH
def test_an_error_ends_the_request(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    request = Streamed(text=["fail"])
    run(function, request)
    error = {"error": (INTERNAL, "RuntimeError: a line and another")}
    assert request.sender.told == [*said("fail", range(1)), error]
    assert "has failed to answer a request" in caplog.text
    assert "in counted" in caplog.text


@BOTH
def test_a_value_unlike_the_declaration_ends_the_request(function: Any) -> None:
    request = Streamed(text=["type"])
    run(function, request)
    (code, text), = (told["error"] for told in request.sender.told)  # fmt: skip
    assert code == INTERNAL
    assert "output 'output1' is declared as int, got str 'no number'" in text


@BOTH
def test_invalid_inputs_are_client_errors(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrong, bad = Streamed(text=["wrong"]), Streamed(text=np.array([b"\xff"], object))
    with caplog.at_level(logging.INFO):
        run(function, wrong, bad)
    assert wrong.sender.told == [{"error": (INVALID, "this text is wrong")}]
    assert bad.sender.told[0]["error"][0] == INVALID
    assert caplog.text == ""


def test_the_threads_of_generators_are_bounded() -> None:
    begun, go_on = [Event() for _ in range(3)], Event()

    @model(max_streams=2)
    def waiting(number: int) -> Iterator[int]:
        begun[number].set()
        assert go_on.wait(SECONDS)
        yield number

    ready = started(waiting)
    requests = [Streamed(number=np.array([number])) for number in range(3)]
    ready.execute(requests)
    assert begun[0].wait(SECONDS)
    assert begun[1].wait(SECONDS)
    assert not begun[2].is_set()
    go_on.set()
    assert all(request.sender.ended.wait(SECONDS) for request in requests)
    assert begun[2].is_set()
    ready.finalize()


def test_a_failed_sender_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Sender):
        def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
            if flags:
                self.ended.set()
            raise OSError("the server has gone")

    ready = started(counted)
    request = Streamed(Broken(), text=["a"])
    ready.execute([request])
    assert request.sender.ended.wait(SECONDS)
    ready.finalize()  # it waits for no thread
    deadline = Event()
    while "could not end a request" not in caplog.text:
        assert not deadline.wait(0.01)
