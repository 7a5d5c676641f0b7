"""The rate limiter: models of one resource never run at the same time, over every transport."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.models.python_models import tensors, write_python_model
from tests.support.http_client import HttpClient
from tests.support.remote import free_port, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

# Fails if another model of the same resource runs.
ALONE = """
    import os
    import time

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            descriptor = os.open("{lock}", os.O_CREAT | os.O_EXCL)
            try:
                time.sleep(0.003)
            finally:
                os.close(descriptor)
                os.unlink("{lock}")
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())])
                for r in requests
            ]
"""
# The same, with the sum of the values of each sequence.
SUMS = (
    ALONE.replace(
        """[
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())])
                for r in requests
            ]""",
        "[self.answer(request) for request in requests]",
    )
    + """
        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            sums = self.__dict__.setdefault("sums", {})
            id = request.correlation_id()
            sums[id] = x + (0 if start.any() else sums.get(id, 0))  # 0: an empty slot
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", sums[id])])
"""
)
START = (
    'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START'
    " int32_false_true: [ 0, 1 ] } }"
)
SIGNATURE = tensors("input", ("X", "INT64", "1")) + tensors("output", ("Y", "INT64", "1"))


def write_models(root: Path) -> None:
    """Models that need all of a resource, and one that needs none."""
    for name, count, instances in (("one", 2, 2), ("other", 2, 1), ("free", 0, 1)):
        limiter = f'resources {{ name: "R" count: {count} global: true }} priority: 2'
        group = f"instance_group {{ count: {instances} rate_limiter {{ {limiter} }} }}\n"
        lock = root.parent / (name if name == "free" else "lock")
        source = ALONE.replace("{lock}", str(lock))
        write_python_model(root, name, source, f"max_batch_size: 2\n{group}{SIGNATURE}")
    # By a server that is not there, and else by this one.
    group = 'instance_group { rate_limiter { resources { name: "R" count: 2 global: true } } }'
    write_remote(
        root, "either", f"127.0.0.1:{free_port()}", fail_over="python",
        more=f"max_batch_size: 2 {group} {SIGNATURE}",
    )  # fmt: skip
    (root / "either" / "1").mkdir()
    source = dedent(ALONE).replace("{lock}", str(root.parent / "lock"))
    (root / "either" / "1" / "model.py").write_text(source)
    for name, strategy in (("direct", ""), ("oldest", "oldest { max_candidate_sequences: 4 }")):
        limiter = 'resources { name: "R" count: 2 global: true }'
        group = f"instance_group {{ count: 2 rate_limiter {{ {limiter} }} }}\n"
        sequences = f"sequence_batching {{ {strategy} {START} }}\n"
        source = SUMS.replace("{lock}", str(root.parent / "lock"))
        config = f"max_batch_size: 2\n{group}{sequences}{SIGNATURE}"
        write_python_model(root, name, source, config)


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    (root := tmp_path_factory.mktemp("limited") / "models").mkdir()
    write_models(root)
    options = ("--rate-limit=execution_count", "--rate-limit-resource=R:2")
    with clean_server(root, options=(*options, *CARRIERS[request.param])) as running:
        yield running


def test_models_take_turns(server: ServerProcess) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(12) as threads:
        clients = [stack.enter_context(make(server)) for make in CLIENTS.values()]
        sent = [
            (np.array([[number]]), ("one", "other", "free")[number % 3], clients[number % 2])
            for number in range(90)
        ]
        calls = [
            (value, threads.submit(client.infer, model, {"X": value}))
            for value, model, client in sent
        ]
        for value, call in calls:
            np.testing.assert_array_equal(call.result(60)["Y"], value)
    with Scraper(server.metrics) as scraper:
        found = scraper.now()
        labels = {"resource": "R", "device": "global"}
        assert found.value("headrace_rate_limiter_used", **labels) == 0
        assert found.value("headrace_rate_limiter_limit", **labels) == 2


def test_a_further_backend_takes_turns_with_other_models(server: ServerProcess) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(6) as threads:
        clients = [stack.enter_context(make(server)) for make in CLIENTS.values()]
        calls = [
            threads.submit(
                clients[number // 2 % len(clients)].infer, ("one", "either")[number % 2],
                {"X": np.array([[number]])},
            )
            for number in range(40)
        ]  # fmt: skip
        for number, call in enumerate(calls):
            assert call.result(60)["Y"] == number
    with Scraper(server.metrics) as scraper:
        found = scraper.now()
        assert found.value("headrace_backend_active", model="either", backend="python") == 1
        labels = {"resource": "R", "device": "global"}
        assert found.value("headrace_rate_limiter_used", **labels) == 0


def test_sequences_take_turns_with_other_models(server: ServerProcess) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(12) as threads:
        clients = [stack.enter_context(make(server)) for make in CLIENTS.values()]

        def sequence(number: int) -> list[int]:
            client, found = clients[number % len(clients)], []
            model = ("direct", "oldest")[number // 2 % 2]
            for step in range(6):
                flags = {"sequence_start": step == 0, "sequence_end": step == 5}
                parameters = {"sequence_id": number + 1} | flags
                value = np.array([[number + step]])
                answer = client.infer(model, {"X": value}, parameters=parameters)
                found.append(int(answer["Y"][0, 0]))
            return found

        def single(number: int) -> list[int]:
            answer = clients[number % len(clients)].infer("one", {"X": np.array([[number]])})
            return [int(answer["Y"][0, 0])]

        running = [threads.submit(sequence, number) for number in range(8)]
        others = [threads.submit(single, number) for number in range(16)]
        for number, each in enumerate(running):
            values = np.cumsum([number + step for step in range(6)])
            assert each.result(120) == values.tolist()
        for number, each in enumerate(others):
            assert each.result(120) == [number]
    with Scraper(server.metrics) as scraper:
        labels = {"resource": "R", "device": "global"}
        assert scraper.now().value("headrace_rate_limiter_used", **labels) == 0


def test_without_the_option_nothing_is_limited(tmp_path: Path) -> None:
    (root := tmp_path / "models").mkdir()
    write_models(root)
    with (
        clean_server(root, options=("--rate-limit=off",)) as server,
        HttpClient(server.url, binary=False) as client,
    ):
        server.await_logged("rate_limiter: has no effect without --rate-limit=execution_count")
        assert client.infer("one", {"X": np.array([[1]])})["Y"] == 1


def test_instances_that_could_never_run_are_not_loaded(tmp_path: Path) -> None:
    (root := tmp_path / "models").mkdir()
    write_models(root)
    options = (
        "--rate-limit=execution_count", "--rate-limit-resource=R:1", "--exit-on-error=false",
    )  # fmt: skip
    with clean_server(root, options=options) as server:
        server.await_logged("needs 2 of 'R', and --rate-limit-resource has 1")
