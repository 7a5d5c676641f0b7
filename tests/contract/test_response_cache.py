"""The response cache over every transport, with and without front ends.

The model counts its runs, so that an answer of the cache can be told from another run.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Client, strings
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

COUNTING = """
    from itertools import count
    from pathlib import Path
    import time

    import numpy as np
    import triton_python_backend_utils as pb_utils

    RUNS = count(1)


    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                [value] = request.inputs()[0].as_numpy().ravel().tolist()
                if value < 0:
                    error = pb_utils.TritonError(f"run {next(RUNS)} has failed")
                    answers.append(pb_utils.InferenceResponse(error=error))
                    continue
                gate = Path("{gate}")
                while value == 77 and not gate.exists():
                    time.sleep(0.002)
                texts = np.array([[str(request.parameters())]], object)
                answers.append(pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("RUN", np.array([[next(RUNS)]], np.int64)),
                        pb_utils.Tensor("SEEN", texts),
                    ],
                    parameters={"kept": True} if value == 50 else {},
                ))
            return answers
"""
SIGNATURE = tensors("input", ("X", "INT64", "1")) + tensors(
    "output", ("RUN", "INT64", "1"), ("SEEN", "STRING", "1")
)
COMPOSED = (
    "max_batch_size: 4\n" + tensors("input", ("X", "INT64", "1"))
    + tensors("output", ("RUN", "INT64", "1"))
    + """ensemble_scheduling { step {
        model_name: "counting" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "RUN" value: "RUN" }
    } }"""
)  # fmt: skip
PAIR = ensemble(
    (("X", "INT64", "1"),), (("RUN", "INT64", "1"), ("AGAIN", "INT64", "1")),
    step("counting", {"X": "X"}, {"RUN": "RUN"}), step("counting", {"X": "RUN"}, {"RUN": "AGAIN"}),
    rows=4,
)  # fmt: skip
CACHED = "response_cache { enable: true }\n"
BUDGET = 16 << 20


def write_models(root: Path) -> None:
    source = COUNTING.replace("{gate}", str(root.parent / "gate"))
    write_python_model(root, "counting", source, f"max_batch_size: 8\n{CACHED}{SIGNATURE}")
    write_python_model(root, "uncached", source, f"max_batch_size: 8\n{SIGNATURE}")
    write_model(root, "echo", identity(), CACHED)
    (root / "composed").mkdir()
    (root / "composed" / "config.pbtxt").write_text(f'platform: "ensemble"\n{CACHED}{COMPOSED}')
    write_ensemble(root, "pair", PAIR)


@dataclass
class Cached:
    """A server and its repository, beside which a gate holds a run for the value 77."""

    server: ServerProcess
    models: Path

    @property
    def url(self) -> str:
        return f"{self.server.url}/v2/models/counting"

    @property
    def gate(self) -> Path:
        return self.models.parent / "gate"

    def client(self) -> Client:
        return HttpClient(self.server.url, binary=False)


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def cached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cached]:
    (root := tmp_path_factory.mktemp("cached") / "models").mkdir()
    write_models(root)
    options = (
        f"--cache-config=local,size={BUDGET}", "--model-control-mode=explicit", "--load-model=*",
        "--metrics-config=summary_latencies=true", *CARRIERS[request.param],
    )  # fmt: skip
    with clean_server(root, options=options) as running:
        yield Cached(running, root)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, cached: Cached) -> Iterator[Client]:
    with CLIENTS[request.param](cached.server) as made:
        yield made


@pytest.fixture(scope="module")
def fresh() -> Callable[[], Array]:
    """Inputs that no other test has sent."""
    numbers = iter(range(1_000, 100_000))
    return lambda: np.array([[next(numbers)]])


def run_of(client: Client, value: Array, **more: object) -> int:
    """The number of the run that has answered."""
    return int(client.infer("counting", {"X": value}, **more)["RUN"][0, 0])  # type: ignore[arg-type]


def counted(client: Client, model: str = "counting") -> tuple[int, int, int, int]:
    """Hits, misses, successes and computed requests."""
    [found] = client.statistics(model)
    stats = found.inference_stats
    return (
        stats.cache_hit.count, stats.cache_miss.count, stats.success.count,
        stats.compute_infer.count,
    )  # fmt: skip


def test_an_equal_request_gets_the_same_answer(client: Client, fresh: Callable[[], Array]) -> None:
    value, before = fresh(), counted(client)
    first = client.infer("counting", {"X": value}, id="one")
    second = client.infer("counting", {"X": value}, id="two")
    assert (first.id, second.id) == ("one", "two")
    assert first["RUN"] == second["RUN"]
    assert first["SEEN"] == second["SEEN"]
    assert run_of(client, fresh()) > first["RUN"]
    grown = [new - old for new, old in zip(counted(client), before, strict=True)]
    assert grown == [1, 2, 3, 2]


def test_models_without_a_cache_run_each_request(client: Client) -> None:
    runs = [client.infer("uncached", {"X": np.array([[1]])})["RUN"] for _ in range(2)]
    assert runs[0] != runs[1]
    assert counted(client, "uncached")[:2] == (0, 0)


def test_an_onnx_model(client: Client, fresh: Callable[[], Array]) -> None:
    before, row = counted(client, "echo"), np.tile(fresh(), (2, 2)).astype(np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(client.infer("echo", {"INPUT0": row})["OUTPUT0"], row)
    hits, misses, *_ = counted(client, "echo")
    assert (hits - before[0], misses - before[1]) == (2, 1)


def test_a_request_may_opt_out(client: Client, fresh: Callable[[], Array]) -> None:
    value = fresh()
    first = run_of(client, value)
    answer = client.infer("counting", {"X": value}, parameters={"response_cache": False})
    assert answer["RUN"] > first
    assert answer["SEEN"] == strings([b"{}"], (1, 1))  # the model does not see it
    assert run_of(client, value) == first
    with pytest.raises(InvalidRequest, match="'response_cache' must be true or false"):
        client.infer("counting", {"X": value}, parameters={"response_cache": 1})


def test_the_steps_of_an_ensemble_opt_out_with_it(
    cached: Cached, client: Client, fresh: Callable[[], Array]
) -> None:
    for model in ("composed", "pair"):
        value = fresh()
        names = ("RUN",) if model == "composed" else ("RUN", "AGAIN")
        first, second = [
            client.infer(model, {"X": value}, parameters={"response_cache": wanted})
            for wanted in (True, False)
        ]
        assert all(second[name] > first[name] for name in names)


def test_parameters_that_a_model_reads_make_another_request(
    client: Client, fresh: Callable[[], Array]
) -> None:
    value = fresh()
    runs = [run_of(client, value, parameters={"p": n}) for n in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]


def test_failed_answers_are_not_kept(client: Client, fresh: Callable[[], Array]) -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(ExecutionFailed, match="has failed") as raised:
            client.infer("counting", {"X": -fresh()})
        texts.append(str(raised.value))
    assert texts[0] != texts[1]


def test_parameters_of_an_answer_are_kept(client: Client) -> None:
    answers = [client.infer("counting", {"X": np.array([[50]])}) for _ in range(2)]
    assert [answer.parameters.get("kept") for answer in answers] == [True, True]
    assert answers[0]["RUN"] == answers[1]["RUN"]


def test_generate(cached: Cached, fresh: Callable[[], Array]) -> None:
    body = {"X": int(fresh()[0, 0])}
    url = f"{cached.url}/generate"
    first, second = [httpx.post(url, json=body, verify=False).json()["RUN"] for _ in range(2)]
    assert first == second
    given = {**body, "parameters": {"response_cache": False}}
    assert httpx.post(url, json=given, verify=False).json()["RUN"] != first


def test_equal_concurrent_requests_are_one_run(cached: Cached) -> None:
    with cached.client() as client, ThreadPoolExecutor(8) as threads:
        first = threads.submit(run_of, client, np.array([[77]]))
        others = [threads.submit(run_of, client, np.array([[77]])) for _ in range(7)]
        cached.gate.touch()
        assert len({call.result(60) for call in (first, *others)}) == 1


def test_metrics(cached: Cached, fresh: Callable[[], Array]) -> None:
    with Scraper(cached.server.metrics) as scraper, cached.client() as client:
        before = scraper.now()
        value = fresh()
        for _ in range(3):
            run_of(client, value)
        after = scraper.now()
    for name, grown in (("num_hits", 2), ("num_misses", 1)):
        name = f"nv_cache_{name}_per_model"
        old = before.value(name, model="counting", version="1")
        assert after.value(name, model="counting", version="1") - old == grown
    for name in ("hit_duration_per_model", "miss_duration_per_model"):
        assert after.value(f"nv_cache_{name}", model="counting", version="1") > 0
    assert after.value("nv_cache_hit_summary_per_model_count", model="counting", version="1") > 0
    assert after.value("headrace_response_cache_limit_bytes") == BUDGET
    assert 0 < after.value("headrace_response_cache_bytes") <= BUDGET
    assert 'nv_cache_num_hits_per_model{model="uncached"' not in after.text


def test_a_changed_model_begins_without_answers(cached: Cached) -> None:
    config = f'backend: "python"\nmax_batch_size: 4\n{CACHED}{SIGNATURE}'
    with cached.client() as client:
        value = np.array([[5]])
        first = client.infer("counting", {"X": value})
        assert client.infer("counting", {"X": value})["RUN"] == first["RUN"]
        whole = [client.infer("composed", {"X": np.array([[9]])})["RUN"] for _ in range(2)]
        assert whole[0] == whole[1]
        (cached.models / "counting" / "config.pbtxt").write_text(config)
        client.load("counting")
        client.infer("counting", {"X": np.array([[6]])})  # the first run of the new process
        assert client.infer("counting", {"X": value})["RUN"] == 2
        assert client.infer("composed", {"X": np.array([[9]])})["RUN"] == 3
        client.unload("composed")
        client.unload("pair")
        client.unload("counting")
        client.unload("echo")
    with Scraper(cached.server.metrics) as scraper:
        until(lambda: scraper.now().value("headrace_response_cache_bytes") == 0, "no answers")


def test_models_that_cannot_have_a_cache(tmp_path: Path) -> None:
    (root := tmp_path / "models").mkdir()
    write_models(root)
    policy = "model_transaction_policy { decoupled: true }\n"
    write_python_model(root, "decoupled", COUNTING, f"{policy}{CACHED}{SIGNATURE}")
    with clean_server(root, options=("--exit-on-error=false",)) as server:
        server.await_logged("response_cache.enable: cannot be set for a model that is decoupled")
        server.await_logged("response_cache.enable: has no effect: this server has no response")
        with HttpClient(server.url, binary=False) as client:
            assert run_of(client, np.array([[1]])) != run_of(client, np.array([[1]]))
