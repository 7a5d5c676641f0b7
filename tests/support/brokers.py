"""Real brokers in processes of their own, on free ports of 127.0.0.1, and consumers of them.

Libraries of brokers are imported where they are used: only the tests in `hosts` have them.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import psutil
import pytest

from tests.support.remote import free_port, free_ports
from tests.support.scrape import until

FROM, TO, FAILED = "numbers", "answers", "numbers-failed"
_END_SECS = 60


class Sent(NamedTuple):
    """A message, as a test writes and reads it."""

    key: bytes | None
    headers: Mapping[str, bytes]
    body: bytes


class KilledBroker(Protocol):
    """A broker that a test may kill; it keeps what it has acknowledged."""

    kills: bool  # False if `kill` only makes it unreachable
    exact: bool  # True if answers are delivered exactly once
    ordered: bool  # True if consumers that end leave the order by key as it was

    def start(self) -> None:
        """Start it, or start it again."""

    def kill(self) -> None:
        """End it by SIGKILL."""

    def stop(self) -> None:
        """End it for good."""

    def address(self, name: str, group: str = "") -> str:
        """The address of a place for messages."""

    def fill(self, sent: Iterable[Sent]) -> None:
        """Write messages to `FROM`."""

    def read(self, name: str) -> list[Sent]:
        """All messages in `TO` or `FAILED`."""

    def count(self, name: str) -> int:
        """The number of messages there."""


class BrokerProcess:
    """The process of a broker."""

    program = ""
    package = ""

    def __init__(self, folder: Path) -> None:
        if shutil.which(self.program) is None:
            pytest.skip(f"{self.program} is not here; it is in Debian's package {self.package}")
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, *arguments], stdout=log, stderr=log, cwd=self.folder,
                env=os.environ | dict(environment or {}),
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(_END_SECS)


class RedisProcess(BrokerProcess):
    """Redis, which writes what it acknowledges to a file first."""

    program, package = "redis-server", "redis-server"
    kills = exact = True
    ordered = False

    def start(self) -> None:
        import redis

        self.launch(
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder),
            "--appendonly", "yes", "--save", "",
        )  # fmt: skip
        self.client = redis.Redis(port=self.port)

        def answers() -> bool:
            try:
                return bool(self.client.ping())
            except redis.ConnectionError:
                return False

        until(answers, "Redis")

    def address(self, name: str, group: str = "") -> str:
        options = f"?group={group}&claim-secs=1" if group else ""
        return f"redis://127.0.0.1:{self.port}/{name}{options}"

    def fill(self, sent: Iterable[Sent]) -> None:
        with self.client.pipeline(transaction=False) as commands:
            for each in sent:
                key = {} if each.key is None else {"key": each.key}
                commands.xadd(FROM, {**each.headers, **key, "body": each.body})
            commands.execute()

    def read(self, name: str) -> list[Sent]:
        found = []
        for _, fields in self.client.xrange(name):
            headers = {n.decode(): v for n, v in fields.items() if n not in (b"key", b"body")}
            found.append(Sent(fields.get(b"key"), headers, fields[b"body"]))
        return found

    def count(self, name: str) -> int:
        return int(self.client.xlen(name))


class NatsProcess(BrokerProcess):
    """NATS with JetStream, which keeps streams in files."""

    program, package = "nats-server", "nats-server"
    kills = exact = True  # while the window for duplicates lasts
    ordered = False

    def start(self) -> None:
        self.launch(
            "--jetstream", "--store_dir", str(self.folder), "--port", str(self.port),
            "--addr", "127.0.0.1",
        )  # fmt: skip

        def answers() -> bool:
            try:
                asyncio.run(self._prepare())
            except Exception:  # of its library, until it listens
                return False
            return True

        until(answers, "NATS")

    async def _prepare(self) -> None:
        async with self._stream() as stream:
            for name in (FROM, TO, FAILED):
                await stream.add_stream(name=f"{name}-kept", subjects=[name])

    @contextlib.asynccontextmanager
    async def _stream(self) -> AsyncIterator[Any]:
        import nats

        client = await nats.connect(
            f"nats://127.0.0.1:{self.port}", allow_reconnect=False, connect_timeout=2
        )
        yield client.jetstream()
        await client.close()

    def address(self, name: str, group: str = "") -> str:
        options = f"?group={group}&ack-secs=2" if group else ""
        return f"nats://127.0.0.1:{self.port}/{name}{options}"

    def fill(self, sent: Iterable[Sent]) -> None:
        async def publish() -> None:
            async with self._stream() as stream:
                for some in batched(sent, 500):
                    await asyncio.gather(*(
                        stream.publish(FROM, each.body, headers=_texts(each)) for each in some
                    ))  # fmt: skip

        asyncio.run(publish())

    def read(self, name: str) -> list[Sent]:
        async def fetch() -> list[Sent]:
            async with self._stream() as stream:
                count = (await stream.stream_info(f"{name}-kept")).state.messages
                reader = await stream.pull_subscribe(name, stream=f"{name}-kept")
                found = list[Sent]()
                while len(found) < count:
                    for each in await reader.fetch(1000, 5):
                        headers = {n: v.encode() for n, v in (each.headers or {}).items()}
                        found.append(Sent(headers.pop("key", None), headers, each.data))
                        await each.ack()  # a thousand may wait for that
                return found

        return asyncio.run(fetch())

    def count(self, name: str) -> int:
        async def ask() -> int:
            async with self._stream() as stream:
                return int((await stream.stream_info(f"{name}-kept")).state.messages)

        return asyncio.run(ask())


class RabbitProcess(BrokerProcess):
    """RabbitMQ, whose queues are durable."""

    program, package = "/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server"
    kills = True
    exact = ordered = False

    def start(self) -> None:
        data = self.folder / "rabbit"
        data.mkdir(exist_ok=True)
        self.launch(environment={
            "RABBITMQ_NODENAME": f"test{self.port}@localhost", "HOME": str(self.folder),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.dist_port), "RABBITMQ_MNESIA_BASE": str(data),
            "RABBITMQ_LOG_BASE": str(data), "RABBITMQ_ENABLED_PLUGINS_FILE": str(data / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(data / "none.conf"), "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        })  # fmt: skip

        def answers() -> bool:
            try:
                asyncio.run(self._prepare())
            except Exception:  # of its library, until it listens
                return False
            return True

        until(answers, "RabbitMQ", _END_SECS)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dist_port, self.epmd_port = free_ports(2)

    async def _prepare(self) -> None:
        async with self._channel() as channel:
            for name in (FROM, TO, FAILED):
                await channel.declare_queue(name, durable=True)

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[Any]:
        import aio_pika

        connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{self.port}/", timeout=5)
        async with connection:
            yield await connection.channel()

    def kill(self) -> None:
        """End the whole of it: the server is below a shell."""
        assert self.process is not None
        whole = psutil.Process(self.process.pid)
        for each in (*whole.children(recursive=True), whole):
            each.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it, unless it was killed, and the registry of names that it has started."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for each in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if each.info["name"] == "epmd" and str(self.epmd_port) in str(each.environ()):
                    each.kill()

    def address(self, name: str, group: str = "") -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def fill(self, sent: Iterable[Sent]) -> None:
        import aio_pika

        async def publish() -> None:
            async with self._channel() as channel:
                for some in batched(sent, 500):
                    await asyncio.gather(*(
                        channel.default_exchange.publish(
                            aio_pika.Message(
                                each.body, headers=_texts(each),
                                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                            ),
                            FROM,
                        )
                        for each in some
                    ))  # fmt: skip

        asyncio.run(publish())

    def read(self, name: str) -> list[Sent]:
        """All messages there, which stay: they are not acknowledged."""

        async def fetch() -> list[Sent]:
            async with self._channel() as channel:
                queue = await channel.declare_queue(name, passive=True)
                arrived: asyncio.Queue[Any] = asyncio.Queue()
                await queue.consume(arrived.put)
                found = []
                for _ in range(queue.declaration_result.message_count):
                    each = await asyncio.wait_for(arrived.get(), 10)
                    headers = {n: _raw(v) for n, v in each.headers.items()}
                    if each.content_type:
                        headers["content-type"] = each.content_type.encode()
                    found.append(Sent(headers.pop("key", None), headers, each.body))
                return found

        return asyncio.run(fetch())

    def count(self, name: str) -> int:
        async def ask() -> int:
            async with self._channel() as channel:
                queue = await channel.declare_queue(name, passive=True)
                return int(queue.declaration_result.message_count)

        return asyncio.run(ask())


def _texts(sent: Sent) -> dict[str, str]:
    headers = {name: value.decode() for name, value in sent.headers.items()}
    return headers if sent.key is None else {**headers, "key": sent.key.decode()}


def _raw(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def batched(items: Iterable[Sent], size: int) -> Iterator[list[Sent]]:
    """Items in lists of at most this size."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some


