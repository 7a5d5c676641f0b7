"""Models with several backends: the first reachable one answers and is named."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import RepositoryError
from headrace.engine.loading import load
from headrace.engine.opening import LoadOptions, open_model
from headrace.placement.backend import load_backends
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.repository.layout import read_model_directory
from tests.contract.conftest import BEHIND_DOORS, CARRIERS, CLIENTS
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import IDENTITY, write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.client import Input, Output
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.http_socket import ask
from tests.support.remote import free_port, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
SIMPLE = add_sub(Datatype.FP32, 3)
BOTH = {"INPUT0": FLOATS, "INPUT1": FLOATS}
# The backend that answers, by model.
ANSWERS = {
    "first": "triton", "second": "onnxruntime", "standby": "triton-2", "third": "onnxruntime",
    "python": "python", "local": "onnxruntime", "plain": "",
}  # fmt: skip
STREAMS = {"teller": "triton", "standing_by": "triton-2", "here": "python"}  # decoupled ones


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The upstream of some of the models."""
    root = tmp_path_factory.mktemp("there")
    for name in ("first", "standby", "local"):
        write_model(root, name, SIMPLE, "max_batch_size: 8")
    write_python_model(root, "teller", TELLER, TELLER_CONFIG)
    with ServerProcess(root) as process:
        yield process


