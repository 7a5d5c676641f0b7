"""How much the server takes in at once, over all models and transports.

A request is counted from when its size is known, for HTTP before its body is read, until it is
answered. At the limit a new one is refused at once: waiting in a longer queue would only make
everyone late. Owned by the event-loop thread.
"""

from collections.abc import Callable

from headrace.core.errors import Overloaded, ServerExiting
from headrace.engine.workbench import Workbench


class Admission:
    """Counts requests and their bytes against two limits; 0 means no limit.

    Invariant: every `enter` is followed by exactly one `leave` with all bytes entered or grown by.
    `workbench` is where what was admitted is worked on when that would hold the loop up.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0
        self.refused = 0
        self.exiting = False
        self.workbench = Workbench()
        self._on_empty: Callable[[], None] | None = None
        self._on_close: set[Callable[[], None]] = set()

    def enter(self, nbytes: int, expected: int = 0) -> None:
        """Count a request of `nbytes` in; raises `Overloaded` or `ServerExiting`.

        `expected` bytes are announced: they must fit, but count only when they come (`grow`), so
        that a client that announces much and sends nothing takes nothing from others.
        """
        if self.exiting:
            raise ServerExiting("Server exiting")
        if self.max_requests and self.requests >= self.max_requests:
            self.refuse()
            raise Overloaded(
                f"the server is at its limit of {self.max_requests} requests at once"
                " (--max-admitted-requests); try again later"
            )
        self._check_bytes(nbytes + expected, alone=self.requests == 0)
        self.requests += 1
        self.bytes += nbytes

    def grow(self, nbytes: int) -> None:
        """Count further bytes of a request that has entered; raises `Overloaded` instead."""
        self._check_bytes(nbytes, alone=self.requests == 1)
        self.bytes += nbytes

    def leave(self, nbytes: int) -> None:
        """Count a request out."""
        self.requests -= 1
        self.bytes -= nbytes
        if self._on_empty is not None and not self.requests:
            self._on_empty()

    def adjust(self, requests: int, nbytes: int) -> None:
        """Count what another process holds: so much more or less than before."""
        self.requests += requests
        self.bytes += nbytes
        if self._on_empty is not None and not self.requests:
            self._on_empty()

    def refuse(self) -> None:
        """Count a request that is refused for a limit."""
        self.refused += 1

    def close(self) -> None:
        """Admit nothing from now on."""
        self.exiting = True
        for callback in list(self._on_close):
            callback()

    def watch_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is admitted any more, until `unwatch_close`."""
        self._on_close.add(callback)

    def unwatch_close(self, callback: Callable[[], None]) -> None:
        """Do not call `callback`."""
        self._on_close.discard(callback)

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the last request leaves; at once if there is none."""
        self._on_empty = callback
        if not self.requests:
            callback()

    def _check_bytes(self, nbytes: int, alone: bool) -> None:
        # A request alone is let in whatever its size: it has a limit of its own.
        if self.max_bytes and not alone and self.bytes + nbytes > self.max_bytes:
            self.refuse()
            raise Overloaded(
                f"the server is at its limit of {self.max_bytes} bytes of requests at once"
                " (--max-admitted-bytes); try again later"
            )
