"""tritonclient loads and unloads models, in every one of its forms."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.contract import graphs
from tests.interop.triton import FAMILIES, Client
from tests.models.onnx_graphs import write_model
from tests.support.server_process import ServerProcess, clean_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("explicit")
    for family in FAMILIES:
        write_model(root, f"add_{family}", graphs.add_constant(1), "max_batch_size: 4")
    options = ("--model-control-mode=explicit", "--load-overrides=files")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture(params=FAMILIES)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    address = server.http if request.param.startswith("http") else server.grpc
    with Client(request.param, address) as client:
        yield client


def ask(client: Client, model: str) -> float:
    """What a model makes of 0."""
    zero = client.input("INPUT0", np.zeros((1, 1), np.float32))
    return float(client.call("infer", model, [zero]).as_numpy("OUTPUT0")[0, 0])


def states(client: Client, model: str) -> list[tuple[str, str]]:
    """What the index says of a model."""
    found = client.call("get_model_repository_index")
    if client.over_http:
        return [(m.get("state", ""), m.get("reason", "")) for m in found if m["name"] == model]
    return [(m.state, m.reason) for m in found.models if m.name == model]


def rows(client: Client, model: str) -> int:
    """The largest batch of a model."""
    config = client.call("get_model_config", model)
    return int(config["max_batch_size"] if client.over_http else config.config.max_batch_size)


def test_load_override_undo_and_unload(client: Client) -> None:
    model = f"add_{client.family}"
    assert states(client, model) == [("", "")]
    assert not client.call("is_model_ready", model)
    assert client.call("is_server_ready")
    client.call("load_model", model)
    assert client.call("is_model_ready", model)
    assert ask(client, model) == 1
    client.call("load_model", model, config=json.dumps({"max_batch_size": 2}))
    assert rows(client, model) == 2
    files = {"file:1/model.onnx": graphs.add_constant(7)}
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.call("load_model", model, files=files)
    client.call("load_model", model, config='{"backend": "onnxruntime"}', files=files)
    assert ask(client, model) == 7
    client.call("load_model", model)  # which undoes both
    assert (ask(client, model), rows(client, model)) == (1, 4)
    assert states(client, model) == [("READY", "")]
    client.call("unload_model", model)
    assert not client.call("is_model_ready", model)
    client.call("unload_model", model, unload_dependents=True)
    assert states(client, model) in ([("UNLOADING", "")], [("UNAVAILABLE", "unloaded")])
    assert client.call("is_server_ready")


def test_errors_are_the_clients_own_exceptions(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'") as caught:
        client.call("load_model", "nobody")
    status = "404" if client.over_http else "StatusCode.NOT_FOUND"
    assert caught.value.status() == status
    with pytest.raises(InferenceServerException, match="path traversal characters"):
        client.call("load_model", "a..b")
    with pytest.raises(InferenceServerException, match="Model name cannot be empty"):
        client.call("load_model", "")
