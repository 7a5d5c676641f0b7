"""A channel of AMQP 0.9.1 for many messages: their frames go past the library, in a few writes.

aiormq opens connections and channels, declares queues, and sends heartbeats. It makes futures,
objects and often a task of each frame, and awaits each write; a message and its answer are seven
frames and more. So `AmqpLink`, the protocol of the library's connection, takes contents and
confirmations out of what arrives, and leaves all other frames to the library. Contents and
acknowledgements are written to the same transport, in whole messages between its frames.

All is called on the event loop. An `AmqpChannel` owns its connection, its `AmqpLink` and the only
channel that contents go through.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from struct import Struct
from time import monotonic
from typing import Any, Self

import aiormq
from pamqp import commands, decode, encode, frame

from headrace.plugins.inboxes.broker import BrokerAddress, RecordRefused

_CONNECT_SECS = _CLOSE_SECS = 5.0
_HEARTBEAT_SECS = 10.0
_WRITTEN = 1 << 18  # bytes in one write
_MOST_SHORT = 255  # bytes of a short text
_FRAME = Struct(">BHI")  # type, channel, size
_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8  # types
_END = b"\xce"
_INDEX, _TAG, _CONFIRM, _CODE = Struct(">I"), Struct(">Q"), Struct(">QB"), Struct(">H")
_BASIC = 60  # the class of all methods here
_DELIVER, _RETURN, _ACK, _NACK = ((_BASIC << 16) + method for method in (60, 50, 80, 120))
_CONTENT = Struct(">HHQ")  # class, weight, size of the body
_ACKNOWLEDGE = Struct(">BHIIQB")  # a frame, without its end
_MULTIPLE, _REQUEUE = 1, 2
# Properties, in this order; one whose bit is missing is, too.
_FLAGS = Struct(">H")
_TYPE, _ENCODING, _HEADERS, _MODE, _ID = 0x8000, 0x4000, 0x2000, 0x1000, 0x0080
_PERSISTENT = b"\x02"
_NO_HEADERS = b"\0\0\0\0"
_TOO_LARGE = "message size"  # in the broker's error for a message


class ChannelFrames:
    """Contents of one channel, and confirmations of those published, read from its frames."""

    def __init__(self) -> None:
        self.arrived: deque[tuple[int, bytes, bytes]] = deque()  # tag, properties, body
        self.problem: Exception | None = None  # of one published, or the end of the channel
        self._stirred = asyncio.Event()
        self._confirmed = 0  # how many of the first ones published
        self._early: set[int] = set()  # confirmed before others
        self._tag = 0  # of the content that is read; 0 for one that is returned
        self._properties = b""
        self._left = 0  # bytes of its body
        self._parts: list[bytes] = []

    def take(self, kind: int, data: bytes, start: int, end: int) -> bool:
        """Read a frame, whose payload is a part of `data`; False if it is of neither."""
        if kind == _BODY:
            self._parts.append(data[start:end])
            self._left -= end - start
        elif kind == _HEADER:
            _, _, self._left = _CONTENT.unpack_from(data, start)
            self._properties, self._parts = data[start + _CONTENT.size : end], []
        else:
            return kind == _METHOD and self._method(data, start)
        if self._left <= 0 and self._tag:
            parts = self._parts
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self.arrived.append((self._tag, self._properties, body))
            self._stirred.set()
        return True

    def _method(self, data: bytes, start: int) -> bool:
        (method,) = _INDEX.unpack_from(data, start)
        start += _INDEX.size
        if method == _DELIVER:
            (self._tag,) = _TAG.unpack_from(data, start + 1 + data[start])  # after the consumer's
        elif method == _ACK:
            self._confirm(*_CONFIRM.unpack_from(data, start))
        elif method == _NACK:
            self.end(ConnectionError("the broker has not kept an answer"))
        elif method == _RETURN:
            (code,) = _CODE.unpack_from(data, start)
            _, text = decode.short_str(data[start + _CODE.size :])
            self._tag = 0
            self.end(ConnectionError(f"an answer is returned: {code} {text}"))
        else:
            return False
        return True

    def _confirm(self, tag: int, bits: int) -> None:
        if self.problem is not None:  # one that is returned is confirmed afterwards
            return
        if bits & _MULTIPLE:
            self._confirmed = max(self._confirmed, tag)
            self._early = {each for each in self._early if each > tag}
        elif tag == self._confirmed + 1:
            self._confirmed = tag
        else:
            self._early.add(tag)
        while self._early and self._confirmed + 1 in self._early:
            self._confirmed += 1
            self._early.remove(self._confirmed)
        self._stirred.set()

    def end(self, problem: Exception) -> None:
        """Take note of a problem; the first one counts."""
        self.problem = self.problem or problem
        self._stirred.set()

    async def some_arrived(self) -> None:
        """Wait for contents, or for a problem."""
        while not self.arrived and self.problem is None:
            self._stirred.clear()
            await self._stirred.wait()

    async def confirmed_beyond(self, count: int) -> int:
        """Wait for more confirmations than `count`; returns their number, or raises the problem."""
        while self._confirmed <= count:
            if self.problem is not None:
                raise self.problem
            self._stirred.clear()
            await self._stirred.wait()
        return self._confirmed


class AmqpLink(asyncio.StreamReaderProtocol):
    """The protocol of a connection: gives frames to their channels, all others to the library."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self.channels: dict[int, ChannelFrames] = {}
        self._partial = b""
        self._heartbeat = 0.0  # time of the next one

    def data_received(self, data: bytes) -> None:
        """Implements `asyncio.Protocol.data_received`."""
        if self._partial:
            data = self._partial + data
        at, size, channels = 0, len(data), self.channels
        others: list[bytes] = []
        while size - at > _FRAME.size:
            kind, number, length = _FRAME.unpack_from(data, at)
            start = at + _FRAME.size
            end = start + length
            if kind > _HEARTBEAT:  # no frame: the library says so
                others.append(data[at:])
                at = size
                break
            if end >= size:
                break
            channel = channels.get(number)
            if channel is None or not channel.take(kind, data, start, end):
                others.append(data[at : end + 1])
            at = end + 1
        self._partial = data[at:]
        # The broker sends no heartbeats while it sends contents, which the library does not see.
        if at and not others and (now := monotonic()) > self._heartbeat:
            self._heartbeat = now + _HEARTBEAT_SECS
            others.append(_FRAME.pack(_HEARTBEAT, 0, 0) + _END)
        if others:
            super().data_received(b"".join(others))


