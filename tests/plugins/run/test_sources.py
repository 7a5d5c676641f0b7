"""Files of patterns, directories and URLs."""

import importlib
import os
from pathlib import Path

import pytest

from headrace.plugins.run.sources import TableFailed, find, format_of


def names(root: Path, *given: str, form: str = "") -> list[str]:
    found = find([str(root / one) for one in given], form)
    return [os.path.relpath(file.path, root) for file in found]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        "b.csv", "a.csv", "c.jsonl.gz", "parts/k=2/y.parquet", "parts/k=1/x.parquet",
        "parts/_metadata", "parts/.hidden/z.parquet", "parts/k=1/_temporary/0.parquet",
        "odd[1].csv",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_the_order_is_that_of_names_for_each_argument(root: Path) -> None:
    assert names(root, "[ab].csv") == ["a.csv", "b.csv"]
    assert names(root, "b.csv", "a.csv") == ["b.csv", "a.csv"]
    assert names(root, "odd[1].csv") == ["odd[1].csv"]
    parts = ["parts/k=1/x.parquet", "parts/k=2/y.parquet"]
    assert (
        names(root, "parts") == names(root, "par*") == names(root, "parts/k=*/*.parquet") == parts
    )
    assert names(root, "parts/**/*.parquet", form="csv") == [
        "parts/k=1/_temporary/0.parquet", *parts
    ]  # fmt: skip


def test_format_size_and_identity_of_a_file(root: Path) -> None:
    [file] = find([str(root / "c.jsonl.gz")])
    assert (file.format, file.codec, file.size) == ("jsonl", "gzip", len("c.jsonl.gz"))
    before = file.identity
    os.utime(root / "c.jsonl.gz", ns=(1, 1))
    [after] = find([str(root / "c.jsonl.gz")])
    assert after.identity != before
    [part] = find([str(root / "parts" / "k=1" / "x.parquet")])
    assert part.partition["k"] == "1"


@pytest.mark.parametrize(("path", "form", "says"), [
    ("data.txt", "", "its name tells no format: --format or --output-format names one of "),
    ("-", "", "standard input and output have no format"),
    ("a.parquet.gz", "", "compresses by its"),
    ("absent.csv", "", r"absent\.csv: cannot be read: "), ("none/*.csv", "", "no files there"),
    ("nothing://x.csv", "", "nothing://x.csv: "),
])  # fmt: skip
def test_names_without_files(
    path: str, form: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TableFailed, match=says):
        find([path], form)


def test_formats() -> None:
    assert format_of("a/b.TSV") == ("tsv", "")
    assert format_of("x.ndjson.zst") == ("jsonl", "zstd")
    assert format_of("data", "csv") == ("csv", "")


def test_object_stores_by_fsspec(root: Path) -> None:
    pytest.importorskip("fsspec")
    system = importlib.import_module("fsspec").filesystem("memory")
    for name in ("in/k=1/a.csv", "in/k=2/b.csv", "in/_SUCCESS"):
        system.pipe_file(f"/{name}", b"x\n1\n")
    found = find(["memory://in"])
    assert [file.path for file in found] == ["memory:///in/k=1/a.csv", "memory:///in/k=2/b.csv"]
    assert [file.partition for file in found] == [{"k": "1"}, {"k": "2"}]
    assert found == find(["memory://in/*/*.csv"])
    assert found[0].open().read() == b"x\n1\n"
    system.pipe_file("/in/k=1/a.csv", b"x\n2\n3\n")
    assert find(["memory://in"])[0].identity != found[0].identity
