"""The interface of doors that packages add: where further calls come from.

A door is declared in the group `headrace.doors` under its name, by which its connections, answers
and traces are counted, and opened by `--door NAME=ADDRESS`. Its calls are subclasses of `Call`,
submitted to a `Target` of the engine; it charges them to the account of their connection.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.doors import Entrance


class Door(Protocol):
    """A door, made with the engine. Owned by the event loop."""

    operations: Sequence[str]  # names of the operations that it offers, as in the protocol's table

    def __init__(self, engine: Entrance) -> None: ...

    async def open(self, address: str) -> str:
        """Take calls; returns the address that is shown. Raises `OSError` with the reason."""

    async def drain(self, seconds: float) -> None:
        """Announce the end to clients, who have so many seconds; their calls are still taken."""

    async def close(self, grace: float) -> None:
        """Close everything; calls under way have `grace` seconds."""
