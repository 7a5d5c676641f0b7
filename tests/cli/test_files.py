"""Files that are replaced as a whole: their permissions, links, and what a failure leaves."""

from pathlib import Path

import pytest

from headrace.cli.files import replace_file


def test_content_and_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o644)
    file.chmod(0o600)
    replace_file(file, b"newer")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"newer", 0o600)
    assert [*tmp_path.iterdir()] == [file]


def test_the_file_behind_a_link_is_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_bytes(b"old")
    link.symlink_to("file")
    replace_file(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "directory", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "none" / "file", b"new")
