"""Kafka: a consumer group's partitions, and transactions.

librdkafka runs the protocol on threads of its own. Calls that block are made on daemon threads, one
at a time (`_using`), which also run the callbacks of rebalances. While nothing is fetched, the
partitions are paused and the consumer goes on polling, so that it stays in its group.

A source is a partition during one assignment: when it is revoked, everything of it is forgotten
before another consumer gets it. `_delivering` is held during a transaction, so that a revocation
waits for its end: what is committed is always of partitions that this consumer has.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    ConsumerOptions,
    Delivery,
    Exactly,
    Inbox,
    InvalidInbox,
    Outbox,
    Record,
    RecordRefused,
)
from headrace.plugins.inboxes.ledger import Committable, Message

_POLL_SECS = 0.1
_COMMIT_MS = 100
_FLUSH_SECS = 0.5
_ANSWER_SECS = 30.0  # of a broker
_TRANSACTION_MS = 15_000  # until a broker ends the transaction of a producer that has ended
_REFUSED = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD})

T = TypeVar("T")
Source = tuple[str, int, int]  # topic, partition, number of the assignment


async def _on_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await run_in_daemon_thread(partial(work, *arguments), "call Kafka")


class KafkaInbox(Inbox):
    """A consumer of a topic."""

    def __init__(self, address: BrokerAddress, options: ConsumerOptions) -> None:
        self.address = address
        self.name = options.name
        given = dict(address.options)
        self.group = given.pop("group", "")
        if not self.group:
            raise InvalidInbox(f"{address}: a consumer needs a group: append ?group=NAME")
        static = {"group.instance.id": options.name} if options.name else {}
        self._config = _servers(address) | {
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "partition.assignment.strategy": "cooperative-sticky",
            "auto.commit.interval.ms": _COMMIT_MS,
            **static,
            **given,
            # Stored when everything before them is delivered, and committed soon after, at a
            # revocation and at the end.
            "enable.auto.offset.store": False,
        }
        _check(Consumer, self._config, address)
        self._lost = options.lost
        self._consumer: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._using, self.delivering = Lock(), Lock()
        self._numbers = count()
        self._assigned: dict[tuple[str, int], int] = {}  # partitions, by the assignment's number
        self._fetched = self._paused = False
        self._early: list[Any] = []  # messages that came while it was held
        self._problem: KafkaException | None = None

    async def open(self) -> None:
        """Implements `Inbox.open`."""
        await self.close()
        self._loop = asyncio.get_running_loop()
        self._consumer = Consumer(self._config)
        self._consumer.subscribe(
            [self.address.name], on_assign=self._assign, on_revoke=self._revoke,
            on_lost=self._revoke,
        )  # fmt: skip
        self._fetched = True  # it has not been held yet

    async def fetch(self, most: int) -> Sequence[Message]:
        """Implements `Inbox.fetch`."""
        self._fetched = True
        return await _on_thread(self._take, most)

    def _take(self, most: int) -> Sequence[Message]:
        with self._using:
            consumer = self.consumer
            if self._problem is not None:
                problem, self._problem = self._problem, None
                raise problem
            if self._paused:
                self._paused = False
                consumer.resume(consumer.assignment())
            found, self._early = self._early, []
            if not found and (first := consumer.poll(_POLL_SECS)) is not None:
                found = [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]
            return [message for each in found if (message := self._message(each)) is not None]

    def _message(self, found: Any) -> Message | None:
        """A message, None for an event; keeps an error until what was fetched before is taken."""
        if (error := found.error()) is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                self._problem = KafkaException(error)
            return None
        place = found.topic(), found.partition()
        if (number := self._assigned.get(place)) is None:
            return None  # revoked meanwhile
        headers = {name: value or b"" for name, value in found.headers() or ()}
        return Message((*place, number), found.offset(), found.key(), headers, found.value() or b"")

    async def hold(self, held: Sequence[Message]) -> None:
        """Implements `Inbox.hold`."""
        if self._fetched:
            self._fetched = False  # it has polled
        else:
            await _on_thread(self._stay)

    def _stay(self) -> None:
        with self._using:
            consumer = self.consumer
            consumer.pause(consumer.assignment())
            self._paused = True
            if (found := consumer.poll(0)) is not None:  # of a partition that is new
                self._early.append(found)

    async def acknowledge(self, progress: Committable) -> None:
        """Implements `Inbox.acknowledge`."""
        if places := self.after(progress.upto.values()):
            self.consumer.store_offsets(offsets=places)

    def after(self, messages: Any) -> list[TopicPartition]:
        """The places behind the last of messages, in partitions that are still assigned."""
        last: dict[Source, int] = {}
        for message in messages:
            last[message.source] = max(message.position, last.get(message.source, -1))
        return [
            TopicPartition(topic, partition, offset + 1)
            for (topic, partition, number), offset in last.items()
            if self._assigned.get((topic, partition)) == number
        ]

    def has(self, message: Message) -> bool:
        """True if a message is of a partition that is still assigned."""
        topic, partition, number = cast(Source, message.source)
        return self._assigned.get((topic, partition)) == number

    async def release(self, messages: Sequence[Message]) -> None:
        """Implements `Inbox.release`: what is not committed is delivered again."""

    async def lag(self) -> int:
        """Implements `Inbox.lag`."""
        return await _on_thread(self._lag)

    def _lag(self) -> int:
        with self._using:
            consumer = self.consumer
            behind = 0
            for place in consumer.position(consumer.assignment()):
                marks = consumer.get_watermark_offsets(place, cached=True)
                if marks is not None and marks[1] >= 0:
                    behind += max(marks[1] - max(place.offset, marks[0]), 0)
            return behind

    async def close(self) -> None:
        """Implements `Inbox.close`."""
        if self._consumer is not None:
            await _on_thread(self._close)

    def _close(self) -> None:
        with self._using:
            consumer, self._consumer = self._consumer, None
            consumer.close()
            self._revoke(consumer, [TopicPartition(*place) for place in self._assigned])
            self._early = []
            self._paused = False

    @property
    def consumer(self) -> Any:
        """The open consumer; raises `ConnectionError`."""
        if self._consumer is None:
            raise ConnectionError("not connected")
        return self._consumer

    # --- rebalances, on the thread that polls

    def _assign(self, _consumer: Any, places: Sequence[TopicPartition]) -> None:
        for place in places:
            self._assigned[place.topic, place.partition] = next(self._numbers)

    def _revoke(self, _consumer: Any, places: Sequence[TopicPartition]) -> None:
        with self.delivering:
            for place in places:
                number = self._assigned.pop((place.topic, place.partition), None)
                if number is not None and self._loop is not None and not self._loop.is_closed():
                    source = place.topic, place.partition, number
                    self._loop.call_soon_threadsafe(self._lost, source)


class KafkaOutbox(Outbox):
    """A topic for records, in their order also when brokers fail."""

    def __init__(self, address: BrokerAddress) -> None:
        self._topic = address.name
        self._config = _servers(address) | {"enable.idempotence": True} | dict(address.options)
        _check(Producer, self._config, address)
        self._producer: Any = None
        self._closed = False

    async def open(self) -> None:
        """Implements `Outbox.open`."""
        self._producer, self._closed = Producer(self._config), False

    async def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Implements `Outbox.publish`."""
        errors = await _on_thread(self._publish, [record for _, record in records])
        if errors:
            yield (first := min(errors))
            raise _raised(errors[first])
        yield len(records)

    def _publish(self, records: Sequence[Record]) -> dict[int, KafkaError]:
        """Publish records until the library refuses one; returns errors by their places."""
        errors: dict[int, KafkaError] = {}

        def told(at: int, error: KafkaError | None, _message: Any) -> None:
            if error is not None:
                errors[at] = error

        producer = self._producer
        for at, record in enumerate(records):
            try:
                _produce(producer, self._topic, record, partial(told, at))
            except KafkaException as error:
                errors[at] = error.args[0]
                break
        while producer.flush(_FLUSH_SECS) and not self._closed:
            pass
        if self._closed:
            raise ConnectionError("closed before everything was published")
        return errors

    async def close(self) -> None:
        """Implements `Outbox.close`."""
        self._closed = True
        if self._producer is not None:
            self._producer.purge()
            self._producer = None


