"""AMQP 0.9.1, as of RabbitMQ: a queue to consume, and queues for answers, with confirms.

The header `key` is the key. Messages that are not acknowledged are delivered again as soon as the
connection ends; a source is what one connection delivers. Queues must exist, or are made durable;
a quorum queue counts deliveries. The broker sends ahead what an inbox may have in flight.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import count
from typing import Any

from headrace.plugins.inboxes.amqp_connection import (
    AmqpConnection,
    Delivered,
    Published,
    open_connection,
)
from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Exactly,
    Inbox,
    Outbox,
    Record,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_FETCH_SECS = 0.2
_MOST_AHEAD = 65_535
_MOST_SHORT = 255  # bytes of an identifier
_KEY, _TYPE, _DELIVERIES = "key", "content-type", "x-delivery-count"


class AmqpInbox(Inbox):
    """A consumer of a queue."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self._address = address
        self._ahead = min(options.in_flight, _MOST_AHEAD)
        self._lost: Callable[[Hashable], None] = options.lost
        self._numbers = count()
        self._source = -1
        self._connection: AmqpConnection | None = None
        self._stirred = asyncio.Event()

    async def open(self) -> None:
        """Implements `Inbox.open`."""
        await self.close()
        self._source = next(self._numbers)
        self._connection = connection = await _connect(self._address, self._stirred.set)
        await connection.declare(self._address.name)
        await connection.consume(self._address.name, self._ahead)

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        arrived = self._open().arrived
        if not arrived:
            self._stirred.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_FETCH_SECS):
                    await self._stirred.wait()
        source = self._source
        return [_message(source, arrived.popleft()) for _ in range(min(most, len(arrived)))]

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`: the connection's heartbeats suffice."""
        self._open()

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`: one frame for all before which none is missing."""
        tags = [each.handle for each in progress.each if each.source == self._source]
        if tags:
            last = progress.upto.get(self._source)
            behind = 0 if last is None else last.handle
            # A tag that was acknowledged alone earlier must not be named again.
            upto = max((tag for tag in tags if tag <= behind), default=0)
            self._open().acknowledge(upto, [tag for tag in tags if tag > behind])

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`."""
        if tags := [each.handle for each in messages if each.source == self._source]:
            self._open().release(tags)

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        return await self._open().declare(self._address.name)

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._lost(self._source)
            await connection.close()

    def _open(self) -> AmqpConnection:
        """The connection; raises `ConnectionError` if there is none."""
        return _checked(self._connection)


class AmqpOutbox(Outbox):
    """A queue for records, by the default exchange."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._connection: AmqpConnection | None = None

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._connection = connection = await _connect(self._address, lambda: None)
        await connection.declare(self._address.name)
        await connection.confirm()

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`: yields as confirmations come."""
        connection = _checked(self._connection)
        published = [_published(*each) for each in records]
        async for confirmed in connection.publish(self._address.name, published):
            yield confirmed

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()


def _checked(connection: AmqpConnection | None) -> AmqpConnection:
    if connection is None:
        raise ConnectionError("not connected")
    connection.check()
    return connection


def _message(source: int, found: Delivered) -> Message:
    headers = {name: _bytes(value) for name, value in found.headers.items()}
    key, deliveries = headers.pop(_KEY, None), headers.pop(_DELIVERIES, None)
    if found.content_type:
        headers[_TYPE] = found.content_type.encode()
    times = 1 if deliveries is None else int(deliveries) + 1
    return Message(source, found.tag, key, headers, found.body, times, found.tag)


def _published(name: str, record: Record) -> Published:
    headers: dict[str, Any] = {n: _text(v) for n, v in record.headers.items() if n != _TYPE}
    if record.key is not None:
        headers[_KEY] = _text(record.key)
    kind = record.headers.get(_TYPE, b"").decode("latin-1")
    return Published(_short(name), kind, headers, record.body)


def _short(name: str) -> str:
    """An identifier that fits: a long one by its digest."""
    return name if len(name.encode()) <= _MOST_SHORT else sha256(name.encode()).hexdigest()


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()


def _text(value: bytes) -> str | bytearray:
    """A header as a text, as most clients expect, if it is one; else as the library takes bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return bytearray(value)


async def _connect(address: BrokerAddress, stirred: Callable[[], None]) -> AmqpConnection:
    vhost = address.options.get("vhost", "/")
    return await open_connection(address.hosts, vhost, address.scheme == "amqps", stirred)


class _Amqp:
    whole_order = False
    inbox_options = outbox_options = frozenset({"vhost"})

    def inbox(self, address: BrokerAddress, options: ConsumerOptions) -> Inbox:
        return AmqpInbox(address, options)

    def outbox(self, address: BrokerAddress) -> Outbox:
        return AmqpOutbox(address)

    def exactly(self, inbox: Inbox, to: BrokerAddress, failed: BrokerAddress) -> Exactly | None:
        return None


BROKER = _Amqp()
