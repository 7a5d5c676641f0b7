"""Redis streams: consumer groups, and delivery in one step with the acknowledgement.

An entry has the fields `body` and, if it has a key, `key`; all others are headers. Entries that a
consumer has read stay pending until they are acknowledged. Those of a consumer that has ended are
taken over once they were idle for `claim-secs`; a living one keeps its own from becoming idle.
"""

import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any
from urllib.parse import quote

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Delivery,
    Exactly,
    Inbox,
    InvalidInbox,
    Outbox,
    Record,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_BLOCK_MS = 100
_CLAIM_SECS = 30.0
_CONNECT_SECS, _ANSWER_SECS = 5.0, 20.0
_BODY, _KEY = b"body", b"key"
# Add the records of entries that are still pending, as others may have answered them, and
# acknowledge each once its records are there: an error leaves it, and those behind it, pending.
# Keys: the stream, then those of records. Arguments: the group; for each entry its id and the
# number of its records; for each record the number of its key, that of its fields, and the fields.
_DELIVER = """
local at = 2
while at <= #ARGV do
  local id = ARGV[at]
  local pending = #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1) > 0
  local records = tonumber(ARGV[at + 1])
  at = at + 2
  for _ = 1, records do
    local size = tonumber(ARGV[at + 1])
    if pending then
      redis.call('XADD', KEYS[tonumber(ARGV[at])], '*', unpack(ARGV, at + 2, at + 1 + size))
    end
    at = at + 2 + size
  end
  if pending then redis.call('XACK', KEYS[1], ARGV[1], id) end
end
"""
_TO, _FAILED = 2, 3  # numbers of keys
_MOST_DELIVERED = 256  # entries in one script, for which Redis does nothing else


