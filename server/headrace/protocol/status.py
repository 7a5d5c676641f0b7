"""Errors and statuses: those that clients get, and the meaning of other servers'.

The one place where the two transports agree on what an error is called. Values follow Triton's
mapping of its error classes, with three deliberate differences that `docs/protocol.md` lists:
malformed JSON is the client's error (400, not 500), a request over the size limit is 413 /
RESOURCE_EXHAUSTED, and a cancelled request is 499 where anyone is left to see it.

The other way round: the error that a client gets for the status of another server, and what is
known of whether anything was executed there. gRPC has one status, UNAVAILABLE, for a server that
refuses and for one that something has befallen while it was at work; only the text tells them
apart. Over HTTP a proxy may answer instead of the server, of which nothing is known unless its text
tells.
"""

from dataclasses import dataclass
from enum import Enum

from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    ExecutionFailed,
    ExecutionTimeout,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotReady,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Quarantined,
    QueueFull,
    QueueTimeout,
    RemoteBroken,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    Restricted,
    ServerError,
    ServerExiting,
    Unavailable,
    Unknown,
    Unsupported,
    UnsupportedEncoding,
    WorkerDied,
)
from headrace.protocol.compression import ANSWER_RATIO


@dataclass(frozen=True, slots=True)
class Status:
    """An HTTP status and the number of a gRPC status.

    `retry_after` is in seconds, 0 for none; an error may know better, see `retry_after`.
    """

    http: int
    grpc: int
    retry_after: int = 0


STATUS: dict[type[ServerError], Status] = {
    InvalidRequest: Status(400, 3),  # INVALID_ARGUMENT
    PayloadTooLarge: Status(413, 8),  # RESOURCE_EXHAUSTED
    ModelLoadFailed: Status(400, 3),
    NotFound: Status(404, 5),  # NOT_FOUND
    Unavailable: Status(503, 14),  # UNAVAILABLE
    ModelNotReady: Status(503, 14),
    QueueFull: Status(503, 14, retry_after=1),
    QueueTimeout: Status(503, 14, retry_after=1),
    Overloaded: Status(503, 14, retry_after=1),
    ServerExiting: Status(503, 14, retry_after=1),
    Unsupported: Status(501, 12),  # UNIMPLEMENTED
    UnsupportedEncoding: Status(501, 12),
    Restricted: Status(403, 14),
    Cancelled: Status(499, 1),  # CANCELLED
    Quarantined: Status(422, 9),  # FAILED_PRECONDITION
    AlreadyExists: Status(400, 6),  # ALREADY_EXISTS
    Unknown: Status(400, 2),  # UNKNOWN
    ExecutionFailed: Status(500, 13),  # INTERNAL
    WorkerDied: Status(500, 13),
    ExecutionTimeout: Status(500, 13),
    RemoteUnavailable: Status(503, 14),
    RemoteLost: Status(502, 14),
    RemoteTimeout: Status(504, 4),  # DEADLINE_EXCEEDED
    RemoteBroken: Status(502, 13),
}
INTERNAL = Status(500, 13)
INTERNAL_TEXT = "internal error"


def retry_after(error: ServerError) -> int:
    """After how many seconds a client should send the request again; 0 if that is not known."""
    return error.retry_after or STATUS[type(error)].retry_after


_UNAVAILABLE, _DEADLINE = 14, 4
_DENIED = frozenset({7, 16})  # PERMISSION_DENIED, UNAUTHENTICATED
_CLASSES: dict[int, type[ServerError]] = {
    1: Cancelled,
    2: Unknown,
    3: InvalidRequest,
    5: NotFound,
    6: AlreadyExists,
    8: PayloadTooLarge,
    9: Quarantined,
    12: Unsupported,
}
# What servers of the protocol say of a request that they have not begun: Triton and this one.
_REFUSALS = (
    "not at ready state",
    "is not ready",
    "Exceeds maximum queue size",
    "Request timeout expired",
    "Server is stopping",
    "Server exiting",
    " is at its limit of",  # the server, or this client's connection or address
    " is at its share of the server's limit of",  # the model
    "failed to connect to all addresses",  # gRPC's library, in a server that has others behind it
    # Knative and Envoy, which stand before KServe's models.
    "pending request queue full",
    "no healthy upstream",
    "reset reason: connection failure",
    "reset reason: remote connection failure",
    "reset reason: connection timeout",
    "reset reason: overflow",
)
# What proxies between the two say of a connection to the server, which they have lost.
_LOSSES = (
    "Socket closed",
    "Connection reset",
    "upstream connect error",
    "upstream request timeout",
)
_OTHERS: dict[int, type[ServerError]] = {_DEADLINE: RemoteTimeout, _UNAVAILABLE: Unavailable}
_HTTP_CLASSES: dict[int, type[ServerError]] = {
    400: InvalidRequest,
    404: NotFound,
    409: AlreadyExists,
    413: PayloadTooLarge,
    422: InvalidRequest,
    499: Cancelled,
    501: Unsupported,
}


