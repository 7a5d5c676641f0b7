"""What the two directions of a connection know of a stream; gRPC's calls are built upon it."""

from collections import deque

from headrace.core.tensors import Buffer
from headrace.wire.http2.protocol import ErrorCode

Fields = list[tuple[bytes, bytes]]


class Stream:
    """One stream from its HEADERS to its end. Subclasses say what its events mean.

    `send_window` is the peer's, `window` ours; `consumed` counts received bytes that were not given
    back to the peer's window yet. `kept` counts those of whole messages that wait for more, until
    `on_keep` was told of them. `place`, if it is there, is where the next bytes belong, whatever
    they are. A stream lives until both sides are closed.
    """

    __slots__ = (
        "consumed", "expected", "held", "kept", "local_closed", "number", "place", "queue",
        "queued", "remote_closed", "scheduled", "send_window", "trailers", "window",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.send_window = 0
        self.window = 0
        self.consumed = 0
        self.place: memoryview | None = None
        self.kept = 0
        self.held = False  # keep the peer's window as it is for now
        self.expected = -1  # bytes of DATA still to come by content-length; -1: not said
        self.remote_closed = False
        self.local_closed = False
        self.queue: deque[Buffer] | None = None  # what waits for windows
        self.queued = 0
        self.scheduled = False
        self.trailers: Fields | None = None  # to end our side with, after the queue

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Take `view[start:stop]`, which is valid during this call only."""

    def on_filled(self, nbytes: int) -> None:
        """The first `nbytes` of `place` have come."""

    def on_keep(self) -> None:
        """Messages are kept, and the peer has not ended its side with them."""

    def on_end(self) -> None:
        """The peer has sent all."""

    def on_gone(self, code: ErrorCode) -> None:
        """The stream is no more: reset by the peer, broken, or lost with its connection."""

    def look(self, now: float) -> None:
        """Called now and then, at `now` seconds: what takes too long may be given up."""

    def on_sent(self) -> None:
        """Some of what was queued has left."""