@pytest.fixture(scope="module")
def models(there: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of models with several backends."""
    root = tmp_path_factory.mktemp("here")
    dead = f"127.0.0.1:{free_port()}"
    write_remote(root, "first", there.grpc, fail_over="onnxruntime")
    labels = 'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "names" }'
    write_remote(
        root, "second", dead, fail_over="onnxruntime", remote_version="7",
        more=f"max_batch_size: 8 {labels} dynamic_batching {{ priority_levels: 2"
        " default_priority_level: 1 }",
    )  # fmt: skip
    (root / "second" / "names").write_text("a\nb\nc\n")
    write_remote(root, "standby", dead, fail_over=f"grpc://{there.grpc}")
    write_remote(root, "third", dead, fail_over=f"grpc://{dead}; onnxruntime")
    declared = "".join(
        f'{kind} {{ name: "{kind.upper()}0" data_type: TYPE_FP32 dims: [ 3 ] }}'
        for kind in ("input", "output")
    )
    write_remote(
        root, "python", dead, fail_over="python", fail_over_instances="2",
        more=f"max_batch_size: 4 {declared}",
    )  # fmt: skip
    local = (
        'backend: "onnxruntime" max_batch_size: 8 parameters { key: "fail_over"'
        f' value {{ string_value: "grpc://{there.grpc}" }} }}'
    )
    for name in ("first", "second", "third"):
        write_model(root, name, SIMPLE)
    write_model(root, "local", SIMPLE, local)
    write_model(root, "plain", SIMPLE, "max_batch_size: 8")
    write_remote(root, "teller", there.grpc, fail_over="python")
    write_remote(root, "standing_by", dead, fail_over=f"grpc://{there.grpc}", remote_model="teller")
    write_remote(root, "here", dead, fail_over="python", more=TELLER_CONFIG)
    for name in ("teller", "here"):
        (root / name / "1").mkdir()
        (root / name / "1" / "model.py").write_text(dedent(TELLER))
    (root / "python" / "1").mkdir()
    (root / "python" / "1" / "model.py").write_text(IDENTITY.replace("\n    ", "\n"))
    return root


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def front(request: pytest.FixtureRequest, models: Path) -> Iterator[ServerProcess]:
    with clean_server(models, options=CARRIERS[request.param], tracebacks=False) as process:
        yield process


def json_body(name: str, **more: Any) -> bytes:
    names = ["INPUT0"] if name == "python" else ["INPUT0", "INPUT1"]
    inputs = [
        {"name": n, "shape": [2, 3], "datatype": "FP32", "data": FLOATS.tolist()} for n in names
    ]
    return json.dumps({"inputs": inputs, **more}).encode()


def by_http(front: ServerProcess, name: str) -> tuple[list[float], str]:
    answer = ask(front.http, "POST", f"/v2/models/{name}/infer", json_body(name))
    assert answer.status == 200, answer
    return answer.document["outputs"][0]["data"], answer.headers.get("headrace-backend", "")


def by_grpc(front: ServerProcess, name: str) -> tuple[list[float], str]:
    inputs = [Input("INPUT0", FLOATS)] + ([Input("INPUT1", FLOATS)] if name != "python" else [])
    with GrpcClient(front.grpc) as client:
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        response, call = infer.with_call(infer_message(name, inputs), timeout=30)
    raw: bytes = response.raw_output_contents[0]
    told = dict(call.trailing_metadata()).get("headrace-backend", "")
    return np.frombuffer(raw, np.float32).tolist(), told


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("way", [by_http, by_grpc])
def test_the_answer_names_its_backend(
    front: ServerProcess, way: Callable[[ServerProcess, str], object], name: str
) -> None:
    sums = FLOATS if name == "python" else FLOATS + FLOATS
    assert way(front, name) == (sums.ravel().tolist(), ANSWERS[name])


@pytest.mark.parametrize(("name", "backend"), STREAMS.items())
def test_a_decoupled_model_has_several_backends_too(
    front: ServerProcess, name: str, backend: str
) -> None:
    text = Input("TEXT", np.array([[b"a"]], object))
    inputs = [text, Input("COUNT", np.array([[3]], np.int32))]
    with GrpcClient(front.grpc) as client:
        asked = infer_message(name, inputs, [Output("INDEX")])
        found = [message.infer_response for message in client.stream([asked])]
    raws = [response.raw_output_contents[0] for response in found]
    assert [np.frombuffer(raw, np.int32).tolist() for raw in raws] == [[0], [1], [2]]
    with Scraper(front.metrics) as scraper:
        served = scraper.now().value(
            "headrace_backend_requests_total", model=name, version="1", backend=backend
        )
    assert served == 1


def test_other_forms_of_requests_name_the_backend_too(front: ServerProcess) -> None:
    path = "/v2/models/second"
    timed = ask(
        front.http, "POST", f"{path}/infer",
        json_body("second", priority=2, parameters={"headrace_timing": True}),
    )  # fmt: skip
    assert timed.headers["headrace-backend"] == "onnxruntime"
    assert "compute_us" in timed.document["parameters"]
    generated = ask(
        front.http, "POST", f"{path}/generate",
        json.dumps({"INPUT0": [1, 2, 3], "INPUT1": [1, 2, 3]}).encode(),
    )  # fmt: skip
    assert generated.document["OUTPUT0"] == [2, 4, 6]
    assert generated.headers["headrace-backend"] == "onnxruntime"
    packed = ask(
        front.http, "POST", f"{path}/infer", json_body("second"), **{"Accept-Encoding": "gzip"}
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["headrace-backend"] == "onnxruntime"


@pytest.mark.parametrize("kind", CLIENTS)
def test_classification_runs_on_this_server(front: ServerProcess, kind: str) -> None:
    with CLIENTS[kind](front) as client:
        answer = client.infer("second", BOTH, classes={"OUTPUT0": 1})
    assert answer["OUTPUT0"].tolist() == [[b"4.000000:2:c"], [b"10.000000:2:c"]]


def test_a_model_is_ready_while_any_backend_is(front: ServerProcess) -> None:
    with CLIENTS["grpc"](front) as client:
        assert all(client.model_ready(name) for name in ANSWERS)
        config = client.model_config("second")
        assert config.backend == "triton"
        assert config.parameters["fail_over"].string_value == "onnxruntime"
        reasons = {model.name: model.reason for model in client.index().models}
    assert reasons["second"] == "triton is not used: no server answers for model 'second'"
    assert not reasons["first"]
    with Scraper(front.metrics) as scraper:
        found = scraper.now()
    labels = {"model": "second", "version": "1"}
    assert found.value("headrace_backend_active", backend="onnxruntime", **labels) == 1
    assert found.value("headrace_backend_active", backend="triton", **labels) == 0
    assert found.value("headrace_backend_requests_total", backend="onnxruntime", **labels) >= 2
    shown = {own["model"] for own, _ in found.samples("headrace_backend_active")}
    assert shown == {name for name, backend in ANSWERS.items() if backend} | set(STREAMS)


@pytest.mark.slow
def test_a_request_that_no_backend_can_run(tmp_path: Path) -> None:
    """The first is absent from the start, and the second is lost."""
    write_model(tmp_path / "there", "standby", SIMPLE, "max_batch_size: 8")
    with ServerProcess(tmp_path / "there") as other:
        dead = f"127.0.0.1:{free_port()}"
        write_remote(
            tmp_path / "here", "standby", dead, fail_over=f"grpc://{other.grpc}", wait_secs="0.1"
        )
        with ServerProcess(tmp_path / "here") as front:
            assert by_grpc(front, "standby")[1] == "triton-2"
            other.stop()
            for _ in range(2):  # one that waits, and one that is refused
                with pytest.raises(grpc.RpcError) as refused:
                    by_grpc(front, "standby")
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            answer = ask(front.http, "POST", "/v2/models/standby/infer", json_body("standby"))
            assert answer.status == 503
            assert "none of its backends (triton, triton-2) can run it" in answer.error
            assert ask(front.http, "GET", "/v2/models/standby/ready").status == 503
            assert "bug " not in front.log


@pytest.mark.parametrize(
    ("parameters", "model", "told"),
    [
        (
            {"fail_over": "onnxruntime"}, add_sub(Datatype.INT32, 3),
            "onnxruntime does not go with triton: first/config.pbtxt: input[0].data_type: the"
            " model's input 'INPUT0' is INT32, not FP32",
        ),
        (
            {"fail_over": "onnxruntime"}, add_sub(Datatype.FP32, 4),
            "onnxruntime does not go with triton: first/config.pbtxt: input[0].dims: the model's"
            " input 'INPUT0' has shape [-1,4], the configuration means [-1,3]",
        ),
        ({"fail_over": "onnxruntime"}, b"nothing", "model.onnx"),
        ({"fail_over": "onnxrutime"}, SIMPLE, "first/config.pbtxt:5: parameters['fail_over']: exp"),
        ({"fail_over": "onnxruntime"}, None, "has no version directory"),
        ({"fail_over": "grpc://127.0.0.1:1", "execution": "thread"}, None, "runs on other servers"),
        ({"fail_over": "grpc://127.0.0.1:1;http:/x"}, SIMPLE, "expected backends of this server"),
        ({"endpoints": "grpc://127.0.0.1:1", "fail_over": "grpc://127.0.0.1:2"}, None,
         "triton: no server answers for model 'first'"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_explained(
    there: ServerProcess, tmp_path: Path, parameters: dict[str, str], model: bytes | None, told: str
) -> None:
    write_remote(tmp_path, "first", there.grpc, **parameters)
    if model is not None:
        write_model(tmp_path, "first", model)
    source, options = read_model_directory(tmp_path / "first"), LoadOptions(1)
    with pytest.raises(RepositoryError) as refused:
        load(open_model(source, load_backends(), options), 1, options)
    assert told in str(refused.value)


def test_settings_of_each_backend_take_effect(there: ServerProcess, tmp_path: Path) -> None:
    parameters = {"execution": "thread", "intra_op_thread_count": "1", "fail_over_instances": "2"}
    write_remote(tmp_path, "first", there.grpc, fail_over="onnxruntime", **parameters)
    write_model(tmp_path, "first", SIMPLE)
    options = LoadOptions(1)
    opened = open_model(read_model_directory(tmp_path / "first"), load_backends(), options)
    loaded = load(opened, 1, options)
    assert not opened.warnings
    assert not loaded.warnings
    assert [(i.name, str(i.kind), i.rank) for i in loaded.instances] == [
        ("first_0", "remote", 0),
        ("first_onnxruntime_0", "thread", 1),
        ("first_onnxruntime_1", "thread", 1),
    ]
    assert loaded.config.max_batch_size == 8
    for instance in loaded.instances:
        instance.model.close()
