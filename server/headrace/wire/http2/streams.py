"""The streams of a connection: which are open, how they end, and what ended ones may cost."""

from collections import deque

from headrace.wire.http2.budget import Budget, Limits
from headrace.wire.http2.protocol import MAX_WINDOW, ConnectionFailure, ErrorCode
from headrace.wire.http2.sender import Sender
from headrace.wire.http2.stream import Stream

_REMEMBERED = 128  # streams that were reset by us: what still comes for them is nobody's fault
_WORK = 8  # control frames that a new stream pays for
_FRAME_WORK = 3  # ... and each DATA frame that is sent


class Streams:
    """Owned by its connection.

    Invariant: a stream is in `open` from its HEADERS until both of its sides are closed.
    """

    def __init__(self, sender: Sender, limits: Limits) -> None:
        self.open: dict[int, Stream] = {}
        self.last = 0  # the highest that the peer has opened
        self.now = 0.0  # seconds; when what is being dealt with has come
        self.drain_to = MAX_WINDOW  # those beyond are ignored
        self.over = False  # none is open, and none will be
        self._sender = sender
        self._limits = limits
        self._reset: deque[int] = deque(maxlen=_REMEMBERED)
        self._control = Budget(limits.control, limits.control_rate)
        self._resets = Budget(limits.resets, limits.resets_rate)
        self._earned_at = 0

    def refuse(self, number: int, code: ErrorCode) -> None:
        """Reset a stream that was never opened, or is no more, for what the peer did."""
        self.count_reset()
        self._sender.reset(number, code)
        self._reset.append(number)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream from our side without, or after, a whole response."""
        self._sender.drop(stream)
        self._sender.reset(stream.number, code)
        self._reset.append(stream.number)
        stream.remote_closed = True
        self.forget(stream)

    def fail(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream for what the peer did, and tell it."""
        self.count_reset()
        self.reset(stream, code)
        stream.on_gone(code)

    def reset_by_peer(self, stream: Stream, code: ErrorCode) -> None:
        """The peer has reset a stream."""
        self.count_reset()
        self._sender.drop(stream)
        stream.remote_closed = True
        self.forget(stream)
        stream.on_gone(code)

    def sent_all(self, stream: Stream) -> None:
        """Our side of a stream is closed."""
        if stream.remote_closed:
            self.forget(stream)
        else:  # section 8.1: the rest of the request is of no use
            self.reset(stream, ErrorCode.NO_ERROR)

    def received_all(self, stream: Stream) -> None:
        """The peer's side of a stream is closed, unless that was reset meanwhile."""
        if stream.remote_closed:
            return
        stream.remote_closed = True
        stream.on_end()
        if stream.local_closed:
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        self.open.pop(stream.number, None)
        if self.drain_to != MAX_WINDOW:
            self.look_if_drained()

    def look_if_drained(self) -> None:
        """After `drain_to` has been set, or a stream is over."""
        if not self.open:
            self.over = True
            self._sender.rouse()

    def lose_all(self) -> None:
        """The connection is no more."""
        self.over = True
        streams, self.open = self.open, {}
        for stream in streams.values():
            self._sender.drop(stream)
            stream.remote_closed = True
            stream.on_gone(ErrorCode.CANCEL)

    # --- frames for streams that are not open

    def is_idle(self, number: int) -> bool:
        """Whether the peer has not opened this stream; one beyond a drain may be, for all we know.

        Stream 0 is never opened, nor are those with even numbers.
        """
        return not number & 1 or (self.last < number <= self.drain_to)

    def was_reset(self, number: int) -> bool:
        """Whether we ended this stream, perhaps before the peer knew, or ignore it in a drain."""
        return number in self._reset or number > self.drain_to

    # --- budgets

    def count_control(self, cost: int) -> None:
        """The peer has sent something that means nothing by itself; raises `ConnectionFailure`."""
        # Peers answer DATA with WINDOW_UPDATEs, and measure their way by PINGs.
        work = self.last // 2 * _WORK + self._sender.frames * _FRAME_WORK
        earned, self._earned_at = work - self._earned_at, work
        if not self._control.spend(cost, self.now, earned):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many frames of no use")

    def count_reset(self) -> None:
        """A stream was opened in vain; raises `ConnectionFailure`."""
        if not self._resets.spend(1, self.now):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")
