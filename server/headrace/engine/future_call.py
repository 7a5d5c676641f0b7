"""A call for somebody who awaits its one response."""

import asyncio

from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError


class Awaited:
    """The way back to a future of the running event loop, for calls that are awaited."""

    __slots__ = ()

    future: asyncio.Future[InferResponse]

    def respond(self, response: InferResponse, final: bool) -> None:
        """Resolve the future."""
        if not self.future.done():
            self.future.set_result(response)

    def fail(self, error: ServerError) -> None:
        """Fail the future."""
        if not self.future.done():
            self.future.set_exception(error)


class FutureCall(Awaited, Call):
    """A copy of a call that resolves a future."""

    __slots__ = ("future",)

    def __init__(self, asked: Call) -> None:
        """Ask what `asked` does."""
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
