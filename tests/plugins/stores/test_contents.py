"""Contents of files by digest, and files under way."""

import os
from pathlib import Path
from threading import Event

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import (
    PART,
    CachedContent,
    CachedContents,
    CacheDirectory,
)
from headrace.repository.model_files import digest_of

KEEP_GOING = Event()
ONE = CachedContent(digest_of(b"one"), 3)


@pytest.fixture
def contents(tmp_path: Path) -> CachedContents:
    directory = CacheDirectory(tmp_path)
    directory.make()
    return CachedContents(directory)


def test_a_content_is_kept_once(contents: CachedContents, tmp_path: Path) -> None:
    assert not contents.has(ONE)
    assert [contents.put(b"one") for _ in range(2)] == [ONE.digest] * 2
    assert contents.has(ONE)
    (tmp_path / "file").write_bytes(b"one")
    contents.adopt(tmp_path / "file", ONE)
    assert not (tmp_path / "file").exists()
    assert contents.nbytes == contents.counted() == 3
    assert not list((tmp_path / "partial").iterdir())
    assert len(list((tmp_path / "objects").glob("*/*"))) == 1


def test_files_are_links_to_a_content(contents: CachedContents, tmp_path: Path) -> None:
    assert not contents.link(ONE, tmp_path / "a")
    contents.put(b"one")
    assert contents.link(ONE, tmp_path / "a")
    with pytest.raises(FileExistsError):
        contents.link(ONE, tmp_path / "a")
    contents.remove_unused()
    assert contents.has(ONE)
    (tmp_path / "a").unlink()
    contents.remove_unused()
    assert not contents.has(ONE)


def test_a_file_is_copied_where_there_are_no_links(
    contents: CachedContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", link)
    contents.put(b"one")
    assert contents.link(ONE, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "a").stat().st_mode & 0o222 == 0


def test_a_file_under_way_is_continued(contents: CachedContents, tmp_path: Path) -> None:
    size = PART + 3
    with contents.partial("p", size, KEEP_GOING) as draft:
        assert draft.missing() == [(0, PART), (PART, size)]
        draft.write(PART, b"end")
    with contents.partial("p", size, KEEP_GOING) as draft:
        assert draft.missing() == [(0, PART)]
        draft.write(0, bytes(PART))
        digest = draft.digest()
        draft.finish(digest)
    assert contents.has(CachedContent(digest, size))
    with contents.partial("q", 3, KEEP_GOING) as draft:
        draft.give_up()
    assert not list((tmp_path / "partial").iterdir())


def test_a_file_under_way_has_one_owner(contents: CachedContents) -> None:
    stopped = Event()
    stopped.set()
    with contents.partial("p", 3, KEEP_GOING), pytest.raises(LoadFailed, match="shutting down"):  # noqa: SIM117
        with contents.partial("p", 3, stopped):
            raise AssertionError("two write one file")


def test_digests_of_contents_that_have_gone_are_forgotten(contents: CachedContents) -> None:
    contents.put(b"one")
    contents.keep_digest("tag", ONE.digest)
    assert (contents.digest("tag"), contents.digest("other")) == (ONE.digest, "")
    contents.remove_unused()
    assert contents.digest("tag") == ""
