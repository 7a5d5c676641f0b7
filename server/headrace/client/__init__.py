"""The client of a server of the protocol: `headrace.Client`, and `headrace.AsyncClient`.

`asynchronous` is the client itself and `blocking` its face for threads; `http` and `grpc` are its
transports, over the codecs of `headrace.protocol` and the connections that upstreams have as well.
"""

from headrace.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailed,
    InputError,
    StatusError,
    TimedOut,
)

__all__ = [
    "AnswerError",
    "ClientError",
    "ConnectionFailed",
    "InputError",
    "StatusError",
    "TimedOut",
]
