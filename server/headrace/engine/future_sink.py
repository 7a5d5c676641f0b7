"""A sink for a caller that awaits the one response of its request."""

import asyncio

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import InferResponse, Sink


class FutureSink(Sink):
    """Resolves a future."""

    __slots__ = ("future",)

    def __init__(self, future: "asyncio.Future[InferResponse]") -> None:
        self.future = future

    def respond(self, response: InferResponse, final: bool) -> None:
        """Resolve the future."""
        if not self.future.done():
            self.future.set_result(response)

    def finish(self) -> None:
        """Fail the future: there is no response."""
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        """Fail the future."""
        if not self.future.done():
            self.future.set_exception(error)

    refuse = fail