class KafkaCluster:
    """A cluster of Kafka, by its address; topics have names of their own."""

    kills = False
    exact = ordered = True
    more = "&partition.assignment.strategy=range"  # which every cluster has

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.suffix = secrets.token_hex(4)

    def topic(self, name: str) -> str:
        return f"{name}-{self.suffix}"

    def start(self) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.servers})
        topics = [NewTopic(self.topic(name), 4) for name in (FROM, TO, FAILED)]
        for future in admin.create_topics(topics).values():
            with contextlib.suppress(Exception):  # they exist after a restart
                future.result(_END_SECS)

    def kill(self) -> None:
        """A cluster that others started stays."""

    def stop(self) -> None:
        """A cluster that others started stays."""

    def address(self, name: str, group: str = "") -> str:
        options = f"?group={group}&session.timeout.ms=6000{self.more}" if group else ""
        return f"kafka://{self.servers}/{self.topic(name)}{options}"

    def fill(self, sent: Iterable[Sent]) -> None:
        from confluent_kafka import Producer

        producer = Producer({
            "bootstrap.servers": self.servers, "queue.buffering.max.messages": 1_000_000
        })  # fmt: skip
        for each in sent:
            producer.produce(
                self.topic(FROM), each.body, each.key, headers=list(each.headers.items())
            )
        assert producer.flush(_END_SECS) == 0

    def read(self, name: str) -> list[Sent]:
        from confluent_kafka import KafkaError, TopicPartition

        with self._reader() as reader:
            partitions = reader.list_topics(self.topic(name)).topics[self.topic(name)].partitions
            reader.assign([TopicPartition(self.topic(name), at, 0) for at in partitions])
            found = list[Sent]()
            ended = 0
            while ended < len(partitions):
                for each in reader.consume(10_000, 0.2):
                    if (error := each.error()) is None:
                        found.append(Sent(each.key(), dict(each.headers() or ()), each.value()))
                    else:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        ended += 1
        return found

    def count(self, name: str) -> int:
        from confluent_kafka import KafkaException, TopicPartition

        if self._counting is None:
            self._counting = self._reader_of()
        try:
            partitions = self._counting.list_topics(self.topic(name), 10).topics[self.topic(name)]
            return sum(
                self._counting.get_watermark_offsets(TopicPartition(self.topic(name), at), 10)[1]
                for at in partitions.partitions
            )
        except KafkaException:  # it is down, or has just come back
            return 0

    _counting: Any = None

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        reader = self._reader_of()
        yield reader
        reader.close()

    def _reader_of(self) -> Any:
        from confluent_kafka import Consumer as Reader

        return Reader({
            "bootstrap.servers": self.servers, "group.id": secrets.token_hex(8),
            "enable.partition.eof": True, "isolation.level": "read_committed",
            "log_level": 0,
        })  # fmt: skip


