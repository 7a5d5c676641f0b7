"""Requests whose model has begun are never run again, whatever its error says.

The model counts its runs and then raises UNAVAILABLE, with the texts by which servers and proxies
refuse requests.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.errors import Unavailable
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import BEHIND_DOORS, CARRIERS, CLIENTS
from tests.models.python_models import in_config, tensors, write_python_model
from tests.support.client import Input
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.http_socket import ask
from tests.support.remote import write_remote
from tests.support.server_process import ServerProcess, clean_server

COUNTING = """
    import json
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            self.file = config["parameters"]["file"]["string_value"]

        def execute(self, requests):
            answers = []
            for request in requests:
                text = request.inputs()[0].as_numpy().ravel()[0].decode()
                with open(self.file, "a") as file:
                    file.write(text + "\\n")
                error = pb_utils.TritonError(text, pb_utils.TritonError.UNAVAILABLE)
                answers.append(pb_utils.InferenceResponse(error=error))
            return answers
"""
TEXTS = (
    "Exceeds maximum queue size",
    "[request id: <id_unknown>] Exceeds maximum queue size",
    "Request for unknown model: 'database' version 1 is not at ready state",
    "model 'database' is not ready: none of its servers can be reached",
    "Request timeout expired",
    "Server exiting",
    "failed to connect to all addresses; last error: UNKNOWN: connection refused",
    "no healthy upstream",
    "the database is away",
)
DECLARED = tensors("input", ("INPUT0", "STRING", "1")) + tensors("output", ("OUTPUT0", "FP32", "1"))
SPLIT = {"split": {"1": 50, "2": 50}}
MODELS = ("pool", "pool_http", "chain", "first_here", "first_there", "split", "plain")


def declared(file: Path, more: str = "") -> str:
    return f"max_batch_size: 0\n{DECLARED}{in_config({'file': file})}{more}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with a line for each run."""
    file = tmp_path_factory.mktemp("runs") / "runs"
    file.touch()
    return file


@pytest.fixture(scope="module")
def there(
    tmp_path_factory: pytest.TempPathFactory, runs: Path
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two upstreams of the models, of which the first alone has the model to fail over to."""
    root = tmp_path_factory.mktemp("there")
    write_python_model(root / "both", "pool", COUNTING, declared(runs))
    write_python_model(root / "first", "first_here", COUNTING, declared(runs))
    with ServerProcess(root / "both", root / "first") as one, ServerProcess(root / "both") as other:
        yield one, other


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def here(
    request: pytest.FixtureRequest,
    there: tuple[ServerProcess, ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
    runs: Path,
) -> Iterator[ServerProcess]:
    root, between = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("between")
    one, other = there
    for folder in (root, between):
        write_remote(folder, "pool", one.grpc, other.grpc)
    write_remote(root, "pool_http", one.url, other.url, remote_model="pool")
    fail_over = {"fail_over": f"grpc://{one.grpc}"}
    more = in_config(fail_over)
    write_python_model(root, "first_here", COUNTING, declared(runs, more))
    write_remote(
        root, "first_there", one.grpc, fail_over="python", more=declared(runs), remote_model="pool"
    )
    (root / "first_there" / "1").mkdir()
    (root / "first_there" / "1" / "model.py").write_bytes(
        (root / "first_here" / "1" / "model.py").read_bytes()
    )
    split = in_config({"traffic": json.dumps(SPLIT).replace('"', '\\"')})
    versions = f"version_policy {{ all {{}} }}\n{split}"
    write_python_model(root, "split", COUNTING, declared(runs, versions))
    (root / "split" / "2").mkdir()
    (root / "split" / "2" / "model.py").write_bytes((root / "split/1/model.py").read_bytes())
    write_python_model(root, "plain", COUNTING, declared(runs))
    with ServerProcess(between) as middle:
        write_remote(root, "chain", middle.grpc, other.grpc, remote_model="pool")
        with clean_server(root, options=CARRIERS[request.param], tracebacks=False) as process:
            yield process


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_has_run_is_not_run_again(
    here: ServerProcess, runs: Path, name: str, kind: str
) -> None:
    before = len(runs.read_text().splitlines())
    with CLIENTS[kind](here) as client:
        for text in TEXTS:
            with pytest.raises(Unavailable) as failed:
                client.infer(name, {"INPUT0": np.array([text.encode()], object)})
            assert text in str(failed.value)
    assert runs.read_text().splitlines()[before:] == list(TEXTS)


@pytest.mark.parametrize(("name", "begun"), [("plain", "true"), ("unknown", "false")])
def test_an_error_says_whether_the_model_has_begun(
    here: ServerProcess, name: str, begun: str
) -> None:
    text = Input("INPUT0", np.array([b"away"], object))
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1], "data": ["away"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    answer = ask(here.http, "POST", f"/v2/models/{name}/infer", body)
    assert answer.headers["headrace-begun"] == begun
    with GrpcClient(here.grpc) as client:
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        with pytest.raises(grpc.RpcError) as failed:
            infer(infer_message(name, [text]), timeout=30)
        [message] = client.stream([infer_message(name, [text])])
    trailing: Any = failed.value.trailing_metadata()
    assert dict(trailing)["headrace-begun"] == begun
    told = {n: v.bool_param for n, v in message.infer_response.parameters.items()}
    assert told.get("headrace_begun", False) is (begun == "true")
