"""The cache of environments: builders, waiters and removal."""

import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.environments.cache import (
    DOCUMENT,
    Built,
    EnvironmentCache,
    Hold,
    default_root,
    key_of,
)

KEY = key_of("an environment")
FOREVER = 1e12


class Builder:
    """Fills environments and counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: Path, lock: int) -> Built:
        assert os.listdir(path) == []
        (path / "python").write_text("")
        assert os.fstat(lock)
        self.count += 1
        return Built(("a==1",), "Python 3")


@contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """Lock an environment like another process that builds it."""
    with (root / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_an_environment_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(2):
        cache = EnvironmentCache(tmp_path / "new" / "cache")
        hold = cache.acquire(KEY, "m", build, 1)
        assert (hold.entry.path / "python").is_file()
    assert build.count == 1
    [entry] = cache.entries()
    assert (entry.key, entry.wanted, entry.python) == (KEY, ("a==1",), "Python 3")
    assert cache.entry(key_of("another")) is None


def test_concurrent_builders_build_once(tmp_path: Path) -> None:
    build = Builder()
    together = threading.Barrier(8)

    def acquire(_: int) -> Hold:
        together.wait()
        return EnvironmentCache(tmp_path).acquire(KEY, "m", build, 60)

    with ThreadPoolExecutor(8) as pool:
        holds = list(pool.map(acquire, range(8)))
    assert build.count == 1
    assert len({hold.entry.path for hold in holds}) == 1


def test_a_failed_build_leaves_nothing_and_is_retried(tmp_path: Path) -> None:
    def fail(path: Path, lock: int) -> Built:
        (path / "half").write_text("")
        raise LoadFailed("no")

    cache = EnvironmentCache(tmp_path)
    with pytest.raises(LoadFailed, match="no"):
        cache.acquire(KEY, "m", fail, 1)
    assert os.listdir(tmp_path) == []
    build = Builder()
    cache.acquire(KEY, "m", build, 1)
    assert build.count == 1


@pytest.mark.parametrize("document", [None, "", "[]", '{"wanted": []}'])
def test_an_interrupted_build_is_repeated(document: str | None, tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    (tmp_path / KEY / "half").write_text("")
    if document is not None:
        (tmp_path / KEY / DOCUMENT).write_text(document)
    build = Builder()
    EnvironmentCache(tmp_path).acquire(KEY, "m", build, 1)
    assert build.count == 1


def test_another_builder_is_awaited_with_a_time_limit(tmp_path: Path) -> None:
    with locked(tmp_path, KEY), pytest.raises(LoadFailed, match="built by another after 0 s"):
        EnvironmentCache(tmp_path).acquire(KEY, "m", Builder(), 0)


def test_environments_in_use_are_not_removed(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path)
    hold = cache.acquire(KEY, "m", Builder(), 1)
    another = EnvironmentCache(tmp_path).acquire(KEY, "m", Builder(), 1)
    removed, kept = cache.prune(FOREVER)
    assert (removed, [entry.key for entry in kept]) == ([], [KEY])
    del hold
    assert cache.prune(FOREVER)[0] == []
    del another
    assert [entry.key for entry in cache.prune(FOREVER)[0]] == [KEY]
    assert os.listdir(tmp_path) == []


def test_recently_used_and_foreign_files_stay(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path)
    cache.acquire(KEY, "m", Builder(), 1)
    os.utime(tmp_path / KEY / DOCUMENT, (1000, 1000))
    assert cache.prune(1000) == ([], [])
    cache.acquire(KEY, "m", Builder(), 1)  # this counts as a use
    assert cache.prune(2000) == ([], [])
    (tmp_path / "photographs").mkdir()
    (tmp_path / key_of("left by a crash")).mkdir()
    cache.prune(FOREVER)
    assert os.listdir(tmp_path) == ["photographs"]


def test_a_build_beyond_the_limit_removes_the_least_recently_used(tmp_path: Path) -> None:
    def build(path: Path, lock: int) -> Built:
        (path / "bin").mkdir()
        (path / "bin" / "python").write_text("x" * 1000)
        return Built(("a==1",), "Python 3")

    keys = [key_of(number) for number in range(4)]
    cache = EnvironmentCache(tmp_path, 3500)

    def kept() -> list[int]:
        return [number for number, key in enumerate(keys) if cache.entry(key)]

    for seconds, key in enumerate(keys[:3]):
        cache.acquire(key, "m", build, 1)
        os.utime(tmp_path / key / DOCUMENT, (seconds, seconds))
    assert [entry.nbytes for entry in cache.entries()] == [1000] * 3
    first = cache.acquire(keys[0], "m", build, 1)
    os.utime(tmp_path / keys[0] / DOCUMENT, (0, 0))  # least recently used, but in use
    assert kept() == [0, 1, 2]
    last = EnvironmentCache(tmp_path).acquire(keys[3], "m", build, 1)  # has no limit
    assert kept() == [0, 1, 2, 3]
    cache.acquire(key_of("more"), "m", build, 1)
    assert kept() == [0, 3]
    (tmp_path / keys[0]).chmod(0o777)  # fails its own use, not another's build
    assert EnvironmentCache(tmp_path, 1).acquire(keys[1], "m", build, 1).entry.nbytes == 1000
    del first, last


def test_a_cache_writable_by_others_is_not_used(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path)
    cache.acquire(KEY, "m", Builder(), 1)
    (tmp_path / KEY).chmod(0o777)
    with pytest.raises(LoadFailed, match="can be changed by others") as caught:
        cache.acquire(KEY, "m", Builder(), 1)
    assert str(tmp_path) not in caught.value.public
    (tmp_path / "file").write_text("")
    other = EnvironmentCache(tmp_path / "file" / "cache")
    with pytest.raises(LoadFailed, match="cannot be written: Not a directory; --env") as refused:
        other.acquire(KEY, "m", Builder(), 1)
    assert str(tmp_path) not in refused.value.public
    assert list(EnvironmentCache(tmp_path / "nothing").entries()) == []


def test_location_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/headrace/environments")
    usual = Path("/home/x/.cache/headrace/environments")
    assert default_root({}) == default_root({"XDG_CACHE_HOME": "relative"}) == usual
