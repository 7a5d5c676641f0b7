"""The cache of stores: what is kept, what is removed, and what was damaged."""

import os
from pathlib import Path
from threading import Event

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import StoreCache, cache_of, key_of
from headrace.plugins.stores.contents import CachedContent
from headrace.repository.model_files import digest_of
from headrace.repository.store import Lease

KEEP_GOING = Event()
ORIGIN = Path("store/m")


def make(cache: StoreCache, name: str, **files: bytes) -> str:
    """A tree of these files; returns its key."""
    key = key_of(name)
    with cache.making(key, KEEP_GOING) as wanted:
        assert wanted
        found = {
            path: CachedContent(cache.contents.put(data), len(data)) for path, data in files.items()
        }
        cache.make(key, found, b"{}", name)
    return key


def use(cache: StoreCache, key: str) -> Lease:
    lease = cache.use(key, ORIGIN)
    assert lease is not None
    return lease


def test_a_tree_is_used_by_many(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path / "cache")
    assert cache.use(key_of("m"), ORIGIN) is None
    key = make(cache, "m", a=b"one", b=b"two")
    first, second = use(cache, key), use(StoreCache(tmp_path / "cache"), key)
    assert first.path == second.path
    assert first.origin == ORIGIN
    assert (first.path / "a").read_bytes() == b"one"
    with cache.making(key, KEEP_GOING) as wanted:
        assert not wanted
    assert cache.contents.nbytes == cache.contents.known_bytes == 6


def test_the_least_recently_used_goes_unless_it_is_in_use(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 250)
    keys = [make(cache, name, a=name.encode() * 100) for name in "abc"]
    for age, key in enumerate(reversed(keys)):
        os.utime(tmp_path / "trees" / f"{key}.json", (1_000 - age, 1_000 - age))
    held = use(cache, keys[0])  # the oldest
    for age, key in enumerate(reversed(keys)):
        os.utime(tmp_path / "trees" / f"{key}.json", (1_000 - age, 1_000 - age))
    cache.make_room()
    assert [cache.use(key, ORIGIN) is not None for key in keys] == [True, False, True]
    assert cache.contents.nbytes == 200
    cache.make_room(200)
    assert [cache.use(key, ORIGIN) is not None for key in keys] == [True, False, False]
    held.release()
    cache.make_room(200)
    assert cache.contents.nbytes == 0
    assert not list((tmp_path / "trees").iterdir())


def test_no_room_is_made_while_another_tree_is_made(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 10)
    key = make(cache, "old", a=b"x" * 100)
    with cache.making(key_of("new"), KEEP_GOING):
        cache.contents.put(b"y" * 100)
        cache.make_room()
        assert use(cache, key).path.is_dir()
        assert cache.contents.nbytes == 200
    cache.make_room()
    assert cache.contents.nbytes == 0


def test_content_of_two_trees_stays_for_the_other(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 150)
    first, second = make(cache, "one", a=b"x" * 100), make(cache, "two", a=b"x" * 100)
    assert cache.contents.nbytes == 100
    held = use(cache, second)
    cache.make_room(100)
    assert cache.use(first, ORIGIN) is None
    assert (held.path / "a").read_bytes() == b"x" * 100


@pytest.mark.parametrize("damage", ["write", "remove", "document"])
def test_a_damaged_tree_is_made_anew(damage: str, tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    key = make(cache, "m", a=b"one")
    tree = use(cache, key).path
    match damage:
        case "write":
            (tree / "a").chmod(0o644)
            (tree / "a").write_bytes(b"two")
        case "remove":
            (tree / "a").unlink()
        case _:
            tree.with_suffix(".json").write_text('{"files": [')
    assert cache.use(key, ORIGIN) is None
    assert make(cache, "m", a=b"one") == key
    assert (use(cache, key).path / "a").read_bytes() == b"one"


def test_a_missing_object_is_noticed(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    lost = {"a": CachedContent("sha256:" + "0" * 64, 3)}
    with cache.making("k", KEEP_GOING), pytest.raises(LoadFailed, match="has lost files of m"):
        cache.make("k", lost, b"{}", "m")
    assert cache.use("k", ORIGIN) is None


def test_waiting_ends_with_the_server(tmp_path: Path) -> None:
    cache, stopped = StoreCache(tmp_path), Event()
    stopped.set()
    with cache.making("k", KEEP_GOING), pytest.raises(LoadFailed, match="is shutting down"):  # noqa: SIM117
        with cache.making("k", stopped):
            raise AssertionError("two make one tree")


def test_listings_are_kept(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    assert cache.listing("s3://b") == {}
    cache.keep_listing("s3://b", {"m": ["state", 3]})
    assert cache.listing("s3://b") == {"m": ["state", 3]}
    assert cache.listing("s3://c") == {}


def test_a_cache_that_others_can_change_is_refused(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    make(cache, "m", a=b"one")
    tmp_path.chmod(0o777)
    with (
        pytest.raises(LoadFailed, match="can be changed by others than this user"),
        cache.making("k", KEEP_GOING),
    ):
        raise AssertionError("a tree is made")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = StoreCache(tmp_path / "file")
    with (
        pytest.raises(LoadFailed, match=r"file cannot be written: Not a directory \(--store-cache"),
        cache.making("k", KEEP_GOING),
    ):
        raise AssertionError("a tree is made")
    cache.keep_listing("s3://b", {})


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_of("").root == tmp_path / "headrace" / "stores"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_of("").root == Path("/home/somebody/.cache/headrace/stores")
    assert cache_of("here").root == Path.cwd() / "here"


def test_files_that_come_together(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    filled: list[Path] = []

    def fill(directory: Path) -> None:
        filled.append(directory)
        (directory / "1").mkdir()
        (directory / "1" / "a").write_bytes(b"one")
        if len(filled) == 1:
            raise LoadFailed("broken")

    with pytest.raises(LoadFailed, match="broken"):
        cache.bring("key", "m", 3, fill, Event())
    assert cache.use("key", tmp_path) is None
    lease, files = cache.bring("key", "m", 3, fill, Event())
    assert files == {"1/a": CachedContent(digest_of(b"one"), 3)}
    assert (lease.path / "1" / "a").read_bytes() == b"one"
    assert not list((tmp_path / "partial").iterdir())
    assert cache.bring("key", "m", 3, fill, Event())[1] == files
    assert len(filled) == 2, "it is there"

    def link(directory: Path) -> None:
        (directory / "a").symlink_to("/etc")

    with pytest.raises(LoadFailed, match="m: a is no file"):
        cache.bring("other", "m", 3, link, Event())


def test_room_is_made_before_files_come_together(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 250)
    held = use(cache, make(cache, "held", a=b"a" * 100))
    make(cache, "old", a=b"b" * 100)
    left: list[int] = []

    def fill(directory: Path) -> None:
        left.append(cache.contents.nbytes)
        (directory / "a").write_bytes(b"c" * 100)

    cache.bring("key", "m", 100, fill, Event())
    assert left == [100], "old has gone, which nobody has loaded"
    assert held.path.is_dir()
    cache.bring("key", "m", 100, fill, Event())
    assert cache.contents.nbytes == 200
