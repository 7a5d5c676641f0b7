"""The programs of the pages of hosts run as they stand."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, check_program

PRINTED = {
    "ray": "10000 True 2500\n",
    "spark": "10000 Row(id=0, label=0)\nRow(id=0, label=0)\n",
    "dask": "10000 True 0\n",
    "beam": "10000\n",
    "flink": "1000 True 251\n",
}  # fmt: skip
NEEDED = {
    "ray": "ray", "spark": "pyspark", "dask": "distributed", "beam": "apache_beam",
    "flink": "pyflink",
}  # fmt: skip


@pytest.mark.parametrize("page", PRINTED)
def test_program(page: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDED[page], reason=f"{page} is not here; see CONTRIBUTING.md")
    [program] = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), "python")
    check_program(program, PRINTED[page], tmp_path, seconds=200)
