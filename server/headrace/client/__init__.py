"""The client of KServe V2 servers: `headrace.Client` and `headrace.AsyncClient`.

`asynchronous` is the client itself and `blocking` its interface for threads; `http` and `grpc` are
its transports, with the codecs of `headrace.protocol` and the connections shared with upstreams.
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
