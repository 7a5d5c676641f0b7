"""What can be set of either transport."""

from dataclasses import dataclass, field

from headrace.wire.http2.keep_alive import KeepAlive

# What zlib is to do for each level of compression.
LEVELS = {"none": 0, "low": 1, "medium": 3, "high": 6}
# The procedures whose answers are compressed by level.
INFERENCE = frozenset(
    f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer")
)


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`compression`, one of `LEVELS`, is of inference answers to those who take them compressed.

    A client may make no progress for `patience_secs`, in sending a message or reading an answer. A
    connection without calls ends after `idle_secs`; 0: never.
    """

    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    compression: str = "none"
    patience_secs: float = 60.0
    idle_secs: float = 0.0
