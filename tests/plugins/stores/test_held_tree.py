"""The models of a store that are brought all at once, in one tree of the cache."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import StoreCache
from headrace.plugins.stores.held_tree import HeldModel, HeldTree
from headrace.plugins.stores.remote import Remote, RemoteFile
from headrace.repository.model_files import digest_of

PLACE = Remote()
PLACE.address = "memory:one"


def one(root: Path, files: Mapping[str, RemoteFile]) -> Mapping[str, HeldModel]:
    return {"m": HeldModel(root, files)}


class Content:
    """Files of one state, and how often they were asked for."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.fills = 0

    def fill(self, directory: Path) -> None:
        self.fills += 1
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def test_a_state_is_brought_once(tmp_path: Path) -> None:
    content = Content(a=b"one")
    tree = HeldTree(PLACE, StoreCache(tmp_path), one)
    digest = digest_of(b"one")
    found = tree.models("1", 3, content.fill)["m"]
    assert found.files == {"a": RemoteFile(3, digest, digest)}
    assert (found.directory / "a").read_bytes() == b"one"
    assert tree.models("1", 3, content.fill)["m"] is found
    again = HeldTree(PLACE, StoreCache(tmp_path), one)
    assert again.models("1", 3, content.fill)["m"] == found
    assert content.fills == 1


def test_the_tree_of_the_last_state_stays_in_the_cache(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 1)
    tree = HeldTree(PLACE, cache, one)
    first = tree.models("1", 3, Content(a=b"one").fill)["m"].directory
    cache.make_room()
    assert tree.read("m", "a", 1, 3) == b"ne"
    tree.models("2", 3, Content(a=b"two").fill)
    cache.make_room()
    assert not first.exists()
    assert tree.read("m", "a", 0, 3) == b"two"


def test_a_file_that_cannot_be_read_is_an_error_of_its_model(tmp_path: Path) -> None:
    tree = HeldTree(PLACE, StoreCache(tmp_path), one)
    with pytest.raises(LoadFailed, match="memory:one: m is being changed"):
        tree.read("m", "a", 0, 3)
    tree.models("1", 3, Content(a=b"one").fill)
    with pytest.raises(LoadFailed, match="memory:one: other is being changed"):
        tree.read("other", "a", 0, 3)
    with pytest.raises(LoadFailed, match="b cannot be read: No such file"):
        tree.read("m", "b", 0, 3)


def test_a_closed_store_brings_nothing(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    tree = HeldTree(PLACE, cache, one)
    tree.stopped.set()

    def late(directory: Path) -> None:
        with pytest.raises(LoadFailed, match="the server is shutting down"):
            tree.models("1", 3, Content().fill)

    HeldTree(PLACE, cache, one).models("1", 3, late)
