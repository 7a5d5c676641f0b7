"""Version 1 of KServe's protocol: predictions for instances, and what models there are."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.plugins.access.keys import new_key
from tests.contract import graphs
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.access_file import known_client
from tests.support.http_socket import RawAnswer, ask
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

ROW = {"instances": [[1, 2]]}


def predict(server: ServerProcess, model: str, document: object, **headers: str) -> RawAnswer:
    """Send a request; a document of bytes is sent unchanged."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return ask(server.http, "POST", f"/v1/models/{model}:predict", body, **headers)


@pytest.mark.parametrize("member", ["instances", "inputs"])
@pytest.mark.parametrize(("model", "rows", "expected"), [
    ("row_sum", [[1, 2, 3.5], [4, 5, 6]], [[6.5], [15.0]]),
    ("row_sum", [{"INPUT0": [1, 2]}], [[3.0]]),
    ("flat", [1, 2.5], [[1.0], [2.5]]),
    ("flat", [[1], [2.5]], [[1.0], [2.5]]),
    ("identity_BYTES", ["grüß", "", '"\\'], None),
    ("identity_BOOL", [True, False], None),
    ("identity_FP16", [0.5, -2.0], None),
    ("identity_UINT64", [2**64 - 1], None),
    ("simple", [{"INPUT0": [1] * 16, "INPUT1": [2] * 16}] * 2,
     [{"OUTPUT0": [3] * 16, "OUTPUT1": [-1] * 16}] * 2),
    ("optional_bias", [1, 2], [101.0, 102.0]),
])  # fmt: skip
def test_predictions(
    server: ServerProcess, member: str, model: str, rows: list[object], expected: object
) -> None:
    found = predict(server, model, {member: rows}).document
    assert list(found) == ["predictions"]
    assert found["predictions"] == ([[row] for row in rows] if expected is None else expected)


def test_bytes_may_be_base64(server: ServerProcess) -> None:
    rows = [{"b64": "YWJj"}, "text"]
    found = predict(server, "one_string", {"instances": rows}).document
    assert found == {"predictions": [["abc"], ["text"]]}


def test_an_unbatched_model_takes_its_whole_tensor(server: ServerProcess) -> None:
    rows = [{"INPUT0": [1, 2, 3], "INPUT1": [0, 0, 1]}] * 2
    assert predict(server, "unbatched", {"instances": rows}).document == {
        "predictions": [{"OUTPUT0": [1.0, 2.0, 4.0], "OUTPUT1": [1.0, 2.0, 2.0]}] * 2
    }


def test_a_large_request(server: ServerProcess) -> None:
    rows = np.arange(8 * 20_000).reshape(8, -1).tolist()
    assert predict(server, "identity_INT64", {"instances": rows}).document["predictions"] == rows


