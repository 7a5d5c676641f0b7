"""Models loaded on request (`--load-on-request` and related options)."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from headrace.core.errors import NotFound, Unavailable, Unsupported
from tests.contract import graphs
from tests.contract.conftest import BEHIND_DOORS, CARRIERS
from tests.models.onnx_graphs import write_model
from tests.models.python_models import write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.models.warmup_models import sample
from tests.support.client import Client, Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.http_client import HttpClient
from tests.support.http_socket import ask, events
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server
from tests.support.teller import tell, told

CONFIG = "max_batch_size: 4"
COPIES = 24  # of models that no other test has requested
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            answer = pb_utils.InferenceRequest(
                model_name="asked", requested_output_names=["OUTPUT0"], inputs=[given]
            ).exec()
            answers.append(pb_utils.InferenceResponse(answer.output_tensors(), answer.error()))
        return answers
"""
ASKS_CONFIG = """
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }
"""

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that loads nothing at start, for each carrier."""
    root = tmp_path_factory.mktemp("on_request")
    for number in range(COPIES):
        write_model(root, f"add_{number}", graphs.add_constant(number), CONFIG)
    write_model(root, "asked", graphs.add_constant(5), CONFIG)
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    write_python_model(root, "asks", ASKS, ASKS_CONFIG)
    warm_up = sample("zeros", "zero_data: true", dims=1)
    write_python_model(root, "warm", ASKS.replace("asked", "cold"), ASKS_CONFIG + warm_up)
    write_model(root, "cold", graphs.add_constant(7), CONFIG)
    for name in ("teller", "flat", "unary_http", "unary_grpc"):
        write_python_model(root, name, TELLER, TELLER_CONFIG)
    options = (*CARRIERS[request.param], "--load-on-request", "--model-load-thread-count=1")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture(scope="module")
def fresh(server: ServerProcess) -> Iterator[int]:
    """Numbers N of models `add_N` without requests so far."""
    return iter(range(COPIES))


def add(client: Client, name: str, version: str = "") -> float:
    answer = client.infer(name, {"INPUT0": np.zeros((1, 1), np.float32)}, version=version)
    return float(answer["OUTPUT0"][0, 0])


def state(client: Client, name: str) -> str:
    return next(model.state for model in client.index().models if model.name == name)


@pytest.mark.parametrize("version", ["", "1"])
def test_the_first_request_loads_the_model(
    client: Client, fresh: Iterator[int], version: str
) -> None:
    number = next(fresh)
    name = f"add_{number}"
    assert client.ready()
    assert client.model_ready(name, version)
    assert state(client, name) == ""
    with pytest.raises(NotFound, match="version 2 is not found"):
        add(client, name, "2")
    assert state(client, name) == ""
    assert add(client, name, version) == number
    assert state(client, name) == "READY"
    assert add(client, name) == number


def test_documents_load_the_model(client: Client, fresh: Iterator[int]) -> None:
    name = f"add_{next(fresh)}"
    assert client.model_metadata(name).inputs[0].name == "INPUT0"
    assert state(client, name) == "READY"
    other = f"add_{next(fresh)}"
    assert client.model_config(other, "1").max_batch_size == 4
    assert state(client, other) == "READY"


def test_raw_bodies_and_flat_json_load_models(server: ServerProcess, fresh: Iterator[int]) -> None:
    number = next(fresh)
    answer = httpx.post(
        f"{server.url}/v2/models/add_{number}/infer",
        content=np.array([1], "<f4").tobytes(),
        headers={"inference-header-content-length": "0"},
        verify=False,
    )
    assert np.frombuffer(answer.content[-4:], "<f4").tolist() == [number + 1]
    other = next(fresh)
    for _ in range(2):
        given = {"INPUT0": 1, "headrace_timing": True}
        answer = httpx.post(
            f"{server.url}/v2/models/add_{other}/generate", json=given, verify=False
        )
        assert answer.json()["OUTPUT0"] == other + 1
        assert answer.json()["batch_rows"] == 1


def test_a_stream_loads_models(server: ServerProcess, fresh: Iterator[int]) -> None:
    numbers = [next(fresh), next(fresh)]
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        for number in numbers:
            one = [Input("INPUT0", np.ones((1, 1), np.float32))]
            stream.send(infer_message(f"add_{number}", one, id=str(number)))
        stream.half_close()
        answers = [message.infer_response for message in stream.rest()]
    assert [answer.id for answer in answers] == list(map(str, numbers))
    found = [np.frombuffer(answer.raw_output_contents[0], "<f4")[0] for answer in answers]
    assert found == [number + 1 for number in numbers]


def test_a_model_that_cannot_be_loaded_says_why(client: Client) -> None:
    with pytest.raises(Unavailable, match="model 'broken' could not be loaded") as refusal:
        add(client, "broken")
    assert refusal.value.retry_after >= 1
    assert not client.model_ready("broken")
    assert client.ready()


def test_decoupled_models(server: ServerProcess) -> None:
    """Before the load, these models are not known to be decoupled."""
    given = {"TEXT": strings([b"a"], [1, 1]), "COUNT": np.array([[1]], np.int32)}
    with HttpClient(server.url, binary=False) as http, GrpcClient(server.grpc) as client:
        for name, door in (("unary_http", http), ("unary_grpc", client)):
            with pytest.raises(Unsupported, match="decoupled transaction policy"):
                door.infer(name, given)
        with Stream(client) as stream:
            stream.send(tell("a", 3))
            stream.half_close()
            assert [told(message)[1] for message in stream.rest()] == ["a0", "a1", "a2"]
    path = "/v2/models/flat/generate_stream"
    answer = ask(server.http, "POST", path, b'{"TEXT": "b", "COUNT": 2}')
    assert [event["OUT"] for event in events(answer)] == ["b0", "b1"]


def test_models_called_by_other_models(server: ServerProcess) -> None:
    with GrpcClient(server.grpc) as client:
        assert state(client, "asked") == ""
        assert add(client, "asks") == 5
        assert state(client, "asked") == "READY"
    # Only one may be loaded at a time here, except those that it waits for.
    with GrpcClient(server.grpc) as client:
        assert add(client, "warm") == 7
        assert state(client, "cold") == "READY"


@pytest.mark.slow
def test_memory_is_kept_within_its_budget(tmp_path: Path) -> None:
    for number in range(7):
        model = graphs.add_with_ballast(number, 20_000_000 if number else 0)
        write_model(tmp_path, f"add_{number}", model, CONFIG)
    options = ("--model-memory-budget=100000000", "--minimum-residency-secs=0", "--pin-model=add_0")
    with (
        ServerProcess(tmp_path, options=options) as server,
        Scraper(server.metrics) as metrics,
        HttpClient(server.url, binary=False) as client,
    ):
        assert state(client, "add_0") == "READY"
        for number in (1, 2, 3, 4, 5, 6, 1):
            assert add(client, f"add_{number}") == number
            found = metrics.now()
            assert found.value("headrace_models_in_memory") <= 5
            taken = sum(size for _, size in found.samples("headrace_model_memory_bytes"))
            assert taken <= found.value("headrace_model_memory_budget_bytes") == 100_000_000
            assert state(client, "add_0") == "READY"
        assert metrics.now().value("headrace_model_evictions_total") >= 2
