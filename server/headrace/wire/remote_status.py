"""What the statuses mean that another server's procedures end with: the error that a client gets
for it, and what is known of whether anything was executed.

gRPC has one status, UNAVAILABLE, for a connection that could not be made, for one that was lost
while the server was at work, and for a server that refuses; only the text tells them apart.
"""

from dataclasses import dataclass
from enum import Enum

from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Quarantined,
    RemoteLost,
    RemoteTimeout,
    ServerError,
    Unavailable,
    Unknown,
    Unsupported,
)

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
# What gRPC itself says before anything of a call was sent.
_UNSENT = ("failed to connect to all addresses", "DNS resolution failed", "empty address list")
# What servers of the protocol say of a request that they have not begun: Triton and this one.
_REFUSALS = (
    "not at ready state",
    "is not ready",
    "Exceeds maximum queue size",
    "Request timeout expired",
    "Server is stopping",
    "Server exiting",
    "server is at its limit of",
)


class Fate(Enum):
    """What has become of a call that failed."""

    UNSENT = "there is no connection"
    REFUSED = "the server has not begun it"
    ANSWERED = "the server says what was wrong with it"
    UNCERTAIN = "it may have been executed"
    LATE = "it may still be executed"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call has failed, and what a client is told of it."""

    fate: Fate
    error: ServerError


def failure_of(model: str, status: int, text: str) -> Failure:
    """What a call to serve `model` failed with, by the number of its gRPC status and its text."""
    if status == _UNAVAILABLE:
        if text.startswith(_UNSENT):
            error = Unavailable(f"no server of model '{model}' can be reached")
            return Failure(Fate.UNSENT, error)
        if any(known in text for known in _REFUSALS):
            return Failure(Fate.REFUSED, Unavailable(text))
        lost = f"the connection to the server of model '{model}' was lost during the request"
        return Failure(Fate.UNCERTAIN, RemoteLost(lost))
    if status == _DEADLINE:
        late = f"the server of model '{model}' has not answered in time"
        return Failure(Fate.LATE, RemoteTimeout(late))
    if status in _DENIED:
        denied = f"the server of model '{model}' does not accept this server's credentials"
        return Failure(Fate.ANSWERED, ExecutionFailed(denied))
    return Failure(Fate.ANSWERED, _CLASSES.get(status, ExecutionFailed)(text))
