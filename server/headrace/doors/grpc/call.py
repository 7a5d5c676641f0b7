"""Calls as handlers see them, over either transport: types, keys, labels, errors, access log."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from headrace.api.header_rules import Key
from headrace.api.operations import OPERATIONS, Operation, by_procedure
from headrace.core.errors import Restricted, ServerError
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.engine.admission import Account
from headrace.observability.statistics import OTHER, STATUS_NAMES
from headrace.protocol.protobuf_contents import varint
from headrace.protocol.status import retry_after

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
        """True if too much waits for the client to read it; `Session.sent` tells of less."""

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
    a transport turns it into a status by `headrace.protocol.status`. `keys` are what procedures ask
    for in the metadata.
    """

    direct: Mapping[str, Direct]
    unary: Mapping[str, Unary]
    sessions: Mapping[str, Open]
    keys: Mapping[str, Key] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """All procedures."""
        return [*self.direct, *self.unary, *self.sessions]


access = logging.getLogger("headrace.access")


def labels(operations: Sequence[Operation] = OPERATIONS) -> dict[str, str]:
    """The labels of procedures in the metrics, by their paths."""
    return {path: found.counted for path, found in by_procedure(operations).items()}


_COUNTED = labels()


def operation_of(path: str) -> str:
    """The label of a procedure's calls in the metrics."""
    return _COUNTED.get(path, OTHER)


def without_key(key: Key, metadata: Mapping[str, str]) -> Restricted | None:
    """The error of a call without the key, None for one with it."""
    given = metadata.get(key.header)
    if given is not None and key.opens([given.encode("latin-1", "replace")]):
        return None
    return Restricted(f"This protocol is restricted, expecting header '{key.header}'")


def error_text(error: ServerError) -> str:
    """The error's text, cut to what fits into trailers: a client refuses longer ones altogether."""
    return bounded(str(error))


def retry_details(error: ServerError, status: int, text: str) -> bytes:
    """`grpc-status-details-bin`: a `google.rpc.Status` with a `RetryInfo` in it.

    Empty for an error that does not say when to come again.
    """
    seconds = retry_after(error)
    if not seconds:
        return b""
    delay = _field(1, b"\x08" + varint(seconds))  # a google.protobuf.Duration
    info = _field(1, b"type.googleapis.com/google.rpc.RetryInfo") + _field(2, delay)
    return b"\x08" + varint(status) + _field(2, text.encode()) + _field(3, info)


def _field(number: int, data: bytes) -> bytes:
    """A field of a message, with a length."""
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


def log_access(client: str, path: str, status: int, begun: float, notes: dict[str, str]) -> None:
    """Write the line of a call that began at `begun`, by `perf_counter`."""
    name = STATUS_NAMES[status] if 0 <= status < len(STATUS_NAMES) else str(status)
    fields = {
        "client": client,
        "method": "gRPC",
        "path": path,
        "status": name,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra=fields | notes,
    )
