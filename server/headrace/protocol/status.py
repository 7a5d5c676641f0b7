"""Mapping of errors to HTTP and gRPC statuses, and of upstreams' statuses to errors.

The one place where both transports agree on the status of an error. Values follow Triton's mapping
of its error classes, with three deliberate differences that `docs/protocol.md` lists: malformed
JSON is the client's error (400, not 500), a request over the size limit is 413 /
RESOURCE_EXHAUSTED, and a cancelled request is 499 if anyone is left to see it.

For upstreams: the error that a client gets for an upstream's status, and what is known about
whether the upstream has executed anything. gRPC has one status, UNAVAILABLE, for a server that
refuses a request and for one that failed while executing it. This server tells them apart by a
field of its answers, `BEGUN`. Of other servers only the text does, as a whole. Over HTTP a proxy
may answer instead of the server; then nothing is known unless its text tells.
"""

import re
from dataclasses import dataclass
from enum import Enum

from headrace.core.call import Call
from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    ExecutionFailed,
    ExecutionTimeout,
    Forbidden,
    InvalidRequest,
    MemoryUnavailable,
    ModelLoadFailed,
    ModelNotReady,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Quarantined,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
    RemoteBroken,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    ResponseTooLarge,
    Restricted,
    SequenceLost,
    ServerError,
    ServerExiting,
    Unauthenticated,
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

    `retry_after` is in seconds, 0 for none; an error may override it, see `retry_after`.
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
    QuotaExceeded: Status(429, 8, retry_after=1),  # RESOURCE_EXHAUSTED
    ServerExiting: Status(503, 14, retry_after=1),
    Unsupported: Status(501, 12),  # UNIMPLEMENTED
    UnsupportedEncoding: Status(501, 12),
    Restricted: Status(403, 14),
    Unauthenticated: Status(401, 16),  # UNAUTHENTICATED
    Forbidden: Status(403, 7),  # PERMISSION_DENIED
    Cancelled: Status(499, 1),  # CANCELLED
    Quarantined: Status(422, 9),  # FAILED_PRECONDITION
    AlreadyExists: Status(400, 6),  # ALREADY_EXISTS
    Unknown: Status(400, 2),  # UNKNOWN
    ExecutionFailed: Status(500, 13),  # INTERNAL
    ResponseTooLarge: Status(500, 8),  # RESOURCE_EXHAUSTED
    MemoryUnavailable: Status(500, 13),
    WorkerDied: Status(500, 13),
    SequenceLost: Status(409, 10),  # ABORTED
    ExecutionTimeout: Status(500, 13),
    RemoteUnavailable: Status(503, 14),
    RemoteLost: Status(502, 14),
    RemoteTimeout: Status(504, 4),  # DEADLINE_EXCEEDED
    RemoteBroken: Status(502, 13),
}
# Header, or trailing metadata, of errors that may mean that the request was not begun: `TRUE` if a
# model has begun it, otherwise it may be sent again. In a stream it is a parameter.
BEGUN, TRUE, FALSE = "headrace-begun", "true", "false"
BEGUN_PARAMETER = "headrace_begun"
INTERNAL = Status(500, 13)
INTERNAL_TEXT = "internal error"


def retry_after(error: ServerError) -> int:
    """Seconds after which a client should retry; 0 if not known."""
    return error.retry_after or STATUS[type(error)].retry_after


def rate_limit(error: ServerError) -> dict[str, str]:
    """Header fields about the quota that a client has used up, by the IETF's draft for them."""
    if not isinstance(error, QuotaExceeded) or error.allowance is None:
        return {}
    quota, _, unit, most, window = error.allowance
    policy, left = f'"{quota}";q={most};qu="{unit}"', f'"{quota}";r=0'
    if window:
        policy, left = f"{policy};w={window}", f"{left};t={retry_after(error)}"
    return {"ratelimit-policy": policy, "ratelimit": left}


def error_fields(error: ServerError) -> list[tuple[str, str]]:
    """The response headers, or trailing metadata, that an error has whatever was requested."""
    found = []
    if seconds := retry_after(error):
        found.append(("retry-after", str(seconds)))
    if isinstance(error, Unauthenticated) and error.challenge:
        found.append(("www-authenticate", error.challenge))
    return [*found, *rate_limit(error).items()]


def begun_field(call: Call, error: ServerError) -> str:
    """The value of `BEGUN` for the error that ends a call; "" if its status is conclusive."""
    if STATUS[type(error)].grpc not in _INCONCLUSIVE:
        return ""
    return TRUE if call.started else FALSE


def begun_told(value: bytes) -> bool | None:
    """A server's word in `BEGUN`; None without any."""
    return {b"true": True, b"false": False}.get(value)


_UNAVAILABLE, _DEADLINE, _NOT_FOUND = 14, 4, 5
_INCONCLUSIVE = frozenset({_UNAVAILABLE, _NOT_FOUND})
_DENIED = {7: 403, 16: 401}  # PERMISSION_DENIED, UNAUTHENTICATED
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
# Whole messages by which servers refuse a request before they begin it: Triton, KServe, and this
# server as it was before it said so itself. Part of a message proves nothing: an ensemble passes on
# the refusal of its second model, and a model may quote a server that it has asked itself.
_REFUSED = re.compile(
    r"(\[request id: [^\]]*\] )?(Exceeds maximum queue size( of \d+ for model '[^']*')?"
    r"|Server is stopping, scheduler for model has stopped accepting new inference requests)"
    r"|Request for unknown model: '[^']*' version \d+ is not at ready state( \(it is [A-Z]+\))?"
    r"|'[^']*' version \d+ is not at ready state"
    r"|Request timeout expired"
    r"|Server not ready"
    r"|the server has as many connections as it may \(--max-connections\)"
    r"|GRPC server is shutting down and has stopped accepting new requests\."
    r"|Model with name \S+ is not ready\."
)
# The same of Knative and Envoy, which run in front of KServe's models. Not "retried and the latest
# reset reason": earlier tries may have been begun.
_REFUSED_BY_PROXY = re.compile(
    r"pending request queue full"
    r"|no healthy upstream"
    r"|upstream connect error or disconnect/reset before headers\. reset reason: "
    r"(overflow|connection timeout|((remote|local) )?connection failure)"
    r"(, transport failure reason: [^\n]*)?"
)
# Texts of proxies that lost their connection to the server.
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


