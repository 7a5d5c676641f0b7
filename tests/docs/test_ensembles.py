"""The page on ensembles: its configuration and its function are the same graph."""

from pathlib import Path

import pytest

from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.repository.config import parse_config
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "ensembles.md").read_text("utf-8")


def test_the_function_makes_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [written] = [parse_config(text, "pipeline").config for text in blocks(PAGE, "protobuf")]
    [program] = blocks(PAGE, "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {"__name__": "page"})
    saved = (tmp_path / "models" / "pipeline" / "config.pbtxt").read_text()
    assert graph(parse_config(saved, "pipeline").config) == graph(written)


def graph(config: ModelConfig) -> object:
    """A graph, whatever its inner tensors are called."""
    declared: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    names = {one.name for one in declared}

    def tensors(mapped: dict[str, str]) -> dict[str, str]:
        return {name: tensor if tensor in names else "" for name, tensor in mapped.items()}

    return (
        config.max_batch_size,
        [(one.name, one.data_type, list(one.dims)) for one in declared],
        [
            (step.model_name, tensors(dict(step.input_map)), tensors(dict(step.output_map)))
            for step in config.ensemble_scheduling.step
        ],
    )
