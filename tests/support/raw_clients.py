"""Clients with full control of their bytes, also for calls that no library makes.

HTTP over a bare socket, HTTP/2 with hand-written frames, and gRPC with messages as bytes.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import grpc
import grpc.aio
from hpack import Decoder, Encoder

from headrace.protocol.http2 import protocol as http2
from tests.support.http2_socket import REQUEST

SERVICE = "/inference.GRPCInferenceService"
_MESSAGE_LIMIT = 64 << 20
_NO_LIMIT = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpConnection:
    """One connection; the caller provides all bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connect to host:port."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=_MESSAGE_LIMIT)
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """The port at this end."""
        port: int = self._writer.get_extra_info("sockname")[1]
        return port

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> HttpAnswer:
        """The next answer; raises `asyncio.IncompleteReadError` if the connection ends first."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return HttpAnswer(int(head[0].split(" ", 2)[1]), headers, body)

    async def ended(self) -> bool:
        """Wait for the other side to close; true if it sent no further byte."""
        try:
            return not await self._reader.read(1)
        except ConnectionError:
            return True

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send a complete request and wait for its answer."""
        await self.send(post_bytes(path, body, headers))
        return await self.receive()

    async def close(self) -> None:
        """Close the connection gracefully."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the other side may have been faster
            await self._writer.wait_closed()

    def reset(self) -> None:
        """Reset the connection."""
        sock = self._writer.get_extra_info("socket")
        if sock.fileno() >= 0:  # unless the other side has been faster
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


@dataclass(slots=True)
class Http2Caller:
    """An HTTP/2 connection whose calls send exactly the given frames."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    encoder: Encoder = field(default_factory=Encoder)

    def request(self, number: int, *pieces: bytes, end: bool = False) -> bytes:
        """Frames of a ModelInfer call with these pieces of DATA."""
        frames = [
            http2.frame(http2.HEADERS, http2.END_HEADERS, number, self.encoder.encode(REQUEST))
        ]
        for index, piece in enumerate(pieces, 1):
            flags = http2.END_STREAM * (end and index == len(pieces))
            frames.append(http2.frame(http2.DATA, flags, number, piece))
        return b"".join(frames)

    def begin(self, number: int, *pieces: bytes, end: bool = False) -> None:
        """Send the frames."""
        self.writer.write(self.request(number, *pieces, end=end))

    async def next_whole_frame(self) -> tuple[int, int, int, bytes]:
        """Type, flags, stream and payload of the next frame."""
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3]))
        return head[3], head[4], int.from_bytes(head[5:]), payload

    async def next_frame(self) -> tuple[int, int, bytes]:
        """Type, stream and payload of the next frame."""
        kind, _, stream, payload = await self.next_whole_frame()
        return kind, stream, payload

    async def statuses(self, count: int) -> list[tuple[str, str]]:
        """gRPC statuses and texts of `count` calls, as they end."""
        decoder = Decoder()
        found: list[tuple[str, str]] = []
        while len(found) < count:
            kind, _, payload = await self.next_frame()
            if kind == http2.HEADERS:
                fields = {str(name): str(value) for name, value in decoder.decode(payload)}
                if "grpc-status" in fields:
                    found.append((fields["grpc-status"], fields.get("grpc-message", "")))
        return found

    async def ended(self) -> int | None:
        """Wait for the end of the connection; the error of a GOAWAY, if any."""
        code = None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, _, payload = await self.next_frame()
                if kind == http2.GOAWAY:
                    code = int.from_bytes(payload[4:8])
        return code


@asynccontextmanager
async def open_http2(address: str, *settings: tuple[int, int]) -> AsyncIterator[Http2Caller]:
    """A connection with these settings after the handshake; it is reset at the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    values = b"".join(struct.pack(">HI", *pair) for pair in settings)
    writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, values))
    try:
        yield Http2Caller(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post_bytes(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def post(
    address: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """One request on a connection of its own."""
    async with await HttpConnection.open(address) as connection:
        return await connection.post(path, body, headers)


async def get(address: str, path: str) -> HttpAnswer:
    """One GET on a connection of its own."""
    async with await HttpConnection.open(address) as connection:
        await connection.send(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        return await connection.receive()


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel with a connection of its own, without limits on message sizes."""
    return grpc.aio.insecure_channel(address, options=_NO_LIMIT)


def procedure(
    channel: grpc.aio.Channel, method: str
) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
    """A procedure of the inference service, from bytes to bytes."""
    return channel.unary_unary(f"{SERVICE}/{method}")


def open_stream(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    """A call of ModelStreamInfer."""
    stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
    return stream()


def call(
    channel: grpc.aio.Channel, method: str, message: bytes, timeout: float | None = None
) -> "grpc.aio.UnaryUnaryCall[bytes, bytes]":
    """Start a call of the inference service; awaiting it gives the answer's bytes.

    Awaiting raises `AioRpcError` for any status but OK.
    """
    return procedure(channel, method)(message, timeout=timeout)


async def code_of(started: "grpc.aio.UnaryUnaryCall[bytes, bytes]") -> grpc.StatusCode:
    """The status of a finished call."""
    try:
        await started
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
