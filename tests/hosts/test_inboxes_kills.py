"""Consumers, workers and brokers that end by SIGKILL, many times: no message is lost.

`INBOX_KILLS=200 INBOX_MESSAGES=200000` runs it whole.
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
from tests.support.scrape import until

KILLS = int(os.environ.get("INBOX_KILLS", "6"))
MESSAGES = int(os.environ.get("INBOX_MESSAGES", "5000"))
KEYS = 50
_SECS = 300
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
        name="only",
        **exactly,
    )  # fmt: skip
    random, killed = Random(1), Counter[str]()
    with Consumer(declared, models) as consumer:
        for at in range(1, KILLS + 1):
            soon = at * MESSAGES // (KILLS + 1)
            until(lambda soon=soon: broker.count(TO) >= soon, f"answer {soon}", _SECS)  # type: ignore[misc]
            what = ("consumer", "worker", "broker")[at % 3] if KILLS < 10 else random.choice(
                ("consumer", "worker", "broker")
            )  # fmt: skip
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
            until(lambda: _all_there(broker), "every message's answer", _SECS)
        finally:
            print(killed, _found(broker)[1])
        assert consumer.stop() == 0
        assert "bug " not in consumer.output
    answers, counts = _found(broker)
    assert broker.count(FAILED) == 0
    for number, value in answers:
        assert value == 2 * number
    if broker.exact:
        assert counts["doubled"] == 0
    if broker.ordered:
        assert counts["out of order"] == 0


def _all_there(broker: KilledBroker) -> bool:
    return _found(broker)[1]["missing"] == 0


def _found(broker: KilledBroker) -> tuple[list[tuple[int, int]], Counter[str]]:
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
    counts["missing"] = MESSAGES - len(there)
    counts["doubled"] = len(answers) - len(there)
    return answers, counts
