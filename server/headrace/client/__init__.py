"""The client of KServe V2 servers: `headrace.Client` and `headrace.AsyncClient`.

`asynchronous` is the client itself and `blocking` its interface for threads; `http` and `grpc` are
its transports, with the codecs of `headrace.protocol` and the connections shared with upstreams.
Its errors are here, as one tree:

ClientError ─┬─ InputError        an argument does not fit the model's signature; nothing was sent
             ├─ ConnectionFailed  no connection, or it was lost before the answer
             │   └─ TimedOut      no answer in time
             ├─ StatusError       the server has answered with an error
             └─ AnswerError       an answer that breaks the protocol
"""

from typing import Any


class ClientError(Exception):
    """Base of all errors of the client's requests."""


class InputError(ClientError, ValueError):
    """An argument does not fit the model's signature, or names a bad file; nothing was sent."""


class ConnectionFailed(ClientError):
    """No connection, or one that was lost before the answer; `sent` tells which."""

    def __init__(self, text: str, sent: bool = True) -> None:
        super().__init__(text)
        self.sent = sent


class TimedOut(ConnectionFailed):
    """No answer within the timeout."""


class StatusError(ClientError):
    """An error reported by the server, with its text.

    `status` is the HTTP status, over gRPC the equivalent of `grpc_status`, which is None over HTTP.
    """

    def __init__(self, status: int, text: str, grpc_status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.grpc_status = grpc_status

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with all its arguments: the executors of a cluster send errors by pickle."""
        return type(self), (self.status, str(self), self.grpc_status), vars(self)


class AnswerError(ClientError):
    """A malformed answer: possibly from another kind of server."""
