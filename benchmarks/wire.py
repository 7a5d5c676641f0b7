"""Client side of a protocol for the load generator: bytes out, bytes in, no I/O."""

from dataclasses import dataclass
from typing import Protocol


class ProtocolError(Exception):
    """The server sent something that this client cannot go on with."""


@dataclass(slots=True)
class Answer:
    """One answer. `token` is what `Wire.send` gave for its request; `error` is empty if it is one
    to read. `head` holds header lines in lower case, where the protocol has any.
    """

    token: int
    error: str
    body: bytes
    head: bytes = b""


class Wire(Protocol):
    """One connection of one protocol."""

    ready: bool

    def start(self) -> bytes:
        """Bytes to write first."""

    def send(self, message: bytes) -> tuple[int, bytes]:
        """Begin a request: its token, and what to write now. Only once `ready`."""

    def receive(self, data: bytes) -> tuple[list[Answer], bytes]:
        """Take what came: answers that are complete now, and what to write back.

        Raises `ProtocolError`.
        """
