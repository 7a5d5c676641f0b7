"""Inboxes with real brokers: forms of messages, failures, order, limits and the end."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.protocol.v2_json import read_answer
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
from tests.support.server_process import EXAMPLES

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROW = list(range(16))
FLAT = json.dumps({"INPUT0": ROW, "INPUT1": ROW}).encode()
V2 = json.dumps({
    "id": "seven",
    "inputs": [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": ROW}
        for name in ("INPUT0", "INPUT1")
    ],
}).encode()  # fmt: skip
HEAD = json.dumps({
    "parameters": {"binary_data_output": True},
    "inputs": [
        {"name": name, "datatype": "INT32", "shape": [1, 16],
         "parameters": {"binary_data_size": 64}}
        for name in ("INPUT0", "INPUT1")
    ],
}).encode()  # fmt: skip
BINARY = HEAD + 2 * np.array(ROW, np.int32).tobytes()
SIZE = "inference-header-content-length"
ONLY = ("--model-control-mode=explicit", "--load-model=simple")
ARROW = b"application/vnd.apache.arrow.stream"
FAILS = """
    class TritonPythonModel:
        def execute(self, requests):
            raise RuntimeError("it always fails")
"""
REPEATS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            counts = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy()[0] for r in requests]
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("Y", np.array([b"y" * count], np.object_))
                ])
                for count in counts
            ]
"""
TEXT = tensors("input", ("X", "INT64", "1")) + tensors("output", ("Y", "STRING", "1"))
CONFIG = tensors("input", ("X", "INT64", "1")) + tensors("output", ("Y", "INT64", "1"))


def table() -> bytes:
    """An Arrow stream with two rows."""
    rows = pa.record_batch({name: pa.array([ROW, ROW]) for name in ("INPUT0", "INPUT1")})
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_batch(rows)
        return bytes(sink.getvalue())


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledBroker]:
    with started(request.param, tmp_path) as found:
        yield found


def read(broker: KilledBroker, name: str, count: int) -> list[Sent]:
    """Messages once there are so many; a transaction's end is an offset of its own."""
    until(lambda: broker.count(name) >= count and len(broker.read(name)) >= count, name)
    return broker.read(name)


def test_each_form_is_answered_in_its_form(broker: KilledBroker, tmp_path: Path) -> None:
    broker.fill([
        Sent(b"flat", {"traceparent": TRACE, "mine": b"1"}, FLAT),
        Sent(b"v2", {"traceparent": TRACE, "mine": b"2"}, V2),
        Sent(b"binary", {"traceparent": TRACE, "mine": b"3", SIZE: b"%d" % len(HEAD)}, BINARY),
        Sent(b"arrow", {"traceparent": TRACE, "mine": b"4", "content-type": ARROW}, table()),
    ])  # fmt: skip
    declared = declare(tmp_path / "inboxes.toml", broker, "simple")
    with Consumer(declared, EXAMPLES, ONLY) as consumer:
        answers = {sent.key: sent for sent in read(broker, TO, 4)}
        assert consumer.stop() == 0
    assert {sent.headers["traceparent"] for sent in answers.values()} == {TRACE}
    keys = (b"flat", b"v2", b"binary", b"arrow")
    assert [answers[k].headers["mine"] for k in keys] == [b"1", b"2", b"3", b"4"]
    twice = [2 * each for each in ROW]
    assert json.loads(answers[b"flat"].body)["OUTPUT0"] == twice
    v2 = json.loads(answers[b"v2"].body)
    assert (v2["id"], v2["outputs"][0]["data"]) == ("seven", twice)
    binary = answers[b"binary"]
    response = read_answer({SIZE.encode(): binary.headers[SIZE]}, binary.body)
    assert response.outputs[0].array.tolist() == [twice]
    assert answers[b"arrow"].headers["content-type"] == ARROW
    found = pa.ipc.open_stream(answers[b"arrow"].body).read_all()
    assert found["OUTPUT0"].to_pylist() == [twice, twice]


