"""The one place where the two transports agree on what an error is called.

Values follow Triton's mapping of its error classes, with three deliberate differences that
`docs/protocol.md` lists: malformed JSON is the client's error (400, not 500), a request over the
size limit is 413 / RESOURCE_EXHAUSTED, and a cancelled request is 499 where anyone is left to see
it.
"""

from dataclasses import dataclass

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
