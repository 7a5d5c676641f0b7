"""Pools in Python: generated files, refusals, and light imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.triton import Drift, Group, Model, Pool
from tests.support.stores import scan

ENDPOINTS = ["grpc://gpu-1:8001", "http://gpu-2:8000"]


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def test_models_on_external_servers(tmp_path: Path) -> None:
    pool = Pool(
        [
            Model("plain"),
            Model(
                "resnet", [Group(2, [0, 1]), Group(kind="cpu")], 32, remote="resnet50", version=3,
                parameters={"timeout_secs": 2.5, "remote_load": False},
                config="dynamic_batching { max_queue_delay_microseconds: 100 }",
            ),
        ],
        endpoints=ENDPOINTS,
        load=True,
        unload=True,
        strict=True,
        parameters={"max_in_flight": 4},
    )  # fmt: skip
    assert pool.write(tmp_path) == tmp_path
    found = {source.name: source for source in scan([tmp_path])}
    assert list(found) == ["plain", "resnet"]
    assert found["resnet"].versions == ()
    common = (
        'backend: "triton"' + parameter("endpoints", ",".join(ENDPOINTS))
        + parameter("remote_unload", "true") + parameter("remote_drift", "refuse")
        + parameter("max_in_flight", "4")
    )  # fmt: skip
    read = {
        name: text_format.Parse((tmp_path / name / "config.pbtxt").read_text(), ModelConfig())
        for name in found
    }
    assert read["plain"] == text_format.Parse(
        'name: "plain"' + common + parameter("remote_load", "true"), ModelConfig()
    )
    assert read["resnet"] == text_format.Parse(
        'name: "resnet" max_batch_size: 32 '
        "instance_group { kind: KIND_GPU count: 2 gpus: [0, 1] }"
        "instance_group { kind: KIND_CPU count: 1 }"
        "dynamic_batching { max_queue_delay_microseconds: 100 }"
        + common + parameter("remote_load", "false") + parameter("remote_model", "resnet50")
        + parameter("remote_version", "3") + parameter("timeout_secs", "2.5"),
        ModelConfig(),
    )  # fmt: skip
    assert pool.options() == []


def test_models_in_managed_tritons(tmp_path: Path) -> None:
    files = tmp_path / "trained"
    (files / "1").mkdir(parents=True)
    (files / "1" / "model.py").touch()
    (files / "labels.txt").touch()
    (files / "config.pbtxt").write_text("not this one")
    root = tmp_path / "models"
    pool = Pool(
        [Model("m", backend="python", files=files, max_batch_size=0)],
        processes="per-gpu", gpus=[0, 1], program="/opt/tritonserver",
    )  # fmt: skip
    pool.write(root)
    assert (root / "m" / "1" / "model.py").is_file()
    assert sorted(os.listdir(root / "m")) == ["1", "config.pbtxt", "labels.txt"]
    text = (root / "m" / "config.pbtxt").read_text()
    assert "max_batch_size: 0" in text
    assert text_format.Parse(text, ModelConfig()).parameters["remote_backend"].string_value
    assert pool.options() == [
        "--triton-server=/opt/tritonserver", "--triton-processes=per-gpu", "--triton-gpus=0,1",
    ]  # fmt: skip
    assert pool.drift() == []


def test_writing_again_changes_only_differences(tmp_path: Path) -> None:
    files, root = tmp_path / "trained", tmp_path / "models"
    for name in ("1", "2"):
        (files / name).mkdir(parents=True)
    pool = Pool([Model("m", backend="python", files=files)])
    pool.write(root)
    config = root / "m" / "config.pbtxt"
    before = config.stat()
    (files / "1").rmdir()
    (files / "3").mkdir()
    (root / "other").mkdir()
    pool.write(root)
    assert sorted(os.listdir(root / "m")) == ["2", "3", "config.pbtxt"]
    assert (config.stat().st_ino, config.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (root / "other").is_dir()
    Pool([Model("m", platform="p", files=files)]).write(root)
    assert config.stat().st_mtime_ns != before.st_mtime_ns


def test_files_that_are_not_links_are_kept(tmp_path: Path) -> None:
    files, root = tmp_path / "trained", tmp_path / "models"
    (files / "1").mkdir(parents=True)
    (root / "m" / "1").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="is no link"):
        Pool([Model("m", backend="python", files=files)]).write(root)
    Pool([Model("m", backend="python", files=root / "m")]).write(root)  # they lie there
    assert not (root / "m" / "1").is_symlink()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Pool([Model("a"), Model("a")], ENDPOINTS), "'a' is there twice"),
        (lambda: Pool([Model("a/b")], ENDPOINTS), "cannot be a model's name"),
        (lambda: Pool([Model("a")]), "give endpoints to the pool, or a backend and files"),
        (lambda: Pool([Model("a", backend="x")]), "a backend and files"),
        (lambda: Pool([Model("a", backend="x")], ENDPOINTS), "for a pool without endpoints"),
        (lambda: Pool([], ENDPOINTS, gpus=[1]), "are for a pool without endpoints"),
        (lambda: Pool([], load=True), "are for a pool with endpoints"),
        (lambda: Pool([Model("a", config="x: 1")], ENDPOINTS).config("a"), "'a': config: 1:1"),
    ],
)  # fmt: skip
def test_invalid_pools(make: "object", text: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=text):
        make()


def test_unreachable_servers() -> None:
    pool = Pool([Model("m")], ["grpc://127.0.0.1:1"])
    [found] = pool.drift(timeout=2)
    assert (found.model, found.endpoint, found.field) == ("m", "grpc://127.0.0.1:1", "model")
    with pytest.raises(ValueError, match="'endpoints'"):
        Pool([Model("m")], ["nonsense"]).drift()


def test_formatted_drift() -> None:
    found = Drift("m", "grpc://a:1", "instance_group", "2 x GPU 0", "1 x CPU")
    assert str(found) == "m on grpc://a:1: instance_group: 2 x GPU 0, not 1 x CPU"


def test_the_module_is_light() -> None:
    program = "import headrace.triton, sys; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"numpy", "google.protobuf", "grpc"} & set(ran.stdout.split())
