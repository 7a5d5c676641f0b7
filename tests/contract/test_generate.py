"""Generate and generate_stream with models of one answer, by exact text.

Decoupled models are in `test_decoupled.py`.
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.contract import graphs
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.models.onnx_graphs import write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.http_socket import EVENTS, HttpSocket, RawAnswer, ask, events
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server, examples

VERBS = ["generate", "generate_stream"]


def generate(
    server: ServerProcess, model: str, document: object, verb: str = "generate", **headers: str
) -> RawAnswer:
    """Send a request; a document of bytes is sent unchanged."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return ask(server.http, "POST", f"/v2/models/{model}/{verb}", body, **headers)


def error_of(answer: RawAnswer) -> str:
    """Text of an error, alone or as the only event."""
    if answer.headers["content-type"] == "application/json":
        return answer.error
    [event] = events(answer)
    assert list(event) == ["error"]
    text: str = event["error"]
    return text


# A model of each kind that declares its parameters, or accepts any.
_BOX = """
    from headrace import model


    @model
    def box(width: float, height: float = 1.0) -> float:
        return width * height
"""
_GREETER = """
    from headrace import Context, model


    @model
    def greeter(name: str, context: Context) -> str:
        return context.parameters.get("word", "Hello") + " " + name
"""
_TELLER = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", np.array([request.parameters()], object))]
                )
                for request in requests
            ]
"""


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def readers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of models that differ in their accepted parameters."""
    root = tmp_path_factory.mktemp("readers")
    bias = 'input [ { name: "INPUT0" }, { name: "BIAS" optional: true } ]'
    write_model(root, "graph", graphs.optional_bias(), f"max_batch_size: 0\n{bias}")
    examples(root, "iris")
    write_python_model(root, "box", _BOX)
    write_python_model(root, "greeter", _GREETER)
    told = tensors("input", ("IN", "INT32", "1")) + tensors("output", ("OUT", "STRING", "1"))
    write_python_model(root, "teller", _TELLER, told)
    with clean_server(root, options=CARRIERS[request.param]) as process:
        yield process


