"""Queues, batches, limits and time-outs, over every transport.

The `spin` models take as long as a request asks for. A test keeps the only instance of one busy,
lets others queue, and looks at what becomes of them; the metrics say when a request runs and how
many wait.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, Unavailable
from headrace.core.tensors import Array
from tests.contract.conftest import CLIENTS, Rounds
from tests.support.client import Answer, Client, Parameter
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

_LONG = 0.5  # seconds that an instance is kept busy


class Crowd:
    """Several callers of one `spin` model at once."""

    def __init__(self, client: Client, model: str, pool: ThreadPoolExecutor, metrics: Scraper):
        self.client, self.model, self.metrics = client, model, metrics
        self._pool = pool
        self._queued = 0

    def send(self, rounds: Array, **parameters: Parameter) -> "Future[Answer]":
        """A request that is under way when this returns, wherever it is then."""
        given = {"headrace_timing": True, **parameters}
        return self._pool.submit(
            self.client.infer, self.model, {"ROUNDS": rounds}, parameters=given
        )

    def run(self, rounds: Array) -> "Future[Answer]":
        """A request that runs when this returns."""
        sent = self.send(rounds)
        self.metrics.until_running(self.model)
        return sent

    def queue(self, rounds: Array, **parameters: Parameter) -> "Future[Answer]":
        """A request that waits behind the one that runs when this returns."""
        self._queued += 1
        sent = self.send(rounds, **parameters)
        self.metrics.until_queued(self.model, self._queued)
        return sent


@pytest.fixture(scope="module", params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, busy_server: ServerProcess) -> Iterator[Client]:
    """The server with slow models, through each transport."""
    with CLIENTS[request.param](busy_server) as client:
        yield client


@pytest.fixture
def crowd(
    caller: Client, pool: ThreadPoolExecutor, busy_metrics: Scraper
) -> Iterator[Callable[[str], Crowd]]:
    """Makes crowds; waits in the end until all their requests are answered."""
    yield lambda model: Crowd(caller, model, pool, busy_metrics)
    busy_metrics.until_idle()


@contextmanager
def took(at_least: float = 0.0, less_than: float = float("inf")) -> Iterator[None]:
    """How many seconds the block may take."""
    begun = time.monotonic()
    yield
    assert at_least <= time.monotonic() - begun < less_than


def test_what_waits_together_runs_together(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    spin = crowd("spin")
    first = spin.run(rounds(_LONG))
    waiting = [spin.queue(np.array([[10 * n], [10 * n + 1]])) for n in range(1, 5)]
    assert first.result()["OUTPUT0"].tolist() == rounds(_LONG).tolist()
    for n, sent in enumerate(waiting, start=1):
        answer = sent.result()
        assert answer["OUTPUT0"].tolist() == [[10 * n], [10 * n + 1]]  # its own rows
        assert answer.parameters["batch_rows"] == 8
    [statistics] = spin.client.statistics("spin")
    assert 8 in {entry.batch_size for entry in statistics.batch_stats}


def test_a_batch_holds_whole_requests_only(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    spin = crowd("spin")
    spin.run(rounds(_LONG))
    sizes = [3, 3, 3, 2]  # of at most 8 rows: two together, then the other two
    waiting = [spin.queue(np.full((rows, 1), rows)) for rows in sizes]
    answers = [sent.result() for sent in waiting]
    assert [answer.parameters["batch_rows"] for answer in answers] == [6, 6, 5, 5]
    assert [answer["OUTPUT0"].tolist() for answer in answers] == [[[n]] * n for n in sizes]


def test_a_model_without_batches_runs_one_by_one(
    crowd: Callable[[str], Crowd], rounds: Rounds
) -> None:
    single = crowd("one_by_one")
    single.run(rounds(_LONG))
    waiting = [single.queue(np.array([[n]])) for n in range(3)]
    for n, sent in enumerate(waiting):
        answer = sent.result()
        assert answer["OUTPUT0"].tolist() == [[n]]
        assert answer.parameters["batch_rows"] == 1


def test_two_instances_run_side_by_side(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    two = crowd("spin_two")
    slow = two.run(rounds(_LONG))
    quick = two.send(np.array([[1]])).result()
    assert not slow.done()
    assert quick.parameters["queue_us"] < _LONG * 1e6 / 2


def test_preserve_ordering(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    ordered = crowd("spin_ordered")
    slow = ordered.run(rounds(_LONG))
    quick = ordered.send(np.array([[1]]))
    ends: dict[str, float] = {}
    slow.add_done_callback(lambda _: ends.setdefault("slow", time.monotonic()))
    quick.add_done_callback(lambda _: ends.setdefault("quick", time.monotonic()))
    # It ran at once, on the other instance, and was kept until the earlier one had its answer.
    assert quick.result().parameters["queue_us"] < _LONG * 1e6 / 2
    slow.result()
    assert ends["quick"] > ends["slow"] - _LONG / 4


def test_full_queue(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    limited = crowd("spin_limited")  # max_queue_size: 2
    limited.run(rounds(_LONG))
    waiting = [limited.queue(np.array([[n]])) for n in range(2)]
    [before] = limited.client.statistics("spin_limited")
    with pytest.raises(Unavailable, match=r"^\[request id: late\] Exceeds maximum queue size"):
        limited.client.infer("spin_limited", {"ROUNDS": np.array([[1]])}, id="late")
    [after] = limited.client.statistics("spin_limited")
    assert after.inference_stats.fail == before.inference_stats.fail
    for n, sent in enumerate(waiting):
        assert sent.result()["OUTPUT0"].tolist() == [[n]]


def test_queue_timeout(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    limited = crowd("spin_reject")  # 20 ms, and requests cannot ask for another
    busy = limited.run(rounds(_LONG))
    [before] = limited.client.statistics("spin_reject")
    name, labels = "nv_inference_request_failure", {"model": "spin_reject", "reason": "REJECTED"}
    rejected = limited.metrics.now().value(name, **labels)
    with pytest.raises(Unavailable, match="Request timeout expired"):
        limited.send(np.array([[1]]), timeout=60_000_000).result()
    assert not busy.done()  # it was told at once, not when its turn came
    [after] = limited.client.statistics("spin_reject")
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert limited.metrics.now().value(name, **labels) - rejected == 1


def test_request_with_a_shorter_timeout(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    patient = crowd("spin_override")  # a minute, and requests may ask for less
    busy = patient.run(rounds(_LONG))
    unhurried = patient.queue(np.array([[1]]))
    with pytest.raises(Unavailable, match="Request timeout expired"):
        patient.send(np.array([[2]]), timeout=10_000).result()
    assert not busy.done()
    assert unhurried.result()["OUTPUT0"].tolist() == [[1]]


def test_no_timeout_to_shorten(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    """Without a default time-out a request's own has no effect: so it is in Triton."""
    patient = crowd("spin_no_default")
    patient.run(rounds(_LONG))
    assert patient.queue(np.array([[1]]), timeout=1).result()["OUTPUT0"].tolist() == [[1]]


