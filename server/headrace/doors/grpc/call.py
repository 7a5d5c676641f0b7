"""Calls as handlers see them, over either transport: types, headers, labels, errors, access log."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from headrace.api.gate import Gate, Values
from headrace.api.operations import NAMED, Operation
from headrace.core.errors import ServerError
from headrace.core.identity import ANYONE, Identity, PeerFacts
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.doors.tls import DoorTls
from headrace.engine.admission import Account
from headrace.observability.statistics import OTHER, STATUS_NAMES
from headrace.protocol.protobuf_contents import varint
from headrace.protocol.status import retry_after

Message = list[Buffer]  # one message as consecutive pieces


Noted = tuple[str, str, str]  # a model, its version and the id of a request


def noted_fields(noted: Noted | None) -> dict[str, str]:
    """The fields of an access log line."""
    return dict(zip(("model", "version", "request_id"), noted or (), strict=False))


class RpcContext(Protocol):
    """One remote procedure call."""

    noted: Noted | None  # for the access log

    def metadata(self) -> Mapping[str, str]:
        """The client's metadata: names in lower case, text values only."""

    @property
    def account(self) -> Account:
        """The account of the client's connection."""

    @property
    def identity(self) -> Identity:
        """The client, as of the call's begin."""

    @property
    def peer_facts(self) -> PeerFacts:
        """The facts about the other end of the connection."""

    def identify(self) -> Identity:
        """The client now, if it would still pass the gate; raises as `Gate.enter`."""

    def remaining(self) -> float:
        """Seconds until the client's deadline; 0 if it has none."""

    def set_trailing(self, name: str, value: str) -> None:
        """Send `name: value` in the trailers, replacing any earlier value of that name."""


class Peer(RpcContext, Protocol):
    """The client's side of a bidirectional stream."""

    @property
    def congested(self) -> bool:
        """True if too much is queued for the client; `StreamSession.sent` reports its end."""

    def send(self, message: Message) -> None:
        """Send a message."""

    def finish(self, error: ServerError | None = None) -> None:
        """End the stream, with status OK or that of an error."""

    def hold(self, held: bool) -> None:
        """Stop or resume the client's messages; those in transit may still arrive."""


class StreamSession(Protocol):
    """The receiver of one stream's messages, on the event-loop thread. Must not block.

    May raise `ServerError`, which ends the stream. After `finish` only `closed` is called.
    """

    @property
    def idle(self) -> bool:
        """True if the client has nothing to wait for."""

    def receive(self, message: Buffer) -> None:
        """Receive a message."""

    def refuse(self, error: ServerError) -> None:
        """Answer a message that was refused before its end; others follow. May raise the error."""
        raise error

    def half_close(self) -> None:
        """The client has finished sending."""

    def sent(self) -> None:
        """The client has read something and is no longer congested."""

    def closed(self) -> None:
        """The stream has ended, from either side. Called exactly once, last."""


class GrpcServer(Protocol):
    """Interface of both transports."""

    async def announce(self, grace: float) -> None:
        """Accept no connections, and tell clients to send new calls elsewhere.

        Calls sent before a client learns of it are accepted. Calls in flight have `grace` seconds
        in all.
        """

    def end_unfinished(self) -> None:
        """Refuse calls whose clients have not sent everything: nothing more is admitted."""

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and wait for those in flight, at most `grace` seconds."""


class BindingServer(GrpcServer, Protocol):
    """A server that opens its port itself."""

    def bind(self, address: str, port: int, tls: DoorTls | None) -> int:
        """Listen; returns the port. Raises `OSError`."""

    async def start(self) -> None:
        """Accept calls."""


# Called with the message and an `InferCall`, which the handler answers.
Direct = Callable[[Buffer, Any], None]
Unary = Callable[[Buffer, Any], Awaitable[bytes]]
Open = Callable[[Peer], StreamSession]


@dataclass(frozen=True, slots=True)
class Handlers:
    """All procedures by full path, such as `/inference.GRPCInferenceService/ModelInfer`.

    `direct` ones are unary, but called synchronously; the call itself is answered, without a task
    or future. `sessions` exchange any number of messages. A handler raises `ServerError`; the
    transport maps it to a status by `headrace.protocol.status`. `operations` are what the
    procedures are at the gate, `limits` the bytes of the largest message of each.
    """

    direct: Mapping[str, Direct]
    unary: Mapping[str, Unary]
    sessions: Mapping[str, Open]
    operations: Mapping[str, Operation] = field(default_factory=dict)
    gate: Gate | None = None  # without one, everyone may call everything
    limits: Mapping[str, int] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """The paths of all procedures."""
        return [*self.direct, *self.unary, *self.sessions]

    def counted(self, path: str) -> str:
        """The metrics label of a procedure's calls."""
        found = self.operations.get(path)
        return OTHER if found is None else found.counted

    def enter(self, path: str, metadata: Mapping[str, str], peer: PeerFacts) -> Identity:
        """The client of a call, once it has passed the gate; raises as `Gate.enter`.

        Raises `LookupError` for a procedure without an operation, so that none can be forgotten.
        """
        if self.gate is None:
            return ANYONE
        return self.gate.enter(self.operations[path], values_of(metadata), peer)


access = logging.getLogger("headrace.access")


def values_of(metadata: Mapping[str, str]) -> Values:
    """The values of metadata by name; several of one name are joined, and so one that is wrong."""

    def values(name: str) -> list[bytes]:
        given = metadata.get(name)
        return [] if given is None else [given.encode("latin-1", "replace")]

    return values


def check_call(
    gate: Gate,
    call: RpcContext,
    identity: Identity,
    model: str,
    version: str,
    operation: Operation = NAMED["ModelInfer"],
) -> None:
    """Raise as `Gate.check`, unless the client of a call may do this to the model."""
    values = values_of(call.metadata())
    gate.check(operation, identity, values, call.peer_facts, model, version)


def error_text(error: ServerError) -> str:
    """The error's text, cut to what fits into trailers, which clients limit."""
    return bounded(str(error))


def retry_details(error: ServerError, status: int, text: str) -> bytes:
    """`grpc-status-details-bin`: a `google.rpc.Status` with a `RetryInfo` in it.

    Empty for an error without a retry delay.
    """
    seconds = retry_after(error)
    if not seconds:
        return b""
    delay = _field(1, b"\x08" + varint(seconds))  # a google.protobuf.Duration
    info = _field(1, b"type.googleapis.com/google.rpc.RetryInfo") + _field(2, delay)
    return b"\x08" + varint(status) + _field(2, text.encode()) + _field(3, info)


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a message."""
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


def log_access(client: str, path: str, status: int, begun: float, notes: dict[str, str]) -> None:
    """Write the access log line of a call that began at `begun`, by `perf_counter`."""
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
