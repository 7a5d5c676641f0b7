"""The server as a model reaches it that is warmed up, from the thread that loads it.

What the model asks for is asked on the server's event loop, and what comes of it is told on the
event loop of the loading thread. Models that are not ready yet cannot be asked.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.requests import InferRequest, InferResponse, Sink, Ticket
from headrace.execution.model_calls import Host

Answer = Callable[[object, ServerError | None], None]


class LoadingHost:
    """Hands on what a model asks `host` for, which belongs to `loop`; to be used on other loops."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop

    def submit(self, request: InferRequest, decoupled: bool, inside: bool, sink: Sink) -> Ticket:
        """Have a model run; errors come to the sink."""
        asked = _Asked(self._loop, asyncio.get_running_loop(), sink)
        _on(self._loop, asked.begin, self._host, request, decoupled, inside)
        return asked

    def control(self, document: Mapping[str, Any], answer: Answer) -> None:
        """Do something else, and answer once."""
        here = asyncio.get_running_loop()

        def back(value: object, error: ServerError | None) -> None:
            _on(here, answer, value, error)

        def ask() -> None:
            try:
                self._host.control(document, back)
            except Exception as error:  # what nonsense raises
                back(None, InvalidRequest(f"{type(error).__name__}: {error}"))

        _on(self._loop, ask)

    def metric(self, document: Mapping[str, Any]) -> None:
        """Not here: what a model tells of its metrics is kept until it serves."""


class _Asked:
    """A request that another model runs: its sink there, its ticket here."""

    def __init__(
        self, there: asyncio.AbstractEventLoop, here: asyncio.AbstractEventLoop, sink: Sink
    ) -> None:
        self._there = there
        self._here = here
        self._sink = sink
        self._ticket: Ticket | None = None

    # --- on the server's event loop

    def begin(self, host: Host, request: InferRequest, decoupled: bool, inside: bool) -> None:
        """Submit it."""
        try:
            self._ticket = host.submit(request, decoupled, inside, self)
        except ServerError as error:
            self.fail(error)

    def respond(self, response: InferResponse, final: bool) -> None:
        _on(self._here, self._sink.respond, response, final)

    def finish(self) -> None:
        _on(self._here, self._sink.finish)

    def fail(self, error: ServerError) -> None:
        _on(self._here, self._sink.fail, error)

    def _change(self, change: Callable[[Ticket], None]) -> None:
        if self._ticket is not None:
            change(self._ticket)

    # --- on that of the loading thread

    def cancel(self) -> None:
        _on(self._there, self._change, lambda ticket: ticket.cancel())

    def hold(self, held: bool) -> None:
        _on(self._there, self._change, lambda ticket: ticket.hold(held))


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *given: object) -> None:
    """Call on another event loop, unless that is closed: then nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *given)
