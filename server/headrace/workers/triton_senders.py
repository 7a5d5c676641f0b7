"""What a model answers one request with, at any time and from any thread.

A request that is neither answered nor kept by the model is answered with an error: nobody waits for
an answer that cannot come.
"""

import sys
from collections.abc import Sequence
from typing import Protocol

from headrace.workers.triton_arguments import UINT32, whole, wrong
from headrace.workers.triton_responses import InferenceResponse, TritonError
from headrace.workers.triton_tensors import TritonModelException

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Exchange(Protocol):
    """The way of answers to the server, from any thread."""

    def respond(
        self, number: int, response: InferenceResponse | None, final: bool, wanted: Sequence[str]
    ) -> None:
        """Send a response to a request, the last one if it is `final`, or only the end."""

    def drop(self, number: int, error: TritonError) -> None:
        """End a request with an error; called wherever the interpreter frees an object."""

    def wait_for_room(self, number: int) -> None:
        """Wait while the client does not read what it has got."""

    async def room(self, number: int) -> None:
        """The same on an event loop."""

    def is_cancelled(self, number: int) -> bool:
        """Whether nobody waits for a request any more."""


class Answering:
    """What one request has been answered so far, by senders."""

    __slots__ = ("closed", "decoupled", "number", "sent", "source", "wanted")

    def __init__(
        self, source: Exchange, number: int, wanted: Sequence[str], decoupled: bool
    ) -> None:
        self.source = source
        self.number = number
        self.wanted = wanted
        self.decoupled = decoupled
        self.sent = 0
        self.closed = False  # nothing more is to be sent

    def __del__(self) -> None:
        if not self.closed:
            missing = (
                "its response sender must send TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                if self.decoupled
                else "execute returned no response to it, and its response sender sent none"
            )
            text = f"the model has dropped the request without completing it: {missing}"
            self.source.drop(self.number, TritonError(text))


class InferenceResponseSender:
    """Answers one request, from any thread."""

    __slots__ = ("_answering",)

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the end of the request, or both.

        Waits while the client does not read, unless it is called on an event loop. Raises
        `TypeError`, and `TritonModelException` for what cannot be sent.
        """
        answering = self._answering
        self._check(response, flags)
        if not flags and not _on_event_loop():
            answering.source.wait_for_room(answering.number)
        self._send(response, flags)

    async def asend(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """As `send`, for coroutines: others run while it waits for the client to read."""
        answering = self._answering
        self._check(response, flags)
        if not flags:
            await answering.source.room(answering.number)
        self._send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the request any more."""
        return self._answering.source.is_cancelled(self._answering.number)

    def _send(self, response: InferenceResponse | None, flags: int) -> None:
        answering = self._answering
        final = bool(flags)
        if response is not None:
            # An ordinary model's only response is its last one, too: the flag may come, or not.
            final = final or not answering.decoupled
            answering.sent += 1
        answering.closed = answering.closed or final
        answering.source.respond(answering.number, response, final, answering.wanted)

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        answering = self._answering
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            whole("flags", flags, UINT32)
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is not None and not isinstance(response, InferenceResponse):
            raise wrong("response", "an InferenceResponse or None", response)
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not answering.decoupled:
            if answering.sent and response is None:
                return  # the response was the end already
            if answering.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one"
                    " response."
                )
            if response is None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before"
                    " sending a response."
                )
        if answering.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")


def _on_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:  # nothing has a loop
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
