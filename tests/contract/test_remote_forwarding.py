"""Forwarded parameters, headers, deadlines and trace contexts."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.support.grpc_client import SERVICE, procedure
from tests.support.http_socket import ask
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.remote import write_remote
from tests.support.server_process import ServerProcess, clean_server

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        def answer(request):
            rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().shape[0]
            told = dict(priority=request.priority(), timeout=request.timeout())
            text = request.parameters() + "|" + repr(told)
            array = np.array([[text.encode()]] * rows, np.object_)
            return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", array)])
        return [answer(request) for request in requests]
"""
_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "TOLD" data_type: TYPE_STRING dims: 1 }
dynamic_batching {}
"""
_clients = count(1)
_INPUT = {"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [[1]]}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def _traced(collector: OtlpReceiver) -> list[str]:
    settings = (
        "mode=opentelemetry", "level=TIMESTAMPS", "rate=1",
        f"opentelemetry,url={collector.address}", "opentelemetry,bsp_schedule_delay=20",
    )  # fmt: skip
    return [f"--trace-config={text}" for text in settings]


@pytest.fixture(scope="module")
def there(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver
) -> Iterator[ServerProcess]:
    """An upstream whose model returns the parameters and headers of its requests."""
    root = tmp_path_factory.mktemp("told")
    (root / "told" / "1").mkdir(parents=True)
    (root / "told" / "config.pbtxt").write_text(_CONFIG)
    (root / "told" / "1" / "model.py").write_text(_MODEL)
    options = ("--grpc-header-forward-pattern=^x-|^authorization", *_traced(collector))
    with ServerProcess(root, options=options) as process:
        yield process


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def front(
    request: pytest.FixtureRequest,
    there: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
    collector: OtlpReceiver,
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("front")
    write_remote(
        root, "told", there.grpc, forward_headers="X-Tenant, authorization",
        forward_priority="true",
    )  # fmt: skip
    step_told = step("told", {"X": "X"}, {"TOLD": "TOLD"})
    composed = ensemble((("X", "INT32", "1"),), (("TOLD", "STRING", "1"),), step_told)
    write_ensemble(root, "composed", composed)
    write_ensemble(root, "kept", composed + "response_cache { enable: true }")
    options = (*CARRIERS[request.param], "--http-header-forward-pattern=^x-as-parameter")
    options += ("--cache-config=local,size=1000000",)
    options += tuple(_traced(collector))
    with clean_server(root, options=options, tracebacks=False) as process:
        yield process


def over_http(
    server: ServerProcess, parameters: Any = None, model: str = "told", **headers: str
) -> tuple[Any, str]:
    """Parameters and headers that the model received."""
    body = json.dumps({"inputs": [_INPUT], "parameters": parameters or {}}).encode()
    answer = ask(server.http, "POST", f"/v2/models/{model}/infer", body, **headers)
    assert answer.status == 200, answer.body
    told, _, rest = answer.document["outputs"][0]["data"][0].partition("|")
    return json.loads(told), rest


def over_grpc(channel: grpc.Channel, *metadata: tuple[str, str], timeout: float = 60) -> Any:
    """Parameters that the model received."""
    message = pb.ModelInferRequest(model_name="told", raw_input_contents=[b"\1\0\0\0"])
    message.inputs.add(name="X", datatype="INT32", shape=[1, 1])
    call = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
    answer = call(message, metadata=metadata, timeout=timeout)
    told = bytes(answer.raw_output_contents[0])[4:].decode()
    return json.loads(told.partition("|")[0])


def test_configured_headers_are_forwarded(front: ServerProcess) -> None:
    told, _ = over_http(front, X_Tenant="me", X_Other="no", X_As_Parameter="yes")
    assert told == {"x-tenant": "me", "X-As-Parameter": "yes"}
    with grpc.insecure_channel(front.grpc) as channel:
        told = over_grpc(channel, ("x-tenant", "you"), ("x-other", "no"), ("authorization", "b"))
        assert told == {"x-tenant": "you", "authorization": "b"}
    # Parameters are not taken for headers.
    given = {"headrace_forward:x-tenant": "me", "headrace_deadline": 1, "x-tenant": 2}
    assert over_http(front, given)[0] == given


def test_headers_reach_the_upstreams_of_steps(front: ServerProcess) -> None:
    asked = {"X_Tenant": "me", "X_Other": "no", "X_As_Parameter": "yes"}
    told, _ = over_http(front, None, "composed", **asked)
    assert told == {"x-tenant": "me", "X-As-Parameter": "yes"}


def test_kept_answers_of_an_ensemble_are_for_the_headers_of_its_steps(front: ServerProcess) -> None:
    for tenant in ("me", "you", "me"):
        assert over_http(front, None, "kept", X_Tenant=tenant)[0] == {"x-tenant": tenant}


def test_each_request_keeps_its_own_headers(front: ServerProcess, pool: ThreadPoolExecutor) -> None:
    with grpc.insecure_channel(front.grpc) as channel:

        def told(number: int) -> Any:
            return over_grpc(channel, ("x-tenant", str(number % 3)))

        found = list(pool.map(told, range(60)))
    assert found == [{"x-tenant": str(number % 3)} for number in range(60)]


def test_priority_and_timeout_are_forwarded(front: ServerProcess) -> None:
    told, rest = over_http(front, {"priority": 2, "timeout": 60_000_000})
    assert told == {}
    seen = eval(rest)
    assert seen["priority"] == 2
    assert 0 < seen["timeout"] < 60_000_000


class Timed(grpc.GenericRpcHandler):
    """A server that answers with its client's timeout in seconds, 0 for none."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            if name == "ModelReady":
                return pb.ModelReadyResponse(ready=True).SerializeToString()
            if name == "ModelMetadata":
                said = pb.ModelMetadataResponse(name="timed")
                said.inputs.add(name="X", datatype="INT32", shape=[1])
                said.outputs.add(name="LEFT", datatype="FP32", shape=[1])
                return said.SerializeToString()
            if name != "ModelInfer":
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
            remaining = context.time_remaining()  # centuries stand for no deadline
            left = np.array([remaining if remaining and remaining < 1e6 else 0], np.float32)
            given = pb.ModelInferResponse(raw_output_contents=[left.tobytes()])
            given.outputs.add(name="LEFT", datatype="FP32", shape=[1])
            return given.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(
    scope="module", params=[(), pytest.param(("--frontends=1",), marks=pytest.mark.slow)],
    ids=["alone", "front end"],
)  # fmt: skip
def timed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("timed")
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [Timed()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        write_remote(root, "timed", f"127.0.0.1:{port}", timeout_secs="0")
        with clean_server(root, options=request.param) as process:
            yield process
        server.stop(None).wait()


@pytest.mark.parametrize(("timeout", "most"), [(None, 0), (40, 41)])
def test_deadlines_are_forwarded(timed: ServerProcess, timeout: float | None, most: float) -> None:
    message = pb.ModelInferRequest(model_name="timed", raw_input_contents=[b"\1\0\0\0"])
    message.inputs.add(name="X", datatype="INT32", shape=[1])
    with grpc.insecure_channel(timed.grpc) as channel:
        call = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        answer = call(message, timeout=timeout)
    [left] = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert (left > 0) == (most > 0)
    assert left <= most


def test_the_call_is_part_of_the_trace(front: ServerProcess, collector: OtlpReceiver) -> None:
    """The upstream's work is part of the client's trace."""
    client = f"{next(_clients):016x}"
    over_http(front, traceparent=f"00-{'5' * 32}-{client}-01")
    root = collector.tree(lambda span: span.parent == client, 7)
    [model] = root.children
    assert sorted(span.name for span in model.children) == ["call", "compute"]
    [call] = [span for span in model.children if span.name == "call"]
    assert call.attributes["headrace.endpoint"].startswith("grpc://")
    assert call.kind == 3  # of a client
    [behind] = call.children
    assert behind.name == "InferRequest"
    assert behind.trace == root.trace == "5" * 32


def test_an_unsampled_trace_is_forwarded_as_such(
    front: ServerProcess, collector: OtlpReceiver
) -> None:
    unrecorded, client = f"{next(_clients):016x}", f"{next(_clients):016x}"
    over_http(front, traceparent=f"00-{'6' * 32}-{unrecorded}-00")
    over_http(front, traceparent=f"00-{'6' * 32}-{client}-01")
    collector.tree(lambda span: span.parent == client, 7)
    assert not [s for s in collector.wait(bool) if s.parent == unrecorded]