# Texts for an unknown model.
_NOT_LOADED = re.compile(
    r"Request for unknown model: '[^']*'"
    r"( version \d+)? (is not found|has no available versions( \([^)]*\))?)"
)


class Fate(Enum):
    """The progress of a failed call."""

    UNSENT = "not sent"
    REFUSED = "refused before execution"
    ANSWERED = "answered with an error"
    UNCERTAIN = "possibly executed"
    LATE = "possibly still executing"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a call, with the error for the client."""

    fate: Fate
    error: ServerError


def unsent(model: str) -> Failure:
    """The failure of a call without any connection to an upstream of `model`."""
    return Failure(Fate.UNSENT, Unavailable(f"no server of model '{model}' can be reached", 1))


def lost(model: str) -> Failure:
    """The failure of a call whose connection to an upstream of `model` was lost."""
    text = f"the connection to the server of model '{model}' was lost during the request"
    return Failure(Fate.UNCERTAIN, RemoteLost(text))


def late(model: str) -> Failure:
    """The failure of a call that an upstream of `model` has not answered in time."""
    text = f"the server of model '{model}' has not answered in time"
    return Failure(Fate.LATE, RemoteTimeout(text))


def too_large(model: str, limit: int, grown: bool = False) -> Failure:
    """The failure of a call whose response exceeds `limit` bytes.

    `grown` means that it does so once decompressed, or that its compression ratio is implausible.
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
    """The failure of a call that an upstream of `model` rejected for its credentials."""
    text = f"the server of model '{model}' does not accept this server's credentials"
    return Failure(Fate.ANSWERED, ExecutionFailed(text))


def _not_loaded(model: str) -> Failure:
    """The failure of a call to an upstream that restarted without `model`, or had it unloaded."""
    return Failure(Fate.REFUSED, Unavailable(f"model '{model}' is not loaded on its server", 1))


def failure_of(model: str, status: int, text: str, begun: bool | None = None) -> Failure:
    """The failure of a call to an upstream of `model`, by its gRPC status.

    `begun` is the upstream's word on whether it has begun the call, if it gave one.
    """
    if status == _UNAVAILABLE:
        refused = _refused(text) or _refused_by_proxy(text) if begun is None else not begun
        if refused:
            return Failure(Fate.REFUSED, Unavailable(text, 1))
        if begun is None and (not text or any(known in text for known in _LOSSES)):
            return lost(model)
        return Failure(Fate.LATE, RemoteUnavailable(text))  # most likely from the model itself
    if status == _DEADLINE:
        return late(model)
    if status in _DENIED:
        return denied(model)
    if status == _NOT_FOUND and begun is not True and _NOT_LOADED.fullmatch(text):
        return _not_loaded(model)
    return Failure(Fate.ANSWERED, _CLASSES.get(status, ExecutionFailed)(text))


def _refused(text: str) -> bool:
    return _REFUSED.fullmatch(text) is not None


def _refused_by_proxy(text: str) -> bool:
    return _REFUSED_BY_PROXY.fullmatch(text.strip()) is not None


def http_status_of(grpc: int) -> int:
    """The HTTP status equivalent to a gRPC status."""
    if grpc in _DENIED:
        return _DENIED[grpc]
    kind = _OTHERS.get(grpc) or _CLASSES.get(grpc, ExecutionFailed)
    return STATUS[kind].http


def http_failure_of(
    model: str, status: int, said: str, text: str, begun: bool | None = None
) -> Failure:
    """The failure of a call to an upstream of `model`, by its HTTP status.

    `text` is the body, and `said` the error in it if it has the protocol's form; no other body
    reaches a client. `begun` is as in `failure_of`.
    """
    told = said or f"the server of model '{model}' has answered with status {status}"
    if status == 503:
        refused = _refused(said) or _refused_by_proxy(text) if begun is None else not begun
        if refused:
            return Failure(Fate.REFUSED, Unavailable(told, 1))
        return Failure(Fate.LATE, RemoteUnavailable(told))
    if status == 429:
        return Failure(Fate.REFUSED, Unavailable(told, 1))
    if status == 502:
        return Failure(Fate.LATE, lost(model).error)
    if status in (408, 504):
        return late(model)
    if status in (401, 403, 407):
        return denied(model)
    if status == 404 and begun is not True and _NOT_LOADED.fullmatch(said):
        return _not_loaded(model)
    if status == 400 and not said:  # not answered by a server of the protocol
        return Failure(Fate.ANSWERED, RemoteBroken(told))
    return Failure(Fate.ANSWERED, _HTTP_CLASSES.get(status, ExecutionFailed)(told))


def failure_of_text(text: str, begun: bool | None = None) -> Failure:
    """The failure of a request on a stream, for which other upstreams send a text only."""
    if _refused(text) if begun is None else not begun:
        return Failure(Fate.REFUSED, Unavailable(text, 1))
    return Failure(Fate.ANSWERED, ExecutionFailed(text))
