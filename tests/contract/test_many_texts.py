"""A million BYTES elements through each door, to where strings are objects and back."""

from collections.abc import Iterator

import grpc
import httpx
import orjson
import pytest

from headrace.core.datatypes import Datatype
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.workers.elements import join, split
from tests.contract.conftest import CARRIERS
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import IDENTITY, tensors, write_python_model
from tests.support.grpc_client import OPTIONS, SERVICE
from tests.support.server_process import ServerProcess, clean_server

pytestmark = pytest.mark.slow

COUNT = 1_000_000
MODELS = ["in_worker", "in_onnx"]
ELEMENTS = {"mixed": [b"", b"a", "ä€".encode(), b"seven!!"] * (COUNT // 4), "empty": [b""] * COUNT}
every_model = pytest.mark.parametrize("model", MODELS)
every_kind = pytest.mark.parametrize("kind", ELEMENTS)


@pytest.fixture(scope="module", params=["default", "frontends"])
def texts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with two models that give back what they get."""
    root = tmp_path_factory.mktemp("texts")
    config = "max_batch_size: 8\n" + tensors("input", ("INPUT0", "STRING", "-1"))
    config += tensors("output", ("OUTPUT0", "STRING", "-1"))
    write_python_model(root, "in_worker", IDENTITY, config)
    write_model(root, "in_onnx", identity(Datatype.BYTES, ["rows", "length"]), "max_batch_size: 8")
    with clean_server(root, options=CARRIERS[request.param]) as server:
        yield server


@every_model
@every_kind
def test_http_binary(texts: ServerProcess, model: str, kind: str) -> None:
    raw = join(ELEMENTS[kind])
    shown = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, COUNT]}
    parameters = {"binary_data_output": True}
    size = {"parameters": {"binary_data_size": len(raw)}}
    head = orjson.dumps({"inputs": [shown | size], "parameters": parameters})
    answer = httpx.post(
        f"{texts.url}/v2/models/{model}/infer",
        content=head + raw,
        headers={"inference-header-content-length": str(len(head))},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text[:200]
    start = int(answer.headers["inference-header-content-length"])
    assert answer.content[start:] == raw


@every_model
@every_kind
def test_json(texts: ServerProcess, model: str, kind: str) -> None:
    data = list(map(bytes.decode, ELEMENTS[kind]))
    given = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, COUNT], "data": data}
    answer = httpx.post(
        f"{texts.url}/v2/models/{model}/infer",
        content=orjson.dumps({"inputs": [given]}),
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text[:200]
    assert orjson.loads(answer.content)["outputs"][0]["data"] == data


@every_model
@every_kind
@pytest.mark.parametrize("typed", [False, True])
def test_grpc(texts: ServerProcess, model: str, kind: str, typed: bool) -> None:
    message = pb.ModelInferRequest(model_name=model)
    given = message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, COUNT])
    if typed:
        given.contents.bytes_contents.extend(ELEMENTS[kind])
    else:
        message.raw_input_contents.append(join(ELEMENTS[kind]))
    with grpc.insecure_channel(texts.grpc, OPTIONS) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        answer = call(message, timeout=60)
    assert list(answer.outputs[0].shape) == [1, COUNT]
    [raw] = answer.raw_output_contents
    assert split(raw, COUNT) == ELEMENTS[kind]


def test_one_that_is_no_text_fails_alone(texts: ServerProcess) -> None:
    raw = join([b"a"] * (COUNT - 1) + [b"\xff"])
    message = pb.ModelInferRequest(model_name="in_onnx")
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, COUNT])
    message.raw_input_contents.append(raw)
    with grpc.insecure_channel(texts.grpc, OPTIONS) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(message, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "holds an element that is not UTF-8" in str(refused.value.details())
        message.raw_input_contents[0] = raw[:-1] + b"b"
        assert call(message, timeout=60).raw_output_contents[0] == raw[:-1] + b"b"
