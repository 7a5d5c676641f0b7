"""Errors of the client, as one tree.

ClientError ─┬─ InputError        an argument does not fit the model's signature; nothing was sent
             ├─ ConnectionFailed  there is no connection, or it has ended before the answer
             │   └─ TimedOut      no answer in time
             ├─ StatusError       the server has answered with an error, in its own words
             └─ AnswerError       an answer that breaks the protocol
"""


class ClientError(Exception):
    """Base of everything that the client raises of requests; its text is for people."""


class InputError(ClientError, ValueError):
    """An argument that does not fit what the model declares; nothing was sent."""


class ConnectionFailed(ClientError):
    """No connection, or one that has ended before the answer; `sent` tells which."""

    def __init__(self, text: str, sent: bool = True) -> None:
        super().__init__(text)
        self.sent = sent


class TimedOut(ConnectionFailed):
    """No answer within the timeout."""


class StatusError(ClientError):
    """The server's error, in its own words.

    `status` is HTTP's, over gRPC the one that stands for `grpc_status`, which is None over HTTP.
    """

    def __init__(self, status: int, text: str, grpc_status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.grpc_status = grpc_status


class AnswerError(ClientError):
    """An answer that makes no sense in the protocol: perhaps there is another kind of server."""
