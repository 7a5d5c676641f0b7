"""When a change to files counts: not while somebody writes, at once if it came as a whole."""

import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from headrace.repository.watching import QUIET_SECS, FileWatcher, WatchedFiles

PART = QUIET_SECS / 2


def itself(file: Path) -> list[Path]:
    return [file]


def beside(file: Path) -> list[Path]:
    """The file and every other `.py` in its directory."""
    return list(file.parent.glob("*.py"))


def put_in_place(file: Path, text: str) -> None:
    """Replace a file by one that was written a while ago."""
    other = file.with_name("written.tmp")
    other.write_text(text)
    os.utime(other, (1_000_000, 1_000_000))
    other.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that exists."""
    path = tmp_path / "model.py"
    path.write_text("one")
    return path


def test_nothing_has_changed(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    assert [watched.look(now) for now in (0, 1, 100)] == [[], [], []]


def test_a_change_counts_once_it_has_come_to_rest(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    file.write_text("half")
    assert watched.look(10) == []
    assert watched.look(10 + PART) == []
    file.write_text("and half")
    assert watched.look(10 + 2 * PART) == []  # it is still being written
    assert watched.look(10 + 3 * PART) == []
    assert watched.look(10 + 4 * PART) == [file]
    assert watched.look(100) == []


def test_the_same_size_and_a_new_time_are_a_change(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    os.utime(file, (5, 5))
    assert [watched.look(0), watched.look(QUIET_SECS)] == [[], [file]]


def test_what_was_put_in_place_counts_at_once(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    put_in_place(file, "two")
    assert watched.look(0) == [file]
    put_in_place(file, "three")
    assert watched.look(0.1) == [file]


def test_a_new_file_of_the_name_that_is_being_written_has_to_rest(file: Path) -> None:
    """As of editors that move the old one away and write a new one."""
    watched = WatchedFiles(file, itself)
    file.rename(file.with_name("backup"))
    file.write_text("half of it")
    assert watched.look(0) == []
    assert watched.look(QUIET_SECS) == [file]


def test_a_file_that_is_gone_is_no_change_until_it_is_back(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    file.unlink()
    assert [watched.look(0), watched.look(100)] == [[], []]
    file.write_text("again")
    assert [watched.look(200), watched.look(300)] == [[], [file]]


def test_a_change_that_is_taken_back_is_none(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    away = file.rename(file.with_name("away"))
    assert watched.look(0) == []
    away.rename(file)
    assert watched.look(100) == []


def test_permissions_are_no_change(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    file.chmod(0o600)
    assert [watched.look(0), watched.look(100)] == [[], []]


def test_a_change_to_another_part_counts(file: Path) -> None:
    part = file.with_name("part.py")
    part.write_text("")
    watched = WatchedFiles(file, beside)
    part.write_text("changed")
    assert [watched.look(0), watched.look(100)] == [[], [part]]
    part.unlink()
    assert [watched.look(200), watched.look(300)] == [[], [part]]


def test_one_part_waits_for_another_that_is_being_written(file: Path) -> None:
    part = file.with_name("part.py")
    part.write_text("")
    watched = WatchedFiles(file, beside)
    part.write_text("half")
    assert watched.look(0) == []
    put_in_place(file, "two")
    assert watched.look(PART) == []
    assert sorted(watched.look(QUIET_SECS)) == [file, part]


def test_parts_that_come_with_a_change_are_watched_from_then_on(file: Path) -> None:
    watched = WatchedFiles(file, beside)
    part = file.with_name("part.py")
    part.write_text("")
    assert watched.look(0) == []  # not known yet
    put_in_place(file, "import part")
    assert watched.look(1) == [file]
    put_in_place(part, "changed")
    assert watched.look(2) == [part]


def test_a_part_that_is_gone_may_come_back_as_it_was(file: Path) -> None:
    part = file.with_name("part.py")
    part.write_text("")
    os.utime(part, (1_000_000, 1_000_000))
    watched = WatchedFiles(file, beside)
    away = part.rename(file.with_name("part.bak"))
    assert [watched.look(0), watched.look(100)] == [[], [part]]
    away.rename(part)
    assert watched.look(200) == [part]


def test_that_the_file_is_lost_is_said_once_it_stays_away(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    file.unlink()
    found = []
    for now in (0, QUIET_SECS, 100):
        watched.look(now)
        found.append(watched.is_lost(now))
    assert found == [False, True, False]
    file.write_text("again")
    watched.look(200)
    assert not watched.is_lost(200)


@pytest.fixture
def told(file: Path) -> Iterator[SimpleQueue[list[Path]]]:
    """What a watcher tells of the file."""
    queue: SimpleQueue[list[Path]] = SimpleQueue()
    watcher = FileWatcher({file: itself}, lambda _, changed: queue.put(changed))
    watcher.start()
    yield queue
    watcher.stop()


def test_the_watcher_tells_of_changes(file: Path, told: SimpleQueue[list[Path]]) -> None:
    put_in_place(file, "two")
    assert told.get(timeout=30) == [file]


def test_the_watch_outlives_a_failure(file: Path) -> None:
    queue: SimpleQueue[Path] = SimpleQueue()

    def fails_once(changed: Path, _: list[Path]) -> None:
        queue.put(changed)
        if queue.qsize() == 1:
            raise RuntimeError("a bug")

    watcher = FileWatcher({file: itself}, fails_once)
    watcher.start()
    try:
        put_in_place(file, "two")
        assert queue.get(timeout=30) == file
        put_in_place(file, "three")
        assert queue.get(timeout=30) == file
    finally:
        watcher.stop()
