"""Files of results: what each format says, and that the bytes depend on the blocks alone."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from headrace.plugins.run.journal import Finished
from headrace.plugins.run.outputs import Output, finished_table, is_direct
from headrace.plugins.run.rows import Position
from headrace.plugins.run.sources import TableFailed

TABLE = pa.table({
    "id": [1, 2, 3, 4],
    "score": pa.array([0.1, 2.5, float("nan"), 1e-9], pa.float32()),
    "vector": pa.array([[0.1, 0.2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32())),
    "text": ["a", 'say "b"', None, "d\ne"],
})  # fmt: skip


def done(table: Any, bad: bytes = b"") -> Finished:
    return Finished(Position(), table.num_rows, 0, finished_table(table, TABLE.schema), bad)


def written(path: Path, form: str, *tables: Any, codec: str = "", bad: str = "") -> bytes:
    output = Output(str(path), form, codec, TABLE.schema, bad)
    for table in tables:
        output.write(done(table, b"{}\n"))
    assert not path.exists()
    output.finish()
    return path.read_bytes()


def test_parquet_and_arrow_have_the_same_table(tmp_path: Path) -> None:
    for form, read in (("parquet", parquet.read_table), ("arrow", read_arrow)):
        written(tmp_path / form, form, TABLE.slice(0, 1), TABLE.slice(1))
        found: Any = read(tmp_path / form)
        assert found.select(["id", "vector", "text"]).equals(TABLE.select(["id", "vector", "text"]))
        assert np.isnan(found["score"][2].as_py())


def read_arrow(path: Path) -> Any:
    return pa.ipc.open_file(path).read_all()


def test_json_lines_have_exact_floats_with_few_digits(tmp_path: Path) -> None:
    lines = written(tmp_path / "o.jsonl", "jsonl", TABLE).splitlines()
    assert json.loads(lines[0]) == {"id": 1, "score": 0.1, "vector": [0.1, 0.2], "text": "a"}
    assert json.loads(lines[2])["score"] is None
    assert json.loads(lines[3])["text"] == "d\ne"


@pytest.mark.parametrize(("form", "separator"), [("csv", ","), ("tsv", "\t")])
def test_csv_has_lists_as_json(form: str, separator: str, tmp_path: Path) -> None:
    written(tmp_path / "o", form, TABLE)
    found = csv.read_csv(
        tmp_path / "o", parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    )
    assert found["vector"].to_pylist() == ["[0.1,0.2]", "[3.0,4.0]", "[5.0,6.0]", "[7.0,8.0]"]
    assert found["text"].to_pylist() == ["a", 'say "b"', "", "d\ne"]


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream", "csv", "jsonl"])
def test_the_same_blocks_give_the_same_bytes_and_no_rows_a_file(form: str, tmp_path: Path) -> None:
    first = written(tmp_path / "a", form, TABLE, TABLE)
    whole = TABLE.filter(pa.array([True] * 4))
    again = written(tmp_path / "b", form, pa.concat_tables([TABLE.slice(0, 2), TABLE.slice(2)]),
                    whole)  # fmt: skip
    assert first == again
    assert written(tmp_path / "c", form) != first


def test_large_blocks_are_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.plugins.run.outputs._GROUP_ROWS", 6)
    written(tmp_path / "o", "parquet", *[TABLE] * 5)
    about = parquet.ParquetFile(tmp_path / "o").metadata
    assert [about.row_group(n).num_rows for n in range(about.num_row_groups)] == [8, 8, 4]


def test_bad_rows_and_results_replace_older_files(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("old")
    (tmp_path / "o").write_text("old")
    output = Output(str(tmp_path / "o"), "jsonl", "", TABLE.schema, str(tmp_path / "bad"))
    output.write(Finished(Position(), 0, 1, b"", b"{}\n"))
    assert (tmp_path / "bad").read_text() == (tmp_path / "o").read_text() == "old"
    output.finish()
    assert ((tmp_path / "bad").read_text(), (tmp_path / "o").read_text()) == ("{}\n", "")
    assert sorted(os.listdir(tmp_path)) == ["bad", "o"]


def test_compressed_and_discarded(tmp_path: Path) -> None:
    written(tmp_path / "o.csv.gz", "csv", TABLE, codec="gzip")
    text = pa.CompressedInputStream(tmp_path / "o.csv.gz", "gzip").read()
    assert text.startswith(b'"id","score"')
    output = Output(str(tmp_path / "p"), "parquet", "", TABLE.schema, "")
    output.discard()
    assert os.listdir(tmp_path) == ["o.csv.gz"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TableFailed, match=r"nowhere/o\.csv: cannot be written: "):
        Output(str(tmp_path / "nowhere" / "o.csv"), "csv", "", TABLE.schema, "")
    with pytest.raises(TableFailed, match=r"nowhere/bad: cannot be written: "):
        Output(str(tmp_path / "o.csv"), "csv", "", TABLE.schema, str(tmp_path / "nowhere" / "bad"))
    assert not os.listdir(tmp_path)
    assert is_direct("/dev/null")
    assert is_direct("-")
    assert not is_direct(str(tmp_path / "o.csv"))
