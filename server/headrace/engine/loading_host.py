"""The server as a model reaches it that is started or warmed up, from the thread that loads it.

What the model asks for is asked on the server's event loop, and what comes of it is told on the
event loop of the loading thread. Meanwhile the load does not count among those that are done at a
time: what it waits for may have to be loaded, too. Models that are not ready yet cannot be asked.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headrace.core.call import Call, InferResponse
from headrace.core.errors import InvalidRequest, ServerError
from headrace.execution.host import Host

Answer = Callable[[object, ServerError | None], None]


class LoadingHost:
    """Hands on what a model asks `host` for, which belongs to `loop`; to be used on other loops."""

    def __init__(
        self, host: Host, loop: asyncio.AbstractEventLoop, wait: Callable[[bool], None]
    ) -> None:
        """`wait` is told when the load begins to wait for somebody, and when it does not."""
        self._host = host
        self._loop = loop
        self._wait = wait
        self._asked = 0
        self._over = False

    def close(self) -> None:
        """The load is over, whatever it has asked; on the server's event loop."""
        self.count(-self._asked)
        self._over = True

    def count(self, more: int) -> None:
        """So many answers more, or less, are waited for; on the server's event loop."""
        if self._over:
            return
        before, self._asked = self._asked, self._asked + more
        if bool(before) != bool(self._asked):
            self._wait(bool(self._asked))

    def submit(self, call: Call, inside: bool) -> None:
        """Have a model run; errors come to the call."""
        asked = _Asked(self, asyncio.get_running_loop(), call)
        call.owner = _There(self._loop, asked)
        _on(self._loop, asked.go, self._host, inside)

    def control(self, document: Mapping[str, Any], answer: Answer) -> None:
        """Do something else, and answer once."""
        here = asyncio.get_running_loop()

        waits = answered = False

        def back(value: object, error: ServerError | None) -> None:
            nonlocal answered
            answered = True
            self.count(-waits)
            _on(here, answer, value, error)

        def ask() -> None:
            nonlocal waits
            try:
                self._host.control(document, back)
            except Exception as error:  # what nonsense raises
                back(None, InvalidRequest(f"{type(error).__name__}: {error}"))
            waits = not answered
            self.count(waits)

        _on(self._loop, ask)

    def metric(self, document: Mapping[str, Any]) -> None:
        """Not here: what a model tells of its metrics is kept until it serves."""


class _Asked(Call):
    """What a call of the loading thread asks for, on the server's event loop."""

    def __init__(self, owner: LoadingHost, here: asyncio.AbstractEventLoop, call: Call) -> None:
        """`call` belongs to the event loop `here`."""
        super().__init__("", "", "", {})
        self.take(call)
        self.refusal = call.refusal
        self._loads = owner
        self._here = here
        self._call = call
        self._over = False

    def go(self, host: Host, inside: bool) -> None:
        """Submit it."""
        self._loads.count(1)
        try:
            host.submit(self, inside)
        except ServerError as error:
            self.fail(error)

    def respond(self, response: InferResponse, final: bool) -> None:
        if final:
            self._end()
        _on(self._here, self._call.pass_response, response, final)

    def finish(self) -> None:
        self._end()
        _on(self._here, self._call.pass_end)

    def fail(self, error: ServerError) -> None:
        self._end()
        _on(self._here, self._call.pass_end, error)

    def cancel(self) -> None:
        self._end()
        super().cancel()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._loads.count(-1)


class _There:
    """The owner of a call of the loading thread: what it asks for, on the server's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asked: _Asked) -> None:
        self._loop = loop
        self._asked = asked

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`."""
        _on(self._loop, self._asked.cancel)

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
        _on(self._loop, self._asked.hold, held)


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *given: object) -> None:
    """Call on another event loop, unless that is closed: then nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *given)