# What they say of a model that they have not.
_NOT_LOADED = "Request for unknown model"


class Fate(Enum):
    """The progress of a call that failed."""

    UNSENT = "there is no connection"
    REFUSED = "the server has not begun it"
    ANSWERED = "the server says what was wrong with it"
    UNCERTAIN = "it may have been executed"
    LATE = "it may still be executed"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a call, with the error that a client gets."""

    fate: Fate
    error: ServerError


def unsent(model: str) -> Failure:
    """There is no connection over which a call to serve `model` could be sent."""
    return Failure(Fate.UNSENT, Unavailable(f"no server of model '{model}' can be reached", 1))


def lost(model: str) -> Failure:
    """The connection has ended that a call to serve `model` was sent over."""
    text = f"the connection to the server of model '{model}' was lost during the request"
    return Failure(Fate.UNCERTAIN, RemoteLost(text))


def late(model: str) -> Failure:
    """A call to serve `model` has not been answered in time."""
    text = f"the server of model '{model}' has not answered in time"
    return Failure(Fate.LATE, RemoteTimeout(text))


def too_large(model: str, limit: int, grown: bool = False) -> Failure:
    """The answer to a call to serve `model` has more than `limit` bytes.

    One that has `grown` does once it is decompressed, or grows more than any honest answer.
    """
    how = "that is too large once it is decompressed:" if grown else "of"
    text = (
        f"the server of model '{model}' has given an answer {how} more than {limit} bytes"
        " (max_response_bytes)"
    )
    if grown:
        text += f", or {ANSWER_RATIO} times its size"
    return Failure(Fate.ANSWERED, RemoteBroken(text))


def denied(model: str) -> Failure:
    """The server of `model` wants other credentials."""
    text = f"the server of model '{model}' does not accept this server's credentials"
    return Failure(Fate.ANSWERED, ExecutionFailed(text))


def _not_loaded(model: str) -> Failure:
    """The server has been started again without `model`, or somebody has unloaded it."""
    return Failure(Fate.REFUSED, Unavailable(f"model '{model}' is not loaded on its server", 1))


def failure_of(model: str, status: int, text: str) -> Failure:
    """The failure of a call to serve `model`, by the number of its gRPC status."""
    if status == _UNAVAILABLE:
        if any(known in text for known in _REFUSALS):
            return Failure(Fate.REFUSED, Unavailable(text, 1))
        if not text or any(known in text for known in _LOSSES):
            return lost(model)
        return Failure(Fate.LATE, RemoteUnavailable(text))  # what the model says, most likely
    if status == _DEADLINE:
        return late(model)
    if status in _DENIED:
        return denied(model)
    if text.startswith(_NOT_LOADED):
        return _not_loaded(model)
    return Failure(Fate.ANSWERED, _CLASSES.get(status, ExecutionFailed)(text))


def http_status_of(grpc: int) -> int:
    """The HTTP status that stands for the number of a gRPC status."""
    if grpc in _DENIED:
        return 403
    kind = _OTHERS.get(grpc) or _CLASSES.get(grpc, ExecutionFailed)
    return STATUS[kind].http


def http_failure_of(model: str, status: int, said: str, text: str) -> Failure:
    """The failure of a call to serve `model`, by the status of HTTP.

    `text` is the body, and `said` the error in it if it has the form that the protocol gives it: no
    other body reaches a client.
    """
    told = said or f"the server of model '{model}' has answered with status {status}"
    if status == 429 or (status == 503 and any(known in text for known in _REFUSALS)):
        return Failure(Fate.REFUSED, Unavailable(told, 1))
    if status == 503:
        return Failure(Fate.LATE, RemoteUnavailable(told))
    if status == 502:
        return Failure(Fate.LATE, lost(model).error)
    if status in (408, 504):
        return late(model)
    if status in (401, 403, 407):
        return denied(model)
    if said.startswith(_NOT_LOADED):
        return _not_loaded(model)
    if status == 400 and not said:  # of whatever has answered, it was not a server of the protocol
        return Failure(Fate.ANSWERED, RemoteBroken(told))
    return Failure(Fate.ANSWERED, _HTTP_CLASSES.get(status, ExecutionFailed)(told))


def failure_of_text(text: str) -> Failure:
    """The failure of a request on a stream, of which the server gives nothing but a text."""
    if any(known in text for known in _REFUSALS):
        return Failure(Fate.REFUSED, Unavailable(text, 1))
    return Failure(Fate.ANSWERED, ExecutionFailed(text))
