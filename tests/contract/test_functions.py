"""Functions and classes as models, over every transport, mostly without a configuration.

The models are in `tests/models/functions`; the first of them is served as a single file.
"""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, InvalidRequest, RepositoryError, ServerError
from headrace.placement.worker.python_backend import PythonBackend
from tests.contract.conftest import EACH_PROXY
from tests.contract.proxied import behind
from tests.models.python_models import write_python_model
from tests.placement.worker.specs import spec
from tests.support.client import Client, Input, strings
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.server_process import ServerProcess
from tests.support.watching import until

FUNCTIONS = Path(__file__).parents[1] / "models" / "functions"
PLAIN = ["area", "counter", "people", "doubled_async"]
STREAMS = ["words", "words_async"]

NARROW = """
    max_batch_size: 4
    input { name: "width" data_type: TYPE_FP64 dims: [ 1 ] reshape { shape: [ ] } }
    output { name: "output1" data_type: TYPE_STRING dims: [ ] }
    parameters { key: "function" value { string_value: "area" } }
"""

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module", params=["default", *EACH_PROXY])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of functions: one as a file, the others in a repository."""
    root, front = tmp_path_factory.mktemp("functions"), tmp_path_factory.mktemp("front")
    for name in [*PLAIN, *STREAMS]:
        write_python_model(root, name, (FUNCTIONS / f"{name}.py").read_text())
    two = (FUNCTIONS / "area.py").read_text() + "\n@model\ndef other(x: int) -> int: return x\n"
    write_python_model(root, "narrow", two, NARROW)
    with ServerProcess(root, options=[str(FUNCTIONS / "sentiment.py")]) as process:
        with behind(request.param, process, root, front, ["sentiment"]) as server:
            yield server
        assert process.stop() == 0
        assert "bug " not in process.log
        assert "the counter is closed" in process.log


def text(*values: str) -> Any:
    """A BYTES array with one value per row."""
    return strings([value.encode() for value in values])


def ask(client: Client, *texts: str, **more: Any) -> Mapping[str, Any]:
    """Answers of `sentiment` for texts."""
    outputs = client.infer("sentiment", {"text": text(*texts), **more}).outputs
    return {name: outputs[name].tolist() for name in ("score", "label")}


def test_a_single_file(client: Client) -> None:
    assert ask(client, "good day", "bad, bad") == {
        "score": [1.0, -2.0], "label": [b"positive", b"negative"]
    }  # fmt: skip
    bias = np.array([-2, 5], np.float32)
    assert ask(client, "good day", "bad, bad", bias=bias)["score"] == [-1.0, 3.0]


def test_metadata_and_configuration_of_a_single_file(client: Client) -> None:
    metadata = client.model_metadata("sentiment")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("text", "BYTES", [-1]), ("bias", "FP32", [-1])
    ]  # fmt: skip
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("score", "FP32", [-1]), ("label", "BYTES", [-1]), ("calls", "FP32", [-1])
    ]  # fmt: skip
    config = client.model_config("sentiment")
    assert config.max_batch_size == 64
    assert [tensor.optional for tensor in config.input] == [False, True]


def test_requests_are_batched_into_few_calls(client: Client) -> None:
    def calls(number: int) -> float:
        answer = client.infer("sentiment", {"text": text("." + "good " * number)})
        assert answer["score"].tolist() == [number]
        return float(answer["calls"][0])

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(calls, range(100)))) < 100


def test_an_invalid_request_does_not_affect_others(client: Client) -> None:
    def outcome(number: int) -> str:
        words = {3: "", 5: "boom"}.get(number % 8, "." + "good " * number)
        try:
            return str(ask(client, words)["score"][0])
        except InvalidRequest as error:
            assert str(error) == "text is empty"  # noqa: PT017
            return "empty"
        except ExecutionFailed as error:
            assert "message: RuntimeError: boom" in str(error)  # noqa: PT017
            return "raised"

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(outcome, range(64)))
    assert outcomes == [
        {3: "empty", 5: "raised"}.get(number % 8, f"{number}.0") for number in range(64)
    ]


def test_a_class_with_whole_requests_and_a_coroutine(client: Client) -> None:
    x = np.array([[1, 2, 3], [0, 0, 1]], np.float32)
    assert client.infer("counter", {"x": x})["output"].tolist() == [8.0, 2.0]
    assert client.model_config("counter").max_batch_size == 0
    with pytest.raises(InvalidRequest, match=r"Expected \[-1,3\], got \[2,4\]"):
        client.infer("counter", {"x": np.ones((2, 4), np.float32)})
    answer = client.infer("doubled_async", {"x": np.array([1.0, 2.0])})
    assert answer["output"].tolist() == [2.0, 4.0]


def test_a_partial_configuration(client: Client) -> None:
    config = client.model_config("narrow")
    assert config.max_batch_size == 4
    assert {tensor.name for tensor in config.input} == {"width", "height", "unit"}
    answer = client.infer("narrow", {"width": np.array([[2.0], [3.0]])})
    assert answer["output0"].tolist() == [2.0, 3.0]


def test_data_frames(client: Client) -> None:
    inputs = [
        Input("name", text("Ada", "Bob")),
        Input("age", np.array([36, 0])),
        Input("age.null", np.array([False, True])),
    ]
    answer = client.infer("people", inputs)
    assert {name: array.tolist() for name, array in answer.outputs.items()} == {
        "name": [b"Ada", b"Bob"], "next": [37, 0], "next.null": [False, True],
        "adult": [True, False],
    }  # fmt: skip
    assert client.infer("people", inputs[:2])["next"].tolist() == [37, 1]


def streamed(server: ServerProcess, model: str, sentence: str) -> list[tuple[str, int]]:
    """Responses of a generator; raises its error."""
    message = infer_message(model, [Input("text", text(sentence))])
    with GrpcClient(server.grpc) as client:
        found = []
        for response in client.stream([message]):
            if response.error_message:
                raise ExecutionFailed(response.error_message)
            answer = read_answer(response.infer_response)
            if answer.outputs:
                found.append((answer["output0"][0].decode(), int(answer["output1"][0])))
        return found


@pytest.mark.parametrize("model", STREAMS)
def test_a_generator(server: ServerProcess, model: str) -> None:
    assert streamed(server, model, "one two three") == [
        ("one", 0), ("two", 1), ("three", 2)
    ]  # fmt: skip
    assert streamed(server, model, " ") == []
    with pytest.raises(ServerError, match="text is empty"):
        streamed(server, model, "")
    with pytest.raises(ServerError, match="RuntimeError: boom"):
        streamed(server, model, "one boom")


@pytest.mark.parametrize("model", STREAMS)
def test_a_generator_is_closed_when_its_client_disconnects(
    server: ServerProcess, model: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    message = infer_message(model, [Input("text", text("one")), Input("log", text(str(log)))])
    with GrpcClient(server.grpc) as client:
        call = client.stream([message])
        next(call)
        next(call)
        call.cancel()

    async def said() -> bool:
        return log.exists()

    asyncio.run(until(said, bool))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "LookupError: the model's file has neither a class TritonPythonModel nor"),
        ("from headrace import model\n@model\ndef f(x): ...",
         "SignatureError: model f: parameter 'x' has no annotation"),
        ("from headrace import nothing", "cannot import name 'nothing' from 'headrace'"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_model(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(RepositoryError) as raised:
        PythonBackend().load_apart(spec(tmp_path, source))
    assert says in str(raised.value)
