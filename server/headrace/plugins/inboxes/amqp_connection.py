"""One connection with one channel of AMQP 0.9.1, whose frames pamqp encodes and decodes.

Frames that each message needs (publish, deliver, acknowledge, confirm) are packed and read here,
many of them in one call: with a client library's future, task and object for each they cost five to
ten times as much as running a small model. Everything else, such as opening and declaring, is an
`ask` whose answer is awaited.

All methods are called on the event loop, which owns the connection. Once it is lost, whatever waits
raises its `problem`, and so does whatever is called later; it is not opened again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import unquote

from pamqp import commands, decode, encode, frame
from pamqp.exceptions import PAMQPException

_CONNECT_SECS = 5.0
_ANSWER_SECS = 30.0
_CLOSE_SECS = 5.0
_HEARTBEAT_SECS = 30
_PROTOCOL = b"AMQP\x00\x00\x09\x01"
_CHANNEL = 1
_METHOD, _HEADER, _BODY, _END = 1, 2, 3, 0xCE
_BASIC = 60
_PUBLISH, _DELIVER, _ACK, _NACK = ((_BASIC << 16) | method for method in (40, 60, 80, 120))
_HAS_TYPE, _HAS_ENCODING, _HAS_HEADERS, _HAS_MODE, _HAS_ID = (
    1 << 15,
    1 << 14,
    1 << 13,
    1 << 12,
    1 << 7,
)
_PERSISTENT = b"\x02"
_frame = Struct(">BHI")  # kind, channel, size
_method = Struct(">I").unpack_from  # class and method
_delivery = Struct(">QB").unpack_from
_content = Struct(">HHQH")  # class, weight, size, flags
_acknowledgement = Struct(">BHIIQBB")
_MULTIPLE, _REQUEUE = 1, 2
_SMALLEST_FRAME = 4096


class Delivered(NamedTuple):
    """A message of a queue; `tag` is what acknowledges it on its connection."""

    tag: int
    content_type: str
    headers: Mapping[str, Any]
    body: bytes


class Published(NamedTuple):
    """A message to publish, with an identifier of its own."""

    id: str
    content_type: str
    headers: Mapping[str, Any]
    body: bytes


class AmqpConnection(asyncio.Protocol):
    """Frames of one connection; `open` makes one."""

    def __init__(self, stirred: Callable[[], None]) -> None:
        """`stirred` is called when messages have arrived, and when the connection is lost."""
        self.arrived: deque[Delivered] = deque()
        self.problem: Exception | None = None
        self._stirred = stirred
        self._transport: Any = None
        self._received = b""
        self._heard = monotonic()
        self._beating: asyncio.TimerHandle | None = None
        self._limit = _SMALLEST_FRAME
        self._asking = asyncio.Lock()
        self._asked: asyncio.Future[Any] | None = None
        self._delivering: list[Any] = []  # tag, type, headers, size, and pieces of the body
        self._returned = False  # the frames of content are of a message that was returned
        self._published = 0
        self._unconfirmed: dict[int, None] = {}
        self._refused: Exception | None = None
        self._confirmed = asyncio.Event()  # something is, or there is a problem
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    # --- requests

    async def start(self, user: str, password: str, vhost: str) -> None:
        """Log in, agree on the sizes of frames, and open the channel."""
        await self.ask(None, 0)
        capabilities = dict.fromkeys(
            ("publisher_confirms", "basic.nack", "consumer_cancel_notify",
             "authentication_failure_close"), True,
        )  # fmt: skip
        tune = await self.ask(
            commands.Connection.StartOk(
                {"product": "headrace", "capabilities": capabilities}, "PLAIN",
                f"\0{user}\0{password}",
            ), 0,
        )  # fmt: skip
        secs = min(tune.heartbeat or _HEARTBEAT_SECS, _HEARTBEAT_SECS)
        self._limit = tune.frame_max or 1 << 17
        self._send(commands.Connection.TuneOk(tune.channel_max, self._limit, secs), 0)
        self._beat(secs)
        await self.ask(commands.Connection.Open(vhost), 0)
        await self.ask(commands.Channel.Open())

    async def ask(self, method: Any, channel: int = _CHANNEL) -> Any:
        """Send a method, and return the one that answers it."""
        async with self._asking:
            self.check()
            self._asked = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(_ANSWER_SECS):
                    if method is None:
                        self._transport.write(_PROTOCOL)
                    else:
                        self._send(method, channel)
                    return await self._asked
            finally:
                self._asked = None

    async def declare(self, queue: str) -> int:
        """Find a queue, whatever its kind, or make a durable one; returns its messages."""
        try:
            found = await self.ask(commands.Queue.Declare(queue=queue, passive=True))
        except LookupError:  # which has closed the channel
            await self.ask(commands.Channel.Open())
            found = await self.ask(commands.Queue.Declare(queue=queue, durable=True))
        return int(found.message_count)

    async def consume(self, queue: str, ahead: int) -> None:
        """Subscribe to a queue, with up to `ahead` unacknowledged messages."""
        await self.ask(commands.Basic.Qos(prefetch_count=ahead))
        await self.ask(commands.Basic.Consume(queue=queue))

    async def confirm(self) -> None:
        """Switch on confirmations of published messages."""
        await self.ask(commands.Confirm.Select())

    async def publish(self, queue: str, messages: Sequence[Published]) -> AsyncIterator[int]:
        """Publish to a queue, in this order; yields how many of the first ones the broker has.

        Raises `ConnectionError` if it has refused one. One call at a time.
        """
        self.check()
        name = queue.encode()
        arguments = b"\x00\x00\x00" + bytes([len(name)]) + name + b"\x01"  # mandatory
        head = _framed(_METHOD, _PUBLISH.to_bytes(4, "big") + arguments)
        first = self._published + 1
        self._published += len(messages)
        unconfirmed = self._unconfirmed = dict.fromkeys(range(first, self._published + 1))
        self._refused = None
        for message in messages:
            self._transport.write(head + self._content_of(message))
            if not self._writable.is_set():
                async with asyncio.timeout(_ANSWER_SECS):
                    await self._writable.wait()
                self.check()
        confirmed = 0
        while confirmed < len(messages):
            self.check()
            if self._refused is not None:
                raise self._refused
            found = next(iter(unconfirmed), self._published + 1) - first
            if found > confirmed:
                confirmed = found
                yield confirmed
                continue
            self._confirmed.clear()
            async with asyncio.timeout(_ANSWER_SECS):
                await self._confirmed.wait()

    def acknowledge(self, upto: int, tags: Sequence[int]) -> None:
        """Acknowledge all messages up to a tag, 0 for none, and each of some others."""
        frames = [_acknowledged(_ACK, upto, _MULTIPLE)] if upto else []
        frames += [_acknowledged(_ACK, tag, 0) for tag in tags]
        self._transport.write(b"".join(frames))

    def release(self, tags: Sequence[int]) -> None:
        """Give messages back to their queue."""
        self._transport.write(b"".join([_acknowledged(_NACK, tag, _REQUEUE) for tag in tags]))

    def check(self) -> None:
        """Raise the problem if the connection is lost."""
        if self.problem is not None:
            raise self.problem

    async def close(self) -> None:
        """Close it in good order if the broker answers in time. Never raises."""
        with suppress(Exception):  # it is lost
            async with asyncio.timeout(_CLOSE_SECS):
                # The end of a connection overtakes acknowledgements; the end of a channel does not.
                await self.ask(commands.Channel.Close(200, "bye", 0, 0))
                await self.ask(commands.Connection.Close(200, "bye", 0, 0), 0)
        if self._transport is not None:
            self._transport.abort()
            await self._gone.wait()

    # --- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements `Protocol.connection_made`."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Implements `Protocol.connection_lost`."""
        self._fail(ConnectionError(f"the connection is lost: {error or 'the broker closed it'}"))
        if self._beating is not None:
            self._beating.cancel()
        self._gone.set()

    def pause_writing(self) -> None:
        """Implements `Protocol.pause_writing`."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Implements `Protocol.resume_writing`."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Implements `Protocol.data_received`."""
        self._heard = monotonic()
        if self._received:
            data = self._received + data
        position, end, before = 0, len(data), len(self.arrived)
        try:
            while end - position >= _frame.size:
                kind, channel, size = _frame.unpack_from(data, position)
                begin = position + _frame.size
                if begin + size >= end:
                    break
                position = begin + size + 1
                if data[position - 1] != _END:
                    raise ValueError(f"a frame of kind {kind} has no end")
                self._take(kind, channel, data[begin : position - 1])
        except (ValueError, IndexError, PAMQPException) as error:
            self._fail(ConnectionError(f"the broker does not speak AMQP 0.9.1: {error}"))
            self._transport.abort()
            return
        self._received = data[position:]
        if len(self.arrived) > before:
            self._stirred()

    # --- frames

    def _take(self, kind: int, channel: int, data: bytes) -> None:
        if kind == _METHOD:
            match _method(data)[0]:
                case 0x3C003C:  # deliver
                    tag, _ = _delivery(data, 5 + data[4])
                    self._delivering, self._returned = [tag], False
                case 0x3C0050:  # confirm
                    self._confirm(*_delivery(data, 4))
                case _:
                    whole = _frame.pack(kind, channel, len(data)) + data + bytes([_END])
                    self._answered(frame.unmarshal(whole)[2])
        elif kind == _HEADER:
            _, _, size, flags = _content.unpack_from(data)
            self._delivering += (*_properties(data, flags), size)
            if not size:
                self._deliver(b"")
        elif kind == _BODY:
            if len(data) == self._delivering[3]:
                self._deliver(data)
                return
            self._delivering.append(data)
            if sum(map(len, pieces := self._delivering[4:])) == self._delivering[3]:
                self._deliver(b"".join(pieces))

    def _deliver(self, body: bytes) -> None:
        tag, content_type, headers, *_ = self._delivering
        if not self._returned:
            self.arrived.append(Delivered(tag, content_type, headers, body))

    def _answered(self, method: Any) -> None:
        match method:
            case commands.Basic.Nack():
                self._refused = ConnectionError("the broker has refused a message")
                self._confirm(method.delivery_tag, method.multiple)
            case commands.Basic.Return():
                self._delivering, self._returned = [0], True
                self._refused = ConnectionError(f"no queue takes messages: {method.reply_text}")
            case commands.Basic.Cancel():
                self._fail(ConnectionError("the queue is gone"))
                self._transport.abort()
            case commands.Channel.Close():
                self._send(commands.Channel.CloseOk())
                text = f"{method.reply_text} ({method.reply_code})"
                known = LookupError if method.reply_code == 404 else ConnectionError
                if self._asked is not None and not self._asked.done():
                    self._asked.set_exception(known(text))
                else:
                    self._fail(ConnectionError(text))
            case commands.Connection.Close():
                self._send(commands.Connection.CloseOk(), 0)
                self._fail(ConnectionError(f"{method.reply_text} ({method.reply_code})"))
            case _:
                if self._asked is not None and not self._asked.done():
                    self._asked.set_result(method)

    def _confirm(self, tag: int, multiple: int) -> None:
        unconfirmed = self._unconfirmed
        if multiple:
            for each in [each for each in unconfirmed if each <= tag]:
                del unconfirmed[each]
        else:
            unconfirmed.pop(tag, None)
        self._confirmed.set()

    def _fail(self, problem: Exception) -> None:
        if self.problem is None:
            self.problem = problem
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(self.problem)
        self._confirmed.set()
        self._writable.set()
        self._stirred()

    def _beat(self, secs: int) -> None:
        """Send a heartbeat twice in `secs`, and end a connection that is silent for twice that."""
        if monotonic() - self._heard > 2 * secs:
            self._fail(ConnectionError(f"the broker was silent for {2 * secs} s"))
            self._transport.abort()
            return
        self._transport.write(b"\x08\x00\x00\x00\x00\x00\x00\xce")
        self._beating = asyncio.get_running_loop().call_later(secs / 2, self._beat, secs)

    def _send(self, method: Any, channel: int = _CHANNEL) -> None:
        self._transport.write(frame.marshal(method, channel))

    def _content_of(self, message: Published) -> bytes:
        flags, properties = _HAS_MODE | _HAS_ID, b""
        if message.content_type:
            flags |= _HAS_TYPE
            properties += encode.short_string(message.content_type)
        if message.headers:
            flags |= _HAS_HEADERS
            properties += encode.field_table(dict(message.headers))
        properties += _PERSISTENT + encode.short_string(message.id)
        body, most = message.body, self._limit - _frame.size - 1
        head = _framed(_HEADER, _content.pack(_BASIC, 0, len(body), flags) + properties)
        return head + b"".join(
            [_framed(_BODY, body[at : at + most]) for at in range(0, len(body), most)]
        )


