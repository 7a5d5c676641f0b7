"""Specifications of Python models to load."""

import json
from pathlib import Path
from textwrap import dedent

from headrace.core.model_spec import LoadSpec


def spec(
    root: Path, source: str, config: dict[str, object] | None = None, **given: str
) -> LoadSpec:
    """Specification of a model on disk."""
    folder = root / "m" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(dedent(source))
    return LoadSpec(
        "m", folder / "model.py", root / "m", given, version=1, instance="m_0",
        as_json=lambda: json.dumps(config or {}), auto_complete=True,
    )  # fmt: skip
