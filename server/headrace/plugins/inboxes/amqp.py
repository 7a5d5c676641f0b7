"""AMQP 0.9.1, as of RabbitMQ: a queue to consume, and queues for answers, with confirms.

The header `key` is the key. Messages that are not acknowledged are delivered again as soon as the
connection ends; a source is what one connection delivers, and has a random name, since tags are
numbered anew by each connection: positions, of which names of answers are made, differ over
processes. Queues must exist, or are made durable; a quorum queue counts deliveries. The broker
sends ahead what an inbox may have in flight.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from headrace.plugins.inboxes.amqp_channel import (
    AmqpChannel,
    decode_properties,
    encode_properties,
)
from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Exactly,
    Inbox,
    Outbox,
    Record,
    RecordRefused,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_FETCH_SECS = 0.2
_ANSWER_SECS = 30.0
_MOST_AHEAD = 65_535  # that AMQP can say
_KEY, _TYPE, _DELIVERIES = "key", "content-type", "x-delivery-count"


class AmqpInbox(Inbox):
    """A consumer of a queue."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self._address = address
        self._ahead = min(options.in_flight, _MOST_AHEAD)
        self._lost: Callable[[Hashable], None] = options.lost
        self._source = ""
        self._channel: AmqpChannel | None = None

    async def open(self) -> None:
        """Implements `Inbox.open`."""
        await self.close()
        self._source = secrets.token_hex(8)
        self._channel = await AmqpChannel.open(self._address)
        await self._channel.consume(self._ahead)

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        frames = self._open_channel().frames
        with suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECS):
                await frames.some_arrived()
        arrived = frames.arrived
        return [self._message(*arrived.popleft()) for _ in range(min(most, len(arrived)))]

    def _message(self, tag: int, properties: bytes, body: bytes) -> Message:
        kind, given = decode_properties(properties)
        headers = {name: _bytes(value) for name, value in given.items()}
        key, deliveries = headers.pop(_KEY, None), headers.pop(_DELIVERIES, None)
        if kind:
            headers[_TYPE] = kind
        times = 1 if deliveries is None else int(deliveries) + 1
        return Message(self._source, tag, key, headers, body, times, tag)

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`: the library's heartbeats suffice."""
        self._open_channel()

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`: one frame for all before which none is missing."""
        channel, source = self._open_channel(), self._source
        tags: list[int] = [m.handle for m in progress.each if m.source == source]
        last = progress.upto.get(source)
        behind = 0 if last is None else last.handle
        frames = [channel.ack(tag) for tag in tags if tag > behind]
        # A tag that was acknowledged alone earlier must not be named again.
        if upto := max((tag for tag in tags if tag <= behind), default=0):
            frames.insert(0, channel.ack(upto, multiple=True))
        await channel.write(frames)

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`."""
        channel = self._open_channel()
        await channel.write(
            channel.give_back(each.handle) for each in messages if each.source == self._source
        )

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        return await self._open_channel().waiting()

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._lost(self._source)
            await channel.close()

    def _open_channel(self) -> AmqpChannel:
        """The channel; raises `ConnectionError`."""
        if self._channel is None or self._channel.is_closed:
            raise ConnectionError("the connection is lost")
        return self._channel


class AmqpOutbox(Outbox):
    """A queue for records, by the default exchange."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._channel: AmqpChannel | None = None
        self._sent = 0  # on this channel

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        await self.close()
        self._channel, self._sent = await AmqpChannel.open(self._address), 0

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`: sends all, and yields as confirmations come."""
        channel = self._channel
        if channel is None or channel.is_closed:
            raise ConnectionError("not connected")
        messages = [
            channel.content(_properties(name, record), record.body) for name, record in records
        ]
        first, done = self._sent, 0
        self._sent += len(messages)
        try:
            async with asyncio.timeout(_ANSWER_SECS):
                await channel.write(messages)
            while done < len(messages):
                async with asyncio.timeout(_ANSWER_SECS):
                    confirmed = await channel.frames.confirmed_beyond(first + done)
                yield (done := confirmed - first)
        except RecordRefused:
            await self.open()  # the broker has ended the channel
            raise

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()


def _properties(name: str, record: Record) -> bytes:
    headers = {n: _text(v) for n, v in record.headers.items() if n != _TYPE}
    if record.key is not None:
        headers[_KEY] = _text(record.key)
    return encode_properties(record.headers.get(_TYPE, b""), headers, name)


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()


def _text(value: bytes) -> str | bytearray:
    """A header as a text, as most clients expect, if it is one; else as the library takes bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return bytearray(value)


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
