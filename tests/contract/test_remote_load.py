"""Models that this server loads on an upstream, with configured instances.

The upstream is a headrace server in the mode `explicit`, which loads on request alone.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from google.protobuf import json_format

from headrace.core.errors import ServerError
from tests.contract.conftest import CLIENTS
from tests.support.client import Client
from tests.support.managed import CPU, write_managed
from tests.support.remote import write_remote
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

ROW = np.array([[1, 2]], np.float32)
EXPLICIT = "--model-control-mode=explicit"
THREE = "instance_group { kind: KIND_CPU count: 3 }"
NAMES = ("plain", "three", "leaves", "drifts")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("there")
    for name in NAMES:
        write_managed(root, CPU, name)
        config = root / name / "config.pbtxt"
        config.write_text(config.read_text().replace('backend: "triton"', 'backend: "python"'))
    with ServerProcess(root, options=(EXPLICIT,)) as process:
        yield process


@pytest.fixture(scope="module")
def beyond(there: ServerProcess) -> Iterator[Client]:
    with CLIENTS["grpc"](there) as client:
        yield client


@pytest.fixture(scope="module")
def front(
    there: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("front")
    often = {"drift_interval_secs": "1", "remote_load": "true"}
    write_remote(root, "plain", there.grpc, remote_load="true")
    write_remote(root, "three", there.url, more=THREE, **often)
    write_remote(root, "leaves", there.url, remote_load="true", remote_unload="true")
    write_remote(root, "drifts", there.grpc, more=THREE, drift_interval_secs="1")
    options = (EXPLICIT, "--load-model=plain", "--load-model=three", "--load-model=leaves")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture(scope="module")
def client(front: ServerProcess) -> Iterator[Client]:
    with CLIENTS["http"](front) as client:
        yield client


def counts(client: Client, name: str) -> list[int]:
    return [group.count for group in client.model_config(name).instance_group]


def test_models_are_loaded_with_the_configured_instance_groups(
    client: Client, beyond: Client
) -> None:
    assert client.infer("plain", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]
    assert counts(beyond, "plain") == [2]
    assert counts(client, "plain") == [2]  # as it is there
    assert client.infer("three", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]
    assert counts(beyond, "three") == [3]
    assert beyond.model_config("three").max_batch_size == 8  # all else is as it was


def test_changes_on_the_upstream_are_reverted(client: Client, beyond: Client) -> None:
    beyond.load("three")
    until(lambda: counts(beyond, "three") == [3], "three instances")
    beyond.unload("three")
    until(lambda: beyond.model_ready("three"), "the model")
    until(lambda: counts(beyond, "three") == [3], "three instances")
    until(lambda: client.model_ready("three"), "a health check to have seen it")
    assert client.infer("three", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]


def test_a_model_is_unloaded_with_its_last_use(client: Client, beyond: Client) -> None:
    assert beyond.model_ready("leaves")
    client.load("leaves", config='{"backend": "triton", "max_batch_size": 4}')  # another takes over
    assert client.model_config("leaves").max_batch_size == 4
    assert beyond.model_ready("leaves")
    client.unload("leaves")
    until(lambda: not beyond.model_ready("leaves"), "the model to be unloaded")
    with pytest.raises(ServerError):
        client.infer("leaves", {"INPUT0": ROW})


def test_differences_are_reported(
    client: Client, beyond: Client, front: ServerProcess, there: ServerProcess
) -> None:
    beyond.load("drifts")
    client.load("drifts")  # with other instances than asked for; it serves
    assert client.infer("drifts", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]
    assert counts(client, "drifts") == [3]  # as it was asked for
    front.await_logged("instance_group: 3 x CPU asked for, 2 x CPU there")
    name, labels = "headrace_endpoint_differences", {"model": "drifts", "version": "1"}
    with Scraper(front.metrics) as scraper:
        assert scraper.now().value(name, **labels) == 1
        config = beyond.model_config("drifts")
        config.instance_group[0].count = 3
        beyond.load("drifts", config=json_format.MessageToJson(config))
        told = f"model drifts: server grpc://{there.grpc} has it as asked for again"
        until(lambda: told in front.log, "the difference to go")
        assert scraper.now().value(name, **labels) == 0