def test_timed_out_requests_go_behind_the_others(
    crowd: Callable[[str], Crowd], rounds: Rounds
) -> None:
    delaying = crowd("spin_delay")
    delaying.run(rounds(_LONG))
    late = delaying.queue(rounds(0.1), timeout=1_000)
    later = delaying.queue(rounds(0.1))
    assert list(as_completed([late, later])) == [later, late]


def test_priorities(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    levels = crowd("spin_priority")
    levels.run(rounds(_LONG))
    low = levels.queue(rounds(0.1), priority=2)
    unnamed = levels.queue(rounds(0.1))  # the default level, which is 2
    beyond = levels.queue(rounds(0.1), priority=7)  # no such level: the default again
    high = levels.queue(rounds(0.1), priority=1)
    assert list(as_completed([low, unnamed, beyond, high])) == [high, low, unnamed, beyond]


def test_limit_of_one_priority_level(crowd: Callable[[str], Crowd], rounds: Rounds) -> None:
    levels = crowd("spin_priority")  # level 1 may hold one request, level 2 any number
    levels.run(rounds(_LONG))
    levels.queue(np.array([[1]]), priority=1)
    levels.queue(np.array([[1]]), priority=2)
    levels.queue(np.array([[1]]), priority=2)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        levels.send(np.array([[1]]), priority=1).result()


def test_preferred_batch_size_ends_the_delay(caller: Client, pool: ThreadPoolExecutor) -> None:
    # The delay is 20 seconds, longer than this test may take; four rows are what the model prefers.
    with took(less_than=10):
        answers = list(pool.map(lambda n: _add_one(caller, "preferred", n), range(4)))
    assert [answer["OUTPUT0"].tolist() for answer in answers] == [[[n + 1]] for n in range(4)]
    assert {answer.parameters["batch_rows"] for answer in answers} == {4}


def test_a_lone_request_waits_for_the_delay(caller: Client) -> None:
    with took(at_least=0.15):
        answer = _add_one(caller, "patient", 1)
    assert 150_000 <= answer.parameters["queue_us"] < 5_000_000
    assert answer.parameters["batch_rows"] == 1


def test_a_failing_request(caller: Client) -> None:
    with pytest.raises(ExecutionFailed) as failed:
        caller.infer("lookup", {"INPUT0": np.array([[99]])}, id="bad one")
    # What ONNX Runtime says would name nodes, tensors and source files.
    assert str(failed.value) == "model 'lookup' failed to execute the request"
    assert caller.infer("lookup", {"INPUT0": np.array([[2]])})["OUTPUT0"].tolist() == [[20]]


def test_a_failing_request_does_not_hurt_its_batch(
    caller: Client, pool: ThreadPoolExecutor
) -> None:
    sent = [
        pool.submit(caller.infer, "lookup_four", {"INPUT0": np.array([[n]])}) for n in (0, 1, 99, 3)
    ]
    with pytest.raises(ExecutionFailed, match="model 'lookup_four' failed to execute the request"):
        sent[2].result()
    rows = [sent[n].result()["OUTPUT0"].tolist() for n in (0, 1, 3)]
    assert rows == [[[0]], [[10]], [[30]]]


def test_a_model_that_loses_rows(caller: Client) -> None:
    one, two = np.ones((1, 1), np.float32), np.ones((2, 1), np.float32)
    assert caller.infer("first_row", {"INPUT0": one})["OUTPUT0"].tolist() == [[1]]
    with pytest.raises(
        ExecutionFailed, match=r"output 'OUTPUT0' of shape \[1,1\] for a batch of 2"
    ):
        caller.infer("first_row", {"INPUT0": two})


def _add_one(client: Client, model: str, value: int) -> Answer:
    given = {"INPUT0": np.array([[value]], np.float32)}
    return client.infer(model, given, parameters={"headrace_timing": True})