class _Links:
    """Makes the transport of a connection, as aiormq's factories do."""

    def __init__(self) -> None:
        self.link: AmqpLink | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def create(
        self, url: Any, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = options["ssl_context_provider"] if url.scheme == "amqps" else None
        context = None if tls is None else await tls.get_context()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        self.link = link = AmqpLink(reader)
        try:
            transport, _ = await loop.create_connection(
                lambda: link, url.host, url.port, ssl=context
            )
        except OSError as error:
            raise aiormq.AMQPConnectionError(*error.args) from error
        self.writer = asyncio.StreamWriter(transport, link, reader, loop)
        return reader, self.writer


class AmqpChannel:
    """A channel with a connection of its own, for one queue."""

    def __init__(self, connection: Any, channel: Any, links: _Links, queue: str) -> None:
        """Use `open`."""
        assert links.link is not None
        assert links.writer is not None
        self.frames = links.link.channels[channel.number] = ChannelFrames()
        self._connection, self._channel, self._queue = connection, channel, queue
        self._writer = links.writer
        self._number: int = channel.number
        self._most: int = channel.max_content_size  # bytes of a body in a frame
        publish = commands.Basic.Publish(routing_key=queue, mandatory=True)
        self._publish: bytes = frame.marshal(publish, self._number)
        channel.closing.add_done_callback(self._ended)

    @classmethod
    async def open(cls, address: BrokerAddress) -> Self:
        """Connect, and make the queue unless it exists; the broker confirms what is published."""
        host = address.options.get("vhost", "/")
        url = f"{address.server}/{'%2F' if host == '/' else host}"
        links = _Links()
        async with asyncio.timeout(_CONNECT_SECS):
            connection = await aiormq.connect(url, transport_factory=links)
        try:
            channel = await connection.channel(publisher_confirms=True)
            made = cls(connection, channel, links, address.name)
            try:
                await made.waiting()
            except aiormq.ChannelNotFoundEntity:
                await channel.queue_declare(address.name, durable=True)
        except BaseException:
            await _close(connection)
            raise
        return made

    def _ended(self, closing: "asyncio.Future[Any]") -> None:
        error = None if closing.cancelled() else closing.exception()
        # A broker ends the channel on which a message was too large.
        kind = RecordRefused if _TOO_LARGE in str(error) else ConnectionError
        self.frames.end(kind(f"the channel has ended: {error}"))

    async def consume(self, ahead: int) -> None:
        """Start the delivery of contents, at most `ahead` of those that are not acknowledged."""
        await self._channel.basic_qos(prefetch_count=ahead)
        await self._channel.basic_consume(self._queue, _unused)

    async def waiting(self) -> int:
        """Messages that wait in the queue, whatever its kind; raises if it does not exist."""
        looking = await self._connection.channel(publisher_confirms=False)
        try:
            found = await looking.queue_declare(self._queue, passive=True)
            return int(found.message_count or 0)
        finally:
            await looking.close()

    @property
    def is_closed(self) -> bool:
        """True once the channel or its connection has ended."""
        return bool(self._channel.is_closed) or self._writer.is_closing()

    def content(self, properties: bytes, body: bytes) -> bytes:
        """The frames that publish a message, to be confirmed; raises `RecordRefused`."""
        number, size = self._number, len(body)
        if len(properties) + _CONTENT.size > self._most:  # they are never divided
            raise RecordRefused(f"headers of {len(properties)} bytes, AMQP takes {self._most}")
        parts = [
            self._publish,
            _FRAME.pack(_HEADER, number, _CONTENT.size + len(properties)),
            _CONTENT.pack(_BASIC, 0, size),
            properties,
            _END,
        ]
        if 0 < size <= self._most:
            parts += (_FRAME.pack(_BODY, number, size), body, _END)
        else:
            for at in range(0, size, self._most):
                part = body[at : at + self._most]
                parts += (_FRAME.pack(_BODY, number, len(part)), part, _END)
        return b"".join(parts)

    def ack(self, tag: int, multiple: bool = False) -> bytes:
        """The frame that acknowledges a message, or all up to it."""
        return self._settle(_ACK, tag, _MULTIPLE if multiple else 0)

    def give_back(self, tag: int) -> bytes:
        """The frame that has a message delivered again."""
        return self._settle(_NACK, tag, _REQUEUE)

    def _settle(self, method: int, tag: int, bits: int) -> bytes:
        size = _INDEX.size + _CONFIRM.size
        return _ACKNOWLEDGE.pack(_METHOD, self._number, size, method, tag, bits) + _END

    async def write(self, messages: Iterable[bytes]) -> None:
        """Write whole messages, or frames, in this order; raises `ConnectionError`."""
        parts: list[bytes] = []
        size = 0
        for message in messages:
            parts.append(message)
            size += len(message)
            if size >= _WRITTEN:
                await self._write(parts)
                parts, size = [], 0
        if parts:
            await self._write(parts)

    async def _write(self, parts: list[bytes]) -> None:
        if self.is_closed:
            raise self.frames.problem or ConnectionError("the connection is lost")
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def close(self) -> None:
        """Disconnect; never raises."""
        await _close(self._connection)


async def _close(connection: Any) -> None:
    with suppress(aiormq.AMQPError, OSError, TimeoutError):  # it is lost
        async with asyncio.timeout(_CLOSE_SECS):
            await connection.close()


async def _unused(_message: Any) -> None:
    """The library's consumer, which gets no message."""


def encode_properties(kind: bytes, headers: Mapping[str, str | bytearray], name: str) -> bytes:
    """The properties of a message that a durable queue keeps; `name` is its id, by its end.

    Raises `RecordRefused`.
    """
    flags = _HEADERS | _MODE | _ID
    shown = name.encode()
    if len(shown) > _MOST_SHORT:
        shown = shown[-_MOST_SHORT:].decode(errors="ignore").encode()
    if len(kind) > _MOST_SHORT:
        raise RecordRefused(f"a content type of {len(kind)} bytes, AMQP takes {_MOST_SHORT}")
    table = encode.field_table(dict(headers)) if headers else _NO_HEADERS
    before = b""
    if kind:
        flags |= _TYPE
        before = bytes((len(kind),)) + kind
    return b"".join((_FLAGS.pack(flags), before, table, _PERSISTENT, bytes((len(shown),)), shown))


def decode_properties(properties: bytes) -> tuple[bytes, Mapping[str, Any]]:
    """The content type and the headers of a message."""
    (flags,) = _FLAGS.unpack_from(properties)
    at, kind = _FLAGS.size, b""
    headers: Mapping[str, Any] = {}
    if flags & _TYPE:
        end = at + 1 + properties[at]
        kind, at = properties[at + 1 : end], end
    if flags & _ENCODING:
        at += 1 + properties[at]
    if flags & _HEADERS and properties[at : at + len(_NO_HEADERS)] != _NO_HEADERS:
        _, headers = decode.field_table(properties[at:])
    return kind, headers
