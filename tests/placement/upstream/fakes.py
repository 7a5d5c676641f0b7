"""Fakes of upstreams and their streams, and a loop with a manual clock."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.placement.upstream.connection import CallFailed, RemoteRequest
from headrace.protocol.status import Failure, failure_of_text
from headrace.protocol.v2_protobuf import RemoteAnswer
from tests.scheduling.fakes import FakeClock, FakeTimer


class Loop:
    """The necessary part of an event loop, with a manual clock."""

    def __init__(self) -> None:
        self._clock = FakeClock()

    def time(self) -> float:
        return self._clock.time / 1e9

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        return self._clock.at(self._clock.time + round(seconds * 1e9), callback)

    def advance(self, seconds: float) -> None:
        self._clock.advance(round(seconds * 1e9))

    @property
    def armed(self) -> int:
        """Number of pending timers."""
        return len(self._clock.armed)


class Server:
    """An upstream and its requests; `call` is its one call."""

    usable = True

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.call = Stream(None)
        self.notes: list[str] = []

    def begin(self, request: RemoteRequest, receiver: object) -> "Stream":
        return self.call

    def stream(self, request: RemoteRequest, receiver: Any) -> "Stream":
        self.streams.append(Stream(receiver))
        return self.streams[-1]

    def succeeded(self) -> None:
        self.notes.append("succeeded")

    def abandoned(self) -> None:
        self.notes.append("abandoned")

    def failed(self, failed: CallFailed) -> None:
        self.notes.append(failed.failure.fate.name)


class Stream:
    """A stream to an upstream."""

    waiting = 0

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        self.held: list[bool] = []
        self.cancelled = False

    def hold(self, held: bool) -> None:
        self.held.append(held)

    def cancel(self) -> None:
        self.cancelled = True

    def give(self, value: int | None, final: bool = False) -> None:
        """Send a response, without outputs for None."""
        outputs = {} if value is None else {"OUT": np.array([value])}
        answer = RemoteAnswer(outputs, {"triton_final_response": final, "more": 1})
        self.receiver.received(answer)

    def refuse(self, text: str) -> None:
        """Send an error."""
        self.receiver.received(failure_of_text(text))

    def end(self, failure: Failure | None = None) -> None:
        """End the stream."""
        if failure is None:
            self.receiver.ended()
        else:
            self.receiver.failed(CallFailed(failure, "said"))
