"""What looks at repositories: soon after something happens, and now and then in any case."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from headrace.repository.layout import Catalogue, scan
from headrace.repository.watching import (
    Change,
    Changed,
    FileEvents,
    FollowedRepositories,
    Gone,
    RepositoryWatcher,
)

Told = SimpleQueue[Sequence[Change]]
_NEVER = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one model."""
    (tmp_path / "r/m/1").mkdir(parents=True)
    (tmp_path / "r/m/1/model.py").write_text("one")
    return tmp_path / "r"


@contextmanager
def watching(
    root: Path, secs: float, events: bool, also: Callable[[Sequence[Change]], object] = len
) -> Iterator[Told]:
    told: Told = SimpleQueue()

    def changed(changes: Sequence[Change]) -> None:
        told.put(changes)
        also(changes)

    followed = FollowedRepositories(Catalogue((root,)), scan([root]))
    watcher = RepositoryWatcher(followed, secs, changed, events)
    watcher.start()
    try:
        yield told
    finally:
        watcher.stop()
        watcher.join()


def name(changes: Sequence[Change]) -> str:
    (change,) = changes
    return change.source.name if isinstance(change, Changed) else f"-{change.name}"


@pytest.mark.parametrize(("secs", "events"), [(_NEVER, True), (0.05, False)])
def test_changes_are_told(root: Path, secs: float, events: bool) -> None:
    with watching(root, secs, events) as told:
        (root / "m/1/model.py").write_text("two")
        assert name(told.get(timeout=30)) == "m"
        (root / "n/1").mkdir(parents=True)
        assert name(told.get(timeout=30)) == "n"
        (root / "n").rename(root / ".n")
        assert told.get(timeout=30) == [Gone("n")]


def test_links_that_are_turned_to_what_was_not_watched(root: Path, tmp_path: Path) -> None:
    """As of git-sync and of volumes in Kubernetes: the events that matter are those of a link."""
    for number in range(3):
        (tmp_path / f"tree{number}/1").mkdir(parents=True)
        (tmp_path / f"tree{number}/1/model.py").write_text("")
    with watching(root, _NEVER, events=True) as told:
        for number in range(3):
            (root / ".next").symlink_to(tmp_path / f"tree{number}")
            (root / ".next").rename(root / "linked")
            assert name(told.get(timeout=30)) == "linked"


def test_the_watch_outlives_a_failure(root: Path) -> None:
    def fails(_: Sequence[Change]) -> None:
        raise RuntimeError("a bug")

    with watching(root, 0.05, events=False, also=fails) as told:
        for text in ("two", "three"):
            (root / "m/1/model.py").write_text(text)
            assert name(told.get(timeout=30)) == "m"


def test_what_cannot_be_watched_is_tried_again(tmp_path: Path) -> None:
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
        events.join(5)