class KafkaMock(KafkaCluster):
    """librdkafka's mock cluster, see `tests.support.kafka_mock`.

    It shows what open transactions have written, so that answers may come twice there.
    """

    exact = False
    more = ""

    def __init__(self, folder: Path) -> None:
        super().__init__("")
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self.process is not None:
            self._tell("up")
            return
        topics = [self.topic(name) for name in (FROM, TO, FAILED)]
        with (self.folder / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("kafka_mock.py")), *topics],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.servers = self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Take all brokers down: their data are in memory only."""
        self._tell("down")

    def _tell(self, what: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def kafka(folder: Path) -> KafkaCluster:
    """The cluster at `INBOX_KAFKA`, else the mock."""
    servers = os.environ.get("INBOX_KAFKA")
    return KafkaCluster(servers) if servers else KafkaMock(folder)


# By name: the library that clients need, and how it is made in a folder.
BROKERS: Mapping[str, tuple[str, Callable[[Path], KilledBroker]]] = {
    "redis": ("redis", RedisProcess),
    "kafka": ("confluent_kafka", kafka),
    "nats": ("nats", NatsProcess),
    "amqp": ("aio_pika", RabbitProcess),
}


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[KilledBroker]:
    """A broker that runs; skips the test if it, or its library, is not here."""
    library, make = BROKERS[name]
    pytest.importorskip(library, reason=f"{library} is not here; see `make test-hosts`")
    broker = make(folder)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


class Consumer:
    """A process that runs `headrace consume`, whose output goes to a file."""

    def __init__(self, declared: Path, repository: Path, options: Sequence[str] = ()) -> None:
        self._command = [
            sys.executable, "-m", "headrace", "consume", str(declared),
            f"--model-repository={repository}", "--metrics-port=0", *options,
        ]  # fmt: skip
        self._log = declared.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        """Standard output and error of all its processes so far."""
        return self._log.read_text()

    @property
    def metrics(self) -> str:
        """The address of the metrics, as host:port."""
        found: list[str] = re.findall(r"metrics +http://([^/]+)/", self.output)
        return found[-1]

    def start(self) -> None:
        before = self.output.count("ready after") if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(
            lambda: self.output.count("ready after") > before or self.process.poll() is not None,  # type: ignore[union-attr]
            "a consumer",
        )
        assert self.process.poll() is None, self.output

    def kill(self) -> None:
        """End it by SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_worker(self) -> None:
        """End a worker by SIGKILL, once there is one."""
        until(self._killed_a_worker, "a worker to kill")

    def _killed_a_worker(self) -> bool:
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "headrace.workers.main" in " ".join(child.cmdline()):
                    child.kill()
                    return True
            except psutil.NoSuchProcess:
                continue
        return False

    def stop(self) -> int:
        """End it by SIGTERM; returns its status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(_END_SECS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.kill()


def declare(
    path: Path, broker: KilledBroker, model: str, *, group: str = "g", **more: object
) -> Path:
    """Write a file with one inbox of a broker."""
    members: dict[str, object] = {
        "from": broker.address(FROM, group), "to": broker.address(TO),
        "failed": broker.address(FAILED), "model": model, **more,
    }  # fmt: skip
    lines = [f"{name} = {_toml(value)}" for name, value in members.items()]
    path.write_text("\n".join(["[[inbox]]", *lines, ""]))
    return path


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
