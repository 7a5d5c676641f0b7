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
    they are. A stream lives until both sides are closed. Most streams are short, so what they begin
    with is the class's: what never changes is never set.
    """

    send_window = 0
    window = 0
    consumed = 0
    place: memoryview | None = None
    kept = 0
    keeps_window = False  # the peer's is to stay as it is for now
    expected = -1  # bytes of DATA still to come by content-length; -1: not said
    remote_closed = False
    local_closed = False
    queue: deque[Buffer] | None = None  # what waits for windows
    queued = 0
    scheduled = False
    trailers: Fields | None = None  # to end our side with, after the queue

    def __init__(self, number: int) -> None:
        self.number = number

    def take_last(self, view: memoryview, start: int, stop: int) -> bool:
        """Take all that the peer sends at once, `view[start:stop]`, and that it sends no more.

        False: nothing was done, so that `on_data` and `on_end` are called instead. Who takes it
        sets `remote_closed` first, and ends the stream as any that the peer has closed.
        """
        return False

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Take `view[start:stop]`, which is valid during this call only."""

    def on_filled(self, nbytes: int) -> None:
        """The first `nbytes` of `place` have come."""

    def on_keep(self) -> None:
        """Messages are kept, and the peer has not ended its side with them."""

    def on_end(self) -> None:
        """The peer has sent all."""

    @property
    def head_size(self) -> int:
        """About how many bytes what the stream was opened with takes."""
        return 0

    def on_gone(self, code: ErrorCode) -> None:
        """The stream is no more: reset by the peer, broken, or lost with its connection."""

    def look(self, now: float) -> None:
        """Called now and then, at `now` seconds: what takes too long may be given up."""

    def on_sent(self) -> None:
        """Some of what was queued has left."""
