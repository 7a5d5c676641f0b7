"""What a handler sees of a call, whatever transport carries it, and what handlers look like."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Call(Protocol):
    """One remote procedure call."""

    def metadata(self) -> Mapping[str, str]:
        """What the client sent along; names in lower case, text values only."""

    def set_trailing(self, name: str, value: str) -> None:
        """Send `name: value` with the status."""

    def note(self, name: str, value: str) -> None:
        """Put `name` (request_id, model, version) into the call's line of the access log."""


Unary = Callable[[bytes, Call], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Handlers:
    """All procedures by their full path, such as `/inference.GRPCInferenceService/ModelInfer`.

    `server_stream` take one message and give many; `bidi_stream` take and give many. A handler
    raises `ServerError`; a transport turns it into a status by `headrace.wire.status`.
    """

    unary: Mapping[str, Unary]
    server_stream: Mapping[str, Stream]
    bidi_stream: Mapping[str, Stream]
