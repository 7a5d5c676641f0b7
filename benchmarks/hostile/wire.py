"""Clients that keep to a protocol only as far as an attack wants them to.

Every wait has an end: a server that hangs must not hang the benchmark.
"""

import resource
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from struct import Struct
from time import monotonic
from typing import Self

from benchmarks.header_blocks import RequestBlocks
from benchmarks.server import split_address

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
METADATA = "/inference.GRPCInferenceService/ModelMetadata"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, WINDOW_UPDATE = 0, 1, 3, 4, 5, 6, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ACK = END_STREAM = 0x1
_END_HEADERS, _CONTINUATION = 0x4, 9
_HEAD = Struct(">BHBBI")  # length (24 bits), type, flags, stream
_SETTING = Struct(">HI")
_INITIAL_WINDOW, _MAX_FRAME = 4, 5
_LARGEST = 2**31 - 1
_ANSWER_SECS = 60.0  # the longest wait for an answer
_PIECE = 1 << 20


def allow_connections() -> None:
    """Let this process have as many connections as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def connect(address: str, receive_buffer: int = 0) -> socket.socket:
    """A connection; `receive_buffer` bytes are all that is taken in unread, unless it is 0."""
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(_ANSWER_SECS)
    try:
        made.connect(split_address(address))
    except OSError:
        made.close()
        raise
    return made


def post_head(path: str, length: int, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """The head of a POST request over HTTP/1.1."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode()


def post(address: str, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """The beginning of the answer to one request; empty if the server would not have it."""
    with suppress(OSError), connect(address) as made:
        with suppress(ConnectionError):  # refused before it was sent, which is answered
            made.sendall(post_head(path, len(body), headers))
            made.sendall(body)
        return made.recv(65_536)
    return b""


class Http2:
    """One connection whose frames are the caller's affair; a thread takes in what comes.

    Messages are sent within the server's windows. It is over once the server has hung up.
    """

    def __init__(
        self,
        address: str,
        path: str = INFER,
        window: int = _LARGEST,
        *,
        headers: Iterable[tuple[str, str]] = (),
        encoding: str = "gzip",
        most_frame: int = 0,
    ) -> None:
        """`window` is what the server may send of each answer.

        `headers` are sent beside those that gRPC needs; `encoding` is that of compressed messages;
        frames have at most `most_frame` bytes, unless it is 0.
        """
        self._socket = connect(address)
        self._most_frame = most_frame or _LARGEST
        self._blocks = RequestBlocks([
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"), ("grpc-encoding", encoding),
            *headers,
        ])  # fmt: skip
        self._next = 1
        self._max_frame = 16_384
        self._initial = self._window = 65_535
        self._windows: dict[int, int] = {}
        self._ended: set[int] = set()
        self._over = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self.raw(PREFACE + frame(SETTINGS, 0, 0, _SETTING.pack(_INITIAL_WINDOW, window)))
        if window:
            more = (_LARGEST - 65_535).to_bytes(4, "big")
            self.raw(frame(WINDOW_UPDATE, 0, 0, more))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    @property
    def over(self) -> bool:
        """True once the server has hung up."""
        return self._over

    def raw(self, data: bytes) -> None:
        """Send bytes as they are; nothing if the server has hung up."""
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                self._over = True

    def open(self) -> int:
        """Begin a call; its stream."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        block = self._blocks.next()
        pieces = [block[at : at + self._max_frame] for at in range(0, len(block), self._max_frame)]
        kinds = [HEADERS] + [_CONTINUATION] * (len(pieces) - 1)
        flags = [0] * (len(pieces) - 1) + [_END_HEADERS]
        self.raw(b"".join(map(frame, kinds, flags, [stream] * len(pieces), pieces)))
        return stream

    def heads(self, count: int, flags: int) -> list[bytes]:
        """HEADERS of `count` calls, to be sent by `raw`."""
        numbers = range(self._next, self._next + 2 * count, 2)
        self._next += 2 * count
        return [frame(HEADERS, _END_HEADERS | flags, n, self._blocks.next()) for n in numbers]

    def send(self, stream: int, data: bytes, end: bool = True, largest: int = 1 << 24) -> bool:
        """Send of a message what the windows let through; whether that was all of it.

        Frames have at most `largest` bytes.
        """
        rest = memoryview(data)
        while rest:
            size = self._take_window(stream, len(rest))
            if not size:
                return False
            frames = []
            most = min(self._max_frame, self._most_frame, largest)
            for start in range(0, size, most):
                piece = rest[start : min(start + most, size)]
                last = end and start + len(piece) == len(rest)
                frames.append(frame(DATA, END_STREAM if last else 0, stream, bytes(piece)))
            self.raw(b"".join(frames))
            rest = rest[size:]
        return True

    def call(self, message: bytes) -> int:
        """Send a whole message, with gRPC's prefix; the stream."""
        stream = self.open()
        self.send(stream, message)
        return stream

    def wait(self, stream: int, seconds: float = _ANSWER_SECS) -> bool:
        """Wait for the end of an answer, or of the connection; whether either came."""
        with self._changed:
            return self._changed.wait_for(lambda: stream in self._ended or self._over, seconds)

    def _take_window(self, stream: int, most: int) -> int:
        deadline = monotonic() + _ANSWER_SECS
        with self._changed:
            while not self._over and stream not in self._ended:
                size = min(most, self._window, self._windows[stream], _PIECE)
                if size > 0:
                    self._window -= size
                    self._windows[stream] -= size
                    return size
                if not self._changed.wait(deadline - monotonic()):
                    return 0
        return 0

    def _read(self) -> None:
        data = b""
        with suppress(OSError):
            while True:
                try:
                    got = self._socket.recv(_PIECE)
                except TimeoutError:
                    continue
                if not got:
                    break
                data += got
                start = 0
                while len(data) >= start + 9:
                    high, low, kind, flags, stream = _HEAD.unpack_from(data, start)
                    end = start + 9 + (high << 16 | low)
                    if len(data) < end:
                        break
                    self._on_frame(kind, flags, stream, data[start + 9 : end])
                    start = end
                data = data[start:]
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._changed:
            if kind == WINDOW_UPDATE:
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + _number(payload)
                else:
                    self._window += _number(payload)
            elif kind == SETTINGS and not flags & ACK:
                for name, value in _SETTING.iter_unpack(payload):
                    if name == _INITIAL_WINDOW:
                        for each in self._windows:
                            self._windows[each] += value - self._initial
                        self._initial = value
                    elif name == _MAX_FRAME:
                        self._max_frame = value
            elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self._ended.add(stream)
            self._changed.notify_all()
        if kind == SETTINGS and not flags & ACK:
            self.raw(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.raw(frame(PING, ACK, 0, payload))


def _number(payload: bytes) -> int:
    return int.from_bytes(payload, "big") & _LARGEST


def bytes_field(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf writes it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A number, as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
