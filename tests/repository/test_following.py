"""What has changed in model repositories: once it is complete, and only what can be looked at."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.repository.layout import Catalogue, ModelSource, scan
from headrace.repository.watching import QUIET_SECS, Change, Changed, FollowedRepositories, Gone

PART = QUIET_SECS / 2


def write(path: Path, text: str = "one") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Repositories:
    """Two repositories, of which the first has a model `m`, and a clock."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = root / "first", root / "second"
        write(self.first / "m/1/model.py")
        self.second.mkdir()
        self.now = 0.0
        self.follow()

    def follow(self, namespacing: bool = False) -> None:
        paths = (self.first, self.second)
        catalogue = Catalogue(paths, namespacing=namespacing)
        self.followed = FollowedRepositories(catalogue, scan(paths, namespacing=namespacing))

    def look(self, later: float = 0.0, only: set[str] | None = None) -> list[Change]:
        self.now += later
        return self.followed.look(self.now, only)

    def settled(self) -> bool:
        return self.followed.settled

    def settle(self) -> list[str]:
        """What is told in the end, by name, with a minus before what is gone."""
        found = [change for _ in range(4) for change in self.look(PART)]
        assert self.settled()
        return [c.source.name if isinstance(c, Changed) else f"-{c.name}" for c in found]


@pytest.fixture
def world(tmp_path: Path) -> Repositories:
    return Repositories(tmp_path)


def test_nothing_has_changed(world: Repositories) -> None:
    assert world.settle() == []


def test_a_change_counts_once_it_has_come_to_rest(world: Repositories) -> None:
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


@pytest.mark.parametrize("change", [
    lambda m: write(m / "config.pbtxt"), lambda m: write(m / "labels.txt"),
    lambda m: write(m / "1/beside.py"), lambda m: write(m / "1/model.py", "another"),
    lambda m: (m / "1").rename(m / "2"), lambda m: (m / "3").mkdir(),
    lambda m: shutil.rmtree(m / "1"),
])  # fmt: skip
def test_what_is_a_change(world: Repositories, change: Callable[[Path], object]) -> None:
    change(world.first / "m")
    assert world.settle() == ["m"]


@pytest.mark.parametrize("name", [".git/index", "m/.swp", "lost+found/x", "m/configs/other.pbtxt"])
def test_what_is_none(world: Repositories, name: str) -> None:
    write(world.first / name)
    assert world.settle() == []


def test_a_change_that_is_taken_back_is_none(world: Repositories) -> None:
    (world.first / "m/1").rename(world.first / "m/.1")
    assert world.look() == []
    (world.first / "m/.1").rename(world.first / "m/1")
    assert world.settle() == []


def test_models_come_and_go(world: Repositories) -> None:
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]
    shutil.rmtree(world.second / "n")
    assert world.look() == []  # it may be on its way to be another one
    assert world.look(PART) == []
    assert world.look(PART) == [Gone("n")]
    assert world.settle() == []
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]


def test_a_model_that_is_missing_for_a_moment(world: Repositories) -> None:
    away = (world.first / "m").rename(world.first / ".m")
    assert world.look() == []
    away.rename(world.first / "m")
    assert world.look(QUIET_SECS) == []
    assert world.settle() == []


def test_a_model_that_comes_and_goes_before_it_is_complete(world: Repositories) -> None:
    write(world.first / "n/1/model.py")
    assert world.look() == []
    shutil.rmtree(world.first / "n")
    assert world.settle() == []


def test_a_link_that_is_turned(world: Repositories, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "1/model.py", name)
    (world.first / "n").symlink_to(tmp_path / "one")
    assert world.settle() == ["n"]
    (world.first / ".next").symlink_to(tmp_path / "two")
    (world.first / ".next").rename(world.first / "n")
    assert world.settle() == ["n"]


def test_a_repository_that_is_a_link(tmp_path: Path) -> None:
    """As of git-sync, which makes a tree for every commit."""
    for name in ("one", "two"):
        write(tmp_path / name / "m/1/model.py", name)
    (tmp_path / "current").symlink_to("one")
    root = tmp_path / "current"
    followed = FollowedRepositories(Catalogue((root,)), scan([root]))
    places = followed.places
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(root)
    assert followed.look(0) == []
    (change,) = followed.look(QUIET_SECS)
    assert isinstance(change, Changed)
    assert followed.places != places


def test_a_repository_that_cannot_be_read_is_as_it_was(
    world: Repositories, caplog: pytest.LogCaptureFixture
) -> None:
    write(world.second / "n/1/model.py")
    assert world.settle() == ["n"]
    away = world.first.rename(world.first.with_name("away"))
    write(world.second / "n/2/model.py")  # the other one goes on
    with caplog.at_level(logging.INFO):
        assert world.settle() == ["n"]
        assert caplog.text.count(f"{world.first} cannot be read: No such file or directory") == 1
        assert "what was loaded from it goes on" in caplog.text
        away.rename(world.first)
        write(world.first / "m/2/model.py")
        assert world.settle() == ["m"]
        assert f"{world.first} is back" in caplog.text


def test_a_repository_that_is_empty_since_it_is_not_mounted(
    world: Repositories, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unmounted directory is empty, and lies on another file system than what was there."""
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


def test_a_repository_that_somebody_has_emptied(world: Repositories) -> None:
    shutil.rmtree(world.first / "m")
    assert world.settle() == ["-m"]


def test_only_where_something_happens(world: Repositories) -> None:
    write(world.first / "n/1/model.py")
    assert world.settle() == ["n"]
    write(world.first / "m/1/model.py", "another")
    write(world.first / "n/1/model.py", "another")
    assert world.look(only={"n"}) == []
    (change,) = world.look(QUIET_SECS, only=set())  # what is under way is looked at, anyway
    assert isinstance(change, Changed)
    assert change.source.name == "n"
    assert world.settle() == ["m"]


def test_a_name_that_occurs_twice(world: Repositories) -> None:
    write(world.second / "m/1/model.py")
    found = [change for _ in range(4) for change in world.look(PART)]
    assert [c.source.duplicate for c in found if isinstance(c, Changed)] == [True]
    shutil.rmtree(world.second / "m")
    found = [change for _ in range(4) for change in world.look(PART)]
    assert [c.source.duplicate for c in found if isinstance(c, Changed)] == [False]


def test_names_with_their_repository(world: Repositories) -> None:
    world.follow(namespacing=True)
    write(world.second / "m/1/model.py")
    assert sorted(world.settle()) == ["-m", "m@first", "m@second"]


def test_what_changed_before_the_first_look(world: Repositories) -> None:
    sources: list[ModelSource] = scan([world.first])
    followed = FollowedRepositories(Catalogue((world.first,)), sources)
    write(world.first / "m/1/model.py", "another")
    write(world.first / "n/1/model.py")
    assert followed.look(0) == []
    assert len(followed.look(QUIET_SECS)) == 2
