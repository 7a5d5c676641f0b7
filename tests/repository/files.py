"""Files and configurations of models."""

from pathlib import Path

from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig


def write(path: Path, text: str = "one") -> None:
    """Write a file and its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def directories(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).mkdir(parents=True, exist_ok=True)
    return root


def config_of(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())
