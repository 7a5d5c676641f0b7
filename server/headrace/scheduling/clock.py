"""The time and the event loop of schedulers, which tests replace by a clock of their own."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol


class Timer(Protocol):
    """A scheduled callback that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the callback."""


class Clock(Protocol):
    """Time and event loop, as needed for scheduling."""

    def now(self) -> int:
        """Nanoseconds of a monotonic clock."""

    def soon(self, callback: Callable[..., object], *args: Any) -> object:
        """Run `callback` with `args` at the end of this tick of the event loop."""

    def at(self, when: int, callback: Callable[[], None]) -> Timer:
        """Run `callback` at `when`, in nanoseconds of the same clock."""


class LoopClock:
    """Nanoseconds of the monotonic clock, and callbacks on an asyncio event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = monotonic_ns
        self.soon = loop.call_soon  # runs after everything that is ready in this tick

    def at(self, when: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Run `callback` at `when`; a loop whose timers are coarser may be early, never lost."""
        return self._loop.call_later(max(when - monotonic_ns(), 0) / 1e9, callback)
