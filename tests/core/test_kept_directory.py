"""Temporary directories that are removed, whatever was put into them."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.core.kept_directory import KeptDirectory, remove_tree

_DEEP = 1_500  # more levels than Python's stack takes


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, empty at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_a_directory_is_private_and_removed(temporary: Path) -> None:
    kept = KeptDirectory("test-")
    assert kept.path.parent == temporary
    assert kept.path.stat().st_mode & 0o777 == 0o700
    (kept.path / "a" / "b").mkdir(parents=True)
    (kept.path / "a" / "file").touch()
    kept.close()


def test_only_what_dead_processes_left_behind_is_removed(temporary: Path) -> None:
    for name in ("test-dead", "test-alive", "other-dead"):
        (temporary / name / "a").mkdir(parents=True)
    alive = os.open(temporary / "test-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    kept = KeptDirectory("test-")
    left = {path.name for path in temporary.iterdir()}
    assert left == {"test-alive", "other-dead", kept.path.name}
    kept.close()
    os.close(alive)
    for name in ("test-alive", "other-dead"):
        remove_tree(temporary / name)


def test_directories_made_at_the_same_time(temporary: Path) -> None:
    def make(_: int) -> None:
        kept = KeptDirectory("test-")
        (kept.path / "file").touch()
        kept.close()
        assert not kept.path.exists()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(200)))


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for path in (outside, inside / "a"):
        path.mkdir(parents=True)
        (path / "file").touch()
    (inside / "link").symlink_to(outside)
    (inside / "a" / "link").symlink_to(outside)
    remove_tree(inside)
    remove_tree(inside)  # once more does no harm
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert not inside.exists()


def test_deep_and_closed_directories_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    level = os.open(root, os.O_RDONLY)
    for _ in range(_DEEP):
        os.mkdir("d", dir_fd=level)
        os.mkdir("e", 0o000, dir_fd=level)
        os.symlink("/", "link", dir_fd=level)
        below = os.open("d", os.O_RDONLY, dir_fd=level)
        os.close(level)
        level = below
    os.close(level)
    remove_tree(root)
    assert not root.exists()
