"""Models by name, in changing repositories, and in stores."""

import os
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest

from headrace.core.errors import LoadFailed
from headrace.repository.catalogue import (
    DUPLICATE,
    NO_SUCH,
    Catalogue,
    Directory,
    at_start,
    open_store,
)
from headrace.repository.layout import materialised
from headrace.repository.model_files import MANIFEST, fingerprint, manifest_of
from headrace.repository.store import Lease, Store
from tests.repository.files import directories, write
from tests.support.scrape import until
from tests.support.stores import catalogue, scan


def test_scanning_lists_directories_by_name(tmp_path: Path) -> None:
    directories(tmp_path, "b/1", "a/2", ".git/1", "empty", "lost+found")
    os.makedirs(os.fsencode(tmp_path) + b"/n\xff/1")  # a name that is not UTF-8
    (tmp_path / "README.md").write_text("")
    assert [(each.name, each.path, each.versions) for each in scan([tmp_path])] == [
        ("a", tmp_path / "a", (2,)), ("b", tmp_path / "b", (1,)), ("empty", tmp_path / "empty", ()),
    ]  # fmt: skip


def test_a_model_in_several_repositories_is_marked(tmp_path: Path) -> None:
    one = directories(tmp_path / "one", "a/1", "b/1")
    two = directories(tmp_path / "two", "b/2", "c/1")
    three = directories(tmp_path / "three", "b/3")
    marked = {source.name: source.duplicate for source in scan([one, two, three])}
    assert marked == {"a": False, "b": True, "c": False}


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"nowhere cannot be read: No such file"):
        scan([tmp_path / "nowhere"])
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadFailed, match=r"file is a file; .* or behind --model-file"):
        scan([tmp_path / "file"])


def test_a_model_in_place_of_a_repository_by_name(tmp_path: Path) -> None:
    write(tmp_path / "net" / "model.onnx")
    known = catalogue([tmp_path / "net"], name="digits")
    assert (known.names(), known.read("net")) == ({"digits": ""}, None)
    found = known.read("digits")
    assert found is not None
    assert found.model_path(1, "model.onnx") == tmp_path / "net" / "model.onnx"
    other = models(tmp_path / "more", "net")
    names = catalogue([tmp_path / "net", other], namespacing=True).names()
    assert sorted(names) == ["net@more", "net@net"]
    file = catalogue([], [tmp_path / "net" / "model.onnx"], name="digits")
    assert file.names() == {"digits": ""}
    one, [] = file.sources()
    assert [source.name for source in one] == ["digits"]


def test_an_empty_repository_is_reported(tmp_path: Path) -> None:
    sources, [warning] = catalogue([tmp_path]).sources()
    assert sources == []
    assert warning.startswith(f"no models in {tmp_path}: expected a file such as")
    assert warning.endswith("found nothing")


def models(root: Path, *names: str) -> Path:
    return directories(root, *[f"{name}/1" for name in names])


def test_current_models_of_the_repositories(tmp_path: Path) -> None:
    one, two = models(tmp_path / "one", "a", "b"), models(tmp_path / "two", "b")
    file = tmp_path / "c.onnx"
    file.write_bytes(b"")
    known = catalogue([one, two], [file])
    assert known.names() == {"a": "", "b": DUPLICATE, "c": ""}
    models(two, "d")
    assert known.names()["d"] == ""
    a, c = known.read("a"), known.read("c")
    assert a is not None
    assert (a.path, a.versions) == (one / "a", (1,))
    assert c is not None
    assert c.file == file
    with pytest.raises(LoadFailed, match="in two or more repositories"):
        known.read("b")


def test_only_names_of_directories_are_found(tmp_path: Path) -> None:
    known = catalogue([models(tmp_path / "one", "a")])
    for name in ("nobody", "", ".", "..", "../one/a", "a/1", "/", "a\0", "A"):
        assert known.read(name) is None


def test_a_repository_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = catalogue([tmp_path / "gone", models(tmp_path / "one", "a")])
    assert known.names() == {"a": ""}
    assert "gone cannot be read" in caplog.text
    found = known.read("a")
    assert found is not None
    assert found.path == tmp_path / "one" / "a"
    with pytest.raises(LoadFailed, match="gone cannot be read"):
        known.read("b")


