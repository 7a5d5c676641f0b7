from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.core.errors import LoadFailed
from headrace.plugins.triton.servers import remote_config, remote_name, remove_model, write_model
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


OWN = config(
    'name: "resnet" backend: "triton" platform: "triton" max_batch_size: 8'
    " dynamic_batching { max_queue_delay_microseconds: 100 }"
    " instance_group { kind: KIND_GPU gpus: [0, 1] } optimization { cuda { graphs: true } }"
    " version_policy { all {} } default_model_filename: 'a.plan'"
    + parameter("remote_backend", "tensorrt")
    + parameter("timeout_secs", "3")
    + parameter("traffic", "x")
    + parameter("EXECUTION_ENV_PATH", "env.tar.gz")
)
GROUPS = [ModelInstanceGroup(kind=ModelInstanceGroup.KIND_GPU, gpus=[0])]


def test_the_configuration_for_triton() -> None:
    assert remote_config(OWN, "resnet.3.1", 3, GROUPS) == config(
        'name: "resnet.3.1" backend: "tensorrt" max_batch_size: 8'
        " instance_group { kind: KIND_GPU gpus: [0] } optimization { cuda { graphs: true } }"
        " version_policy { specific { versions: [3] } } default_model_filename: 'a.plan'"
        + parameter("EXECUTION_ENV_PATH", "env.tar.gz")
    )


def test_models_not_batched_here_are_batched_by_triton() -> None:
    own = ModelConfig()
    own.CopyFrom(OWN)
    own.parameters["batching"].string_value = "off"
    found = remote_config(own, "n", 3, [])
    assert found.dynamic_batching.max_queue_delay_microseconds == 100
    assert not found.instance_group
    assert "batching" not in found.parameters


def test_a_platform_instead_of_a_backend() -> None:
    own = config('backend: "triton"' + parameter("remote_platform", "tensorflow_savedmodel"))
    found = remote_config(own, "n", 1, [])
    assert (found.platform, found.backend) == ("tensorflow_savedmodel", "")


def test_each_load_has_a_name_of_its_own() -> None:
    assert remote_name("resnet", 3, 1) == "resnet.3.1"
    assert remote_name("a b/../é@space", 1, 2) == "a_b_.._" + "_@space.1.2"


def test_the_files_are_links(tmp_path: Path) -> None:
    root, directory = tmp_path / "resnet", tmp_path / "there"
    for name in ("1/model.plan", "2/model.plan", "configs/a.pbtxt", "warmup/data", ".hidden/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "config.pbtxt").write_text("ours")
    (root / "labels.txt").write_text("labels")
    write_model(directory, root, 2, remote_config(OWN, "there", 2, GROUPS))
    assert directory.stat().st_mode & 0o777 == 0o700
    found = sorted(path.name for path in directory.iterdir())
    assert found == ["2", "config.pbtxt", "labels.txt", "warmup"]
    assert (directory / "2" / "model.plan").read_text() == "2/model.plan"
    assert config((directory / "config.pbtxt").read_text()).name == "there"
    remove_model(directory)
    assert not directory.exists()
    assert (root / "2" / "model.plan").exists()


def test_a_model_without_a_version_directory(tmp_path: Path) -> None:
    (tmp_path / "resnet").mkdir()
    with pytest.raises(LoadFailed, match="no version directory"):
        write_model(tmp_path / "there", tmp_path / "resnet", 1, OWN)
