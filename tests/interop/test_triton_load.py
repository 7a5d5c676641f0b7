"""A real Triton in the mode `explicit`, on which this server loads models repeatedly."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ServerError
from headrace.triton import Group, Model, Pool
from tests.support.grpc_client import GrpcClient
from tests.support.managed import CPU, write_managed
from tests.support.remote import free_ports
from tests.support.scrape import until
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

ROW = np.array([[1, 2]], np.float32)


def start(folder: Path, ports: list[int]) -> Triton:
    triton = Triton(
        real_program(), folder / "models", folder / "log", ["--model-control-mode=explicit"], ports
    )
    triton.wait()
    return triton


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_managed(tmp_path / "models", CPU)
    config = tmp_path / "models" / "times" / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "triton"', 'backend: "python"'))
    return tmp_path


def test_a_model_is_loaded_with_its_instances(folder: Path) -> None:
    ports = free_ports(2)
    triton = start(folder, ports)
    try:
        asked = Model("times", [Group(3, kind="cpu")], parameters={"health_interval_secs": 0.2})
        pool = Pool([asked], [f"grpc://{triton.grpc}"], load=True, unload=True)
        [missing] = pool.drift()
        assert missing.field == "model"
        root = pool.write(folder / "front")
        options = ("--model-control-mode=explicit", "--load-model=*")
        with (
            ServerProcess(root, options=options) as front,
            GrpcClient(front.grpc) as client,
            GrpcClient(triton.grpc) as beyond,
        ):
            assert client.infer("times", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]
            [group] = beyond.model_config("times").instance_group
            assert group.count == 3
            assert pool.drift() == []
            other = Pool([Model("times", [Group(1, kind="cpu")], 16)], pool.endpoints)
            assert [one.field for one in other.drift()] == ["max_batch_size", "instance_group"]
            triton.stop()
            until(lambda: not client.model_ready("times"), "the loss")
            triton = start(folder, ports)
            until(lambda: client.model_ready("times"), "the model")
            assert client.infer("times", {"INPUT0": ROW})["OUTPUT0"].tolist() == [[3, 6]]
            assert pool.drift() == []
            client.unload("times")
            until(lambda: not ready(triton), "the model to go there")
            assert front.stop() == 0
            assert "bug " not in front.log
    finally:
        triton.stop()


def ready(triton: Triton) -> bool:
    with GrpcClient(triton.grpc) as client:
        try:
            return client.model_ready("times")
        except ServerError:
            return False
