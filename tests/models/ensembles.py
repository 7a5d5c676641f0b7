"""Ensembles for the tests."""

from collections.abc import Mapping
from pathlib import Path

from tests.models.python_models import tensors

Tensors = tuple[tuple[str, str, str], ...]  # name, type and dims of each


def step(
    model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1
) -> str:
    """A step of `ensemble_scheduling`: the ensemble's tensors by input, and by output."""
    maps = [
        f'{kind}_map {{ key: "{name}" value: "{tensor}" }}'
        for kind, mapped in (("input", inputs), ("output", outputs))
        for name, tensor in mapped.items()
    ]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}\n'


def ensemble(inputs: Tensors, outputs: Tensors, *steps: str, rows: int = 8, more: str = "") -> str:
    """The configuration of an ensemble; `more` is part of its `ensemble_scheduling`."""
    return (
        f'platform: "ensemble"\nmax_batch_size: {rows}\n'
        + tensors("input", *inputs)
        + tensors("output", *outputs)
        + f"ensemble_scheduling {{\n{''.join(steps)}{more}}}\n"
    )


def write_ensemble(root: Path, name: str, config: str) -> None:
    """An ensemble with the version directory that Triton wants."""
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)
