"""The event loop as the scheduler sees it."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns


class LoopClock:
    """Nanoseconds of the monotonic clock, and callbacks on an asyncio event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = monotonic_ns
        self.soon = loop.call_soon  # after everything that is ready in this tick

    def at(self, when: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Run `callback` at `when`; a loop whose timers are coarser may be early, never lost."""
        return self._loop.call_later(max(when - monotonic_ns(), 0) / 1e9, callback)
