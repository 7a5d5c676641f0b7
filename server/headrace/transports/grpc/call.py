"""Calls as handlers see them, whatever transport carries them, and the types of handlers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.api.header_rules import Key
from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.engine.admission import Account

Message = list[Buffer]  # one message in pieces, which are written one after the other


Noted = tuple[str, str, str]  # a model, its version and the id of a request


def noted_fields(noted: Noted | None) -> dict[str, str]:
    """Fields of the access log's line."""
    return dict(zip(("model", "version", "request_id"), noted or (), strict=False))


class RpcContext(Protocol):
    """One remote procedure call."""

    noted: Noted | None  # for the call's line of the access log

    def metadata(self) -> Mapping[str, str]:
        """The metadata that the client sent; names in lower case, text values only."""

    @property
    def account(self) -> Account:
        """The account of the client's connection."""

    def remaining(self) -> float:
        """Seconds until the client's deadline; 0 if it has none."""

    def set_trailing(self, name: str, value: str) -> None:
        """Send `name: value` with the status, in place of any other value of that name."""


class Peer(RpcContext, Protocol):
    """The client's end of a stream of messages both ways."""

    @property
    def congested(self) -> bool:
        """Whether too much waits for the client to read it; `Session.sent` tells of less."""

    def send(self, message: Message) -> None:
        """Send a message."""

    def finish(self, error: ServerError | None = None) -> None:
        """End the stream, with a good status or an error's."""

    def hold(self, held: bool) -> None:
        """Let no more messages come for now, or again; those under way may still come."""


class Session(Protocol):
    """The receiver of one stream's messages, on the event-loop thread. Must not wait.

    May raise `ServerError`, which ends the stream. After `finish` nothing is called but `closed`.
    """

    def receive(self, message: Buffer) -> None:
        """Take a message."""

    def half_close(self) -> None:
        """The client sends no more."""

    def sent(self) -> None:
        """The client has read something, since when it is not congested."""

    def closed(self) -> None:
        """The stream is over, whoever ended it. Called exactly once, last."""


class Server(Protocol):
    """Either of the two transports."""

    async def announce(self, grace: float) -> None:
        """Accept no connections, and have clients send new calls elsewhere.

        Calls that are sent before a client knows of it are taken. Calls under way have `grace`
        seconds in all.
        """

    async def stop(self, grace: float) -> None:
        """Take no more calls, and wait for those under way, at most `grace` seconds."""


# Given the message and an `InferCall`, which it answers.
Direct = Callable[[Buffer, Any], None]
Unary = Callable[[Buffer, Any], Awaitable[bytes]]
Open = Callable[[Peer], Session]


@dataclass(frozen=True, slots=True)
class Handlers:
    """All procedures by their full path, such as `/inference.GRPCInferenceService/ModelInfer`.

    `direct` are unary as well, but are called synchronously; the call is its own answer, with no
    task or future between. `sessions` take and give many messages. A handler raises `ServerError`;
    a transport turns it into a status by `headrace.wire.status`. `keys` are what procedures ask for
    in the metadata.
    """

    direct: Mapping[str, Direct]
    unary: Mapping[str, Unary]
    sessions: Mapping[str, Open]
    keys: Mapping[str, Key] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """All procedures."""
        return [*self.direct, *self.unary, *self.sessions]
