"""NATS JetStream: a durable consumer that is pulled, and a subject for answers.

The headers `key` and `content-type` are like those of other brokers; the key is not a thing of
NATS. A message is delivered again once it was not acknowledged for `ack-secs`; those under way are
renewed. Answers carry `Nats-Msg-Id`, by which a stream drops what it has already: an answer that is
published again within the stream's window for duplicates, two minutes by default, stays one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import nats
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import AckPolicy, ConsumerConfig

from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Exactly,
    Inbox,
    InvalidInbox,
    Outbox,
    Record,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_FETCH_SECS = 0.2
_ACK_SECS = 30.0
_ANSWER_SECS = 10.0
_KEY, _ID = "key", "Nats-Msg-Id"
_UNLIMITED = -1


class NatsInbox(Inbox):
    """A durable consumer of a stream."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self._address = address
        self._group = address.options.get("group", "")
        if not self._group:
            raise InvalidInbox(f"{address}: a consumer needs a group: append ?group=NAME")
        given = address.options.get("ack-secs", str(_ACK_SECS))
        try:
            self._ack_secs = float(given)
        except ValueError:
            raise InvalidInbox(f"{address}: ack-secs must be a number, got {given!r}") from None
        self._client: Any = None
        self._messages: Any = None

    async def open(self) -> None:
        """Implements `Inbox.open`: the stream must exist, the consumer is made if it is missing."""
        await self.close()
        self._client = client = await _connect(self._address)
        stream = client.jetstream(timeout=_ANSWER_SECS)
        name = self._address.options.get("stream") or await stream.find_stream_name_by_subject(
            self._address.name
        )
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT, ack_wait=self._ack_secs, max_deliver=_UNLIMITED,
            max_ack_pending=_UNLIMITED,
        )  # fmt: skip
        self._messages = await stream.pull_subscribe(
            self._address.name, self._group, stream=name, config=config
        )

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        if self._messages is None or not self._client.is_connected:
            raise ConnectionError("not connected")
        try:
            found = await self._messages.fetch(most, _FETCH_SECS)
        except NatsTimeout:  # there is none
            return ()
        return [_message(each) for each in found]

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`."""
        for message in held:
            await message.handle.in_progress()

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`: an acknowledgement that is lost means a delivery more."""
        for message in progress.each:
            await message.handle.ack()

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`."""
        for message in messages:
            await message.handle.nak()

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        if self._messages is None:
            raise ConnectionError("not connected")
        return int((await self._messages.consumer_info()).num_pending or 0)

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        client, self._client, self._messages = self._client, None, None
        await _close(client)


class NatsOutbox(Outbox):
    """A subject that a stream keeps."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._client: Any = None

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._client = await _connect(self._address)

    async def publish(self, records: Sequence[tuple[str, Record]]) -> None:
        """Implements `Outbox.publish`."""
        if self._client is None:
            raise ConnectionError("not connected")
        stream = self._client.jetstream(timeout=_ANSWER_SECS)
        async with asyncio.TaskGroup() as tasks:  # they begin in this order, and so they are sent
            for name, record in records:
                headers = _headers(record) | {_ID: name}
                tasks.create_task(stream.publish(self._address.name, record.body, headers=headers))

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        client, self._client = self._client, None
        await _close(client)


def _message(found: Any) -> Message:
    about = found.metadata
    headers = {name: value.encode() for name, value in (found.headers or {}).items()}
    key = headers.pop(_KEY, None)
    headers.pop(_ID, None)  # the answer has another one
    return Message(
        about.stream, about.sequence.stream, key, headers, found.data, about.num_delivered, found
    )


def _headers(record: Record) -> dict[str, str]:
    """Headers as the library takes them: texts without line breaks."""
    given: Mapping[str, bytes] = record.headers
    if record.key is not None:
        given = {**given, _KEY: record.key}
    return {
        name: " ".join(value.decode("utf-8", "replace").split()) for name, value in given.items()
    }


async def _connect(address: BrokerAddress) -> Any:
    async def told(_error: Exception) -> None:
        """Errors reach whoever calls the library, too."""

    # Whoever uses a connection that is lost opens another one.
    return await nats.connect(
        [f"{address.scheme}://{host}" for host in address.hosts.split(",")],
        allow_reconnect=False, error_cb=told, connect_timeout=5,
    )  # fmt: skip


async def _close(client: Any) -> None:
    if client is not None and not client.is_closed:
        with suppress(nats.errors.Error, OSError):  # it is lost
            await client.close()


class _Nats:
    whole_order = False
    inbox_options = frozenset({"group", "stream", "ack-secs"})
    outbox_options: frozenset[str] = frozenset()

    def inbox(self, address: BrokerAddress, options: ConsumerOptions) -> Inbox:
        return NatsInbox(address, options)

    def outbox(self, address: BrokerAddress) -> Outbox:
        return NatsOutbox(address)

    def exactly(self, inbox: Inbox, to: BrokerAddress, failed: BrokerAddress) -> Exactly | None:
        return None


BROKER = _Nats()
