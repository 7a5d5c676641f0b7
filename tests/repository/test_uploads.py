"""Files of requests: where they may lie, and that they do not stay."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest, LoadFailed
from headrace.repository.overrides import MOST_FILES, Uploads, checked_paths

PART = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["", ".", "..", "1", "model.onnx", "~", "a" * 256, "\0", "\\", "$HOME", "\ud800"]
)
PATH = st.lists(PART, max_size=5).map("/".join) | st.text(max_size=20)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    deadline = monotonic() + 30
    while not condition():
        assert monotonic() < deadline


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_files_lie_in_a_directory_of_their_own_as_long_as_they_are_used(temporary: Path) -> None:
    uploads = Uploads(10)
    files = checked_paths({"1/model.onnx": b"abc", "labels.txt": memoryview(b"de"), "1/w/x": b""})
    one, two = uploads.write(files), uploads.write(files)
    assert one.path != two.path
    for path in (one.path, one.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    found = [p for p in one.path.rglob("*") if p.is_file()]
    assert {str(p.relative_to(one.path)): p.read_bytes() for p in found} == {
        "1/model.onnx": b"abc",
        "labels.txt": b"de",
        "1/w/x": b"",
    }
    with pytest.raises(LoadFailed, match=r"5 bytes of files are too many .* 10 are kept at most"):
        uploads.write(files)
    path = one.path
    del one
    until(lambda: not path.exists())
    uploads.write(files)
    assert two.path.exists()
    uploads.close()
    uploads.close()


def test_what_cannot_be_written_leaves_nothing_behind(temporary: Path) -> None:
    uploads = Uploads(10)
    with pytest.raises(LoadFailed, match="its files cannot be kept: "):
        uploads.write({("a" * 300,): b"abc"})
    (root,) = temporary.iterdir()
    until(lambda: not list(root.iterdir()))
    uploads.write({("a",): b"0123456789"})  # what was counted is not any more
    uploads.close()


def test_what_a_killed_process_has_left_behind_goes(temporary: Path) -> None:
    for name in ("headrace-models-dead", "headrace-models-alive", "headrace-models-link"):
        if name.endswith("link"):
            (temporary / name).symlink_to(temporary)
        else:
            (temporary / name / "1").mkdir(parents=True)
    alive = os.open(temporary / "headrace-models-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    uploads = Uploads(10)
    uploads.write({("a",): b""})
    uploads.close()
    os.close(alive)
    assert {p.name for p in temporary.iterdir()} == {
        "headrace-models-alive",
        "headrace-models-link",
    }
    (temporary / "headrace-models-link").unlink()
    uploads.write({("a",): b""})
    uploads.close()


@pytest.mark.parametrize(("path", "problem"), [
    ("/etc/passwd", "must be relative"), ("", "must consist of names"),
    ("../x", "must consist of names"), ("1/../../x", "must consist of names"),
    ("1//x", "must consist of names"), ("1/", "must consist of names"),
    ("./x", "must consist of names"), ("1/a\0b", "neither control characters"),
    ("1\\x", "nor backslashes"), ("a" * 256, "is too long"),
    ("/".join(["a" * 200] * 6), "is too long"), ("/".join("a" * 17), "must have at most 16 names"),
    ("\ud800", "is not text"),
])  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(path: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        checked_paths({path: b""})


def test_paths_that_cannot_be_together() -> None:
    with pytest.raises(InvalidRequest, match="'1' is a file and a directory"):
        checked_paths({"1": b"", "1/model.onnx": b""})
    with pytest.raises(InvalidRequest, match=f"at most {MOST_FILES} files"):
        checked_paths({str(n): b"" for n in range(MOST_FILES + 1)})


@given(st.dictionaries(PATH, st.binary(max_size=4), max_size=4))
def test_nothing_is_ever_written_elsewhere(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = tempfile.tempdir
        tempfile.tempdir = folder
        uploads = Uploads(1_000)
        try:
            parts = checked_paths(files)
            upload = uploads.write(parts)
            inside = {p for p in upload.path.rglob("*") if p.is_file()}
            assert {p.relative_to(upload.path).parts for p in inside} == set(parts)
            assert {p for p in Path(folder).rglob("*") if p.is_file()} == inside
        except (InvalidRequest, LoadFailed):
            assert not [p for p in Path(folder).rglob("*") if p.is_file()]
        finally:
            uploads.close()
            tempfile.tempdir = before