def test_exact_texts_of_answers(server: ServerProcess) -> None:
    answer = generate(server, "row_sum", {"INPUT0": [1, 2, 3.5], "id": "seven"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.body == (
        b'{"OUTPUT0":6.5,"id":"seven","model_name":"row_sum","model_version":"1"}'
    )
    stream = generate(server, "row_sum", {"INPUT0": [1, 2, 3.5]}, "generate_stream")
    assert (stream.status, stream.headers["content-type"]) == (200, EVENTS)
    assert stream.body == (b'data: {"OUTPUT0":6.5,"model_name":"row_sum","model_version":"1"}\n\n')
    words = generate(server, "identity_BYTES", {"INPUT0": ["gr\u00fc\u00df\n", "", '"\\']})
    assert words.document["OUTPUT0"] == ["gr\u00fc\u00df\n", "", '"\\']
    [event] = events(generate(server, "identity_BYTES", {"INPUT0": "a\n\nb"}, "generate_stream"))
    assert event["OUTPUT0"] == "a\n\nb"


def test_timings_are_in_a_header_except_for_streams(server: ServerProcess) -> None:
    answer = generate(server, "row_sum", {"INPUT0": 1})
    assert re.fullmatch(r'queue;dur=[\d.]+, compute;dur=[\d.]+, batch;desc="1"',
                        answer.headers["server-timing"])  # fmt: skip
    stream = generate(server, "row_sum", {"INPUT0": 1}, "generate_stream")
    assert "server-timing" not in stream.headers
    failed = generate(server, "nope", {})
    assert failed.headers["server-timing"] == 'queue;dur=0.000, compute;dur=0.000, batch;desc="0"'


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("model", "document", "status", "text"), [
    ("nope", {"INPUT0": 1}, 404, "Request for unknown model: 'nope' is not found"),
    ("row_sum/versions/9", {}, 404, "'row_sum' version 9 is not found"),
    ("row_sum", b"", 400, "failed to parse the request JSON buffer"),
    ("row_sum", {}, 400, "expected 1 inputs but got 0 inputs for model 'row_sum'"),
    ("row_sum", {"INPUT0": "x"}, 400, "input 'INPUT0' of datatype FP32 takes numbers"),
    ("row_sum", {"triton_x": 1}, 400, "parameter keys starting with 'triton_' are reserved"),
])  # fmt: skip
def test_errors_before_inference(
    server: ServerProcess, verb: str, model: str, document: object, status: int, text: str
) -> None:
    answer = generate(server, model, document, verb)
    assert answer.status == status
    assert text in answer.error  # which is plain JSON


def test_misspelt_members_are_refused(readers: ServerProcess) -> None:
    for model, document, text in (
        ("box", {"width": 2, "hieght": 3}, "['width','height']; did you mean 'height'?"),
        ("graph", {"INPUT0": 1, "BAIS": 3}, "did you mean 'BIAS'?"),
        ("iris", {"flower": [5, 3, 1, 0], "threshold": 3}, "unknown member 'threshold'"),
    ):
        answer = generate(readers, model, document)
        assert answer.status == 400
        assert "unknown member " in answer.error
        assert text in answer.error


def test_models_that_read_parameters_get_every_member(readers: ServerProcess) -> None:
    assert generate(readers, "box", {"width": 2, "height": 3}).document["output"] == 6
    answer = generate(readers, "greeter", {"name": "Ada", "word": "Salut", "other": 1})
    assert answer.document["output"] == "Salut Ada"
    answer = generate(readers, "teller", {"IN": 1, "word": "Salut", "id": "seven"})
    assert json.loads(answer.document["OUT"]) == {"word": "Salut", "id": "seven"}


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_of_execution(server: ServerProcess, verb: str) -> None:
    answer = generate(server, "lookup", {"INPUT0": 99}, verb)
    assert answer.status == 500
    assert error_of(answer) == "model 'lookup' failed to execute the request"


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_compressed(server: ServerProcess, verb: str) -> None:
    answer = generate(server, "row_sum", {"INPUT0": 1}, verb, Content_Encoding="gzip")
    assert answer.status == 400
    assert "must not be compressed" in answer.error
    answer = generate(server, "row_sum", {"INPUT0": 1}, verb, Accept_Encoding="gzip")
    assert answer.headers["content-encoding"] is None
    assert b'"OUTPUT0":1.0' in answer.body


def test_connections_are_kept(server: ServerProcess) -> None:
    """After any request, one after the other."""
    path = "/v2/models/row_sum"
    infer = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    with HttpSocket(server.http) as connection:
        for _ in range(2):
            for verb in VERBS:
                answer = connection.ask("POST", f"{path}/{verb}", b'{"INPUT0":[1,2]}')
                assert b'"OUTPUT0":3.0' in answer.body
            answer = connection.ask("POST", f"{path}/infer", json.dumps(infer).encode())
            assert b'"data":[1.0]' in answer.body
    # A body may be chunked.
    with HttpSocket(server.http) as connection:
        connection.send(
            b"POST /v2/models/row_sum/generate HTTP/1.1\r\nHost: x\r\n"
            b'Transfer-Encoding: chunked\r\n\r\n9\r\n{"INPUT0"\r\n5\r\n:[7]}\r\n0\r\n\r\n'
        )
        assert connection.receive().document["OUTPUT0"] == 7


@pytest.mark.parametrize("verb", VERBS)
def test_a_decoupled_model_with_one_answer(server: ServerProcess, verb: str) -> None:
    answer = generate(server, "decoupled", {"INPUT0": 1}, verb)
    assert answer.status == 200
    found = answer.document if verb == "generate" else events(answer)[0]
    assert found["OUTPUT0"] == 2


def test_requests_are_counted(server: ServerProcess, metrics: Scraper) -> None:
    name, labels = "nv_inference_request_success", {"model": "row_sum"}
    before = metrics.now().value(name, **labels)
    for verb in VERBS:
        generate(server, "row_sum", {"INPUT0": 1}, verb)
    assert metrics.now().value(name, **labels) == before + 2
    metrics.until_idle()


def test_limits(narrow: ServerProcess) -> None:
    for verb in VERBS:
        answer = generate(narrow, "identity", {"INPUT0": [1.5] * 1_000}, verb)
        assert answer.status == 413
        assert "--max-request-bytes" in answer.error
    answer = generate(narrow, "identity", {"INPUT0": [1.5]})
    assert answer.document["OUTPUT0"] == 1.5
