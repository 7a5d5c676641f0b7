"""The class labels of outputs, which lie in files beside the model's configuration."""

from pathlib import Path

from headrace.repository.config import Problem
from headrace.wire.pb.model_config_pb2 import ModelConfig


def read_labels(
    directory: Path, config: ModelConfig
) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    """The labels of each output that names a file with them, and what is wrong with the files."""
    root = directory.resolve()
    labels: dict[str, tuple[str, ...]] = {}
    found: list[Problem] = []
    for index, output in enumerate(config.output):
        if not output.label_filename:
            continue
        try:
            labels[output.name] = _lines(root, output.label_filename)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # not the path, which clients see
            text = f"'{output.label_filename}' cannot be read: {reason}"
            found.append(Problem(f"output[{index}].label_filename", text))
    return labels, found


def _lines(root: Path, name: str) -> tuple[str, ...]:
    """The lines of a file within `root`; raises `OSError` or `ValueError`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError("it lies outside of the model's directory")
    # Not by splitlines, which also ends lines at characters that may be part of a label.
    lines = path.read_bytes().decode("utf-8-sig").split("\n")
    if not lines[-1]:
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)
