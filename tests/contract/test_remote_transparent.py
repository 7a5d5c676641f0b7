"""Requests that go on to another server as they came: clients are told what that server tells."""

import gzip
import json
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.wire.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.contract.test_remote import CASES, NAMES, outcome
from tests.support.client import Client, Inputs
from tests.support.grpc_client import SERVICE, procedure
from tests.support.http_socket import ask
from tests.support.remote import values, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

INTS = np.arange(32, dtype=np.int32).reshape(2, 16)


@pytest.fixture(scope="module")
def there(servers: Callable[[str], ServerProcess]) -> ServerProcess:
    """The server that runs the models."""
    return servers("default")


@pytest.fixture(scope="module", params=["grpc", "http"])
def endpoint(request: pytest.FixtureRequest, there: ServerProcess) -> str:
    """Where it is asked."""
    return f"grpc://{there.grpc}" if request.param == "grpc" else there.url


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def front(
    request: pytest.FixtureRequest, endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The server before it."""
    root = tmp_path_factory.mktemp("front")
    for name in NAMES:
        write_remote(root, name, endpoint, forward="transparent", forward_headers="x-tenant")
    renamed = {"remote_model": "versions_all", "remote_version": "3"}
    write_remote(root, "third", endpoint, forward="transparent", **renamed)
    with clean_server(root, options=CARRIERS[request.param], tracebacks=False) as process:
        yield process


@pytest.fixture(
    scope="module", params=["grpc", "http-binary", pytest.param("http", marks=pytest.mark.slow)]
)
def pair(
    request: pytest.FixtureRequest, there: ServerProcess, front: ServerProcess
) -> Iterator[tuple[Client, Client]]:
    """The model's server, and the one before it."""
    with CLIENTS[request.param](there) as direct, CLIENTS[request.param](front) as through:
        yield direct, through


@pytest.mark.parametrize(("name", "inputs"), CASES)
def test_answers_are_the_same(pair: tuple[Client, Client], name: str, inputs: Inputs) -> None:
    direct, through = pair
    assert outcome(through, name, inputs) == outcome(direct, name, inputs)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES, Datatype.BF16])
def test_datatypes(pair: tuple[Client, Client], datatype: Datatype) -> None:
    direct, through = pair
    if not direct.carries(datatype) or (datatype is Datatype.BYTES and not direct.carries_bytes):
        pytest.skip("this form of tensors has no place for it")
    inputs, name = {"INPUT0": values(datatype, (8, 2))}, f"identity_{datatype}"
    assert outcome(through, name, inputs) == outcome(direct, name, inputs)


def test_another_name_and_version_there(pair: tuple[Client, Client]) -> None:
    _, through = pair
    zero = {"INPUT0": np.zeros((1, 1), np.float32)}
    for version in ("", "3"):
        answer = through.infer("third", zero, version=version)
        assert (answer.model_name, answer.model_version) == ("third", "3")
        assert answer["OUTPUT0"].tolist() == [[3]]


def test_large_ones(pair: tuple[Client, Client]) -> None:
    direct, through = pair
    inputs = {"INPUT0": values(Datatype.FP32, (8, 100_000))}
    assert outcome(through, "identity_FP32", inputs) == outcome(direct, "identity_FP32", inputs)


@pytest.mark.parametrize("kind", ["grpc", "http-binary"])
def test_they_are_counted(front: ServerProcess, endpoint: str, kind: str) -> None:
    labels = {"model": "simple", "version": "1"}
    with Scraper(front.metrics) as scraper, CLIENTS[kind](front) as client:
        before = scraper.now()
        client.infer("simple", {"INPUT0": INTS, "INPUT1": INTS})
        assert isinstance(outcome(client, "simple", {"INPUT0": INTS}), tuple)  # an error
        after = scraper.now()
    name = "nv_inference_request_success"
    assert after.value(name, **labels) - before.value(name, **labels) == 1
    if kind.startswith(endpoint[:4]):  # otherwise it has been read, and refused, here
        name, labels["endpoint"] = "headrace_endpoint_requests_total", endpoint
        assert after.value(name, **labels) - before.value(name, **labels) == 2


def test_a_message_goes_on_as_it_came(front: ServerProcess, endpoint: str) -> None:
    """With what nobody here knows."""
    if endpoint.startswith("http"):
        pytest.skip("it is read, and written for HTTP")
    message = pb.ModelInferRequest(model_name="simple", id="7")
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        message.inputs[-1].contents.int_contents.extend(range(16))
    data = message.SerializeToString() + b"\x9a\x06\x03abc"  # field 99
    with grpc.insecure_channel(front.grpc) as channel:
        call = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        answer = call(pb.ModelInferRequest.FromString(data))
    assert (answer.model_name, answer.id) == ("simple", "7")
    assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == list(range(0, 32, 2))


_VECTOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1, 2.5, 3]}
_BODY = json.dumps({"id": "7", "inputs": [_VECTOR]}).encode()


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("infer", _BODY, {}),
        ("infer", gzip.compress(_BODY, mtime=0), {"content-encoding": "gzip"}),
        ("infer", _BODY, {"accept-encoding": "deflate"}),
        ("infer", b"{", {}),
        ("infer", b"", {}),
        ("infer", gzip.compress(_BODY, mtime=0), {"content-encoding": "zstd"}),
        ("infer", b"x" * 12, {"inference-header-content-length": "0"}),
        ("infer", _BODY, {"inference-header-content-length": "9999"}),
        ("generate", b'{"INPUT0": [1, 2, 3], "id": "9"}', {}),
        ("generate", b'{"INPUT0": []}', {}),
        ("generate_stream", b'{"INPUT0": [1, 2, 3]}', {}),
    ],
)
def test_bodies_go_on_as_they_came(
    front: ServerProcess, there: ServerProcess, path: str, body: bytes, headers: dict[str, str]
) -> None:
    """Whatever they are; of the answers, what concerns the body."""
    told = []
    for server in (there, front):
        answer = ask(server.http, "POST", f"/v2/models/identity_FP32/{path}", body, **headers)
        kept = {n: v for n, v in answer.headers.items() if n.startswith(("content-", "inference"))}
        told.append((answer.status, kept, answer.body))
    assert told[1] == told[0]


def test_a_name_in_json(front: ServerProcess, endpoint: str) -> None:
    """It has to be found in the answer, which must not be packed for that."""
    packed = {"accept-encoding": "gzip"} if endpoint.startswith("http") else {}
    body = json.dumps({"inputs": [{**_VECTOR, "shape": [1, 1], "data": [0]}]}).encode()
    answer = ask(front.http, "POST", "/v2/models/third/infer", body, **packed)
    assert answer.document["model_name"] == "third"
    assert answer.document["outputs"][0]["data"] == [3]
