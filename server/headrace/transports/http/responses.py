"""What has come for a generate request and is not sent yet."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError
from headrace.engine.admission import Account
from headrace.engine.doors import GIVE_UP_BYTES, PAUSE_BYTES, not_read
from headrace.engine.workbench import LARGE, Job, Workbench
from headrace.wire.elements import uncharged


class Responses:
    """What came for one generate request and is not taken yet, as JSON.

    Owned by the event loop. Invariants: the call is held exactly while the model was asked to
    pause; after `ended` or `gone` nothing more is taken in.
    """

    def __init__(
        self,
        encode: Callable[[InferResponse], bytes],
        give_up_bytes: int = GIVE_UP_BYTES,
        workbench: Workbench | None = None,
        account: Account | None = None,
    ) -> None:
        """Beyond `give_up_bytes` that wait, the request is given up.

        With a `workbench`, what is large is encoded there. `account` counts what waits.
        """
        self.count = 0  # responses so far
        self.ended = False
        self.error: Exception | None = None  # that it ended with
        self.refused = False  # whether that was before the request was queued
        self.gone = False
        self._encode = encode
        self._workbench = workbench
        self._account = account
        self._give_up_bytes = give_up_bytes
        self._texts: list[bytes] = []
        self._nbytes = 0
        self._pending = 0  # bytes of responses that are not encoded
        self._charged = 0  # of both, as the account has them
        self._news = asyncio.Event()
        self._call: Call | None = None
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
        elif size > LARGE and self._workbench is not None:
            self._pending += size
            self._take_up(response, final, size)
            self._restrain(final)
        else:
            self._encode_here(response, final)

    def _take_up(self, response: InferResponse, final: bool, size: int) -> None:
        """Encode a response of `size` bytes that are pending, on the workbench if it is large."""
        if size > LARGE and self._workbench is not None:
            self._job = self._workbench.do(
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

    def _charge(self) -> None:
        """Count what waits now."""
        if self._account is not None:
            waiting = self._nbytes + self._pending
            self._account.count(waiting - self._charged)
            self._charged = waiting

    def _restrain(self, final: bool) -> None:
        """See to it that not too much waits, after more has come."""
        self._charge()
        waiting = self._nbytes + self._pending
        if final:
            return
        if self._held and waiting > self._give_up_bytes:
            self._texts.clear()
            self._give_up(not_read())
        elif not self._held and waiting > PAUSE_BYTES:
            self._held = True
            if self._call is not None:
                self._call.hold(True)

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

    # --- what the client does

    def attach(self, call: Call) -> None:
        """The request is under way."""
        self._call = call
        if self.ended:
            call.cancel()
        elif self._held:
            call.hold(True)

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
        self._nbytes = self._pending = 0
        self._charge()
        if self._call is not None and not self.ended:
            self.ended = True
            self._call.cancel()

    async def news(self) -> None:
        """Wait until there is something to take, the end, or nobody to have it."""
        await self._news.wait()

    def take(self) -> list[bytes]:
        """What has come since the last time; the model goes on."""
        texts, self._texts = self._texts, []
        self._nbytes = 0
        self._charge()
        if not (self.ended or self.gone):
            self._news.clear()
        if self._held and self._pending <= PAUSE_BYTES:
            self._held = False
            if self._call is not None and not self.ended:
                self._call.hold(False)
        return texts

    def _give_up(self, error: Exception) -> None:
        self.close()
        self.error = error
        self.finish()
