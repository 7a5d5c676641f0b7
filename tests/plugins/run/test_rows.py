"""Blocks of rows: formats, borders, continuation from any of them, and rows that cannot be read."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from headrace.plugins.run.rows import BLOCK_BYTES, Position, RowBlock, TableReader
from headrace.plugins.run.sources import TableFailed, find

ROWS = 1000
TABLE = pa.table({
    "id": np.arange(ROWS),
    "x": np.arange(ROWS) / 8,
    "kind": pa.array(["a", "b"] * (ROWS // 2)),
})  # fmt: skip


def as_parquet(path: Path) -> None:
    parquet.write_table(TABLE, path, row_group_size=300)


def as_arrow(path: Path) -> None:
    coded = TABLE.set_column(2, "kind", TABLE["kind"].dictionary_encode())
    with pa.ipc.new_file(path, coded.schema) as writer:
        writer.write_table(coded, max_chunksize=300)


def as_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=300)


def as_csv(path: Path) -> None:
    rows = [f"{row['id']},{row['x']},{row['kind']}\n" for row in TABLE.to_pylist()]
    path.write_text("id,x,kind\n" + "".join(rows))


def as_json(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))


def as_gzip(path: Path) -> None:
    as_csv(path.with_suffix(""))
    with pa.CompressedOutputStream(path, "gzip") as file:
        file.write(path.with_suffix("").read_bytes())


FILES: dict[str, Callable[[Path], None]] = {
    "t.parquet": as_parquet, "t.arrow": as_arrow, "t.arrows": as_stream, "t.csv": as_csv,
    "t.jsonl": as_json, "t.csv.gz": as_gzip,
}  # fmt: skip
CHUNK = 4096
BEGIN = Position()


def blocks(
    path: Path | str, *, start: Position = BEGIN, columns: Sequence[str] = ("id", "x", "kind"),
    rows: int = 70, types: dict[str, Any] | None = None,
) -> list[RowBlock]:  # fmt: skip
    reader = TableReader(find([str(path)]), (types or {}).get)
    return list(reader.blocks(start, columns, rows))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.plugins.run.rows.BLOCK_BYTES", CHUNK)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", FILES)
def test_every_format_continues_after_any_block(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[name](path)
    found = blocks(path)
    assert pa.concat_tables(block.table for block in found).equals(TABLE)
    assert np.concatenate([block.numbers for block in found]).tolist() == [*range(1, ROWS + 1)]
    assert max(block.table.num_rows for block in found) <= 70
    assert found[-1].share == pytest.approx(1, rel=1e-3)
    assert len(found) >= 15
    for index, block in enumerate(found):
        rest = blocks(path, start=block.end)
        assert [one.end for one in rest] == [one.end for one in found[index + 1 :]]
        assert all(a.table.equals(b.table) for a, b in zip(rest, found[index + 1 :], strict=True))


@pytest.mark.parametrize("name", FILES)
def test_only_the_wanted_columns_in_their_order(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[name](path)
    [*found] = blocks(path, columns=("kind", "id"))
    assert found[0].table.column_names == ["kind", "id"]


def test_several_files_have_the_types_of_the_first(tmp_path: Path) -> None:
    for name, kind in (("a", "float"), ("b", "double"), ("c", "int32")):
        parquet.write_table(pa.table({"x": pa.array([1, 2], kind)}), tmp_path / f"{name}.parquet")
    found = blocks(tmp_path, columns=["x"])
    assert [block.table.schema.field("x").type for block in found] == [pa.float32()] * 3
    assert [block.end for block in found] == [Position(n, 0, 2, 2) for n in range(3)]
    parquet.write_table(pa.table({"x": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(TableFailed, match=r"d\.parquet: column 'x' of string is no float"):
        blocks(tmp_path, columns=["x"])
    with pytest.raises(TableFailed, match=r"a\.parquet: it lacks the column 'z'; it has x"):
        blocks(tmp_path, columns=["z"])


def test_partitions_are_columns(tmp_path: Path) -> None:
    for day, number in (("2024-01-01", 9), ("2024-01-02", 10)):
        folder = tmp_path / f"day={day}" / f"number={number}"
        folder.mkdir(parents=True)
        parquet.write_table(pa.table({"x": [1.0]}), folder / "part.parquet")
    (tmp_path / "_SUCCESS").touch()
    found = blocks(tmp_path, columns=["x", "day", "number"])
    rows = pa.concat_tables(block.table for block in found).to_pylist()
    assert rows == [
        {"x": 1.0, "day": "2024-01-01", "number": 9}, {"x": 1.0, "day": "2024-01-02", "number": 10}
    ]  # fmt: skip


@pytest.mark.usefixtures("small_chunks")
def test_wide_rows_make_small_blocks(tmp_path: Path) -> None:
    wide = pa.table({"x": pa.array([[1.0] * 100] * 50)})
    parquet.write_table(wide, tmp_path / "t.parquet")
    found = blocks(tmp_path / "t.parquet", columns=["x"])
    assert max(block.table.nbytes for block in found) <= CHUNK + 1024
    assert pa.concat_tables(block.table for block in found).equals(wide)


VALUES = st.text(st.sampled_from('ab,"\n é'), max_size=8)


@given(rows=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=60), quote=st.booleans())
@settings(max_examples=80)
def test_quoted_values_with_lines_are_never_cut(
    rows: list[tuple[str, str]], quote: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL if quote else csv.QUOTE_MINIMAL,
                        lineterminator="\n")  # fmt: skip
    writer.writerows([("n", "a", "b"), *((i, *row) for i, row in enumerate(rows))])
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_text(text.getvalue(), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.plugins.run.rows.BLOCK_BYTES", 64)
        kinds = {"a": pa.string(), "b": pa.string()}
        found = blocks(path, columns=("a", "b"), types=kinds)
        table = pa.concat_tables(block.table for block in found)
        for block in found:
            rest = blocks(path, start=block.end, columns=("a", "b"), types=kinds)
            assert sum(one.table.num_rows for one in rest) == len(rows) - block.numbers[-1]
    expected = [tuple(None if v in ("NA", "NULL") else v for v in row) for row in rows]
    assert [tuple(row.values()) for row in table.to_pylist()] == expected


@pytest.mark.usefixtures("small_chunks")
def test_bad_rows_of_texts_stay_in_their_block(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{n},{n / 2}" for n in range(ROWS)]
    lines[10] = "10,ten"
    lines[500] = "500"
    lines[501] = '"501","5","6"'
    path.write_text("\n".join(["id,x", *lines]))
    found = blocks(path, columns=["id", "x"], types={"x": pa.float32()}, rows=50)
    bad = [one for block in found for one in block.bad]
    assert [(one.row, one.content) for one in bad] == [
        (11, "10,ten"), (501, "500"), (502, '"501","5","6"')
    ]  # fmt: skip
    assert "column 'x'" in bad[0].reason
    assert "'ten'" in bad[0].reason
    assert "Expected 2 columns, got 1" in bad[1].reason
    numbers = np.concatenate([block.numbers for block in found])
    ids = pa.concat_tables(block.table for block in found)["id"].to_numpy()
    assert (numbers == ids + 1).all()
    assert len(numbers) == ROWS - 3
    half = found[len(found) // 2]
    rest = blocks(path, columns=["id", "x"], start=half.end, types={"x": pa.float32()}, rows=50)
    assert [one.bad for one in rest] == [one.bad for one in found[len(found) // 2 + 1 :]]


def test_bad_rows_of_json(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"x": 1}\n{"x": "two"}\n\n{"x": 3\n{"y": 0}\n{"x": 4.5, "z": []}\n')
    [block] = blocks(path, columns=["x"], types={"x": pa.float32()})
    assert block.table["x"].to_pylist() == [1.0, None, 4.5]
    assert [(one.row, one.content) for one in block.bad] == [(2, '{"x": "two"}'), (3, '{"x": 3')]
    assert "changed from number to string" in block.bad[0].reason


def test_types_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"image": [[1, 2], [3, 4]], "id": 7, "gap": null, "time": "2024-01-01"}\n')
    reader = TableReader(find([str(path)]), {"image": pa.float32()}.get)
    assert reader.types["image"] == pa.list_(pa.list_(pa.float32()))
    assert (reader.types["id"], reader.types["gap"]) == (pa.int64(), pa.string())


@pytest.mark.parametrize(("name", "content", "says"), [
    ("t.csv", b"", "has no first line"), ("t.csv", b"a,b,a\n1,2,3\n", "column 'a' twice"),
    ("t.csv", b"a, a\n1,2\n", "column 'a' twice"),
    ("t.parquet", b"nothing", "cannot be read: "), ("t.arrow", b"nothing", "cannot be read: "),
    ("t.csv", b'x\n"' + b"a\n" * 30_000, "no row ends in 0 MiB from byte 2; is there a quote"),
])  # fmt: skip
def test_files_that_cannot_be_read(
    name: str, content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.plugins.run.rows._LONGEST", 16384)
    monkeypatch.setattr("headrace.plugins.run.rows.BLOCK_BYTES", CHUNK)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TableFailed, match=says) as raised:
        blocks(tmp_path / name, columns=["x"])
    assert str(raised.value).startswith(str(tmp_path / name))


def test_a_mark_of_byte_order_and_other_line_ends(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfx,y\r\n1,a\r\n2,b")
    [block] = blocks(tmp_path / "t.csv", columns=["x", "y"])
    assert block.table.to_pylist() == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]
    assert BLOCK_BYTES > 1 << 20
