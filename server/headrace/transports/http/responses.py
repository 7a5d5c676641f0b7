"""What has come for a generate request and is not sent yet."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.core.errors import ServerError
from headrace.core.requests import Call, InferResponse, Sink, Ticket
from headrace.engine.doors import GIVE_UP_BYTES, PAUSE_BYTES, Target, not_read
from headrace.engine.workbench import LARGE, Job
from headrace.transports.http.exchange import Exchange
from headrace.wire.elements import uncharged


class Responses(Sink):
    """The sink of one generate request: what came for it and is not taken yet, as JSON.

    Owned by the event loop. Invariants: the ticket is held exactly while the model was asked to
    pause; after `ended` or `gone` nothing more is taken in.
    """

    door = "HTTP"

    def __init__(
        self,
        encode: Callable[[InferResponse], bytes],
        give_up_bytes: int = GIVE_UP_BYTES,
        exchange: Exchange | None = None,
    ) -> None:
        """Beyond `give_up_bytes` that wait, the request is given up. `exchange` has its headers."""
        self.count = 0  # responses so far
        self.ended = False
        self.error: Exception | None = None  # that it ended with
        self.refused = False  # whether that was before the request was queued
        self.gone = False
        self._encode = encode
        self._exchange = exchange
        self._give_up_bytes = give_up_bytes
        self._texts: list[bytes] = []
        self._nbytes = 0
        self._pending = 0  # bytes of responses that are not encoded
        self._news = asyncio.Event()
        self._ticket: Ticket | None = None
        self._held = False
        self._job: Job[bytes] | None = None  # encodes a response
        self._behind: deque[Callable[[], None]] = deque()  # what came since

    # --- what the engine does

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response."""
        if self.ended:
            return
        size = sum(tensor.array.nbytes for tensor in response.outputs)
        if self._job is not None:
            self._pending += size
            self._behind.append(partial(self._take_up, response, final, size))
            self._restrain(final)
        elif size > LARGE and self._exchange is not None:
            self._pending += size
            self._take_up(response, final, size)
            self._restrain(final)
        else:
            self._encode_here(response, final)

    def _take_up(self, response: InferResponse, final: bool, size: int) -> None:
        """Encode a response of `size` bytes that are pending, on the workbench if it is large."""
        if size > LARGE and self._exchange is not None:
            self._job = self._exchange.workbench.do(
                size, lambda charge: self._encode(response), partial(self._encoded, final, size),
                uncharged,
            )  # fmt: skip
        else:
            self._pending -= size
            self._encode_here(response, final)

    def _encode_here(self, response: InferResponse, final: bool) -> None:
        try:
            text = self._encode(response)
        except Exception as error:  # it has no such form, or that is a bug
            self._give_up(error)
            return
        self._add(text, final)

    def _encoded(
        self, final: bool, size: int, text: bytes | None, problem: Exception | None
    ) -> None:
        """Take a response that was encoded on the workbench, and what came since."""
        self._job = None
        self._pending -= size
        if text is None:
            self._give_up(problem or not_read())
            return
        self._add(text, final)
        while self._behind and self._job is None:
            self._behind.popleft()()

    def _add(self, text: bytes, final: bool) -> None:
        self._texts.append(text)
        self._nbytes += len(text)
        self.count += 1
        self._news.set()
        if final:
            self.ended = True
        self._restrain(final)

    def _restrain(self, final: bool) -> None:
        """See to it that not too much waits, after more has come."""
        waiting = self._nbytes + self._pending
        if final:
            return
        if self._held and waiting > self._give_up_bytes:
            self._texts.clear()
            self._give_up(not_read())
        elif not self._held and waiting > PAUSE_BYTES:
            self._held = True
            if self._ticket is not None:
                self._ticket.hold(True)

    def finish(self) -> None:
        """Take the end without a further response."""
        if self._job is not None:
            self._behind.append(self.finish)
            return
        self.ended = True
        self._news.set()

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the request."""
        if self._job is not None:
            self._behind.append(partial(self.fail, error))
        elif not self.ended:
            self.error = error
            self.finish()

    def refuse(self, error: ServerError) -> None:
        """Take the error that the request was refused with."""
        self.refused = True
        self.fail(error)

    def header(self, name: str) -> str:
        """`Exchange.header`."""
        return "" if self._exchange is None else self._exchange.header(name)

    def routed(self, request: Call, target: Target) -> None:
        """`Exchange.routed`."""
        if self._exchange is not None:
            self._exchange.routed(request, target)

    def answered_by(self, backend: str) -> None:
        """`Exchange.answered_by`."""
        if self._exchange is not None:
            self._exchange.answered_by(backend)

    # --- what the client does

    def attach(self, ticket: Ticket) -> None:
        """The request is under way."""
        self._ticket = ticket
        if self.ended:
            ticket.cancel()
        elif self._held:
            ticket.hold(True)

    def leave(self) -> None:
        """The client has gone away."""
        self.gone = True
        self._news.set()

    def close(self) -> None:
        """Nobody wants anything any more."""
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._behind.clear()
        if self._ticket is not None and not self.ended:
            self.ended = True
            self._ticket.cancel()

    async def news(self) -> None:
        """Wait until there is something to take, the end, or nobody to have it."""
        await self._news.wait()

    def take(self) -> list[bytes]:
        """What has come since the last time; the model goes on."""
        texts, self._texts = self._texts, []
        self._nbytes = 0
        if not (self.ended or self.gone):
            self._news.clear()
        if self._held and self._pending <= PAUSE_BYTES:
            self._held = False
            if self._ticket is not None and not self.ended:
                self._ticket.hold(False)
        return texts

    def _give_up(self, error: Exception) -> None:
        self.close()
        self.error = error
        self.finish()
