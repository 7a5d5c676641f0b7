"""The programs and commands of docs/run.md run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import csv, parquet

from tests.docs.pages import BLOCK, ROOT

PAGE = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
COMMANDS = {"python": [sys.executable, "-c"], "sh": ["bash", "-ec"]}


@pytest.mark.slow
def test_blocks(tmp_path: Path) -> None:
    (tmp_path / "model_repository").symlink_to(ROOT / "model_repository")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = ""
    for language, block in BLOCK.findall(PAGE):
        if language in COMMANDS:
            ended = subprocess.run(
                [*COMMANDS[language], block], cwd=tmp_path, capture_output=True, text=True,
                timeout=120, env={**os.environ, "PATH": path},
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            ran += ended.stderr
    assert ran.count("50,000 rows in ") == 4
    whole = parquet.read_table(tmp_path / "out.parquet")
    assert whole["id"].to_pylist() == [*range(50_000)]
    assert csv.read_csv(tmp_path / "labels.csv.gz")["label"].equals(whole["label"])
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 50_000
