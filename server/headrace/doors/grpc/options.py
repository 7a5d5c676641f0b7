"""Options of both transports: keep-alive, compression and patience."""

from dataclasses import dataclass, field

from headrace.api.operations import NAMED
from headrace.protocol.http2.keep_alive import KeepAlive

# The effort of zlib for each compression level.
LEVELS = {"none": 0, "low": 1, "medium": 3, "high": 6}
# The procedures whose answers are compressed by level.
INFERENCE = frozenset(NAMED[name].procedure for name in ("ModelInfer", "ModelStreamInfer"))


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`compression`, one of `LEVELS`, applies to inference answers for clients that accept it.

    A client may make no progress for `patience_secs` while sending a message or reading an answer.
    A connection without calls is closed after `idle_secs`, a stream without requests ends after
    `stream_idle_secs`; 0: never. A connection may have `streams` open calls, whose clients may be
    `window` bytes ahead of the server.
    """

    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    compression: str = "none"
    patience_secs: float = 60.0
    idle_secs: float = 0.0
    stream_idle_secs: float = 0.0
    streams: int = 1024
    window: int = (1 << 20) + (64 << 10)
