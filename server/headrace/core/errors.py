"""Errors, as one tree. Doors know the status of a leaf from `headrace.protocol.status`.

ServerError ─┬─ InvalidRequest       the client broke the protocol or the model's signature
             │   ├─ PayloadTooLarge  a body, a decompressed body or a message is over the limit
             │   └─ ModelLoadFailed  a model could not be loaded as was asked
             ├─ NotFound             no such model, version or route
             ├─ Unavailable          not now; the same request may succeed later
             │   ├─ ModelNotReady    the version is known, but it does not serve at present
             │   ├─ QueueFull        the model's queue is at its limit
             │   ├─ QueueTimeout     it waited in the queue for longer than its policy allows
             │   ├─ Overloaded       the whole server is at its limit of admitted requests or bytes
             │   └─ ServerExiting    the server is shutting down
             ├─ Unsupported          understood, but this server or model does not do it
             │   └─ UnsupportedEncoding  a compression that is not offered
             ├─ Restricted           only those who send a certain header may ask for this
             ├─ Cancelled            the client went away or its deadline passed
             ├─ Quarantined          workers have died of the same input before: it is not run again
             ├─ AlreadyExists        a model's own answer: what it was to make is there
             ├─ Unknown              a model's own answer: an error of no known kind
             └─ ExecutionFailed      the backend raised, or gave something that breaks the signature
                 ├─ WorkerDied       the worker process that had begun it is no more
                 ├─ ExecutionTimeout  it took longer than its model may, and was ended
                 ├─ RemoteUnavailable  the server that had it says so, of the model or of itself
                 ├─ RemoteLost       the connection to the server that had it is no more
                 ├─ RemoteTimeout    the server that had it has not answered in time
                 └─ RemoteBroken     its answer breaks the protocol or is too large

RepositoryError ─┬─ InvalidConfig    a model's configuration is wrong; names file, line and field
                 ├─ InvalidOption    the same as a backend tells it, which knows the field only
                 └─ LoadFailed       a model's files could not be turned into something that runs
                     └─ Contradiction  a model says of itself other things than its configuration

A `ServerError` reaches a client: its text says what was wrong and what was expected, never
internals. A `RepositoryError` reaches whoever operates the server, by start-up output and log; what
of it may reach clients, by the repository index, is its `public` text.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self


class ServerError(Exception):
    """Base of everything that a request can be answered with instead of a response.

    `retry_after` is after how many seconds the same request may succeed, where that is known better
    than by the class. `spent` is where the time of a request went that was queued: nanoseconds in
    the queue and in execution, and the rows of its batch.
    """

    retry_after = 0
    spent: tuple[int, int, int] | None = None

    def of_request(self, queue_ns: int, compute_ns: int, batch_rows: int) -> Self:
        """This error with the time of one request: a copy if it has that of another already."""
        error = self if self.spent is None else copy(self)
        error.spent = queue_ns, compute_ns, batch_rows
        return error


class InvalidRequest(ServerError):
    """The request breaks the protocol or does not fit the model's signature."""


class PayloadTooLarge(InvalidRequest):
    """The request is larger than the server accepts."""


class ModelLoadFailed(InvalidRequest):
    """A model could not be loaded as was asked; what served before goes on."""


class NotFound(ServerError):
    """No model, version or route of this name."""


class Unavailable(ServerError):
    """The request was refused for now; nothing of it was executed."""

    def __init__(self, text: str = "", retry_after: int = 0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class ModelNotReady(Unavailable):
    """The model version is known but not serving."""


class QueueFull(Unavailable):
    """The model's queue holds as many requests as its policy allows."""


class QueueTimeout(Unavailable):
    """The request waited in the queue for longer than its policy allows."""


class Overloaded(Unavailable):
    """The server has admitted as many requests or bytes as it may hold at once."""


class ServerExiting(Unavailable):
    """The server is shutting down and admits nothing new."""


class Unsupported(ServerError):
    """A part of the protocol that this server, or this model, does not offer."""


class UnsupportedEncoding(Unsupported):
    """The body is compressed in a way that this server does not offer."""


class Restricted(ServerError):
    """The operation is not for whoever sends such headers."""


class Cancelled(ServerError):
    """Nobody waits for the answer any more."""


class Quarantined(ServerError):
    """The same input was under way when workers died, more than once."""


class ExecutionFailed(ServerError):
    """The model ran and failed, or its outputs do not fit its signature."""


class WorkerDied(ExecutionFailed):
    """The worker process ended while the request was under way there."""


class ExecutionTimeout(ExecutionFailed):
    """The execution took longer than its model may take, and was ended for that."""


class RemoteUnavailable(ExecutionFailed):
    """Another server answers that something is not available; it may have begun the request."""


class RemoteLost(ExecutionFailed):
    """The connection to another server ended while that may have been executing the request."""


class RemoteTimeout(ExecutionFailed):
    """Another server has not answered in time; it may still be executing the request."""


class RemoteBroken(ExecutionFailed):
    """Another server's answer breaks the protocol, or is larger than the model's may be."""


class AlreadyExists(ServerError):
    """A model has answered that what it was to make is there already."""


class Unknown(ServerError):
    """A model has answered with an error that it has no name for."""


class RepositoryError(Exception):
    """Base of what keeps a model from being served.

    `public` is what clients are told of it: without paths of this machine and without the words of
    libraries. It is the whole text unless given.
    """

    def __init__(self, text: str, public: str = "") -> None:
        # Names of files need not be text, but what clients are told has to be.
        text = text.encode(errors="backslashreplace").decode()
        super().__init__(text)
        self.public = public or text


class InvalidConfig(RepositoryError):
    """A model configuration that cannot be accepted."""


class InvalidOption(RepositoryError):
    """A setting for a backend that it cannot follow; `path` is the configuration's field."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path
        self.text = text


class LoadFailed(RepositoryError):
    """A model whose files cannot be loaded."""


class Contradiction(LoadFailed):
    """A model says of itself other things than its configuration.

    `problems` are the configuration's fields, each with what is wrong.
    """

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {text}" for path, text in problems))
        self.problems = tuple(problems)


def is_fault(error: ServerError) -> bool:
    """True if an error is the version's own: its execution failed, or nothing can execute it.

    Clients cause all others as they like, by what they send or by how much of it: requests that are
    wrong, expire in the queue, find it full, or are given up.
    """
    return isinstance(error, ExecutionFailed | Unknown | ModelNotReady)
