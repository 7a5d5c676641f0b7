"""A server while it loads its models, and after a failed load."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import NotFound, Unavailable
from tests.contract.conftest import CLIENTS
from tests.contract.repository import write_failing_repository
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch, check_health
from tests.support.http_socket import ask
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

_ZERO = {"INPUT0": np.zeros((1, 1), np.float32)}


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that holds the load of the model `late` of a repository."""
    return write_failing_repository(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def starting(late: Path) -> Iterator[ServerProcess]:
    """A server with open ports; its model `late` is held in its load, `broken` will fail."""
    late.touch()
    root, options = late.parents[1], ["--exit-on-error=false"]
    with ServerProcess(root, options=options, wait=False) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
def started(starting: ServerProcess, late: Path) -> ServerProcess:
    """The same server with `late` loaded."""
    late.unlink()
    with GrpcClient(starting.grpc) as client:
        until(lambda: client.model_ready("late"), "the late model", seconds=60)
    return starting


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, started: ServerProcess) -> Iterator[Client]:
    """Clients of the server with a broken model, for each transport."""
    with CLIENTS[request.param](started) as client:
        yield client


def _is_being_loaded(client: GrpcClient, model: str) -> bool:
    """True if the model has a loading version, and not only its name."""
    found = [one for one in client.index().models if one.name == model]
    return [(one.version, one.state) for one in found] == [("1", "LOADING")]


def test_while_a_model_is_loading(starting: ServerProcess) -> None:
    with GrpcClient(starting.grpc) as client:
        assert client.live()
        assert not client.ready()
        assert not client.model_ready("late")
        assert all(model.state for model in client.index().models)  # also of those still to begin
        until(partial(_is_being_loaded, client, "late"), "its version")
        assert "late" not in {model.name for model in client.index(ready=True).models}
        assert check_health(client) == NOT_SERVING
        with HealthWatch(client) as watch:
            assert watch.next() == NOT_SERVING
    for make in CLIENTS.values():
        with make(starting) as client:
            for asks in (
                partial(client.infer, "late", _ZERO),
                partial(client.model_config, "late"),
            ):
                with pytest.raises(Unavailable, match="version 1 is not at ready state") as refusal:
                    asks(version="1")
                assert refusal.value.retry_after == 1
                with pytest.raises(Unavailable, match="'late' is not ready: it is being loaded"):
                    asks()
                assert refusal.value.retry_after == 1
            with pytest.raises(NotFound, match="'late' version 2 is not found"):
                client.model_metadata("late", "2")
    assert ask(starting.http, "GET", "/v2/health/live").document == {"live": True}
    answer = ask(starting.http, "GET", "/v2/health/ready")
    said = json.loads(answer.body)
    assert (answer.status, said["ready"]) == (503, False)
    assert said["reason"].startswith("models are being loaded: ")
    assert "late" in said["reason"]
    said = json.loads(ask(starting.http, "GET", "/v2/models/late/ready").body)
    assert "version 1 is LOADING" in said["reason"]


def test_a_model_that_failed(client: Client) -> None:
    models = {model.name: model for model in client.index().models}
    assert {name: model.state for name, model in models.items()} == {
        "broken": "UNAVAILABLE", "good": "READY", "hollow": "UNAVAILABLE", "late": "READY",
        "unheard_of": "UNAVAILABLE",
    }  # fmt: skip
    assert "model.onnx is not a valid ONNX model" in models["broken"].reason
    assert models["unheard_of"].reason == (
        "unheard_of/config.pbtxt:3: dynamic_batching.default_queue_policy.timeout_action:"
        " must be one of REJECT, DELAY, got 7"
    )
    assert {model.name for model in client.index(ready=True).models} == {"good", "late"}
    assert not client.model_ready("broken")
    for ask_for in (client.model_metadata, client.model_config):
        with pytest.raises(NotFound, match="'broken' has no available versions"):
            ask_for("broken")
        with pytest.raises(Unavailable, match="'broken' version 1 is not at ready state"):
            ask_for("broken", "1")
    with pytest.raises(NotFound, match="'broken' has no available versions"):
        client.infer("broken", _ZERO)
    with pytest.raises(Unavailable, match="'broken' version 1 is not at ready state"):
        client.infer("broken", _ZERO, version="1")


def test_other_models_are_served(client: Client) -> None:
    """Configured by `--exit-on-error=false`."""
    assert client.live()
    until(client.ready, "the last model to be tried")
    assert client.model_ready("good")
    assert client.infer("good", _ZERO)["OUTPUT0"].tolist() == [[1]]
    assert [model.name for model in client.statistics()] == ["good", "late"]
    # Clients see neither the server's paths nor the libraries' messages.
    (reason,) = [model.reason for model in client.index().models if model.name == "hollow"]
    assert reason == "ONNX Runtime cannot load hollow/1/model.onnx; the server's log says why"


def test_reason_of_a_failed_model(started: ServerProcess) -> None:
    said = json.loads(ask(started.http, "GET", "/v2/models/broken/versions/1/ready").body)
    assert said["reason"] == (
        "Request for unknown model: 'broken' version 1 is not at ready state (it is UNAVAILABLE):"
        " model.onnx is not a valid ONNX model: unknown wire type 6"
    )
    started.await_logged("failed to load broken version 1: ")
    started.await_logged("/hollow/1/model.onnx failed:No graph was found in the protobuf.")


def test_health_of_a_server_that_is_ready_without_some_models(started: ServerProcess) -> None:
    with GrpcClient(started.grpc) as client:
        until(client.ready, "the last model to be tried")
        assert check_health(client) == SERVING
        with HealthWatch(client) as watch:
            assert watch.next() == SERVING
