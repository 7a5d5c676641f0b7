"""A call for somebody who awaits its one response."""

import asyncio

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import Call, InferResponse


class FutureCall(Call):
    """Resolves a future of the running event loop."""

    __slots__ = ("future",)

    def __init__(self, asked: Call) -> None:
        """Ask what `asked` does."""
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

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