class KafkaTransactions(Exactly):
    """Transactions that publish answers and commit their messages."""

    def __init__(self, inbox: KafkaInbox, to: BrokerAddress, failed: BrokerAddress) -> None:
        self._inbox = inbox
        self._to, self._failed = to.name, failed.name
        name = inbox.name or secrets.token_hex(8)
        self._config = _servers(to) | {
            "transactional.id": f"headrace-{inbox.group}-{inbox.address.name}-{name}",
            "transaction.timeout.ms": _TRANSACTION_MS,
            **to.options,
        }
        _check(Producer, self._config, to)
        self._producer: Any = None

    async def open(self) -> None:
        """Implements `Exactly.open`: ends a transaction that an earlier process left open."""
        self._producer = Producer(self._config)
        await _on_thread(self._producer.init_transactions, _ANSWER_SECS)

    async def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Implements `Exactly.deliver`."""
        await _on_thread(self._deliver, deliveries)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        inbox, producer = self._inbox, self._producer
        errors: list[KafkaError] = []

        def told(error: KafkaError | None, _message: Any) -> None:
            if error is not None:
                errors.append(error)

        with inbox.delivering:
            if not all(inbox.has(each.message) for each in deliveries):
                raise ConnectionError("partitions were revoked; their messages are for others")
            producer.begin_transaction()
            try:
                for _, answers, failure in deliveries:
                    for record in answers:
                        _produce(producer, self._to, record, told)
                    if failure is not None:
                        _produce(producer, self._failed, failure, told)
                places = inbox.after(each.message for each in deliveries)
                group = inbox.consumer.consumer_group_metadata()
                producer.send_offsets_to_transaction(places, group, _ANSWER_SECS)
                _commit(producer)
            except KafkaException as error:
                problem = error.args[0]
                # The library's error for a transaction does not tell that of a record.
                why = next((each for each in errors if each.code() in _REFUSED), problem)
                if problem.txn_requires_abort() or why.code() in _REFUSED:
                    producer.abort_transaction(_ANSWER_SECS)
                raise _raised(why) from error

    async def close(self) -> None:
        """Implements `Exactly.close`."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None


