"""Errors, as one tree. `headrace.protocol.status` maps each leaf to its status on the wire.

ServerError ─┬─ InvalidRequest       the client broke the protocol or the model's signature
             │   ├─ PayloadTooLarge  a body, a decompressed body or a message is over the limit
             │   └─ ModelLoadFailed  a model could not be loaded as requested
             ├─ NotFound             no such model, version or route
             ├─ Unavailable          not now; the same request may succeed later
             │   ├─ ModelNotReady    the version is known, but it does not serve at present
             │   ├─ QueueFull        the model's queue is at its limit
             │   ├─ QueueTimeout     queued for longer than the model's policy allows
             │   ├─ Overloaded       the whole server is at its limit of admitted requests or bytes
             │   ├─ QuotaExceeded    the client is at its own limit
             │   └─ ServerExiting    the server is shutting down
             ├─ Unsupported          understood, but this server or model does not do it
             │   └─ UnsupportedEncoding  a compression that is not offered
             ├─ Restricted           the operation requires a certain request header
             ├─ Unauthenticated      the client has to prove who it is, or has failed to
             ├─ Forbidden            no role of the client permits the operation
             ├─ Cancelled            the client went away or its deadline passed
             ├─ Quarantined          workers have died of the same input before: refused
             ├─ AlreadyExists        raised by a model: the object to be created exists
             ├─ MemoryUnavailable    a client's shared memory cannot be opened
             ├─ Unknown              raised by a model: an error of unknown kind
             └─ ExecutionFailed      the backend failed, or its outputs break the signature
                 ├─ ResponseTooLarge  its response has more bytes than it may
                 ├─ WorkerDied       the worker process died while executing it
                 │   └─ SequenceLost  and with it the state of its sequence
                 ├─ ExecutionTimeout  it exceeded the model's execution limit
                 ├─ RemoteUnavailable  the upstream reports that it, or the model, is unavailable
                 ├─ RemoteLost       the connection to the upstream was lost
                 ├─ RemoteTimeout    the upstream has not answered in time
                 └─ RemoteBroken     the upstream's answer is malformed or too large

RepositoryError ─┬─ InvalidConfig    a model's configuration is wrong; names file, line and field
                 ├─ InvalidOption    the same, raised by a backend, which knows the field only
                 └─ LoadFailed       a model's files could not be loaded
                     └─ Contradiction  a model's own declaration differs from its configuration

A `ServerError` reaches a client: its text says what was wrong and what was expected, never
internals. A `RepositoryError` reaches the operator, by start-up output and log; clients see only
its `public` text, by the repository index.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self


class ServerError(Exception):
    """Base of every error that a request can be answered with.

    `retry_after` is the number of seconds after which a retry may succeed, where more precise than
    the class's. `spent` is the time of a queued request: nanoseconds in the queue and in
    execution, and the rows of its batch.
    """

    retry_after = 0
    spent: tuple[int, int, int] | None = None

    def of_request(self, queue_ns: int, compute_ns: int, batch_rows: int) -> Self:
        """Attach the times of one request; returns a copy if the error has those of another one."""
        error = self if self.spent is None else copy(self)
        error.spent = queue_ns, compute_ns, batch_rows
        return error

    def without_frames(self) -> Self:
        """Drop the frames that it passed, to keep it: they have a request's data, or the error.

        So do those of the errors that it was raised from, or while they were handled.
        """
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)


class InvalidRequest(ServerError):
    """The request breaks the protocol or does not fit the model's signature."""


class PayloadTooLarge(InvalidRequest):
    """The request is larger than the server accepts."""


class ModelLoadFailed(InvalidRequest):
    """A model could not be loaded as requested; the versions that served go on serving."""


class NotFound(ServerError):
    """No model, version or route of this name."""