def test_a_message_without_an_answer_is_given_up(broker: KilledBroker, tmp_path: Path) -> None:
    write_python_model(models := tmp_path / "models", "fails", FAILS, CONFIG)
    broker.fill([
        Sent(b"a", {"mine": b"1"}, b'{"X":[1]}'),
        Sent(b"b", {"mine": b"2"}, b'{"X":["no number"]}'),
    ])  # fmt: skip
    declared = declare(tmp_path / "inboxes.toml", broker, "fails", tries=2, retry_secs=0.01)
    with Consumer(declared, models) as consumer:
        failed = {sent.key: sent for sent in read(broker, FAILED, 2)}
        with Scraper(consumer.metrics) as scraper:
            now = scraper.now()
            assert now.value("headrace_inbox_failures_total", reason="InvalidRequest") == 1
            assert now.value("headrace_inbox_failures_total", reason="ExecutionFailed") == 1
            assert now.value("headrace_inbox_retries_total") == 1
        assert consumer.stop() == 0
    assert failed[b"a"].body == b'{"X":[1]}'
    headers = failed[b"a"].headers
    assert headers["mine"] == b"1"
    assert (headers["headrace-error"], headers["headrace-tries"]) == (b"ExecutionFailed", b"2")
    assert b"it always fails" in headers["headrace-error-reason"]
    assert failed[b"b"].headers["headrace-tries"] == b"1"
    assert broker.count(TO) == 0


