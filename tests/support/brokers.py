"""Real brokers in processes of their own, on free ports of 127.0.0.1, and consumers of them.

Libraries of brokers are imported where they are used: only the tests in `hosts` have them.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import psutil
import pytest

from tests.support.remote import free_port
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
            found, ended = [], 0
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

    def start(self) -> None:
        before = self.output.count("ready after") if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
            )  # fmt: skip
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


def declare(path: Path, broker: KilledBroker, model: str, group: str = "g", **more: object) -> Path:
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