class Unavailable(ServerError):
    """Not now; models raise this too, so that it alone does not tell if the request was begun."""

    def __init__(self, text: str = "", retry_after: int = 0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class ModelNotReady(Unavailable):
    """The model version is known but not serving."""


class QueueFull(Unavailable):
    """The model's queue is full."""


class QueueTimeout(Unavailable):
    """The request waited in the queue for longer than its policy allows."""


class Overloaded(Unavailable):
    """The server is at its limit of admitted requests or bytes."""


class Allowance(NamedTuple):
    """The limit of a quota that was reached: so many of a `unit` at once, or in a window.

    `limit` is its key in the configuration. `window` is in seconds, 0 for what is under way.
    """

    quota: str
    limit: str
    unit: str
    most: int
    window: int = 0


class QuotaExceeded(Unavailable):
    """The client is at a limit of its own; others are not affected.

    `until` is when a further request may be admitted, in seconds of the monotonic clock; 0 if that
    depends on other requests.
    """

    def __init__(
        self,
        text: str = "",
        retry_after: int = 0,
        allowance: Allowance | None = None,
        until: float = 0.0,
    ) -> None:
        super().__init__(text, retry_after)
        self.allowance = allowance
        self.until = until


class ServerExiting(Unavailable):
    """The server is shutting down and accepts no new requests."""


class Unsupported(ServerError):
    """A feature of the protocol that this server or model does not support."""


class UnsupportedEncoding(Unsupported):
    """The body's content encoding is not supported."""


class Restricted(ServerError):
    """The operation requires a request header that is missing or has another value."""


class Unauthenticated(ServerError):
    """The client has not proved who it is; `challenge` says how, as in `WWW-Authenticate`."""

    challenge = ""


class Forbidden(ServerError):
    """The client is known, and none of its roles permits the operation."""


class Cancelled(ServerError):
    """The client no longer waits for the answer."""


class Quarantined(ServerError):
    """The request's input was being executed when workers died, more than once."""


class ExecutionFailed(ServerError):
    """The model's execution failed, or its outputs do not fit its signature."""


class ResponseTooLarge(ExecutionFailed):
    """The model's response is larger than the server sends."""


class WorkerDied(ExecutionFailed):
    """The worker process died while executing the request."""


class SequenceLost(WorkerDied):
    """The worker process with the state of the request's sequence, to be begun again, has ended."""


class ExecutionTimeout(ExecutionFailed):
    """The execution exceeded the model's time limit and was ended."""


class RemoteUnavailable(ExecutionFailed):
    """An upstream reports that it is unavailable; it may have begun the request."""


class RemoteLost(ExecutionFailed):
    """The connection to an upstream was lost while it may have been executing the request."""


class RemoteTimeout(ExecutionFailed):
    """An upstream has not answered in time; it may still be executing the request."""


class RemoteBroken(ExecutionFailed):
    """An upstream's answer breaks the protocol, or exceeds the model's response size limit."""


class AlreadyExists(ServerError):
    """A model has reported that the object to be created exists."""


class MemoryUnavailable(ServerError):
    """Shared memory that a client registers does not exist, or cannot be opened.

    The status is INTERNAL, as in Triton.
    """


class Unknown(ServerError):
    """A model has reported an error of unknown kind."""


class RepositoryError(Exception):
    """Base of the errors that prevent a model from being served.

    `public` is the text that clients see: without paths of this machine and without messages of
    libraries. It is the whole text unless given.
    """

    def __init__(self, text: str, public: str = "") -> None:
        # File names need not be valid text; what clients receive has to be.
        text = text.encode(errors="backslashreplace").decode()
        super().__init__(text)
        self.public = public or text


class InvalidConfig(RepositoryError):
    """A model configuration that cannot be accepted."""


class InvalidOption(RepositoryError):
    """A backend option that is invalid or unsupported; `path` is the configuration's field."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path
        self.text = text


class LoadFailed(RepositoryError):
    """A model whose files cannot be loaded."""


class Contradiction(LoadFailed):
    """A model's own declaration differs from its configuration.

    `problems` are (field of the configuration, what is wrong).
    """

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {text}" for path, text in problems))
        self.problems = tuple(problems)


def is_fault(error: ServerError, begun: bool) -> bool:
    """True if an error counts against the model version: a failed execution, or no instance.

    `begun` is true if the request was begun. Clients can cause all others at will, by the content
    or the number of their requests: invalid requests, queue timeouts, full queues, cancellations.
    """
    failed = isinstance(error, ExecutionFailed | Unknown | ModelNotReady)
    if isinstance(error, SequenceLost):  # others go on to send requests of a lost sequence
        return begun
    return failed or (begun and isinstance(error, Unavailable))
