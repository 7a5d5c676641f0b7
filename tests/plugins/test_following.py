"""Detection of changes to single files and repositories, by polling and by events."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.following import (
    QUIET_SECS,
    Change,
    Changed,
    FileEvents,
    FollowedRepositories,
    Follower,
    Gone,
    Reloader,
    WatchedFiles,
)
from headrace.repository.catalogue import Catalogue
from headrace.repository.layout import ModelSource, single_file
from headrace.repository.store import Store
from tests.repository.files import write
from tests.support.scrape import until
from tests.support.stores import catalogue, scan

PART = QUIET_SECS / 2

# An event loop that calls on the thread that asks it.
AT_ONCE: Any = SimpleNamespace(call_soon_threadsafe=lambda call: call())


def engine(**methods: Callable[..., object]) -> Any:
    """An engine with these methods."""
    return SimpleNamespace(**methods)


# --- files


def itself(file: Path) -> list[Path]:
    return [file]


def beside(file: Path) -> list[Path]:
    """The file and every other `.py` in its directory."""
    return list(file.parent.glob("*.py"))


def put_in_place(file: Path, text: str) -> None:
    """Replace a file by one that was written a while ago."""
    other = file.with_name("written.tmp")
    write(other, text)
    os.utime(other, (1_000_000, 1_000_000))
    other.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that exists."""
    write(tmp_path / "model.py")
    return tmp_path / "model.py"


@pytest.fixture
def part(file: Path) -> Path:
    """A file that belongs to it."""
    part = file.with_name("part.py")
    part.touch()
    os.utime(part, (1_000_000, 1_000_000))
    return part


def test_a_changed_file_counts_once_unchanged_for_two_looks(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    assert [watched.look(now) for now in (0, 1, 9)] == [[], [], []]
    file.write_text("half")
    assert watched.look(10) == []
    assert watched.look(10 + PART) == []
    file.write_text("and half")
    assert watched.look(10 + 2 * PART) == []  # it is still being written
    assert watched.look(10 + 3 * PART) == []
    assert watched.look(10 + 4 * PART) == [file]
    assert watched.look(100) == []


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda file: os.utime(file, (5, 5)), True),  # the same size and a new time
        (lambda file: (file.rename(file.with_name("backup")), file.write_text("new")), True),
        (lambda file: file.chmod(0o600), False),
    ],
)  # fmt: skip
def test_changes_of_a_file(file: Path, change: Callable[[Path], object], counts: bool) -> None:
    watched = WatchedFiles(file, itself)
    change(file)
    assert [watched.look(0), watched.look(QUIET_SECS)] == [[], [file] if counts else []]


