"""Consumers, workers and brokers that end by SIGKILL, many times: no message is lost.

`INBOX_KILLS=200 INBOX_MESSAGES=200000` runs it whole, with all brokers or with one (`-k nats`);
`INBOX_KILLED=consumer` kills nothing else.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.models.python_models import tensors, write_python_model
from tests.support.brokers import (
    BROKERS,
    FAILED,
    TO,
    Consumer,
    KilledBroker,
    Sent,
    declare,
    started,
)
from tests.support.scrape import Scraper, until

KILLS = int(os.environ.get("INBOX_KILLS", "6"))
MESSAGES = int(os.environ.get("INBOX_MESSAGES", "5000"))
KILLED = os.environ.get("INBOX_KILLED", "consumer,worker,broker").split(",")
KEYS = 50
IN_FLIGHT = 512
_SECS = 300
_MORE = 50  # messages at once, until all consumers have had some
DOUBLED = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("Y", 2 * pb_utils.get_input_tensor_by_name(r, "X").as_numpy())
                ])
                for r in requests
            ]
"""
CONFIG = (
    "max_batch_size: 64\ndynamic_batching {}\n"
    + tensors("input", ("X", "INT64", "1"))
    + tensors("output", ("Y", "INT64", "1"))
)


def numbered(at: int) -> Sent:
    return Sent(b"k%d" % (at % KEYS), {"number": b"%d" % at}, b'{"X":[%d]}' % at)


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledBroker]:
    with started(request.param, tmp_path) as found:
        yield found


def test_kills_lose_nothing(broker: KilledBroker, tmp_path: Path) -> None:
    write_python_model(models := tmp_path / "models", "doubled", DOUBLED, CONFIG)
    for first in range(0, MESSAGES, 10_000):
        broker.fill(numbered(at) for at in range(first, min(first + 10_000, MESSAGES)))
    exactly: dict[str, Any] = {} if broker.exact else {"exactly_once": False}
    declared = declare(
        tmp_path / "inboxes.toml", broker, "doubled", tries=10, retry_secs=0.05, deliveries=1000,
        in_flight=IN_FLIGHT, name="only",
        **exactly,
    )  # fmt: skip
    random, killed = Random(1), Counter[str]()
    with Consumer(declared, models) as consumer:
        for at in range(1, KILLS + 1):
            soon = at * MESSAGES // (KILLS + 1)
            until(lambda soon=soon: broker.count(TO) >= soon, f"answer {soon}", _SECS)  # type: ignore[misc]
            what = KILLED[at % len(KILLED)] if KILLS < 10 else random.choice(KILLED)
            killed[what] += 1
            match what:
                case "consumer":
                    consumer.kill()
                    consumer.start()
                case "worker":
                    consumer.kill_worker()
                case "broker":
                    broker.kill()
                    broker.start()
        until(lambda: broker.count(TO) >= MESSAGES, "all answers", _SECS)
        try:
            until(lambda: _found(broker)[1]["missing"] == 0, "every message's answer", _SECS)
        finally:
            print(killed, _found(broker)[1])
        assert consumer.stop() == 0
        assert "bug " not in consumer.output
    assert broker.read(FAILED) == []
    counts = _checked(broker, MESSAGES)
    if broker.kills and not killed["broker"]:  # which may forget acknowledgements
        assert counts["doubled"] <= IN_FLIGHT * killed["consumer"]
    if broker.ordered:
        assert counts["out of order"] == 0


def test_another_consumer_of_the_group_takes_over(broker: KilledBroker, tmp_path: Path) -> None:
    """Two consumers share the messages until one is killed; the other answers all that it had."""
    write_python_model(models := tmp_path / "models", "doubled", DOUBLED, CONFIG)
    exactly: dict[str, Any] = {} if broker.exact else {"exactly_once": False}
    declared = [
        declare(tmp_path / f"{name}.toml", broker, "doubled", in_flight=64, **exactly)
        for name in ("killed", "other")
    ]
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        broker.fill(numbered(at) for at in range(sent, sent + count))
        sent += count

    with Consumer(declared[0], models) as killed, Consumer(declared[1], models) as other:

        def shared() -> bool:
            send(_MORE)
            return all(_delivered(consumer) > 0 for consumer in (killed, other))

        until(shared, "messages at both consumers", _SECS)
        until(lambda: broker.count(TO) >= sent, "answers of both", _SECS)
        before = sent
        send(2000)
        until(lambda: broker.count(TO) > before, "answers of messages that both have", _SECS)
        killed.kill()
        until(lambda: _found(broker, sent)[1]["missing"] == 0, "every message's answer", _SECS)
        assert other.stop() == 0
        assert "bug " not in other.output
    assert broker.read(FAILED) == []
    counts = _checked(broker, sent)
    if broker.kills:  # Kafka's positions are committed from time to time
        assert counts["doubled"] <= 64


def _delivered(consumer: Consumer) -> float:
    with Scraper(consumer.metrics) as scraper:
        return scraper.now().value("headrace_inbox_delivered_total")


def _checked(broker: KilledBroker, messages: int) -> Counter[str]:
    """Check the answers' values, and that none is doubled where all are exact; returns counts."""
    answers, counts = _found(broker, messages)
    for number, value in answers:
        assert value == 2 * number
    if broker.exact:
        assert counts["doubled"] == 0
    return counts


def _found(
    broker: KilledBroker, messages: int = MESSAGES
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """The answers with their numbers, and how many are missing, doubled and out of order."""
    answers = []
    last: dict[bytes | None, int] = {}
    seen, counts = set[int](), Counter[str]()
    for sent in broker.read(TO):
        number = int(sent.headers["number"])
        answers.append((number, json.loads(sent.body)["Y"]))
        if number < last.get(sent.key, -1) and number not in seen:  # not an answer that is repeated
            counts["out of order"] += 1
        last[sent.key] = max(number, last.get(sent.key, -1))
        seen.add(number)
    there = Counter(number for number, _ in answers)
    counts["missing"] = messages - len(there)
    counts["doubled"] = len(answers) - len(there)
    return answers, counts
