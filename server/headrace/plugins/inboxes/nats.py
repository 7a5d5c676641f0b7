"""NATS JetStream: a durable consumer that is pulled, and a subject for answers.

The headers `key` and `content-type` are like those of other brokers; the key is not a thing of
NATS. A message is delivered again once it was not acknowledged for `ack-secs`; those under way are
renewed. Answers carry `Nats-Msg-Id`, by which a stream drops what it has already: an answer that is
published again within the stream's window for duplicates, two minutes by default, stays one.

Pulling and publishing are the protocol's own messages, and a subscription takes what comes back:
the library's calls for them make a task, a timer and an identifier for each message. It would queue
messages for a callback, too, and run that in a task; they go to a `Taker` as they are read.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import nats
import orjson
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Exactly,
    Inbox,
    InvalidInbox,
    Outbox,
    Record,
    RecordRefused,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_FETCH_SECS = 0.2
_LATE_SECS = 1.0  # after which a pull is over without the broker's word
_ACK_SECS = 30.0
_ANSWER_SECS = 10.0
_KEY, _ID = "key", "Nats-Msg-Id"
_HEADERS_BYTES = len("NATS/1.0\r\n\r\n")
_STATUS = "Status"  # of messages that are the broker's own word
_ERROR = b'"error":'  # in a reply; streams' names, the only texts in others, have no quotes
_UNLIMITED = -1
# In errors of streams for messages and headers that are too large.
_REFUSED = b'"err_code":10054,', b'"err_code":10097,'
_PLAIN_TOKENS = (
    9  # of the subject for a message's acknowledgement; others name a domain and an account
)


def _check_subject(address: BrokerAddress) -> None:
    if any(char.isspace() for char in address.name):
        raise InvalidInbox(f"{address}: a subject has no white space, got {address.name!r}")
    for option in ("group", "stream"):
        value = address.options.get(option, "")
        if any(char.isspace() or char in ".*>/" for char in value):
            raise InvalidInbox(
                f"{address}: {option} must have no white space, '.', '*', '>' and '/', got"
                f" {value!r}"
            )


class Taker:
    """A subscription's future, as the library takes it, that gets all of its messages.

    `take` must not raise: the library would read no more.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        """False: messages are wanted until the connection ends."""
        return False


