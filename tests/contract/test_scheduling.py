"""Queues, batches, limits and timeouts, over every transport.

The `held` models run for as long as a test wants. A test keeps their only instance busy, queues
further requests, and checks their outcomes; metrics show when a request runs and how many wait.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, Unavailable
from tests.contract.proxied import behind
from tests.support.client import Answer, Client, Parameter
from tests.support.held import Gates
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

_NUMBERS = count(1_000_000)  # of requests that are held


class Crowd:
    """Several clients of one `held` model."""

    def __init__(
        self, client: Client, model: str, pool: ThreadPoolExecutor, metrics: Scraper, gates: Gates
    ) -> None:
        self.client, self.model, self.metrics = client, model, metrics
        self._pool = pool
        self._gates = gates
        self._queued = 0

    def send(self, *values: int, **parameters: Parameter) -> "Future[Answer]":
        """Send a request of `rows`; returns once it is in flight."""
        rows = np.array(values).reshape(-1, 1)
        given = {"headrace_timing": True, **parameters}
        return self._pool.submit(self.client.infer, self.model, {"VALUE": rows}, parameters=given)

    def run(self) -> "Future[Answer]":
        """Send a request that runs on return, until `go_on`."""
        number = next(_NUMBERS)
        self._gates.close(number)
        sent = self.send(number)
        self.metrics.until_running(self.model)
        return sent

    def go_on(self) -> None:
        self._gates.open()

    def queue(self, *values: int, **parameters: Parameter) -> "Future[Answer]":
        """Send a request that is queued on return."""
        sent = self.send(*values, **parameters)
        self._queued += 1
        self.metrics.until_queued(self.model, self._queued)
        return sent


Crowds = Callable[[str], Crowd]


@pytest.fixture(scope="module", params=["default", pytest.param("proxy", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest,
    busy_server: ServerProcess,
    busy_repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """The server with such models, or a proxy before it, which then queues."""
    folder = tmp_path_factory.mktemp("front")
    with behind(request.param, busy_server, busy_repository, folder) as server:
        yield server


@pytest.fixture
def crowd(
    caller: Client, pool: ThreadPoolExecutor, metrics: Scraper, gates: Gates
) -> Iterator[Crowds]:
    """Makes crowds; at the end all their requests are answered."""
    yield lambda model: Crowd(caller, model, pool, metrics, gates)
    gates.open()
    metrics.until_idle()


@contextmanager
def took(at_least: float = 0.0, less_than: float = float("inf")) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert at_least <= time.monotonic() - begun < less_than


def order(*sent: "Future[Answer]") -> list["Future[Answer]"]:
    """Requests in the order in which the model has run them."""
    return sorted(sent, key=lambda one: int(one.result()["TURN"][0, 0]))


def test_queued_requests_form_one_batch(crowd: Crowds) -> None:
    held = crowd("held")
    first = held.run()
    waiting = [held.queue(10 * n, 10 * n + 1) for n in range(1, 5)]
    held.go_on()
    assert first.result().parameters["batch_rows"] == 1
    for n, sent in enumerate(waiting, start=1):
        answer = sent.result()
        assert answer["OUTPUT0"].tolist() == [[10 * n], [10 * n + 1]]  # its own rows
        assert answer.parameters["batch_rows"] == 8
    [statistics] = held.client.statistics("held")
    assert 8 in {entry.batch_size for entry in statistics.batch_stats}
    # Of at most 8 rows: two together, then the other two.
    held = crowd("held")
    held.run()
    sizes = [3, 3, 3, 2]  # of at most 8 rows: two together, then the other two
    more = [held.queue(*[rows] * rows) for rows in sizes]
    held.go_on()
    answers = [sent.result() for sent in more]
    assert [answer.parameters["batch_rows"] for answer in answers] == [6, 6, 5, 5]
    assert [answer["OUTPUT0"].tolist() for answer in answers] == [[[n]] * n for n in sizes]


def test_two_instances_run_concurrently(crowd: Crowds) -> None:
    two = crowd("held_two")
    slow = two.run()
    assert two.send(1).result()["OUTPUT0"].tolist() == [[1]]
    assert not slow.done()


def test_preserve_ordering(crowd: Crowds, gates: Gates) -> None:
    ordered = crowd("held_ordered")
    slow = ordered.run()
    number = next(_NUMBERS)
    quick = ordered.send(number)
    # It runs at once, on the other instance, and its answer waits for the earlier one's.
    until(lambda: gates.passed(number), "a request that runs on the other instance")
    assert not quick.done()
    ordered.go_on()
    assert quick.result()["OUTPUT0"].tolist() == [[number]]
    slow.result()


def test_full_queue(crowd: Crowds) -> None:
    limited = crowd("held_limited")  # max_queue_size: 2
    limited.run()
    waiting = [limited.queue(n) for n in range(2)]
    [before] = limited.client.statistics("held_limited")
    full = r"^\[request id: late\] Exceeds maximum queue size"
    with pytest.raises(Unavailable, match=full) as refusal:
        limited.client.infer("held_limited", {"VALUE": np.array([[1]])}, id="late")
    assert refusal.value.retry_after == 1
    [after] = limited.client.statistics("held_limited")
    assert after.inference_stats.fail == before.inference_stats.fail
    limited.go_on()
    for n, sent in enumerate(waiting):
        assert sent.result()["OUTPUT0"].tolist() == [[n]]


def test_queue_timeout(crowd: Crowds) -> None:
    limited = crowd("held_reject")  # 1.5 s, and requests cannot ask for another
    busy = limited.run()
    [before] = limited.client.statistics("held_reject")
    name, labels = "nv_inference_request_failure", {"model": "held_reject", "reason": "REJECTED"}
    rejected = limited.metrics.now().value(name, **labels)
    told = "queue of model 'held_reject' for 1500 ms, the timeout of the model's queue policy"
    with pytest.raises(Unavailable, match=told) as refusal:
        limited.send(1, timeout=60_000_000).result()
    assert refusal.value.retry_after == 1
    queued, computed, rows = refusal.value.spent or (0, 0, 0)
    assert queued >= 1_500_000_000
    assert (computed, rows) == (0, 0)
    assert not busy.done()  # reported at once, not when its turn came
    [after] = limited.client.statistics("held_reject")
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert limited.metrics.now().value(name, **labels) - rejected == 1


def test_request_with_a_shorter_timeout(crowd: Crowds) -> None:
    patient = crowd("held_override")  # a minute, and requests may ask for less
    busy = patient.run()
    unhurried = patient.queue(1)
    with pytest.raises(Unavailable, match="for 10 ms, its own timeout"):
        patient.send(2, timeout=10_000).result()
    assert not busy.done()
    patient.go_on()
    assert unhurried.result()["OUTPUT0"].tolist() == [[1]]


def test_timed_out_requests_go_behind_the_others(crowd: Crowds) -> None:
    delaying = crowd("held_delay")
    delaying.run()
    late = delaying.queue(1, timeout=1)
    later = delaying.queue(2)
    delaying.go_on()
    assert order(late, later) == [later, late]


def test_priorities(crowd: Crowds) -> None:
    levels = crowd("held_priority")
    levels.run()
    low = levels.queue(1, priority=2)
    unnamed = levels.queue(2)  # the default level, which is 2
    beyond = levels.queue(3, priority=7)  # no such level: the default again
    high = levels.queue(4, priority=1)
    levels.go_on()
    assert order(low, unnamed, beyond, high) == [high, low, unnamed, beyond]


def test_priority_levels_up_to_64_bits(crowd: Crowds) -> None:
    levels = crowd("held_levels")
    levels.run()
    least = levels.queue(1, priority=2**64 - 1)
    unnamed = levels.queue(2)  # the default level, the last but one
    low, high = [levels.queue(3 + n, priority=level) for n, level in enumerate((2**63, 1))]
    levels.go_on()
    assert order(least, unnamed, low, high) == [high, low, unnamed, least]


def test_limit_of_one_priority_level(crowd: Crowds) -> None:
    levels = crowd("held_priority")  # level 1 may hold one request, level 2 any number
    levels.run()
    levels.queue(1, priority=1)
    levels.queue(1, priority=2)
    levels.queue(1, priority=2)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        levels.send(1, priority=1).result()


def test_preferred_batch_size_ends_the_delay(caller: Client, pool: ThreadPoolExecutor) -> None:
    # The delay is 20 seconds, longer than this test may take; four rows are the preferred size.
    with took(less_than=10):
        answers = list(pool.map(lambda n: _add_one(caller, "preferred", n), range(4)))
    assert [answer["OUTPUT0"].tolist() for answer in answers] == [[[n + 1]] for n in range(4)]
    assert {answer.parameters["batch_rows"] for answer in answers} == {4}


def test_a_single_request_waits_for_the_delay(caller: Client) -> None:
    with took(at_least=0.15):
        answer = _add_one(caller, "patient", 1)
    assert 150_000 <= answer.parameters["queue_us"] < 5_000_000
    assert answer.parameters["batch_rows"] == 1


def test_failing_requests_and_lost_rows(caller: Client) -> None:
    with pytest.raises(ExecutionFailed) as failed:
        caller.infer("lookup", {"INPUT0": np.array([[99]])}, id="bad one")
    # ONNX Runtime's message would name nodes, tensors and source files.
    assert str(failed.value) == "model 'lookup' failed to execute the request"
    _, computed, rows = failed.value.spent or (0, 0, 0)
    assert computed > 0
    assert rows == 1
    assert caller.infer("lookup", {"INPUT0": np.array([[2]])})["OUTPUT0"].tolist() == [[20]]
    # A model that drops rows.
    one, two = np.ones((1, 1), np.float32), np.ones((2, 1), np.float32)
    assert caller.infer("first_row", {"INPUT0": one})["OUTPUT0"].tolist() == [[1]]
    with pytest.raises(
        ExecutionFailed, match=r"output 'OUTPUT0' of shape \[1,1\] for a batch of 2"
    ):
        caller.infer("first_row", {"INPUT0": two})


def _add_one(client: Client, model: str, value: int) -> Answer:
    given = {"INPUT0": np.array([[value]], np.float32)}
    return client.infer(model, given, parameters={"headrace_timing": True})
