"""AMQP 0.9.1, as of RabbitMQ: a queue to consume, and queues for answers, with confirms.

The header `key` is the key. Messages that are not acknowledged are delivered again as soon as the
connection ends; a source is what one connection delivers, and has a random name, since tags are
numbered anew by each connection: positions, of which names of answers are made, differ over
processes. Queues must exist, or are made durable; a quorum queue counts deliveries. The broker
sends ahead what an inbox may have in flight.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import aio_pika
from aio_pika import DeliveryMode

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
_ANSWER_SECS = 30.0
_CLOSE_SECS = 5.0
_KEY, _TYPE, _DELIVERIES = "key", "content-type", "x-delivery-count"


class AmqpInbox(Inbox):
    """A consumer of a queue."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self._address = address
        self._ahead = options.in_flight
        self._lost: Callable[[Hashable], None] = options.lost
        self._source = ""
        self._connection: Any = None
        self._queue: Any = None
        self._broken = False  # the library's connection does not say so
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def open(self) -> None:
        """Implements `Inbox.open`."""
        await self.close()
        self._source, self._broken = secrets.token_hex(8), False
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._arrived = arrived
        self._connection = await _connect(self._address)
        channel = await self._connection.channel()
        channel.close_callbacks.add(partial(self._closed, self._source))
        await channel.set_qos(prefetch_count=min(self._ahead, 65_535))
        self._queue = await _declare(self._connection, channel, self._address.name)
        await self._queue.consume(arrived.put)

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        self._check()
        found = []
        try:
            async with asyncio.timeout(_FETCH_SECS):
                found.append(await self._arrived.get())
        except TimeoutError:
            return ()
        while len(found) < most and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return [self._message(each) for each in found]

    def _message(self, found: Any) -> Message:
        headers = {name: _bytes(value) for name, value in found.headers.items()}
        key, deliveries = headers.pop(_KEY, None), headers.pop(_DELIVERIES, None)
        if found.content_type:
            headers[_TYPE] = found.content_type.encode()
        times = 1 if deliveries is None else int(deliveries) + 1
        return Message(self._source, found.delivery_tag, key, headers, found.body, times, found)

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`: the library's heartbeats suffice."""
        self._check()

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`: one frame for all before which none is missing."""
        handles = {
            m.handle.delivery_tag: m.handle for m in progress.each if m.source == self._source
        }
        last = progress.upto.get(self._source)
        behind = 0 if last is None else last.handle.delivery_tag
        # A tag that was acknowledged alone earlier must not be named again.
        if upto := max((tag for tag in handles if tag <= behind), default=0):
            await handles[upto].ack(multiple=True)
        for tag, handle in handles.items():
            if tag > behind:
                await handle.ack()

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`."""
        for message in messages:
            if message.source == self._source:
                await message.handle.nack(requeue=True)

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        self._check()
        channel = await self._connection.channel()
        try:
            queue = await channel.declare_queue(self._address.name, passive=True)
            return int(queue.declaration_result.message_count or 0)
        finally:
            await channel.close()

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        if self._connection is not None:
            connection, self._connection, self._queue = self._connection, None, None
            self._lost(self._source)
            await _close(connection)

    def _check(self) -> None:
        if self._connection is None or self._broken:
            raise ConnectionError("the connection is lost")

    def _closed(self, source: str, *_: Any) -> None:
        if source == self._source:
            self._broken = True


class AmqpOutbox(Outbox):
    """A queue for records, by the default exchange."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._connection: Any = None
        self._exchange: Any = None

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._connection = await _connect(self._address)
        channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        await _declare(self._connection, channel, self._address.name)
        self._exchange = channel.default_exchange

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`: yields as confirmations come."""
        if self._connection is None or self._connection.is_closed:
            raise ConnectionError("not connected")
        # They begin in this order, and so they are sent.
        tasks = [asyncio.create_task(self._publish(*each)) for each in records]
        try:
            for confirmed, task in enumerate(tasks, 1):
                await task
                if confirmed == len(tasks) or not tasks[confirmed].done():
                    yield confirmed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self, name: str, record: Record) -> None:
        headers: dict[str, Any] = {n: _text(v) for n, v in record.headers.items() if n != _TYPE}
        if record.key is not None:
            headers[_KEY] = _text(record.key)
        kind = record.headers.get(_TYPE)
        message = aio_pika.Message(
            record.body, headers=headers, message_id=name, delivery_mode=DeliveryMode.PERSISTENT,
            content_type=None if kind is None else kind.decode("latin-1"),
        )  # fmt: skip
        await self._exchange.publish(
            message, self._address.name, mandatory=True, timeout=_ANSWER_SECS
        )

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await _close(connection)


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()


def _text(value: bytes) -> str | bytearray:
    """A header as a text, as most clients expect, if it is one; else as the library takes bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return bytearray(value)


async def _declare(connection: Any, channel: Any, name: str) -> Any:
    """A queue that exists, whatever its kind, or a new one that is durable."""
    looking = await connection.channel()
    try:
        await looking.declare_queue(name, passive=True)
        return await channel.get_queue(name)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        return await channel.declare_queue(name, durable=True)


async def _connect(address: BrokerAddress) -> Any:
    options: Mapping[str, str] = address.options
    host = options.get("vhost", "/")
    url = f"{address.server}/{'%2F' if host == '/' else host}"
    return await aio_pika.connect(url, timeout=5)


async def _close(connection: Any) -> None:
    with suppress(aio_pika.exceptions.AMQPError, OSError, TimeoutError):  # it is lost
        async with asyncio.timeout(_CLOSE_SECS):
            await connection.close()


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
