"""Metadata of the server and its models, over every transport."""

import pytest

from headrace import __version__
from headrace.core.errors import InvalidRequest, NotFound, Unavailable
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelQueuePolicy
from tests.support.client import Client


def test_server_metadata(caller: Client) -> None:
    metadata = caller.server_metadata()
    assert (metadata.name, metadata.version) == ("headrace", __version__)
    assert list(metadata.extensions) == [
        "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
        "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
        "binary_tensor_data", "parameters", "statistics", "trace", "logging",
    ]  # fmt: skip


def test_model_metadata(caller: Client) -> None:
    metadata = caller.model_metadata("simple")
    assert (metadata.name, metadata.platform) == ("simple", "onnxruntime_onnx")
    assert list(metadata.versions) == ["1"]
    inputs = [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs]
    outputs = [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs]
    assert inputs == [("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16])]
    assert outputs == [("OUTPUT0", "INT32", [-1, 16]), ("OUTPUT1", "INT32", [-1, 16])]
    assert metadata.properties["backend"] == "onnxruntime"


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("unbatched", [2, 3]), ("scalar", []), ("row_sum", [-1, -1]), ("matrix", [-1, -1, -1]),
        ("bare", [-1, 3]), ("flat", [-1, 1]), ("folded", [-1, 2, 2]),
    ],
)  # fmt: skip
def test_shapes_in_metadata(caller: Client, model: str, shape: list[int]) -> None:
    assert list(caller.model_metadata(model).inputs[0].shape) == shape


@pytest.mark.parametrize(("model", "version", "versions"), [
    ("versions_default", "", ["10"]), ("versions_latest", "", ["3", "10"]),
    ("versions_all", "", ["1", "2", "3", "10"]), ("versions_specific", "", ["1", "3"]),
    ("versions_all", "2", ["2"]),
])  # fmt: skip
def test_versions_in_metadata(
    caller: Client, model: str, version: str, versions: list[str]
) -> None:
    assert list(caller.model_metadata(model, version).versions) == versions


def test_documents_of_unknown_models(caller: Client) -> None:
    for ask in (caller.model_metadata, caller.model_config):
        with pytest.raises(NotFound, match="Request for unknown model: 'nope' is not found"):
            ask("nope")
        with pytest.raises(NotFound, match="unknown model: 'simple' version 7 is not found"):
            ask("simple", "7")
        with pytest.raises(NotFound, match="'versions_latest' version 1 is not found"):
            ask("versions_latest", "1")
    with pytest.raises(InvalidRequest, match="requested model 'nope' is not available"):
        caller.statistics("nope")
    with pytest.raises(InvalidRequest, match="requested model version is not available for model"):
        caller.statistics("simple", "7")


def test_config_as_written(caller: Client) -> None:
    config = caller.model_config("spin_delay")
    policy = config.dynamic_batching.default_queue_policy
    assert (config.name, config.max_batch_size) == ("spin_delay", 1)
    assert policy.timeout_action == ModelQueuePolicy.DELAY
    assert policy.default_timeout_microseconds == 60_000_000
    assert policy.allow_timeout_override
    assert config.parameters["execution"].string_value == "thread"


def test_config_is_completed_from_the_model(caller: Client) -> None:
    config = caller.model_config("bare")
    assert (config.name, config.backend) == ("bare", "onnxruntime")
    assert config.platform == "onnxruntime_onnx"
    assert config.default_model_filename == "model.onnx"
    assert config.max_batch_size == 64
    assert list(config.dynamic_batching.preferred_batch_size) == [64]
    assert config.version_policy.latest.num_versions == 1
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [
        ("INPUT0", 11, [3]),
        ("INPUT1", 11, [3]),
    ]
    [group] = config.instance_group
    assert (group.name, group.count) == ("bare", 1)
    assert group.kind == ModelInstanceGroup.KIND_CPU


def test_configs_of_a_version_and_of_an_optional_input(caller: Client) -> None:
    config: ModelConfig = caller.model_config("versions_specific", "3")
    assert list(config.version_policy.specific.versions) == [1, 3]
    optional = caller.model_config("optional_bias")
    assert {t.name: t.optional for t in optional.input} == {"INPUT0": False, "BIAS": True}


def test_index(caller: Client) -> None:
    models = caller.index().models
    assert [m.version for m in models if m.name == "versions_latest"] == ["3", "10"]
    assert {m.state for m in models} == {"READY"}
    assert {m.reason for m in models} == {""}
    assert caller.index(ready=True) == caller.index()


def test_loading_by_request_is_refused(caller: Client) -> None:
    for ask in (caller.load, caller.unload):
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            ask("simple")
        # The right to load is checked before the rest of the request.
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            ask("simple", "some_repository")
    assert caller.model_ready("simple")
