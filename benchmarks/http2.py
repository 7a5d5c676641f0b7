"""gRPC's unary calls over HTTP/2, as a load generator needs them.

Strategy:
- Headers are the same for all calls, so their blocks are made and read once; see
  `benchmarks.header_blocks`.
- A message that fits into the windows, which is the rule, leaves as one write with its headers; the
  rest of a larger one waits for the server's window updates.
- The server gets windows so large that it never waits for ours.
"""

from collections import deque
from struct import Struct

from benchmarks.header_blocks import AnswerBlocks, Fields, RequestBlocks
from benchmarks.wire import Answer, ProtocolError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = Struct(">BHBBI")  # length (24 bits), type, flags, stream
_SETTING = Struct(">HI")
_UINT32 = Struct(">I")
_GRPC_PREFIX = Struct(">BI")  # compressed or not, length

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME = 1, 2, 3, 4, 5

_MAX_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 65_535
_REFILL = 2**29  # bytes received before the connection's window is filled up again


class _Stream:
    """A call under way: what has come of its answer."""

    __slots__ = ("fields", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.fields: Fields = {}


class _Unsent:
    """The rest of a message that did not fit into a window."""

    __slots__ = ("rest", "stream", "window")

    def __init__(self, stream: int, rest: bytes, window: int) -> None:
        self.stream = stream
        self.rest = memoryview(rest)
        self.window = window


class GrpcWire:
    """A connection for calls of one method; the token of a call is its stream's number."""

    def __init__(self, authority: str, path: str, calls: int) -> None:
        """`calls` is how many there will be at once."""
        self.ready = False
        self._calls = calls
        self._request_blocks = RequestBlocks([
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
            ("te", "trailers"), ("content-type", "application/grpc"),
            ("user-agent", "headrace-bench"),
        ])  # fmt: skip
        self._answer_blocks = AnswerBlocks()
        self._next_stream = 1
        self._streams: dict[int, _Stream] = {}
        self._unsent: deque[_Unsent] = deque()
        self._window = self._stream_window = _DEFAULT_WINDOW
        self._max_frame = 16_384
        self._received = 0
        self._rest = b""
        self._partial: tuple[int, int, bytes] | None = None
        self._out: list[bytes] = []

    def start(self) -> bytes:
        """The preface, our settings, and a larger window for the connection."""
        settings = _SETTING.pack(_ENABLE_PUSH, 0) + _SETTING.pack(_INITIAL_WINDOW, _MAX_WINDOW)
        return b"".join((
            _PREFACE,
            _frame(_SETTINGS, 0, 0, settings),
            _frame(_WINDOW_UPDATE, 0, 0, _UINT32.pack(_MAX_WINDOW - _DEFAULT_WINDOW)),
        ))  # fmt: skip

    def send(self, message: bytes) -> tuple[int, bytes]:
        """Begin a call with a message that `grpc_message` has framed."""
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = _Stream()
        block = self._request_blocks.next()
        size = len(message)
        head = _FRAME.pack(0, len(block), _HEADERS, _END_HEADERS, stream)
        if not self._unsent and size <= min(self._window, self._stream_window, self._max_frame):
            self._window -= size
            frame = _FRAME.pack(size >> 16, size & 0xFFFF, _DATA, _END_STREAM, stream)
            return stream, b"".join((head, block, frame, message))
        self._unsent.append(_Unsent(stream, message, self._stream_window))
        return stream, b"".join((head, block, *self._pump()))

    def receive(self, data: bytes) -> tuple[list[Answer], bytes]:
        """Take frames; raises `ProtocolError`."""
        if self._rest:
            data = self._rest + data
        answers: list[Answer] = []
        position, size = 0, len(data)
        while size - position >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, position)
            end = position + 9 + (high << 16 | low)
            if end > size:
                break
            answer = self._take(kind, flags, stream & _MAX_WINDOW, data[position + 9 : end])
            if answer is not None:
                answers.append(answer)
            position = end
        self._rest = data[position:]
        if not self._out:
            return answers, b""
        out = b"".join(self._out)
        self._out.clear()
        return answers, out

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> Answer | None:
        if self._partial is not None and kind != _CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if kind == _DATA:
            return self._on_data(flags, stream, payload)
        if kind == _HEADERS:
            payload = _without_padding(flags, payload)
            self._partial = (stream, flags, payload[5 if flags & _PRIORITY else 0 :])
            return self._on_headers() if flags & _END_HEADERS else None
        if kind == _CONTINUATION:
            if self._partial is None:
                raise ProtocolError("a header block goes on that has not begun")
            first, first_flags, block = self._partial
            self._partial = (first, first_flags, block + payload)
            return self._on_headers() if flags & _END_HEADERS else None
        if kind == _RST_STREAM:
            known = self._streams.pop(stream, None)
            code = _number(payload)
            return Answer(stream, f"stream reset, code {code}", b"") if known else None
        self._control(kind, flags, stream, payload)
        return None

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW_UPDATE:
            self._grow(stream, _number(payload))
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self._configure(payload)
            self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
            self.ready = True
        elif kind == _GOAWAY:
            code = _number(payload[4:8])
            raise ProtocolError(f"the server closes the connection, code {code}: {payload[8:]!r}")
        elif kind == _PUSH_PROMISE:
            raise ProtocolError("the server pushes, which was turned off")

    def _configure(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == _TABLE_SIZE:
                self._request_blocks.limit_table(value)
            elif name == _MAX_STREAMS and value < self._calls:
                raise ProtocolError(f"the server takes only {value} calls on a connection")
            elif name == _INITIAL_WINDOW:
                for unsent in self._unsent:
                    unsent.window += value - self._stream_window
                self._stream_window = value
            elif name == _MAX_FRAME:
                self._max_frame = value

    def _grow(self, stream: int, increment: int) -> None:
        if not stream:
            self._window += increment
        else:
            for unsent in self._unsent:
                if unsent.stream == stream:
                    unsent.window += increment
        self._out.extend(self._pump())

    def _pump(self) -> list[bytes]:
        """The queued data that the windows allow, in frames."""
        frames: list[bytes] = []
        for unsent in self._unsent:
            while unsent.rest:
                size = min(len(unsent.rest), self._window, unsent.window, self._max_frame)
                if size <= 0:
                    break
                last = size == len(unsent.rest)
                piece = bytes(unsent.rest[:size])
                frames.append(_frame(_DATA, _END_STREAM if last else 0, unsent.stream, piece))
                unsent.rest = unsent.rest[size:]
                unsent.window -= size
                self._window -= size
        while self._unsent and not self._unsent[0].rest:
            self._unsent.popleft()
        return frames

    def _on_data(self, flags: int, number: int, payload: bytes) -> Answer | None:
        self._received += len(payload)
        if self._received >= _REFILL:
            self._out.append(_frame(_WINDOW_UPDATE, 0, 0, _UINT32.pack(self._received)))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            return None  # of a stream that has been reset
        stream.pieces.append(_without_padding(flags, payload))
        return self._finish(number) if flags & _END_STREAM else None

    def _on_headers(self) -> Answer | None:
        assert self._partial is not None
        number, flags, block = self._partial
        self._partial = None
        fields = self._answer_blocks.fields(block)
        stream = self._streams.get(number)
        if stream is None:
            return None
        stream.fields = fields if not stream.fields else stream.fields | fields
        return self._finish(number) if flags & _END_STREAM else None

    def _finish(self, number: int) -> Answer:
        stream = self._streams.pop(number)
        fields, status = stream.fields, stream.fields.get(b"grpc-status")
        pieces = stream.pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if status == b"0" and fields.get(b":status") == b"200":
            if len(data) < 5 or _GRPC_PREFIX.unpack_from(data) != (0, len(data) - 5):
                return Answer(number, "an answer that is not one whole message", data)
            return Answer(number, "", data[5:])
        code = b"?" if status is None else status
        text = fields.get(b"grpc-message", b"")
        http = fields.get(b":status", b"?")
        return Answer(
            number, f"gRPC {code.decode()} (HTTP {http.decode()}): {text[:200].decode()}", data
        )


def grpc_message(message: bytes) -> bytes:
    """A message with gRPC's prefix, uncompressed."""
    return _GRPC_PREFIX.pack(0, len(message)) + message


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("a frame with more padding than content")
    return payload[1 : len(payload) - payload[0]]


def _number(payload: bytes) -> int:
    if len(payload) != 4:
        raise ProtocolError("a frame of the wrong size")
    value: int = _UINT32.unpack(payload)[0]
    return value & _MAX_WINDOW