class RedisInbox(Inbox):
    """A consumer of a stream's group."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self.address = address
        self.group = _group(address)
        self._stream = address.name
        given = address.options.get("claim-secs", str(_CLAIM_SECS))
        try:
            self._claim_secs = float(given)
        except ValueError:
            raise InvalidInbox(f"{address}: claim-secs must be a number, got {given!r}") from None
        unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._consumer = options.name or unique
        self._client: Redis | None = None
        self._look = 0.0  # time of the next look for entries of consumers that have ended

    @property
    def client(self) -> "Redis":
        """The open connection; raises `ConnectionError`."""
        if self._client is None:
            raise ConnectionError("not connected")
        return self._client

    async def open(self) -> None:
        """Implements `Inbox.open`: creates stream and group if they are missing."""
        await self.close()
        client = self._client = _connect(self.address)
        try:
            await client.xgroup_create(self._stream, self.group, "0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # it exists
                raise
        self._look = 0.0

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        now = monotonic()
        if now >= self._look:
            claimed = await self._claim(most)
            if len(claimed) < most:
                self._look = now + self._claim_secs / 2
            if claimed:
                return claimed
        found = await self.client.xreadgroup(
            self.group, self._consumer, {self._stream: ">"}, most, _BLOCK_MS
        )
        return [
            self._message(id, fields, 1) for _, entries in _streams(found) for id, fields in entries
        ]

    async def _claim(self, most: int) -> list[Message]:
        """Take over entries of consumers that have ended."""
        client, idle = self.client, int(self._claim_secs * 1000)
        pending = await client.xpending_range(self._stream, self.group, "-", "+", most, idle=idle)
        if not pending:
            return []
        times = {each["message_id"]: each["times_delivered"] for each in pending}
        entries = await client.xclaim(self._stream, self.group, self._consumer, idle, list(times))
        # Entries without fields were deleted from the stream meanwhile.
        gone = [id for id, fields in entries if not fields]
        if gone:
            await client.xack(self._stream, self.group, *gone)
        return [self._message(id, fields, times[id] + 1) for id, fields in entries if fields]

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`."""
        if held:
            ids = [message.position for message in held]
            await self.client.xclaim(self._stream, self.group, self._consumer, 0, ids, justid=True)

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`."""
        if progress.each:
            ids = [message.position for message in progress.each]
            await self.client.xack(self._stream, self.group, *ids)

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`: others take them over when they were idle for a while."""

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        for group in await self.client.xinfo_groups(self._stream):
            if group["name"] == self.group.encode():
                return int(group.get("lag") or 0)
        return 0

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    def _message(self, id: bytes, fields: Mapping[bytes, bytes], deliveries: int) -> Message:
        headers = {n.decode(): v for n, v in fields.items() if n not in (_BODY, _KEY)}
        body = fields.get(_BODY, b"")
        return Message(self._stream, id, fields.get(_KEY), headers, body, deliveries)


class RedisOutbox(Outbox):
    """A stream for records."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._client: Redis | None = None

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._client = _connect(self._address)

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`."""
        if self._client is None:
            raise ConnectionError("not connected")
        async with self._client.pipeline(transaction=False) as commands:
            for _, record in records:
                commands.execute_command("XADD", self._address.name, "*", *_fields(record))
            await commands.execute()
        yield len(records)

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


class RedisExactly(Exactly):
    """Delivery by a script that adds records only if their entry was still pending."""

    def __init__(self, inbox: RedisInbox, to: BrokerAddress, failed: BrokerAddress) -> None:
        self._inbox = inbox
        self._to, self._failed = to.name, failed.name
        self._stream = inbox.address.name

    async def open(self) -> None:
        """Implements `Exactly.open`: the connection is the inbox's."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Implements `Exactly.deliver`.

        One that is repeated, since its reply was lost, finds its entries acknowledged.
        """
        script = self._inbox.client.register_script(_DELIVER)
        keys = [self._stream, self._to, self._failed]
        for first in range(0, len(deliveries), _MOST_DELIVERED):
            values: list[Any] = [self._inbox.group]
            for message, answers, failure in deliveries[first : first + _MOST_DELIVERED]:
                records = [(_TO, record) for record in answers]
                if failure is not None:
                    records.append((_FAILED, failure))
                values += (message.position, len(records))
                for number, record in records:
                    fields = _fields(record)
                    values += (number, len(fields), *fields)
            await script(keys, values)

    async def close(self) -> None:
        """Implements `Exactly.close`."""


def _fields(record: Record) -> list[str | bytes]:
    found: list[str | bytes] = [_BODY, record.body]
    if record.key is not None:
        found += (_KEY, record.key)
    for name, value in record.headers.items():
        found += (name, value)
    return found


def _streams(found: Any) -> Iterable[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """The streams of an answer to XREADGROUP, which is a mapping in RESP 3."""
    if isinstance(found, dict):
        return [(name, entries[0]) for name, entries in found.items()]
    return found or ()


def _group(address: BrokerAddress) -> str:
    group = address.options.get("group")
    if not group:
        raise InvalidInbox(f"{address}: a consumer needs a group: append ?group=NAME")
    return group


def _connect(address: BrokerAddress) -> "Redis":
    database = quote(address.options.get("db", "0"))
    client: Redis = Redis.from_url(
        f"{address.server}/{database}", socket_connect_timeout=_CONNECT_SECS,
        socket_timeout=_ANSWER_SECS,
    )  # fmt: skip
    return client


class _Redis:
    whole_order = False
    inbox_options = frozenset({"group", "db", "claim-secs"})
    outbox_options = frozenset({"db"})

    def inbox(self, address: BrokerAddress, options: ConsumerOptions) -> Inbox:
        return RedisInbox(address, options)

    def outbox(self, address: BrokerAddress) -> Outbox:
        return RedisOutbox(address)

    def exactly(self, inbox: Inbox, to: BrokerAddress, failed: BrokerAddress) -> Exactly | None:
        assert isinstance(inbox, RedisInbox)
        own = _place(inbox.address)
        return RedisExactly(inbox, to, failed) if own == _place(to) == _place(failed) else None


def _place(address: BrokerAddress) -> tuple[str, str]:
    return address.server, address.options.get("db", "0")


BROKER = _Redis()