def test_a_name_of_several_repositories_with_namespaces(tmp_path: Path) -> None:
    one, two = models(tmp_path / "x/one", "a", "b"), models(tmp_path / "y/one", "a")
    known = catalogue([one, two], namespacing=True)
    assert list(known.names()) == ["a@one", "a@one-2", "b"]
    found = known.read("a@one-2")
    assert found is not None
    assert (found.name, found.path, found.written_name) == ("a@one-2", two / "a", "a")
    with pytest.raises(LoadFailed, match="There are 2 identifiers of model 'a'"):
        known.read("a")


def test_models_loaded_at_start(tmp_path: Path) -> None:
    sources = scan([models(tmp_path, "a", "b")])
    assert at_start(sources, ["*"]) == sources
    assert at_start(sources, []) == []
    found = at_start(sources, ["b", "nobody", "nobody"])
    assert [(s.name, s.problem) for s in found] == [("b", ""), ("nobody", NO_SUCH)]


# --- stores


class Shelf(Store):
    """A store of models whose directories are made when they are loaded."""

    def __init__(self, root: Path, tokens: dict[str, str]) -> None:
        self.address = "shelf:one"
        self._root = root
        self.tokens = tokens
        self.made = list[tuple[str, Hashable]]()

    def names(self) -> Collection[str]:
        return self.tokens

    def token(self, name: str) -> Hashable:
        return self.tokens[name]

    def materialise(self, name: str, token: Hashable) -> Lease:
        self.made.append((name, token))
        if token == "broken":
            raise ZeroDivisionError("a bug")
        write(self._root / f"{name}-{token}" / "1" / "model.py")
        return Lease(self._root / f"{name}-{token}")


def test_models_of_a_store_are_brought_when_they_are_loaded(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "cache", {"a": "x", "b": "y"})
    known = Catalogue((shelf, Directory(models(tmp_path / "here", "b", "c"))))
    assert known.names() == {"a": "", "b": DUPLICATE, "c": ""}
    sources, [] = known.sources()
    assert [(each.name, each.is_absent) for each in sources] == [
        ("a", True), ("b", False), ("c", False),
    ]  # fmt: skip
    assert shelf.made == []
    found = known.read("a")
    assert found is not None
    assert (found.repository, found.written_name, found.versions) == ("shelf:one", "a", ())
    here = materialised(found)
    assert (here.path, here.versions, here.is_absent) == (tmp_path / "cache/a-x", (1,), False)
    assert materialised(here) is here
    assert shelf.made == [("a", "x")]


def test_the_state_of_an_absent_model_is_its_token(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, {"a": "x"})
    known = Catalogue((shelf,))
    [before], [] = known.sources()
    [same], [] = known.sources()
    assert fingerprint(before) == fingerprint(same)
    shelf.tokens["a"] = "z"
    [after], [] = known.sources()
    assert fingerprint(before) != fingerprint(after)


def test_a_bug_in_a_store_is_an_error_of_its_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(tmp_path, {"a": "broken"})
    [source], [] = Catalogue((shelf,)).sources()
    with pytest.raises(LoadFailed, match="shelf:one: its store failed: ZeroDivisionError"):
        materialised(source)
    assert "ZeroDivisionError: a bug" in caplog.text
    del shelf.tokens["a"]
    assert Catalogue((shelf,)).sources() == ([], ["no models in shelf:one"])


def test_names_of_stores_with_namespaces(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, {"a": "x"})
    known = Catalogue((Directory(models(tmp_path / "here", "a")), shelf), namespacing=True)
    assert list(known.names()) == ["a@here", "a@shelf:one"]


class GatedShelf(Shelf):
    """A store that answers once it is `open`, with the error `down` unless that is empty."""

    def __init__(self, address: str, *names: str) -> None:
        super().__init__(Path(), dict.fromkeys(names, "x"))
        self.address = address
        self.down = ""
        self.open = Event()
        self.asked: SimpleQueue[None] = SimpleQueue()

    def names(self) -> Collection[str]:
        self.asked.put(None)
        self.open.wait(60)
        if self.down:
            raise LoadFailed(self.down)
        return super().names()


