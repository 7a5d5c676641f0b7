"""What a Python model and the server tell one another of the model's configuration."""

from pathlib import Path
from typing import Any

from google.protobuf import json_format

from headrace.core.errors import InvalidConfig
from headrace.core.model_spec import LoadSpec
from headrace.wire.pb.model_config_pb2 import ModelConfig

# What `auto_complete_config` may say.
_COMPLETED = (
    "max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy",
)  # fmt: skip


def with_completion(config: ModelConfig, completed: dict[str, Any] | None) -> ModelConfig:
    """A copy of `config` with what the model says of itself; raises `InvalidConfig`."""
    result = ModelConfig()
    result.CopyFrom(config)
    for name in _COMPLETED if completed is not None else ():
        assert completed is not None
        if name in completed:
            result.ClearField(name)  # type: ignore[arg-type]
            try:
                json_format.ParseDict({name: completed[name]}, result)
            except json_format.ParseError as error:
                raise InvalidConfig(f"auto_complete_config: {error}") from error
    return result


def start_arguments(spec: LoadSpec, config: str) -> dict[str, str]:
    """What `initialize` gets; `config` is the whole configuration as JSON."""
    return {
        "model_config": config,
        "model_instance_kind": _kind(spec),
        "model_instance_name": spec.instance,
        "model_instance_device_id": str(spec.device or 0),
        "model_repository": str(Path(spec.root)),
        "model_version": str(spec.version),
        "model_name": spec.model,
    }


def _kind(spec: LoadSpec) -> str:
    if spec.by_model:
        return "MODEL"
    return "CPU" if spec.device is None else "GPU"