class NatsInbox(Inbox):
    """A durable consumer of a stream."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        _check_subject(address)
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
        self._stream: Any = None
        self._name = ""  # of the stream
        self._inbox = ""  # the subject that messages are pulled to
        self._arrived: deque[Any] = deque()  # messages of the library
        self._stirred = asyncio.Event()
        self._expected = 0  # messages that the last pull may still bring
        self._over = 0.0  # time at which it is over
        self._renewal = 0.0  # time of the next one

    async def open(self) -> None:
        """Implements `Inbox.open`: the stream must exist, the consumer is made if it is missing."""
        await self.close()
        self._client = client = await _connect(self._address, self._stir)
        self._stream = stream = client.jetstream(timeout=_ANSWER_SECS)
        subject = self._address.name
        name = self._address.options.get("stream") or await stream.find_stream_name_by_subject(
            subject
        )
        try:
            await stream.consumer_info(name, self._group)
        except NotFoundError:
            config = ConsumerConfig(
                durable_name=self._group, filter_subject=subject, ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._ack_secs, max_deliver=_UNLIMITED, max_ack_pending=_UNLIMITED,
            )  # fmt: skip
            await stream.add_consumer(name, config)
        self._name, self._inbox = name, client.new_inbox()
        await client.subscribe(self._inbox, future=Taker(partial(self._take, client)))

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`: what one pull brings may be fetched in parts."""
        client, arrived = self._client, self._arrived
        if client is None or not client.is_connected:
            raise ConnectionError("not connected")
        if not arrived:
            self._stirred.clear()
            now = monotonic()
            if self._expected <= 0 or now >= self._over:
                self._expected, self._over = most, now + _FETCH_SECS + _LATE_SECS
                await client.publish(
                    f"$JS.API.CONSUMER.MSG.NEXT.{self._name}.{self._group}",
                    orjson.dumps({"batch": most, "expires": int(_FETCH_SECS * 1e9)}),
                    self._inbox,
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(_FETCH_SECS):
                    await self._stirred.wait()
        return [_message(arrived.popleft()) for _ in range(min(most, len(arrived)))]

    def _take(self, client: Any, found: Any) -> None:
        """A message, or the broker's word that a pull is over."""
        if client is not self._client:
            return
        if found.headers and _STATUS in found.headers and not found.data:
            self._expected = 0
        else:
            self._expected -= 1
            self._arrived.append(found)
        self._stirred.set()

    def _stir(self) -> None:
        self._stirred.set()

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`: renews them thrice in the time after which others get them."""
        now = monotonic()
        if now < self._renewal:
            return
        self._renewal = now + self._ack_secs / 3
        waiting = [found.reply for found in self._arrived]
        for handle in (*(message.handle for message in held), *waiting):
            await self._client.publish(handle, b"+WPI")

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`: an acknowledgement that is lost means a delivery more."""
        for message in progress.each:
            await self._client.publish(message.handle)

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`."""
        waiting = [found.reply for found in self._arrived]
        self._arrived.clear()
        for handle in (*(message.handle for message in messages), *waiting):
            await self._client.publish(handle, b"-NAK")

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        if self._stream is None:
            raise ConnectionError("not connected")
        return int((await self._stream.consumer_info(self._name, self._group)).num_pending or 0)

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        client, self._client, self._stream = self._client, None, None
        self._arrived.clear()
        self._expected = 0
        await _close(client)


class NatsOutbox(Outbox):
    """A subject that a stream keeps."""

    def __init__(self, address: BrokerAddress) -> None:
        _check_subject(address)
        self._address = address
        self._client: Any = None
        self._inbox = ""  # the subject for confirmations, with a number after it
        self._numbers = count()
        self._unconfirmed: set[str] = set()  # subjects of the group that is published
        self._settled = asyncio.Event()  # all of it is confirmed, or there is a problem
        self._problem: Exception | None = None

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._client = client = await _connect(self._address, self._lost)
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", future=Taker(self._confirm))

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`: sends all, and then awaits their confirmations."""
        client = self._client
        if client is None:
            raise ConnectionError("not connected")
        subjects = [f"{self._inbox}.{next(self._numbers)}" for _ in records]
        self._unconfirmed, self._problem = set(subjects), None
        self._settled.clear()
        for subject, (name, record) in zip(subjects, records, strict=True):
            headers = _headers(record) | {_ID: name}
            # The library looks at the body alone, and the broker ends the connection.
            size = len(record.body) + sum(map(_header_bytes, headers.items()), _HEADERS_BYTES)
            if size > client.max_payload:
                raise RecordRefused(f"{size} bytes, the broker takes {client.max_payload}")
            try:
                await client.publish(self._address.name, record.body, subject, headers)
            except nats.errors.BadHeaderError as error:
                raise RecordRefused(str(error)) from error
        async with asyncio.timeout(_ANSWER_SECS):
            await self._settled.wait()
        if self._problem is not None:
            raise self._problem
        yield len(records)

    def _confirm(self, found: Any) -> None:
        if found.subject not in self._unconfirmed:  # of a group that has failed
            return
        self._unconfirmed.remove(found.subject)
        if (problem := _problem(found)) is not None:
            self._problem = self._problem or problem
        if self._problem is not None or not self._unconfirmed:
            self._settled.set()

    def _lost(self) -> None:
        self._problem = ConnectionError("the connection is lost")
        self._settled.set()

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        client, self._client = self._client, None
        await _close(client)


def _message(found: Any) -> Message:
    """A message; the subject for its acknowledgement tells where it is from."""
    tokens = found.reply.split(".")
    stream, _, deliveries, position = tokens[2:6] if len(tokens) == _PLAIN_TOKENS else tokens[4:8]
    headers = {name: value.encode() for name, value in (found.headers or {}).items()}
    key = headers.pop(_KEY, None)
    headers.pop(_ID, None)  # the answer has another one
    return Message(stream, int(position), key, headers, found.data, int(deliveries), found.reply)


def _problem(found: Any) -> Exception | None:
    """The error in a reply to a published message; None if the stream keeps the message."""
    if found.headers and _STATUS in found.headers:
        return ConnectionError(f"no stream takes the subject: status {found.headers[_STATUS]}")
    if _ERROR not in found.data:
        return None
    kind = RecordRefused if any(code in found.data for code in _REFUSED) else ConnectionError
    return kind(f"refused by the stream: {found.data.decode(errors='replace')}")


def _header_bytes(header: tuple[str, str]) -> int:
    name, value = header
    return len(name) + len(value.encode()) + 4  # a colon, a space and the end of the line


def _headers(record: Record) -> dict[str, str]:
    """Headers as the library takes them: texts without line breaks."""
    given: Mapping[str, bytes] = record.headers
    if record.key is not None:
        given = {**given, _KEY: record.key}
    return {
        name: " ".join(value.decode("utf-8", "replace").split()) for name, value in given.items()
    }


async def _connect(address: BrokerAddress, lost: Callable[[], None]) -> Any:
    """A connection; `lost` is called when it ends."""

    async def told(_error: Exception) -> None:
        """Errors reach whoever calls the library, too."""

    async def disconnected() -> None:
        lost()

    # Subjects are the broker's, or were checked when the inbox was declared. Whoever uses a
    # connection that is lost opens another one.
    return await nats.connect(
        [f"{address.scheme}://{host}" for host in address.hosts.split(",")],
        skip_subject_validation=True, allow_reconnect=False, error_cb=told,
        disconnected_cb=disconnected, connect_timeout=5,
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
