"""OpenTelemetry: exported spans, and trace contexts of clients."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Input
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.http_socket import ask
from tests.support.otlp_receiver import OtlpReceiver, Span
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.traces import grpc_settings, http_settings

# It calls `identity`, on request as part of its trace, and returns its trace context.
OUTER = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            [name] = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy().ravel()
            if name == b"fail":
                raise ValueError("as asked")
            traced = {"trace": request.trace()} if name == b"with the trace" else {}
            if name != b"alone":
                value = pb_utils.Tensor("INPUT0", np.ones((1, 3), np.float32))
                inner = pb_utils.InferenceRequest(
                    model_name="identity", requested_output_names=["OUTPUT0"], inputs=[value],
                    **traced,
                ).exec()
                assert not inner.has_error(), inner.error().message()
            said = [request.trace().get_context(), json.loads(request.parameters())]
            told = np.array([[json.dumps(said).encode()]], object)
            return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", told)])
"""
CONFIG = "max_batch_size: 8\n" + tensors("input", ("COMMAND", "STRING", "1")) + tensors(
    "output", ("TOLD", "STRING", "1")
)  # fmt: skip
ROW = np.ones((1, 3), np.float32)
_CLOCKS_NS = 50_000_000
_numbers = count(1)


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="default"),
        pytest.param(("--frontends=1",), id="frontends", marks=pytest.mark.slow),
        pytest.param(
            ("--http-fast-path=false", "--grpc-transport=grpcio"),
            id="reference",
            marks=pytest.mark.slow,
        ),
    ],
)
def server(
    request: pytest.FixtureRequest,
    collector: OtlpReceiver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "identity", identity(Datatype.FP32, ["rows", 3]), "max_batch_size: 8")
    write_python_model(root, "outer", OUTER, CONFIG)
    config = (
        "mode=opentelemetry", "level=TIMESTAMPS", "rate=1",
        f"opentelemetry,url={collector.address}", "opentelemetry,bsp_schedule_delay=20",
        "opentelemetry,resource=test.key=test.value",
    )  # fmt: skip
    options = [f"--trace-config={text}" for text in config] + list(request.param)
    with clean_server(root, options=options) as process:
        yield process


def test_traced_requests_are_exemplars(server: ServerProcess) -> None:
    trace = f"{next(_numbers):032x}"
    answer = ask(
        server.http, "POST", "/v2/models/identity/infer",
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}',
        traceparent=f"00-{trace}-{9:016x}-01",
    )  # fmt: skip
    assert answer.status == 200
    accept = "application/openmetrics-text;version=1.0.0"

    def told() -> list[str]:
        answer = ask(server.metrics, "GET", "/metrics", accept=accept)
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.body.endswith(b"# EOF\n")
        return [line for line in answer.body.decode().splitlines() if trace in line]

    until(lambda: bool(told()), "an exemplar")
    [line] = told()
    assert re.fullmatch(
        r'headrace_request_duration_seconds_bucket\{model="identity",version="1",le="[0-9.e-]+"\}'
        rf' [1-9]\d* # \{{trace_id="{trace}"\}} [0-9.e-]+ [0-9.]+', line,
    )  # fmt: skip