def test_a_replaced_file_counts_at_once(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    put_in_place(file, "two")
    assert watched.look(0) == [file]
    put_in_place(file, "three")
    assert watched.look(0.1) == [file]


def test_a_missing_file_is_lost_if_it_stays_away(file: Path) -> None:
    watched = WatchedFiles(file, itself)
    away = file.rename(file.with_name("away"))
    assert watched.look(0) == []
    away.rename(file)
    assert watched.look(10) == []
    file.unlink()
    found = []
    for now in (20, 20 + QUIET_SECS, 100):
        assert watched.look(now) == []
        found.append(watched.is_lost(now))
    assert found == [False, True, False]
    file.write_text("again")
    assert [watched.look(200), watched.is_lost(200), watched.look(300)] == [[], False, [file]]


def test_changes_of_parts_count(file: Path, part: Path) -> None:
    watched = WatchedFiles(file, beside)
    part.write_text("changed")
    assert [watched.look(0), watched.look(100)] == [[], [part]]
    part.write_text("half")
    assert watched.look(200) == []
    put_in_place(file, "two")  # which waits for the part that is being written
    assert watched.look(200 + PART) == []
    assert sorted(watched.look(200 + QUIET_SECS)) == [file, part]
    part.unlink()
    assert [watched.look(300), watched.look(400)] == [[], [part]]


def test_a_missing_part_may_return_unchanged(file: Path, part: Path) -> None:
    watched = WatchedFiles(file, beside)
    away = part.rename(file.with_name("part.bak"))
    assert [watched.look(0), watched.look(100)] == [[], [part]]
    away.rename(part)
    assert watched.look(200) == [part]


def test_parts_added_by_a_change_are_watched(file: Path) -> None:
    watched = WatchedFiles(file, beside)
    part = file.with_name("part.py")
    part.touch()
    assert watched.look(0) == []  # not known yet
    put_in_place(file, "import part")
    assert watched.look(1) == [file]
    put_in_place(part, "changed")
    assert watched.look(2) == [part]


def test_the_watch_of_a_file_survives_an_error(file: Path) -> None:
    queue: SimpleQueue[Path | None] = SimpleQueue()
    bugs = [ValueError("a bug")]

    def fails_once(source: ModelSource, added: bool) -> None:
        queue.put(source.file)
        if bugs:
            raise bugs.pop()

    watcher = Reloader(engine(follow=fails_once), [single_file(file)], AT_ONCE)
    watcher.start()
    try:
        for text in ("two", "three", "four"):
            put_in_place(file, text)
            assert queue.get(timeout=30) == file
    finally:
        watcher.stop()


# --- repositories


class Repositories:
    """Two repositories, of which the first has a model `m`, and a manual clock."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = root / "first", root / "second"
        write(self.first / "m/1/model.py")
        self.second.mkdir()
        self.now = 0.0
        self.follow()

    def follow(self, namespacing: bool = False) -> None:
        paths = (self.first, self.second)
        known = catalogue(paths, namespacing=namespacing)
        self.followed = FollowedRepositories(known, known.sources()[0])

    def look(self, later: float = 0.0, only: set[str] | None = None) -> list[Change]:
        self.now += later
        return self.followed.look(self.now, only)

    def settled(self) -> bool:
        return self.followed.settled

    def changes(self) -> list[Change]:
        """The reported changes."""
        found = [change for _ in range(4) for change in self.look(PART)]
        assert self.settled()
        return found

    def settle(self) -> list[str]:
        """The settled changes by name, with a minus for removed models."""
        return [told(change) for change in self.changes()]


def told(change: Change) -> str:
    return change.source.name if isinstance(change, Changed) else f"-{change.name}"


@pytest.fixture
def world(tmp_path: Path) -> Repositories:
    return Repositories(tmp_path)


def test_a_changed_model_counts_once_unchanged_for_two_looks(world: Repositories) -> None:
    assert world.settle() == []
    write(world.first / "m/2/model.py", "half")
    assert world.look() == []
    assert not world.settled()
    assert world.look(PART) == []
    write(world.first / "m/2/model.py", "and half")
    assert world.look(PART) == []
    assert world.look(PART) == []
    (change,) = world.look(PART)
    assert isinstance(change, Changed)
    assert change.source.versions == (1, 2)
    assert world.settled()
    assert world.settle() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: write(m / "config.pbtxt"), lambda m: write(m / "labels.txt"),
        lambda m: write(m / "1/beside.py"), lambda m: write(m / "1/model.py", "another"),
        lambda m: (m / "1").rename(m / "2"), lambda m: (m / "3").mkdir(),
        lambda m: shutil.rmtree(m / "1"),
    ],
)  # fmt: skip
def test_changes_of_a_model(world: Repositories, change: Callable[[Path], object]) -> None:
    change(world.first / "m")
    assert world.settle() == ["m"]


def test_changes_that_are_ignored(world: Repositories) -> None:
    for name in (".git/index", "m/.swp", "lost+found/x", "m/configs/other.pbtxt"):
        write(world.first / name)
        assert world.settle() == []
    (world.first / "m/1").rename(world.first / "m/.1")
    assert world.look() == []
    (world.first / "m/.1").rename(world.first / "m/1")  # taken back
    assert world.settle() == []


def test_models_are_added_and_removed(world: Repositories) -> None:
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]
    shutil.rmtree(world.second / "n")
    assert world.look() == []  # it may be changing
    assert world.look(PART) == []
    assert world.look(PART) == [Gone("n")]
    assert world.settle() == []
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]
    write(world.first / "early/1/model.py")
    assert world.look() == []
    shutil.rmtree(world.first / "early")  # before it was complete
    assert world.settle() == []
    away = (world.first / "m").rename(world.first / ".m")
    assert world.look() == []
    away.rename(world.first / "m")  # it was missing for a moment
    assert world.look(QUIET_SECS) == []
    assert world.settle() == []
    shutil.rmtree(world.first / "m")
    assert world.settle() == ["-m"]


def test_replaced_links(world: Repositories, tmp_path: Path) -> None:
    """Also of a whole repository, as by git-sync, which makes a tree for every commit."""
    for name in ("one", "two"):
        write(tmp_path / name / "m/1/model.py", name)
        (world.first / ".next").symlink_to(tmp_path / name / "m")
        (world.first / ".next").rename(world.first / "n")
        assert world.settle() == ["n"]
    root = tmp_path / "current"
    root.symlink_to("one")
    followed = FollowedRepositories(catalogue([root]), scan([root]))
    places = followed.places
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(root)
    assert followed.look(0) == []
    (change,) = followed.look(QUIET_SECS)
    assert isinstance(change, Changed)
    assert followed.places != places


def test_an_unreadable_repository_is_unchanged(
    world: Repositories, caplog: pytest.LogCaptureFixture
) -> None:
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]
    away = world.first.rename(world.first.with_name("away"))
    write(world.second / "n/2/model.py")  # the other one goes on
    with caplog.at_level(logging.INFO):
        assert world.settle() == ["n"]
        assert caplog.text.count(f"{world.first} cannot be read: No such file or directory") == 1
        assert "the models loaded from it stay" in caplog.text
        away.rename(world.first)
        write(world.first / "m/2/model.py")
        assert world.settle() == ["m"]
        assert f"{world.first} is back" in caplog.text


def test_an_unmounted_repository_is_unchanged(
    world: Repositories, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unmounted directory is empty, and on another file system than before."""
    elsewhere = Path("/dev/shm") / f"headrace-{os.getpid()}"
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    elsewhere.mkdir()
    try:
        away = world.first.rename(tmp_path / "away")
        world.first.symlink_to(elsewhere)
        assert world.settle() == []
        assert "is empty, and on another file system" in caplog.text
        world.first.unlink()
        away.rename(world.first)
        assert world.settle() == []
    finally:
        elsewhere.rmdir()


def test_only_concerned_models_are_checked(world: Repositories) -> None:
    write(world.first / "n/1/model.py")
    assert world.settle() == ["n"]
    write(world.first / "m/1/model.py", "another")
    write(world.first / "n/1/model.py", "another")
    assert world.look(only={"n"}) == []
    # A pending model is checked anyway.
    assert [told(change) for change in world.look(QUIET_SECS, only=set())] == ["n"]
    assert world.settle() == ["m"]


def test_a_name_that_occurs_twice(world: Repositories) -> None:
    write(world.second / "m/1/model.py")
    assert [c.source.duplicate for c in world.changes() if isinstance(c, Changed)] == [True]
    shutil.rmtree(world.second / "m")
    assert [c.source.duplicate for c in world.changes() if isinstance(c, Changed)] == [False]
    world.follow(namespacing=True)
    write(world.second / "m/1/model.py")
    assert sorted(world.settle()) == ["-m", "m@first", "m@second"]


def test_changes_before_the_first_look(world: Repositories) -> None:
    followed = FollowedRepositories(catalogue([world.first]), scan([world.first]))
    write(world.first / "m/1/model.py", "another")
    write(world.first / "n/1/model.py")
    assert followed.look(0) == []
    assert len(followed.look(QUIET_SECS)) == 2


# --- soon after an event, and periodically in any case

_NEVER = 3600.0


@contextmanager
def watching(
    root: Path, secs: float, events: bool, also: Callable[[], object] = list
) -> Iterator[Callable[[], str]]:
    """Watch a repository; its next reported change."""
    changes: SimpleQueue[str] = SimpleQueue()

    def follow(source: ModelSource, new: bool) -> None:
        changes.put(source.name)
        also()

    def unload(name: str) -> None:
        changes.put(f"-{name}")

    def take() -> str:
        return changes.get(timeout=30)

    told = engine(follow=follow, unload=unload)
    watcher = Follower(told, catalogue([root]), scan([root]), secs, AT_ONCE, events)
    watcher.start()
    try:
        yield take
    finally:
        watcher.stop()
        asyncio.run(watcher.stopped())
    assert changes.empty()


@pytest.mark.parametrize(("secs", "events"), [(_NEVER, True), (0.05, False)])
def test_changes_are_reported(world: Repositories, secs: float, events: bool) -> None:
    root = world.first
    with watching(root, secs, events) as take:
        (root / "m/1/model.py").write_text("two")
        assert take() == "m"
        (root / "n/1").mkdir(parents=True)
        assert take() == "n"
        (root / "n").rename(root / ".n")
        assert take() == "-n"


def test_links_replaced_with_unwatched_targets(world: Repositories, tmp_path: Path) -> None:
    """git-sync and volumes in Kubernetes do so: the relevant events are those of a link."""
    for number in range(3):
        write(tmp_path / f"tree{number}/1/model.py", "")
    with watching(world.first, _NEVER, events=True) as take:
        for number in range(3):
            (world.first / ".next").symlink_to(tmp_path / f"tree{number}")
            (world.first / ".next").rename(world.first / "linked")
            assert take() == "linked"


def test_the_watch_of_a_repository_survives_an_error(world: Repositories) -> None:
    def fails() -> None:
        raise ValueError("a bug")

    with watching(world.first, 0.05, events=False, also=fails) as take:
        for text in ("two", "three"):
            write(world.first / "m/1/model.py", text)
            assert take() == "m"


def test_a_failed_watch_is_retried(tmp_path: Path) -> None:
    hints: SimpleQueue[frozenset[str] | None] = SimpleQueue()
    events = FileEvents([tmp_path / "r"], 0.05, hints.put)
    events.start()
    try:
        (tmp_path / "r/m").mkdir(parents=True)
        found: frozenset[str] | None = frozenset()
        number = 0
        while found is not None and "m" not in found:  # it may be watched from any moment on
            number += 1
            (tmp_path / "r/m/file").write_text(str(number))
            found = hints.get(timeout=30)
    finally:
        events.stop()
        events.join(60)


# --- stores that are not directories


class Shelf(Store):
    """Models by name with their tokens. `names` waits for `open`, and fails while it is `down`."""

    def __init__(self, address: str, **tokens: str) -> None:
        self.address = address
        self.tokens = tokens
        self.open = Event()
        self.open.set()
        self.down = False

    def names(self) -> Collection[str]:
        self.open.wait(60)
        if self.down:
            raise LoadFailed(f"{self.address} cannot be reached")
        return list(self.tokens)

    def token(self, name: str) -> Hashable:
        return self.tokens[name]


def followed(*shelves: Shelf, late: Callable[[], None] = lambda: None) -> FollowedRepositories:
    known = Catalogue(shelves)
    return FollowedRepositories(known, known.sources()[0], late)


def names(changes: Iterable[Change]) -> list[str]:
    return [each.source.name if isinstance(each, Changed) else f"-{each.name}" for each in changes]


def test_a_store_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Shelf("slow:", a="1"), Shelf("quick:", b="1")
    answered = Event()
    looking = followed(slow, quick, late=answered.set)
    slow.open.clear()
    slow.tokens, quick.tokens = {"c": "1"}, {"b": "2"}
    clock, found = count(1), list[str]()

    def changes(number: int) -> bool:
        found.extend(names(looking.look(next(clock))))
        return len(found) >= number

    until(lambda: changes(1), "the change of the other store")
    assert found == ["b"], "and the model of the store that hangs is not gone"
    slow.open.set()
    assert answered.wait(60)
    until(lambda: changes(3), "the changes of the store")
    assert sorted(found) == ["-a", "b", "c"]


def test_models_of_a_store_that_is_out_of_reach_from_the_start_stay() -> None:
    shelf = Shelf("shelf:", a="1")
    known = Catalogue((shelf,))
    sources, [] = known.sources()
    shelf.down = True
    looking = FollowedRepositories(known, sources)
    assert [names(looking.look(now)) for now in range(4)] == [[], [], [], []]
    shelf.down, shelf.tokens = False, {"a": "2"}
    assert [names(looking.look(now)) for now in (4, 5)] == [[], ["a"]]
