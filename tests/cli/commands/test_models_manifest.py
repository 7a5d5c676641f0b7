"""`headrace models manifest`."""

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.repository.model_files import MANIFEST


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["models", "manifest", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_manifest_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.py").write_text("one")
    assert run(str(tmp_path), "--check") == 1
    assert f"there is no {MANIFEST}" in capsys.readouterr().err
    assert run(str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}: {MANIFEST} written, files: 1\n"
    assert run(str(tmp_path), "--check") == 0
    (tmp_path / "1/model.py").write_text("two")
    capsys.readouterr()
    assert run("--check", "--json", str(tmp_path)) == 1
    [report] = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["1/model.py does not hold what it is to hold"]


def test_a_path_that_is_not_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "nowhere")) == 1
    assert "it is no directory of a model" in capsys.readouterr().err