class Doors:
    """Ways to run a model: each takes a model, an input, an id and headers."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def http(self, model: str, value: Any, id: str, **headers: str) -> Any:
        kind, name = ("BYTES", "COMMAND") if isinstance(value, str) else ("FP32", "INPUT0")
        data = [value] if isinstance(value, str) else value.ravel().tolist()
        tensor = {"name": name, "shape": [1, len(data)], "datatype": kind, "data": data}
        body = json.dumps({"id": id, "inputs": [tensor]}).encode()
        path = f"/v2/models/{model}/infer"
        answer = ask(self._server.http, "POST", path, body, **headers)
        if answer.status != 200:
            raise ExecutionFailed(answer.error)
        return answer.document["outputs"][0]["data"]

    def generate(self, model: str, value: Any, id: str, **headers: str) -> None:
        body = json.dumps({"id": id, "INPUT0": value.ravel().tolist()}).encode()
        path = f"/v2/models/{model}/generate_stream"
        assert ask(self._server.http, "POST", path, body, **headers).status == 200

    def unary(self, model: str, value: Any, id: str, **headers: str) -> None:
        with GrpcClient(self._server.grpc) as client:
            call = client.procedure("ModelInfer", pb.ModelInferResponse)
            call(infer_message(model, [Input("INPUT0", value)], id=id), metadata=_pairs(headers))

    def stream(self, model: str, value: Any, id: str, **headers: str) -> None:
        with GrpcClient(self._server.grpc) as client:
            stream = Stream(client, *_pairs(headers))
            stream.send(infer_message(model, [Input("INPUT0", value)], id=id))
            stream.half_close()
            assert len(stream.rest()) == 1


def _pairs(headers: dict[str, str]) -> list[tuple[str, str]]:
    return list(headers.items())


DOORS = ("http", "generate", "unary", "stream")


@pytest.fixture
def id() -> str:
    return f"request {next(_numbers)}"


def of_request(id: str) -> Callable[[Span], bool]:
    return lambda span: span.attributes.get("triton.request_id") == id


@pytest.mark.parametrize("door", DOORS)
def test_a_request_is_three_spans(
    server: ServerProcess, collector: OtlpReceiver, door: str, id: str
) -> None:
    getattr(Doors(server), door)("identity", ROW, id)
    model = collector.tree(of_request(id), 2)
    [compute] = model.children
    root = collector.tree(lambda span: span.id == model.parent, 3)
    assert (root.name, model.name, compute.name) == ("InferRequest", "identity", "compute")
    assert root.trace == model.trace == compute.trace
    assert root.parent == ""
    assert model.start <= compute.start <= compute.end <= model.end
    # The root may be of a front end, a process with its own reading of the system clock.
    assert root.start - _CLOCKS_NS <= model.start <= model.end <= root.end + _CLOCKS_NS
    kind = "HTTP_RECV" if door in ("http", "generate") else "GRPC_WAITREAD"
    sent = kind[:4] + "_SEND"
    assert root.events == [
        f"{kind}_START", f"{kind}_END", "INFER_RESPONSE_COMPLETE", f"{sent}_START", f"{sent}_END",
    ]  # fmt: skip
    assert model.events == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert compute.events == [
        "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"
    ]  # fmt: skip
    assert model.attributes["triton.model_name"] == "identity"
    assert model.attributes["triton.model_version"] == 1
    assert root.resource["service.name"] == "headrace"
    assert root.resource["test.key"] == "test.value"
    assert not root.failed


@pytest.mark.parametrize("door", DOORS)
def test_a_clients_trace_is_continued(
    server: ServerProcess, collector: OtlpReceiver, door: str, id: str
) -> None:
    trace, span = f"{next(_numbers):032x}", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{span}-01", "tracestate": "vendor=x"}
    getattr(Doors(server), door)("identity", ROW, id, **headers)
    root = collector.tree(lambda found: found.trace == trace and found.parent == span, 3)
    assert root.name == "InferRequest"
    assert root.state == "vendor=x"
    assert root.children[0].attributes["triton.request_id"] == id


@pytest.mark.parametrize("door", DOORS)
def test_an_unsampled_client_trace_is_not_recorded(
    server: ServerProcess, collector: OtlpReceiver, door: str, id: str
) -> None:
    header = f"00-{next(_numbers):032x}-b7ad6b7169203331-00"
    getattr(Doors(server), door)("identity", ROW, f"not {id}", traceparent=header)
    getattr(Doors(server), door)("identity", ROW, id)
    spans = collector.wait(lambda spans: any(map(of_request(id), spans)))
    assert not any(map(of_request(f"not {id}"), spans))


def test_calls_of_a_model_join_its_trace(
    server: ServerProcess, collector: OtlpReceiver, id: str
) -> None:
    [told] = Doors(server).http("outer", "with the trace", id)
    context, parameters = json.loads(told)
    outer = collector.tree(of_request(id), 4)
    assert sorted(span.name for span in outer.children) == ["compute", "identity"]
    [inner] = [span for span in outer.children if span.name == "identity"]
    assert [span.name for span in inner.children] == ["compute"]
    assert inner.attributes["triton.trace_parent_id"] == outer.attributes["triton.trace_id"]
    expected = f"00-{outer.trace}-{outer.id}-01"
    assert json.loads(context) == {"traceparent": expected}
    assert parameters == {}


def test_calls_without_a_trace_context_do_not_join(
    server: ServerProcess, collector: OtlpReceiver, id: str
) -> None:
    Doors(server).http("outer", "without the trace", id)
    assert [span.name for span in collector.tree(of_request(id), 2).children] == ["compute"]


def test_a_model_sees_the_context_of_an_unsampled_trace(server: ServerProcess, id: str) -> None:
    headers = {"traceparent": f"00-{7:032x}-b7ad6b7169203331-00", "tracestate": "a=b,c=d"}
    [told] = Doors(server).http("outer", "alone", id, **headers)
    assert json.loads(json.loads(told)[0]) == headers
    http_settings(server, "outer", trace_level=["OFF"])
    try:
        assert json.loads(Doors(server).http("outer", "alone", id)[0]) == [None, {}]
    finally:
        http_settings(server, "outer", trace_level=None)


def test_a_request_that_fails(server: ServerProcess, collector: OtlpReceiver, id: str) -> None:
    with pytest.raises(ExecutionFailed):
        Doors(server).http("outer", "fail", id)
    model = collector.tree(of_request(id), 1)
    assert model.failed
    assert collector.tree(lambda span: span.id == model.parent, 2).failed


def test_settings_of_the_mode(server: ServerProcess, collector: OtlpReceiver) -> None:
    expected = {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1",
        "trace_mode": "opentelemetry", "url": f"http://{collector.address}",
        "resource": "test.key=test.value", "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "20", "bsp_max_export_batch_size": "512",
    }  # fmt: skip
    assert http_settings(server) == grpc_settings(server, "identity") == expected