@pytest.mark.parametrize(
    ("name", "exactly_once", "limit"),
    [
        ("kafka", True, 2000),
        ("kafka", False, 2000),
        ("nats", False, 1 << 20),
        ("amqp", False, 2000),
    ],
)
def test_an_answer_that_is_refused_is_a_failure(
    name: str, exactly_once: bool, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker refuses an answer for its size: those of others of its group are delivered."""
    monkeypatch.setenv("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", f"-rabbit max_message_size {limit}")
    write_python_model(models := tmp_path / "models", "repeats", REPEATS, TEXT)
    with started(name, tmp_path) as broker:
        option = f"?message.max.bytes={limit}" if name == "kafka" else ""
        bodies = [b'{"X":[%d]}' % (limit if at == 7 else at) for at in range(20)]
        broker.fill(Sent(b"k", {"number": b"%d" % at}, body) for at, body in enumerate(bodies))
        declared = declare(
            tmp_path / "inboxes.toml", broker, "repeats", exactly_once=exactly_once,
            to=broker.address(TO) + option,
        )  # fmt: skip
        with Consumer(declared, models) as consumer:
            with Scraper(consumer.metrics) as scraper:
                until(
                    lambda: scraper.now().value("headrace_inbox_delivered_total") == len(bodies),
                    "all outcomes",
                )
                count = scraper.now().value("headrace_inbox_failures_total", reason="AnswerRefused")
            assert consumer.stop() == 0
        [failed] = broker.read(FAILED)
        numbers = [int(sent.headers["number"]) for sent in broker.read(TO)]
    assert count == 1
    assert failed.body == bodies[7]
    assert failed.headers["headrace-error"] == b"AnswerRefused"
    assert failed.headers["headrace-error-reason"]
    assert list(dict.fromkeys(numbers)) == [at for at in range(20) if at != 7]


def test_a_failure_that_is_refused_goes_without_its_message(tmp_path: Path) -> None:
    with started("kafka", tmp_path) as broker:
        broker.fill([Sent(b"k", {"mine": b"1"}, b'{"INPUT0":"%b"}' % (b"x" * 3000))])
        declared = declare(
            tmp_path / "inboxes.toml", broker, "simple",
            to=broker.address(TO) + "?message.max.bytes=2000",
        )  # fmt: skip
        with Consumer(declared, EXAMPLES, ONLY) as consumer:
            [failed] = read(broker, FAILED, 1)
            assert consumer.stop() == 0
    assert (failed.key, failed.body) == (b"k", b"")
    assert failed.headers["headrace-error"] == b"InvalidRequest"
    assert "mine" not in failed.headers


def test_order_by_key_at_a_full_engine(broker: KilledBroker, tmp_path: Path) -> None:
    """The account has room for few messages: fetching waits, and nothing is refused."""
    count = 600
    broker.fill(Sent(b"k%d" % (at % 7), {"number": b"%d" % at}, FLAT) for at in range(count))
    declared = declare(tmp_path / "inboxes.toml", broker, "simple")
    options = (*ONLY, "--max-admitted-requests=8")
    with Consumer(declared, EXAMPLES, options) as consumer:
        answers = read(broker, TO, count)
        with Scraper(consumer.metrics) as scraper:
            assert scraper.now().value("headrace_overloaded_total") == 0
            assert scraper.now().value("headrace_inbox_delivered_total") == count
        assert consumer.stop() == 0
    by_key: dict[bytes | None, list[int]] = {}
    for sent in answers:
        by_key.setdefault(sent.key, []).append(int(sent.headers["number"]))
    assert sum(map(len, by_key.values())) == count
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_sigterm_delivers_what_was_taken(broker: KilledBroker, tmp_path: Path) -> None:
    """Consumers end one after the other: their answers are all messages, each once."""
    count = 3000
    broker.fill(Sent(None, {"number": b"%d" % at}, FLAT) for at in range(count))
    # The mock of Kafka keeps no offsets of transactions.
    exactly: dict[str, Any] = {} if broker.exact else {"exactly_once": False}
    declared = declare(tmp_path / "inboxes.toml", broker, "simple", in_flight=64, **exactly)
    for least in (1, count // 2, count):
        with Consumer(declared, EXAMPLES, ONLY) as consumer:
            until(lambda least=least: broker.count(TO) >= least, "answers")  # type: ignore[misc]
            assert consumer.stop() == 0
            assert not re.search("bug |Traceback", consumer.output)
    numbers = sorted(int(sent.headers["number"]) for sent in read(broker, TO, count))
    assert numbers == list(range(count))


def test_groups_answer_the_same_messages_to_one_place(tmp_path: Path) -> None:
    """Their answers are no repetitions of each other, as NATS drops them."""
    with started("nats", tmp_path) as broker:
        broker.fill([Sent(None, {}, FLAT)])
        both = [
            declare(tmp_path / f"{group}.toml", broker, "simple", group=group).read_text()
            for group in ("first", "second")
        ]
        (declared := tmp_path / "inboxes.toml").write_text("".join(both))
        with Consumer(declared, EXAMPLES, ONLY) as consumer:
            with Scraper(consumer.metrics) as scraper:

                def delivered() -> bool:
                    each = scraper.now().samples("headrace_inbox_delivered_total")
                    return sum(value for _, value in each) == 2

                until(delivered, "both answers")
            assert consumer.stop() == 0
        assert broker.count(TO) == 2


def test_answers_from_a_later_consumer_are_no_repetitions(tmp_path: Path) -> None:
    """RabbitMQ numbers messages for each connection; NATS drops answers whose names it has had."""
    with started("amqp", tmp_path) as rabbit, started("nats", tmp_path) as nats:
        for at in range(1, 3):
            rabbit.fill([Sent(None, {"number": b"%d" % at}, FLAT)])
            declared = declare(tmp_path / "inboxes.toml", rabbit, "simple", to=nats.address(TO))
            with Consumer(declared, EXAMPLES, ONLY) as consumer:
                with Scraper(consumer.metrics) as scraper:

                    def delivered(scraper: Scraper = scraper) -> bool:
                        return scraper.now().value("headrace_inbox_delivered_total") == 1

                    until(delivered, "an answer")
                assert consumer.stop() == 0
        assert [sent.headers["number"] for sent in nats.read(TO)] == [b"1", b"2"]


def test_a_model_that_comes_late(broker: KilledBroker, tmp_path: Path) -> None:
    """Messages wait for their model, at the broker, and do not fail."""
    (models := tmp_path / "models").mkdir()
    broker.fill([Sent(None, {}, FLAT)])
    declared = declare(tmp_path / "inboxes.toml", broker, "simple")
    options = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with Consumer(declared, models, options) as consumer:
        assert broker.count(TO) == broker.count(FAILED) == 0
        (models / "simple").symlink_to(EXAMPLES / "simple")
        assert len(read(broker, TO, 1)) == 1
        assert consumer.stop() == 0
    assert broker.count(FAILED) == 0