def test_stores_are_listed_side_by_side() -> None:
    stores = [GatedShelf("one:", "a"), GatedShelf("two:", "b"), GatedShelf("three:", "c")]
    known = Catalogue(tuple(stores))
    ways: list[Callable[[], object]] = [known.names, known.sources, lambda: known.read("c")]
    for listed in ways:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(listed)
            for store in stores:
                store.asked.get(timeout=60)
            assert not found.done()
            for store in stores:
                store.open.set()
            assert found.result(60)
        for store in stores:
            store.open.clear()


def test_a_store_that_hangs_delays_no_model_of_another_one(tmp_path: Path) -> None:
    slow, here = GatedShelf("slow:", "b"), Directory(models(tmp_path, "a"))
    known = Catalogue((slow, here))
    for _ in range(3):
        found = known.read("a")
        assert found is not None
        assert found.path == here.path / "a"
    assert slow.asked.qsize() == 1, "it is not asked again before it has answered"
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(known.read, "b")
        for _ in range(2):
            slow.asked.get(timeout=60)
        slow.tokens = {"b": "x", "c": "x"}
        slow.open.set()
        found = reading.result(60)
    assert found is not None
    assert (found.repository, found.written_name) == ("slow:", "b")
    assert known.read("c") is not None, "it is asked again"
    slow.tokens = {"a": "x"}

    def is_ambiguous() -> bool:
        try:
            known.read("a")
        except LoadFailed as error:
            return str(error) == DUPLICATE
        return False

    until(is_ambiguous, "the end of the first listing")


def test_stores_out_of_reach_break_no_other_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = GatedShelf("s3://first"), GatedShelf("s3://second")
    first.down, second.down = "s3://first cannot be reached", "no route"
    first.open.set()
    second.open.set()
    known = Catalogue((first, Directory(models(tmp_path, "a")), second))
    assert known.names() == {"a": ""}
    assert "s3://second: no route" in caplog.text
    assert known.read("a") is not None
    expected = r"^s3://first cannot be reached; s3://second: no route$"
    with pytest.raises(LoadFailed, match=expected):
        known.read("b")
    with pytest.raises(LoadFailed, match=expected):
        known.sources()
    second.down = ""
    with pytest.raises(LoadFailed, match=r"^s3://first cannot be reached$"):
        known.read("b")


def test_an_address_without_a_store_is_a_directory(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)) == Directory(tmp_path)
    with pytest.raises(LoadFailed, match=r"^models:/team/1 is in MLflow's model registry"):
        open_store("models:/team/1").names()


def test_a_directory_as_a_target(tmp_path: Path) -> None:
    source = tmp_path / "source" / "a"
    write(source / "1" / "model.py", "first")
    target = Directory(tmp_path / "new" / "target")
    target.publish("a", source, manifest_of(source))
    assert target.names() == ["a"]
    assert target.problems("a") == []
    assert target.size("a") > 0
    (source / "1" / "model.py").unlink()
    write(source / "2" / "model.py")
    target.publish("a", source, manifest_of(source))
    assert sorted(path.name for path in (target.path / "a").iterdir()) == ["2", MANIFEST]
    assert [path.name for path in target.path.iterdir()] == ["a"], "no draft is left"
    write(target.path / "b" / "1" / "model.py")
    assert target.problems("b") == [f"there is no {MANIFEST}"]
    (target.path / "a" / "2" / "model.py").write_text("other")
    assert target.problems("a") == ["2/model.py does not hold what it is to hold"]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../a", "a/b", "/a", "a\0"])
def test_no_name_leaves_the_target(name: str, tmp_path: Path) -> None:
    source = models(tmp_path / "source", "a") / "a"
    with pytest.raises(LoadFailed, match="cannot be the name of a model's directory"):
        Directory(tmp_path / "target").publish(name, source, manifest_of(source))
    assert not (tmp_path / "target").exists()


def test_a_model_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write(source / "1" / "model.py", "new")
    write(tmp_path / "target" / "a" / "1" / "model.py", "old")
    rename = Path.rename

    def rename_others(self: Path, target: Path) -> Path:
        if ".new." in self.name:
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_others)
    with pytest.raises(LoadFailed, match="cannot be written: no space left"):
        Directory(tmp_path / "target").publish("a", source, manifest_of(source))
    assert (tmp_path / "target" / "a" / "1" / "model.py").read_text() == "old"
    assert [each.name for each in (tmp_path / "target").iterdir()] == ["a"]
