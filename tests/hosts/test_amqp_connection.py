"""Connections of AMQP with a real RabbitMQ: what other clients write and read, and what fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import FAILED, FROM, TO, KilledBroker, Sent, started

LONG = bytes(range(256)) * 1200  # of several frames
BODIES = (b"", b"x", LONG)
HEADERS = {"text": "grün", "more": "1"}
_SECS = 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KilledBroker]:
    with started("amqp", tmp_path) as found:
        yield found


@asynccontextmanager
async def connected(broker: KilledBroker, user: str = "guest") -> AsyncIterator[Any]:
    """A connection, and what its owner is stirred by."""
    module = import_module("headrace.plugins.inboxes.amqp_connection")  # needs a library
    hosts = broker.address("").removeprefix("amqp://").rstrip("/").replace("guest:", f"{user}:", 1)
    stirred = asyncio.Event()
    connection = await module.open_connection(hosts, "/", False, stirred.set)
    connection.stirred = stirred
    try:
        yield connection
    finally:
        await connection.close()


async def arrived(connection: Any, count: int) -> list[Any]:
    async with asyncio.timeout(_SECS):
        while len(connection.arrived) < count:
            connection.stirred.clear()
            connection.check()
            await connection.stirred.wait()
    return list(connection.arrived)


async def publish(connection: Any, queue: str, bodies: Sequence[bytes]) -> list[int]:
    module = import_module("headrace.plugins.inboxes.amqp_connection")
    sent = [module.Published(str(at), "a/b", HEADERS, body) for at, body in enumerate(bodies)]
    return [count async for count in connection.publish(queue, sent)]


async def test_published_messages_are_read_by_another_client(broker: KilledBroker) -> None:
    async with connected(broker) as connection:
        await connection.confirm()
        counts = await publish(connection, TO, BODIES)
        assert counts == sorted(set(counts))
        assert counts[-1] == len(BODIES)
    headers = {name: value.encode() for name, value in HEADERS.items()} | {"content-type": b"a/b"}
    found = await asyncio.to_thread(broker.read, TO)
    assert [(sent.headers, sent.body) for sent in found] == [(headers, body) for body in BODIES]


async def test_messages_of_another_client_arrive(broker: KilledBroker) -> None:
    sent = [Sent(b"k", {"mine": b"1"}, body) for body in BODIES]
    await asyncio.to_thread(broker.fill, sent)
    async with connected(broker) as connection:
        await connection.consume(FROM, 10)
        found = await arrived(connection, len(sent))
        assert [each.body for each in found] == list(BODIES)
        assert all(each.headers == {"key": "k", "mine": "1"} for each in found)
        connection.acknowledge(found[1].tag, ())
        connection.release([found[2].tag])
        [*_, again] = await arrived(connection, len(sent) + 1)
        assert again.body == LONG
        connection.acknowledge(0, [again.tag])
    assert await asyncio.to_thread(broker.count, FROM) == 0


async def test_a_queue_is_made_if_it_is_missing(broker: KilledBroker) -> None:
    async with connected(broker) as connection:
        assert await connection.declare("new") == 0
        await connection.confirm()
        assert await publish(connection, "new", [b"x"]) == [1]
        assert await connection.declare("new") == 1


async def test_messages_without_a_queue_are_refused(broker: KilledBroker) -> None:
    async with connected(broker) as connection:
        await connection.confirm()
        with pytest.raises(ConnectionError, match="no queue takes messages: NO_ROUTE"):
            await publish(connection, "absent", [b"x"])
        assert await publish(connection, FAILED, [b"x"]) == [1]


async def test_a_tag_that_is_not_known_ends_the_connection(broker: KilledBroker) -> None:
    async with connected(broker) as connection:
        connection.acknowledge(0, [7])
        async with asyncio.timeout(_SECS):
            await connection.stirred.wait()
        with pytest.raises(ConnectionError, match="unknown delivery tag 7"):
            connection.check()


async def test_a_wrong_user_is_refused(broker: KilledBroker) -> None:
    with pytest.raises(ConnectionError, match="ACCESS_REFUSED"):
        async with connected(broker, user="mallory"):
            pass


async def test_the_end_of_the_broker_ends_what_waits(broker: KilledBroker) -> None:
    async with connected(broker) as connection:
        await connection.confirm()
        publishing = asyncio.ensure_future(publish(connection, TO, [LONG] * 200))
        await asyncio.to_thread(broker.kill)
        with pytest.raises(ConnectionError, match="connection is lost"):
            async with asyncio.timeout(_SECS):
                await publishing
        with pytest.raises(ConnectionError, match="connection is lost"):
            await connection.declare(TO)
