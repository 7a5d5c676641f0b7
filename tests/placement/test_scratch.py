"""Scratch directories: their limits, and their end."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.placement.scratch import Scratch
from tests.support.scrape import until


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scratch]:
    """A scratch directory; nothing is left of it at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = Scratch(None)
    yield found
    found.remove()
    until(lambda: not list(tmp_path.iterdir()), "the directory's removal")


def test_an_empty_directory(scratch: Scratch) -> None:
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert scratch.excess(1) == ""


def test_bytes_in_all_directories_count(scratch: Scratch) -> None:
    (scratch.path / "a" / "b").mkdir(parents=True)
    (scratch.path / "a" / "b" / "file").write_bytes(bytes(1 << 20))
    assert scratch.excess(2 << 20) == ""
    assert scratch.excess(1 << 20) == "has more than 1048576 bytes in its scratch directory"


def test_a_link_counts_as_itself(scratch: Scratch) -> None:
    (scratch.path / "all").symlink_to("/")
    assert scratch.excess(1 << 20) == ""


def test_sparse_files_count_by_their_blocks(scratch: Scratch) -> None:
    with (scratch.path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert scratch.excess(1 << 20) == ""


def test_paths_too_long_to_be_measured(scratch: Scratch) -> None:
    level = os.open(scratch.path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 200, dir_fd=level)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=level)
        os.close(level)
        level = below
    os.close(level)
    assert scratch.excess(1 << 30) == "has paths in its scratch directory that are too long"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is hidden from root")
def test_hidden_files(scratch: Scratch) -> None:
    (scratch.path / "hidden").mkdir(mode=0o000)
    assert "hides a part of its scratch directory" in scratch.excess(1 << 20)