@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_compressed_requests(carrier: str, tmp_path: Path) -> None:
    write_model(tmp_path, "row_sum", graphs.row_sum(), "max_batch_size: 8")
    with clean_server(tmp_path, options=CARRIERS[carrier]) as server:
        for rows in ([[1, 2]], [[1] * 100_000] * 4):  # unpacked at once, and on a thread
            body = json.dumps({"instances": rows}).encode()
            for name, packed in (
                ("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)),
                ("identity", body),
            ):  # fmt: skip
                answer = predict(server, "row_sum", packed, **{"Content-Encoding": name})
                assert answer.document == {"predictions": [[float(sum(row))] for row in rows]}
        for name, body, status, text in (
            ("br", b"{}", 501, "'br', expected one of gzip, deflate, identity"),
            ("gzip", b"{}", 400, "the request body is not valid gzip"),
            ("gzip", gzip.compress(b"{"), 400, "failed to parse the request JSON buffer"),
        ):
            answer = predict(server, "row_sum", body, **{"Content-Encoding": name})
            assert (answer.status, text in answer.error) == (status, True), answer.body
        with Scraper(server.metrics) as scraper:
            assert scraper.now().value("headrace_admitted_bytes") == 0


@pytest.mark.parametrize(("model", "document", "status", "text"), [
    ("nope", ROW, 404, "Request for unknown model: 'nope' is not found"),
    ("row_sum", b"{", 400, "failed to parse the request JSON buffer"),
    ("row_sum", [], 400, "the request must be a JSON object, got an array"),
    ("row_sum", {}, 400, "has either 'instances' or 'inputs'"),
    ("row_sum", {"instances": [], "inputs": []}, 400, "has either 'instances' or 'inputs'"),
    ("row_sum", {"instances": []}, 400, "with an element for each row, got an empty array"),
    ("row_sum", {"instances": {}}, 400, "with an element for each row, got an object"),
    ("row_sum", {"instances": [[1], [1, 2]]}, 400, "input 'INPUT0' holds arrays of several"),
    ("row_sum", {"instances": [["a"]]}, 400, "takes numbers, but its data holds a string"),
    ("row_sum", {"instances": [[[1]]]}, 400, "unexpected shape for input 'INPUT0'"),
    ("row_sum", {"instances": [{"INPUT": [1]}]}, 400, "'INPUT'"),
    ("row_sum", {"instances": [[1]] * 9}, 400, "batch"),
    ("simple", {"instances": [[1] * 16]}, 400, "values for the inputs ['INPUT0','INPUT1']"),
    ("simple", {"instances": [{"INPUT0": [1] * 16}]}, 400, "expected 2 inputs but got 1"),
    ("simple", {"instances": [{"INPUT0": [1] * 16}, [1]]}, 400, "row 1 of 'instances'"),
    ("one_string", {"instances": [{"b64": "?"}]}, 400, "input 'INPUT0' holds something"),
    ("decoupled", {"instances": [[1]]}, 501, "decoupled"),
])  # fmt: skip
def test_errors(
    server: ServerProcess, model: str, document: object, status: int, text: str
) -> None:
    answer = predict(server, model, document)
    assert (answer.status, text in answer.error) == (status, True), answer.body


def test_models_and_their_readiness(server: ServerProcess) -> None:
    names = ask(server.http, "GET", "/v1/models").document["models"]
    assert {"row_sum", "simple", "unbatched"} <= set(names)
    ready = ask(server.http, "GET", "/v1/models/row_sum").document
    assert ready == {"name": "row_sum", "ready": True}
    unknown = ask(server.http, "GET", "/v1/models/nope")
    assert (unknown.status, "'nope' is not found" in unknown.error) == (404, True)


@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_models_on_request_and_counts(carrier: str, tmp_path: Path) -> None:
    write_model(tmp_path, "row_sum", graphs.row_sum(), "max_batch_size: 8")
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    options = ["--load-on-request", *CARRIERS[carrier]]
    with clean_server(tmp_path, options=options) as server, Scraper(server.metrics) as scraper:
        assert predict(server, "row_sum", ROW).document == {"predictions": [[3.0]]}
        broken = predict(server, "broken", ROW)
        assert (broken.status, "could not be loaded" in broken.error) == (503, True)
        assert ask(server.http, "GET", "/v1/models/broken").status == 503
        shown = scraper.now()
        assert shown.value("nv_inference_request_success", model="row_sum") == 1
        counted = shown.value("headrace_requests_total", door="http", operation="infer")
        assert counted == 2
        assert shown.value("headrace_admitted_bytes") == 0


def test_access_is_that_of_version_2(tmp_path: Path) -> None:
    web = new_key()
    (models := tmp_path / "models").mkdir()
    (tmp_path / "access.toml").write_text(
        known_client("web", web, ["infer", "read"], ["simple"])
        + '[[quotas]]\nof = ["address"]\nrequests_per_sec = 0.001\nburst = 1\n'
    )
    row = {"instances": [{"INPUT0": [1] * 16, "INPUT1": [2] * 16}]}
    options = [
        f"--access={tmp_path}/access.toml", f"--audit-log={tmp_path}/audit", "--audit-infer=1",
        "--trusted-proxies=127.0.0.1",
    ]  # fmt: skip
    with clean_server(onnx_examples(models), options=options) as server:
        assert predict(server, "simple", row).status == 401
        assert ask(server.http, "GET", "/v1/models").status == 401
        key = {"Authorization": f"Bearer {web.key}"}
        named = {"X-Forwarded-For": "10.1.2.3"}
        assert predict(server, "simple", row, **key, **named).status == 200
        assert predict(server, "simple", row, **key, **named).status == 429
        assert predict(server, "digits", row, **key).status == 404
        assert ask(server.http, "GET", "/v1/models", b"", **key).document == {"models": ["simple"]}
        assert ask(server.http, "GET", "/v1/models/digits", b"", **key).status == 404
    entries = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    told = [(e["model"], e["status"], e["address"]) for e in entries if "model" in e]
    assert told == [("simple", "200", "10.1.2.3"), *[("digits", "404", "127.0.0.1")] * 2]


ASKED = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            told = [np.array([[str(request.parameters())]], object) for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", each)]) for each in told]
"""


@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_headers_count_as_in_version_2(carrier: str, tmp_path: Path) -> None:
    rules = """
        max_batch_size: 8
        version_policy { all {} }
        parameters { key: "traffic" value { string_value:
            '{"split": {"1": 50, "2": 50}, "sticky": {"header": "X-User"}}' } }
    """
    for number in (1, 2):
        write_model(tmp_path, "sticky", graphs.add_constant(number), rules, version=number)
    write_python_model(
        tmp_path, "asked", ASKED,
        "max_batch_size: 8\n" + tensors("input", ("X", "INT64", "1"))
        + tensors("output", ("TOLD", "STRING", "1")),
    )  # fmt: skip
    options = ["--http-header-forward-pattern=^x-tell", *CARRIERS[carrier]]
    with clean_server(tmp_path, options=options) as server:
        found = []
        for number in range(16):
            user = {"X-User": f"user-{number}"}
            one = predict(server, "sticky", {"instances": [0]}, **user).document["predictions"]
            given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [0]}
            body = json.dumps({"inputs": [given]}).encode()
            two = ask(server.http, "POST", "/v2/models/sticky/infer", body, **user).document
            found.append((one[0][0], two["outputs"][0]["data"][0]))
        assert set(found) == {(1.0, 1.0), (2.0, 2.0)}
        told = predict(server, "asked", {"instances": [0]}, **{"X-Tell": "me"}).document
        assert told == {"predictions": [['{"X-Tell": "me"}']]}
        late = predict(server, "asked", {"instances": [0]}, **{"grpc-timeout": "x"})
        assert (late.status, "grpc-timeout must be" in late.error) == (400, True)


def test_large_answers_are_limited(tmp_path: Path) -> None:
    write_model(tmp_path, "wide", identity(Datatype.FP32, ["n"]), "max_batch_size: 0")
    with clean_server(tmp_path, options=["--max-response-bytes=100000"]) as server:
        assert predict(server, "wide", {"instances": [0.125] * 10_000}).status == 200
        for size in (20_000, 50_000):  # too large as JSON, and as it is
            answer = predict(server, "wide", {"instances": [0.125] * size})
            assert (answer.status, "--max-response-bytes" in answer.error) == (500, True)
