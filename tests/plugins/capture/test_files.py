"""Files of captured calls: lines that are rotated, and parts in Parquet."""

import logging
import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from headrace.plugins.capture.files import JsonLines, ParquetParts, read_documents
from headrace.plugins.capture.records import CapturedCall


def call(number: int) -> CapturedCall:
    return CapturedCall("m", "1", str(number), "http", 10**18 + number, "", {"n": number}, [])


def ids(path: Path) -> list[str]:
    return [document["id"] for document in read_documents(str(path))]


def test_lines_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    file = JsonLines(str(path), 400, 1)
    for number in range(7):
        file.write([call(number)])
    file.close()
    assert ids(tmp_path / "capture.jsonl.1") + ids(path) == ["4", "5", "6"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert file.unwritten == 0


def test_calls_that_cannot_be_written_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "folder").mkdir()
    lines, parts = JsonLines(f"{folder}/c.jsonl", 0, 1), ParquetParts(f"{folder}/c.parquet", 1, 0)
    (folder / "c.jsonl").unlink()
    folder.rmdir()
    caplog.set_level(logging.ERROR)
    for file in (lines, parts):
        for _ in range(2):
            file.write([call(1), call(2)])
        assert file.unwritten == 4
        assert (
            len([one for one in caplog.records if "cannot write the capture" in one.message]) == 1
        )
        caplog.clear()
    folder.mkdir()
    lines.write([call(3)])
    parts.write([call(3)])
    assert ids(folder / "c.jsonl") == ["3"]
    assert len(list(folder.glob("c-*.parquet"))) == 1


def test_parts_are_whole_when_they_have_a_name(tmp_path: Path) -> None:
    now = [0.0]
    file = ParquetParts(f"{tmp_path}/c.parquet", 0, 0, now=lambda: now[0])
    file.write([call(1), call(2)])
    assert list(tmp_path.iterdir()) == []
    now[0] = 59
    file.write([])
    assert list(tmp_path.iterdir()) == []
    now[0] = 60
    file.write([])
    [part] = tmp_path.iterdir()
    assert ids(part) == ["1", "2"]
    file.write([call(3)])
    file.close()
    parts = sorted(tmp_path.iterdir())
    assert [ids(one) for one in parts] == [["1", "2"], ["3"]]
    table: Any = pq.read_table(parts[0])
    assert table.column("parameters").to_pylist() == ['{"n":1}', '{"n":2}']
    assert [orjson.loads(text) for text in table.column("parameters").to_pylist()] == [
        document["parameters"] for document in read_documents(str(parts[0]))
    ]


def test_nobody_else_can_read_a_part_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    def write_table(table: Any, where: Path, **options: Any) -> None:
        with where.open("r+b") as begun:
            modes.append(os.fstat(begun.fileno()).st_mode & 0o777)
        write(table, where, **options)

    write = pq.write_table
    monkeypatch.setattr(pq, "write_table", write_table)
    file = ParquetParts(f"{tmp_path}/c.parquet", 1, 0)
    file.write([call(1)])
    [part] = tmp_path.iterdir()
    assert [*modes, part.stat().st_mode & 0o777] == [0o600, 0o600]
    assert ids(part) == ["1"]


def test_old_parts_are_removed(tmp_path: Path) -> None:
    other = tmp_path / "c-mine.parquet"
    other.touch()
    file = ParquetParts(f"{tmp_path}/c.parquet", 1, 2)
    for number in range(5):
        file.write([call(number)])
    parts = sorted(tmp_path.glob("c-0*.parquet"))
    assert [ids(one) for one in parts] == [["2"], ["3"], ["4"]]
    assert other.exists()


def test_calls_of_a_part_are_not_lost_if_an_older_one_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"c-{0:020d}.parquet").mkdir()
    file = ParquetParts(f"{tmp_path}/c.parquet", 1, 1)
    for number in range(4):
        file.write([call(number)])
    parts = [one for one in sorted(tmp_path.iterdir()) if one.is_file()]
    assert [ids(one) for one in parts] == [["0"], ["1"], ["2"], ["3"]]
    assert file.unwritten == 0
    [logged] = [one.message for one in caplog.records]
    assert "cannot remove old parts" in logged


def test_a_directory_that_is_missing_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        JsonLines(f"{tmp_path}/no/c.jsonl", 0, 0)
    with pytest.raises(PermissionError, match="its directory is missing"):
        ParquetParts(f"{tmp_path}/no/c.parquet", 0, 0)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("{}\n{")
    with pytest.raises(ValueError, match="line 2"):
        list(read_documents(str(path)))
