"""Archives on a web server: what is unpacked, what is refused, and changes of an archive."""

import io
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.archives import unpack
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.remote import Unreached
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import MANIFEST, write_manifest
from headrace.repository.store import StoreOptions
from tests.models.onnx_graphs import constant, write_model
from tests.plugins.stores.remotes import (
    brought,
    following_server,
    opened_store,
    special,
    tarred,
)
from tests.support.object_store import BUCKET, ObjectStore
from tests.support.scrape import until
from tests.support.stores import constant_of


def zipped(files: Mapping[Any, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def linked(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def encrypted() -> bytes:
    content = bytearray(zipped({"a": b"x"}))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + offset] |= 1
    return bytes(content)


def damaged() -> bytes:
    content = bytearray(zipped({"a": bytes(range(256))}))
    content[40] ^= 0xFF
    return bytes(content)


GOOD = {
    "m.zip": zipped({"a/": b"", "a/b": b"x", "__MACOSX/a/._b": b"junk"}),
    "m.tar.gz": tarred(("./a/b", b"x")),
    "m.tgz": tarred((special("a", tarfile.DIRTYPE), b""), ("a//b", b"x")),
    "m.tar": tarred(("a/b", b"x"), mode="w"),
}


@pytest.mark.parametrize("name", GOOD)
def test_plain_files_are_unpacked(name: str, tmp_path: Path) -> None:
    unpack([(name, io.BytesIO(GOOD[name]))], tmp_path, 1, 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "a" / "b"]
    assert files[0].read_bytes() == b"x"


BAD = {
    "parent.zip": (zipped({"../a": b"x"}), "'../a' leads out of the archive"),
    "deep.zip": (zipped({"a/../../b": b"x"}), "leads out of the archive"),
    "root.zip": (zipped({"/etc/a": b"x"}), "'/etc/a' leads out of the archive"),
    "link.zip": (zipped({linked("a"): b"/etc"}), "'a' is no file"),
    "encrypted.zip": (encrypted(), "'a' is encrypted"),
    "damaged.zip": (damaged(), "it cannot be unpacked: "),
    "large.zip": (zipped({"a": bytes(1 << 20)}), "it unpacks to more than 1000 bytes"),
    "many.zip": (zipped({str(n): b"" for n in range(9)}), "it has more than 8 files"),
    "file.zip": (zipped({"a": b"x", "a/b": b"x"}), "(it cannot be unpacked|is in it twice)"),
    "text.zip": (b"no archive", "it cannot be unpacked: File is not a zip file"),
    "parent.tar.gz": (tarred(("a/../../b", b"x")), "leads out of the archive"),
    "root.tar.gz": (tarred(("/a", b"x")), "'/a' leads out of the archive"),
    "link.tar.gz": (tarred((special("a", tarfile.SYMTYPE, "/etc"), b"")), "'a' is no file"),
    "hard.tar.gz": (tarred((special("a", tarfile.LNKTYPE, "b"), b"")), "'a' is no file"),
    "pipe.tar.gz": (tarred((special("a", tarfile.FIFOTYPE), b"")), "'a' is no file"),
    "device.tar.gz": (tarred((special("a", tarfile.CHRTYPE), b"")), "'a' is no file"),
    "twice.tar.gz": (tarred(("a", b"x"), ("./a", b"y")), "a is in it twice"),
    "large.tar.gz": (tarred(("a", bytes(1 << 20))), "it unpacks to more than 1000 bytes"),
    "cut.tar.gz": (tarred(("a", bytes(range(256)) * 3))[:-40], "it cannot be unpacked: "),
    "text.tar.gz": (b"no archive", "it cannot be unpacked: "),
}


@pytest.mark.parametrize("name", BAD)
def test_everything_else_is_refused(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / "within").mkdir()
    with pytest.raises(LoadFailed, match=message):
        unpack([(name, io.BytesIO(content))], tmp_path / "within", 1000, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["within"], "nothing was written outside"
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


# --- with a real web server


@pytest.fixture
def opened(site: ObjectStore, tmp_path: Path) -> Callable[..., RemoteStore]:
    """Writes an archive to the site if it has `content`, and opens it as a store."""

    def write(path: str, content: bytes = b"", **limits: Any) -> RemoteStore:
        if content:
            site.put(path, content)
        return opened_store(f"{site.url}/{BUCKET}/{path}", tmp_path / "cache", **limits)

    return write


LAYOUTS = {
    "repository.zip": ({"a/1/model.onnx": b"1", "b/2/model.onnx": b"2"}, {
        "a": {"1/model.onnx": b"1"}, "b": {"2/model.onnx": b"2"},
    }),
    "alone.zip": ({"1/model.onnx": b"1", "labels.txt": b"x"}, {
        "alone": {"1/model.onnx": b"1", "labels.txt": b"x"},
    }),
    "flat.zip": ({"model.onnx": b"1"}, {"flat": {"model.onnx": b"1"}}),
    "folder.zip": ({"fraud/1/model.onnx": b"1"}, {"fraud": {"1/model.onnx": b"1"}}),
    "nested.zip": ({"repo-main/README.md": b"", "repo-main/a/1/model.onnx": b"1"}, {
        "a": {"1/model.onnx": b"1"},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, opened: Callable[..., RemoteStore]) -> None:
    files, expected = LAYOUTS[name]
    store = opened(f"layouts/{name}", zipped(dict(files)))
    assert set(store.names()) == set(expected)
    assert {model: brought(store, model) for model in expected} == expected
    assert [store.problems(model) for model in expected] == [[]] * len(expected)
    with pytest.raises(LoadFailed, match=r"cannot be written: replace the archive as a whole$"):
        store.publish("a", Path(), b"")


def test_a_large_archive_is_read_in_parts_and_once(opened: Callable[..., RemoteStore]) -> None:
    weights = np.random.default_rng(0).bytes(2 * PART)
    content = tarred(("m/1/model.onnx", b"1"), ("m/1/weights.bin", weights))
    store = opened("large.tar.gz", content)
    assert store.names() == {"m"}
    assert store.counts.read_bytes == len(content) > 2 * PART
    assert brought(store, "m") == {"1/model.onnx": b"1", "1/weights.bin": weights}
    assert store.counts.read_bytes == len(content), "its files are in the cache"
    assert not list((store.cache.root / "partial").iterdir())
    again = opened("large.tar.gz")
    assert set(again.names()) == {"m"}
    assert brought(again, "m") == {"1/model.onnx": b"1", "1/weights.bin": weights}
    assert again.counts.read_bytes == 0


def test_a_model_with_a_manifest_has_its_digests(
    opened: Callable[..., RemoteStore], tmp_path: Path
) -> None:
    directory = write_model(tmp_path, "m", b"one")
    write_manifest(directory)
    manifest = (directory / MANIFEST).read_bytes()
    for name, above in (("m.zip", ""), ("repo.zip", "m/")):
        files = {f"{above}1/model.onnx": b"one", f"{above}{MANIFEST}": manifest}
        store = opened(f"listed/{name}", zipped(dict(files)))
        assert store.names() == {"m"}
        assert brought(store, "m") == {"1/model.onnx": b"one"}
        files[f"{above}1/model.onnx"] = b"onE"
        store = opened(f"listed/{name}", zipped(dict(files)))
        assert store.names() == {"m"}
        other = RemoteStore(store.remote, StoreOptions(str(tmp_path / f"other-{name}")))
        assert other.names() == {"m"}
        with pytest.raises(LoadFailed, match="does not hold what its manifest tells"):
            other.materialise("m", other.token("m"))


def test_unchanged_models_of_a_new_archive_stay(opened: Callable[..., RemoteStore]) -> None:
    store = opened("changed.zip", zipped({"a/1/model.onnx": b"1", "b/1/model.onnx": b"1"}))
    store.names()
    before = {name: store.token(name) for name in "ab"}
    opened("changed.zip", zipped({"a/1/model.onnx": b"1", "b/1/model.onnx": b"2"}))
    assert set(store.names()) == {"a", "b"}
    assert store.token("a") == before["a"]
    assert store.token("b") != before["b"]
    assert brought(store, "b") == {"1/model.onnx": b"2"}
    with pytest.raises(LoadFailed, match="b is being changed"):
        store.materialise("b", before["b"])


def test_a_bad_archive_changes_nothing(opened: Callable[..., RemoteStore]) -> None:
    store = opened("bad.zip", zipped({"a/1/model.onnx": b"1"}))
    assert store.names() == {"a"}
    token = store.token("a")
    opened("bad.zip", zipped({"a/1/model.onnx": b"2", "../b": b"x"}))
    with pytest.raises(
        LoadFailed, match=r"bad\.zip cannot be used: '\.\./b' leads out of the archive"
    ):
        store.names()
    assert store.token("a") == token
    read = store.counts.read_bytes
    with pytest.raises(Unreached, match="leads out of the archive"):
        store.remote.models()
    assert store.counts.read_bytes == read, "it is not fetched again"
    assert not list((store.cache.root / "partial").iterdir())
    assert len(list((store.cache.root / "trees").glob("*.json"))) == 1
    opened("bad.zip", zipped({"a/1/model.onnx": b"1" * 10_000}))
    tight = opened("bad.zip", cache_bytes=5000)
    with pytest.raises(LoadFailed, match="it unpacks to more than 5000 bytes"):
        RemoteStore(tight.remote, StoreOptions(str(tight.cache.root / "other"))).names()


PACKED = zipped({"1/model.onnx": bytes(10_000), "labels.txt": b""})


@pytest.mark.parametrize(("limits", "problem"), [
    ({"archive_files": 2, "archive_bytes": 10_000}, ""),
    ({"archive_bytes": 1, "archive_ratio": 10_000 // len(PACKED) + 1}, ""),
    ({"archive_files": 1}, "it has more than 1 files (--store-archive-files)"),
    ({"archive_bytes": 9999, "archive_ratio": 1}, "it unpacks to more than 9999 bytes ("),
    ({"archive_bytes": 1, "archive_ratio": 2},
     f"it unpacks to more than {2 * len(PACKED)} bytes ("),
    ({"cache_bytes": 5000}, "it unpacks to more than 5000 bytes ("),
])  # fmt: skip
def test_limits_of_archives(
    limits: dict[str, int], problem: str, opened: Callable[..., RemoteStore]
) -> None:
    store = opened("limits.zip", PACKED, **limits)
    if not problem:
        assert store.names() == {"limits"}
        return
    with pytest.raises(LoadFailed, match=re.escape(f"limits.zip cannot be used: {problem}")):
        store.names()
    assert store.counts.failures == 1
    assert problem in store.trouble


def test_an_archive_that_is_not_there(opened: Callable[..., RemoteStore]) -> None:
    store = opened("nothing.zip")
    with pytest.raises(LoadFailed, match=r"nothing\.zip cannot be reached: it is not there"):
        store.names()
    assert store.trouble.endswith("it is not there")


@pytest.mark.slow
def test_a_server_follows_an_archive(site: ObjectStore, tmp_path: Path) -> None:
    site.put("followed.zip", zipped({"m/1/model.onnx": constant(1), "n/model.onnx": constant(7)}))
    with following_server(f"{site.url}/{BUCKET}/followed.zip", tmp_path / "cache") as server:
        assert (constant_of(server, "m"), constant_of(server, "n")) == (1, 7)
        site.put(
            "followed.zip", zipped({"m/1/model.onnx": constant(2), "n/model.onnx": constant(7)})
        )
        until(lambda: constant_of(server, "m") == 2, "the new archive")
        assert "n has changed" not in server.log