def _framed(kind: int, data: bytes) -> bytes:
    return _frame.pack(kind, _CHANNEL, len(data)) + data + b"\xce"


def _acknowledged(method: int, tag: int, flags: int) -> bytes:
    return _acknowledgement.pack(_METHOD, _CHANNEL, 13, method, tag, flags, _END)


def _properties(data: bytes, flags: int) -> tuple[str, Mapping[str, Any]]:
    """The content type and the headers, which are before all other properties."""
    position, content_type = _content.size, ""
    if flags & _HAS_TYPE:
        end = position + 1 + data[position]
        content_type, position = data[position + 1 : end].decode("utf-8", "replace"), end
    if flags & _HAS_ENCODING:
        position += 1 + data[position]
    if not flags & _HAS_HEADERS:
        return content_type, {}
    return content_type, decode.field_table(data[position:])[1]


async def open_connection(
    hosts: str, vhost: str, tls: bool, stirred: Callable[[], None]
) -> AmqpConnection:
    """A connection to `[user[:password]@]host[:port]`; raises `OSError`."""
    user, _, place = hosts.rpartition("@")
    name, _, password = (user or "guest:guest").partition(":")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        host, port = place, "5671" if tls else "5672"
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_SECS):
        _, connection = await loop.create_connection(
            lambda: AmqpConnection(stirred), host.strip("[]"), int(port), ssl=tls or None
        )
        try:
            await connection.start(unquote(name), unquote(password), vhost)
        except BaseException:
            await connection.close()
            raise
    return connection
