"""Models of docs/from-others.md are served, with the results of their original servers."""

import re
from pathlib import Path

import pytest

import headrace
from headrace.core.tensors import Array
from headrace.settings import OPTIONS
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "from-others.md").read_text(encoding="utf-8")


def test_ports_are_the_defaults() -> None:
    ports = {
        option.name: str(option.default) for option in OPTIONS if option.name.endswith("-port")
    }
    [row] = re.findall(r"^\| metrics at 8082 \| (.*) \|$", PAGE, re.MULTILINE)
    assert f"{ports['metrics-port']} (`--metrics-port`)" in row
    for door in ("http", "grpc", "metrics"):
        assert f"`--{door}-port`" in PAGE
        assert ports[f"{door}-port"] in PAGE


@pytest.mark.slow
def test_the_migrated_models(tmp_path: Path) -> None:
    files = {text.split()[1]: text for text in blocks(PAGE, "python")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    asked: dict[str, tuple[dict[str, object], list[object]]] = {
        "scale": ({"x": [1.5, 2]}, [3, 4]), "shout": ({"text": ["hey"]}, [b"HEY!"]),
        "classify": ({"x": [[0, 2, 1], [5, 0, 0]]}, [1, 0]), "mean": ({"x": [[1, 2, 6]]}, [3]),
    }  # fmt: skip
    assert {f"{name}.py" for name in asked} == set(files)
    with headrace.serve(*(tmp_path / name for name in files)) as server:
        for name, (inputs, expected) in asked.items():
            answer: Array = server.client.model(name)(**inputs).array
            assert answer.tolist() == expected, name