def _commit(producer: Any) -> None:
    """Commit a transaction; one whose outcome is not known yet is asked for again."""
    while True:
        try:
            producer.commit_transaction(_ANSWER_SECS)
            return
        except KafkaException as error:
            if not error.args[0].retriable():
                raise


def _raised(error: KafkaError) -> Exception:
    return RecordRefused(error.str()) if error.code() in _REFUSED else KafkaException(error)


def _produce(producer: Any, topic: str, record: Record, told: Callable[..., None]) -> None:
    """Add a record to a producer's queue; waits while it is full.

    Raises `KafkaException` for one that the library refuses.
    """
    while True:
        try:
            producer.produce(
                topic,
                record.body,
                record.key,
                headers=list(record.headers.items()),
                on_delivery=told,
            )
            return
        except BufferError:
            producer.poll(_POLL_SECS)


def _servers(address: BrokerAddress) -> dict[str, Any]:
    if "@" in address.hosts:
        raise InvalidInbox(
            f"{address}: a user belongs to the options: ?sasl.username=NAME&sasl.password=..."
        )
    return {"bootstrap.servers": address.hosts}


def _check(make: Callable[..., Any], config: Mapping[str, Any], address: BrokerAddress) -> None:
    """Raise `InvalidInbox` for options that librdkafka does not know."""
    try:
        made = make(dict(config))
    except KafkaException as error:
        raise InvalidInbox(f"{address}: {error.args[0].str()}") from None
    if make is Consumer:
        made.close()


class _Kafka:
    whole_order = True
    inbox_options = outbox_options = None

    def inbox(self, address: BrokerAddress, options: ConsumerOptions) -> Inbox:
        return KafkaInbox(address, options)

    def outbox(self, address: BrokerAddress) -> Outbox:
        return KafkaOutbox(address)

    def exactly(self, inbox: Inbox, to: BrokerAddress, failed: BrokerAddress) -> Exactly | None:
        assert isinstance(inbox, KafkaInbox)
        if to.scheme != "kafka" or not inbox.address.hosts == to.hosts == failed.hosts:
            return None
        return KafkaTransactions(inbox, to, failed)


BROKER = _Kafka()
