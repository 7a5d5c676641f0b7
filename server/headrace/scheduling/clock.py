"""Time and the event loop, as far as scheduling needs them."""

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """Something scheduled that can be called off."""

    def cancel(self) -> None:
        """Do not run it."""


class Clock(Protocol):
    """Time and the event loop, as far as scheduling needs them."""

    def now(self) -> int:
        """Nanoseconds of a monotonic clock."""

    def soon(self, callback: Callable[..., object], *args: Any) -> object:
        """Run `callback` with `args` at the end of this tick of the event loop."""

    def at(self, when: int, callback: Callable[[], None]) -> Timer:
        """Run `callback` at `when`, in nanoseconds of the same clock."""
