"""Models of a place in memory, brought to a cache on disk."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Barrier, Thread

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores import remote as remote_module
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    Unreached,
)
from headrace.plugins.stores.remote_store import (
    Attempts,
    RemoteStore,
    RemoteToken,
    StoreOutage,
)
from headrace.repository.model_files import MANIFEST, Digests, manifest_of
from headrace.repository.store import StoreOptions
from tests.support.scrape import until

LARGE = bytes(range(256)) * (3 * PART // 256) + b"end"


class Memory(Remote):
    """A place in memory. `on_read` is called before each part is read."""

    address = "memory:one"

    def __init__(self, **models: Mapping[str, bytes]) -> None:
        self.content = {name: dict(files) for name, files in models.items()}
        self.down = ""
        self.reads: list[tuple[str, int]] = []
        self.on_read: Callable[[str, int], None] = lambda path, start: None
        self.closed = False

    def _files(self, name: str) -> dict[str, RemoteFile]:
        found = self.content[name].items()
        return {path: RemoteFile(len(data), str(hash(data))) for path, data in found}

    def _reach(self) -> None:
        if self.down:
            raise Unreached(f"{self.address} cannot be reached: {self.down}")

    def models(self) -> Mapping[str, ModelState]:
        self._reach()
        return {name: ModelState.of(self._files(name)) for name in self.content}

    def contents(self, name: str) -> RemoteContents:
        self._reach()
        return self.contents_of(name, self._files(name))

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        self._reach()
        self.reads.append((path, start))
        self.on_read(path, start)
        return self.content[name][path][start:stop]

    def close(self) -> None:
        self.closed = True


def opened(memory: Memory, cache: Path, nbytes: int = 0, offline: bool = False) -> RemoteStore:
    return RemoteStore(memory, StoreOptions(str(cache), nbytes, offline))


def brought(store: RemoteStore, name: str) -> dict[str, bytes]:
    """The files of a model but its manifest, whose digests are compared."""
    store.names()
    lease = store.materialise(name, store.token(name))
    assert Digests().problems(lease.path) == []
    files = (path for path in lease.path.rglob("*") if path.is_file())
    found = {str(path.relative_to(lease.path)): path.read_bytes() for path in files}
    assert found.pop(MANIFEST)
    return found


def answers(store: RemoteStore) -> bool:
    """True if the store has been asked."""
    try:
        store.names()
    except LoadFailed:
        return False
    return True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_FIRST_PAUSE_SECS", 0.001)
    monkeypatch.setattr(remote_module, "_LONGEST_PAUSE_SECS", 0.004)


FILES = {"1/model.onnx": LARGE, "1/empty": b"", "config.pbtxt": b"", "labels.txt": b"a\nb\n"}


def test_a_model_is_brought_whole_and_once(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    store = opened(memory, tmp_path)
    assert brought(store, "m") == FILES
    assert store.counts.read_bytes == sum(map(len, FILES.values()))
    assert (store.counts.brought, store.left_bytes, store.trouble) == (1, 0, "")
    again = opened(memory, tmp_path)
    assert brought(again, "m") == FILES
    assert again.counts.read_bytes == 0
    assert next(family.name for family, _ in store.metrics()) == "headrace_store_up"


def test_a_download_is_told_while_it_is_under_way(tmp_path: Path) -> None:
    memory, seen = Memory(m=FILES), list[tuple[str, int, int]]()
    store = opened(memory, tmp_path)

    def look(path: str, start: int) -> None:
        seen.extend((each.model, each.nbytes, each.done) for each in store.downloads)

    memory.on_read = look
    brought(store, "m")
    nbytes = sum(map(len, FILES.values()))
    assert {(model, whole) for model, whole, _ in seen} == {("m", nbytes)}
    assert all(0 <= done < nbytes for _, _, done in seen)
    assert store.downloads == ()


def test_versions_that_stay_are_the_same_files(tmp_path: Path) -> None:
    memory = Memory(m={"1/model.onnx": b"one"})
    store = opened(memory, tmp_path)
    store.names()
    first = store.materialise("m", store.token("m"))
    memory.content["m"]["2/model.onnx"] = b"two"
    store.names()
    second = store.materialise("m", store.token("m"))
    assert first.path != second.path
    assert first.origin == second.origin
    assert (first.path / "1/model.onnx").samefile(second.path / "1/model.onnx")
    assert [path for path, _ in memory.reads] == ["1/model.onnx", "2/model.onnx"]


def test_a_manifest_tells_what_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_bytes(b"content")
    manifest = manifest_of(tmp_path / "m")
    memory = Memory(m={"a": b"content", "b": b"half wr", MANIFEST: manifest})
    store = opened(memory, tmp_path / "cache")
    assert brought(store, "m") == {"a": b"content"}
    assert store.problems("m") == []
    memory.content["m"]["a"] = b"coNtent"
    assert store.problems("m") == ["a does not hold what it is to hold"]
    assert brought(store, "m") == {"a": b"content"}, "the state is that of the manifest"
    store = opened(memory, tmp_path / "other")
    with pytest.raises(LoadFailed, match="m: a does not hold what its manifest tells"):
        brought(store, "m")
    del memory.content["m"]["a"]
    with pytest.raises(LoadFailed, match="m: a of its manifest is not there"):
        brought(store, "m")
    del memory.content["m"][MANIFEST]
    assert store.problems("m") == [f"there is no {MANIFEST}"]


def test_a_model_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    store = opened(memory, tmp_path)

    def change(path: str, start: int) -> None:
        memory.content["m"]["labels.txt"] += b"x"

    memory.on_read = change
    with pytest.raises(LoadFailed, match="memory:one: m is being changed"):
        brought(store, "m")
    memory.on_read = lambda path, start: None
    token = store.token("m")
    with pytest.raises(LoadFailed, match="memory:one: m is being changed"):
        store.materialise("m", token)
    assert brought(store, "m") == memory.content["m"]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", "a/./b"])
def test_no_path_leaves_the_directory(path: str, tmp_path: Path) -> None:
    store = opened(Memory(m={path: b"x"}), tmp_path / "cache")
    with pytest.raises(LoadFailed, match="is no path within its directory"):
        brought(store, "m")


def test_parts_that_fail_are_tried_again(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    failed = set[tuple[str, int]]()

    def fail_once(path: str, start: int) -> None:
        if (path, start) not in failed:
            failed.add((path, start))
            raise Unreached("memory:one cannot be reached: busy")

    memory.on_read = fail_once
    assert brought(opened(memory, tmp_path), "m") == FILES


def test_a_part_of_another_length_is_refused(tmp_path: Path) -> None:
    memory = Memory(m={"a": b"abc"})
    store = opened(memory, tmp_path)

    def cut(path: str, start: int) -> None:
        memory.content["m"]["a"] = b"a"

    memory.on_read = cut
    with pytest.raises(LoadFailed, match="memory:one: m/a: 1 bytes came in place of 3"):
        brought(store, "m")


def test_a_download_is_continued(tmp_path: Path) -> None:
    memory = Memory(m={"1/model.onnx": LARGE})

    def fail(path: str, start: int) -> None:
        if start == 2 * PART:
            raise LoadFailed("broken")

    memory.on_read = fail
    with pytest.raises(LoadFailed, match="broken"):
        brought(opened(memory, tmp_path), "m")
    read = {start for _, start in memory.reads} - {2 * PART}
    memory.reads.clear()
    memory.on_read = lambda path, start: None
    store = opened(memory, tmp_path)
    assert brought(store, "m") == {"1/model.onnx": LARGE}
    assert {start for _, start in memory.reads} == {0, PART, 2 * PART, 3 * PART} - read
    assert not list((tmp_path / "partial").iterdir())


def test_a_store_out_of_reach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    memory = Memory(m=FILES, other={"a": b"x"})
    store = opened(memory, tmp_path)
    assert brought(store, "m") == FILES
    known = store.token("m")
    memory.down = "unplugged"
    with pytest.raises(LoadFailed, match="memory:one cannot be reached: unplugged"):
        store.names()
    assert store.trouble == "memory:one cannot be reached: unplugged"
    assert store.current("m") == known, "the last known state"
    assert store.materialise("m", known).path.is_dir()
    with pytest.raises(LoadFailed, match="unplugged"):
        store.materialise("other", store.token("other"))
    restarted = opened(memory, tmp_path)
    assert set(restarted.names()) == {"m", "other"}
    assert restarted.materialise("m", restarted.token("m")).path.is_dir()
    memory.down = ""
    until(lambda: answers(store), "the end of the pause")
    assert brought(store, "other") == {"a": b"x"}
    assert store.trouble == ""
    assert "memory:one can be reached again" in caplog.text
    nothing = opened(memory, tmp_path / "empty")
    memory.down = "unplugged"
    with pytest.raises(LoadFailed, match="unplugged"):
        nothing.names()


def test_a_model_that_failed_is_offered_again_by_another_token(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    store = opened(memory, tmp_path)
    store.names()
    first = store.token("m")

    def broken(path: str, start: int) -> None:
        raise LoadFailed("broken")

    memory.on_read = broken
    with pytest.raises(LoadFailed, match="broken"):
        store.materialise("m", first)
    attempts = Attempts()
    attempts.fail(now=10.0)
    assert [attempts.offered(now) for now in (10.0, 10.0009, 11.0, 12.0)] == [0, 0, 1, 1]
    memory.on_read = lambda path, start: None
    store.names()
    again = store.token("m")
    assert isinstance(again, RemoteToken)
    assert store.materialise("m", again).path.is_dir()
    assert store.token("m") == again


def test_pauses_grow_up_to_a_limit() -> None:
    outage = StoreOutage()
    seconds = []
    for _ in range(5):
        outage.fail("down", 100.0)
        seconds.append(outage.backoff.delay)
        assert outage.until == 100.0 + outage.backoff.delay
    assert seconds == [0.001, 0.002, 0.004, 0.004, 0.004]


def test_offline_nothing_is_asked(tmp_path: Path) -> None:
    memory = Memory(m=FILES, other={"a": b"x"})
    brought(opened(memory, tmp_path), "m")
    memory.down = "it must not be asked"
    memory.reads.clear()
    store = opened(memory, tmp_path, offline=True)
    assert brought(store, "m") == FILES
    assert store.current("m") == store.token("m")
    with pytest.raises(LoadFailed, match=r"other is not in the cache \(--store-offline\)"):
        store.materialise("other", store.token("other"))
    assert store.trouble == ""
    with pytest.raises(LoadFailed, match="memory:one is not asked"):
        opened(memory, tmp_path / "empty", offline=True).names()


def test_room_is_made_before_a_model_is_brought(tmp_path: Path) -> None:
    memory = Memory(a={"x": b"a" * 600}, b={"x": b"b" * 600}, c={"x": b"c" * 600})
    store = opened(memory, tmp_path, nbytes=1300)
    store.names()
    held = store.materialise("a", store.token("a"))
    store.materialise("b", store.token("b")).release()
    most: list[int] = []
    memory.on_read = lambda path, start: most.append(store.cache.contents.nbytes)
    store.materialise("c", store.token("c")).release()
    assert most == [600], "b has gone, which nobody has loaded"
    assert (held.path / "x").read_bytes() == b"a" * 600
    assert store.cache.contents.nbytes == 1200


def test_two_servers_share_one_download(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    both, found = Barrier(2, timeout=60), []

    def serve() -> None:
        store = opened(memory, tmp_path)
        both.wait()
        found.append(brought(store, "m"))

    threads = [Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [FILES, FILES]
    assert sorted(memory.reads) == sorted(set(memory.reads))


def test_a_closed_store_brings_nothing(tmp_path: Path) -> None:
    memory = Memory(m={"1/model.onnx": LARGE})
    store = opened(memory, tmp_path)
    memory.on_read = lambda path, start: store.close()
    with pytest.raises(LoadFailed, match="the server is shutting down"):
        brought(store, "m")
    assert memory.closed


def test_a_place_that_cannot_be_written_says_how_models_get_there(tmp_path: Path) -> None:
    memory = Memory(m=FILES)
    with pytest.raises(LoadFailed, match="memory:one cannot be written: it is read only"):
        opened(memory, tmp_path).publish("m", tmp_path, b"")
    memory.publishing = "use the other door"
    with pytest.raises(LoadFailed, match="memory:one cannot be written: use the other door"):
        opened(memory, tmp_path).publish("m", tmp_path, b"")
