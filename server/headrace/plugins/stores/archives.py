"""Archives on web servers as stores: `https://HOST/PATH/NAME.zip`, `.tar.gz`, `.tgz` or `.tar`.

An archive has one model, named like its file, or a repository of models. It is asked for its tag,
size and time of change; when those change, it is downloaded in parts, and unpacked as a whole to a
tree of the cache, from which its models are taken. So a model is complete, and those with the same
files as before stay loaded.

Unpacking writes plain files alone, at paths below one directory. Everything else is refused: links,
devices, paths that lead elsewhere, files that are there twice, encrypted ones, and archives of too
many files or bytes.
"""

import gzip
import logging
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import cache_of, key_of
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.download import FileDownloads, StoreCounts
from headrace.plugins.stores.held_tree import HeldModel, HeldTree, RefusedArchive
from headrace.plugins.stores.objects import library, library_errors, opened_site
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    Unreached,
    is_inside,
    unreached,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.layout import model_directories
from headrace.repository.model_files import MANIFEST, digest_of
from headrace.repository.store import Download, Store, StoreOptions

log = logging.getLogger(__name__)

SUFFIXES = (".zip", ".tar.gz", ".tgz", ".tar")
_CHUNK = 1 << 20
_TOOLS_OWN = "__MACOSX"  # what macOS adds to archives


class ArchiveMember(NamedTuple):
    """An entry of an archive: its path; `problem` is why it is refused; `open` is for its bytes."""

    path: str
    problem: str
    open: Callable[[], IO[bytes]]


def most_unpacked(nbytes: int, options: StoreOptions) -> int:
    """The most bytes that archives of so many bytes may unpack to."""
    most = max(options.archive_bytes, options.archive_ratio * nbytes)
    return min(most, options.cache_bytes or most)


def unpack(
    archives: Iterable[tuple[str, IO[bytes]]], directory: Path, most: int, most_files: int
) -> None:
    """Write all files of archives below a directory: at most `most_files` of `most` bytes in all.

    Each has a name, which tells its kind by its suffix, and is closed. Raises `RefusedArchive`, and
    `LoadFailed` for errors of the disk; files are left behind.
    """
    left, count = most, 0
    try:
        for member in _members(archives, most):
            path = "/".join(PurePosixPath(member.path).parts)  # without `./` before it
            if path.partition("/")[0] == _TOOLS_OWN:
                continue
            problem = member.problem or ("" if is_inside(path) else "leads out of the archive")
            count += 1
            if count > most_files:
                raise RefusedArchive(f"it has more than {most_files} files (--store-archive-files)")
            if problem:
                raise RefusedArchive(f"{member.path[:200]!r} {problem}")
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, target.open("xb") as copy:
                while chunk := source.read(_CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        raise _too_large(most)
                    copy.write(chunk)
    except FileExistsError as error:
        twice = Path(error.filename).relative_to(directory)
        raise RefusedArchive(f"{twice} is in it twice") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise RefusedArchive("a file in it is a directory, too") from error
    except (
        zipfile.BadZipFile, tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError,
        NotImplementedError, RuntimeError, ValueError,
    ) as error:  # fmt: skip
        raise RefusedArchive(f"it cannot be unpacked: {error}") from error
    except OSError as error:  # of the disk: another attempt may succeed
        raise LoadFailed(f"it cannot be unpacked: {error}") from error


def _members(archives: Iterable[tuple[str, IO[bytes]]], most: int) -> Iterator[ArchiveMember]:
    for name, file in archives:
        with file:
            if name.endswith(".zip"):
                yield from _of_zip(file)
            else:
                yield from _of_tar(file, name.endswith("gz"), most)


def _of_zip(file: IO[bytes]) -> Iterator[ArchiveMember]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            problem = "is encrypted" if info.flag_bits & 1 else ""
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                problem = "is no file"
            if not info.is_dir():
                yield ArchiveMember(info.filename, problem, partial(archive.open, info))


def _of_tar(file: IO[bytes], packed: bool, most: int) -> Iterator[ArchiveMember]:
    plain = gzip.GzipFile(fileobj=file) if packed else file
    with tarfile.open(fileobj=plain, mode="r:") as archive:
        for info in archive:

            def opened(info: tarfile.TarInfo = info) -> IO[bytes]:
                found = archive.extractfile(info)
                assert found is not None, "a file without content. This is a bug."
                return found

            if not info.isdir():
                yield ArchiveMember(info.name, "" if info.isreg() else "is no file", opened)
    # Only the end of the compressed data has its checksum.
    if packed and not any(not plain.read(_CHUNK) for _ in range(most // _CHUNK + 2)):
        raise _too_large(most)


def _too_large(most: int) -> RefusedArchive:
    return RefusedArchive(
        f"it unpacks to more than {most} bytes"
        " (--store-archive-bytes, --store-archive-ratio, --store-cache-bytes)"
    )


class FoundArchive(NamedTuple):
    """An archive as a web server tells of it: bytes, tag, and a text that changes with it."""

    size: int
    tag: str
    state: str


class ArchiveRemote(Remote):
    """Models of an archive."""

    publishing = "replace the archive as a whole"

    def __init__(self, address: str, options: StoreOptions) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        self.address, self._store = opened_site(address, last=False)
        self.counts = StoreCounts()
        self._name = self.address.rpartition("/")[2]
        self._library = library()
        self._options = options
        cache = cache_of(options.cache, options.cache_bytes)
        self._tree = HeldTree(self, cache, self._divided)
        self._files = FileDownloads(cache.contents, self.counts, self._tree.stopped)

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`; unpacks an archive that is not in the cache."""
        return {name: ModelState.of(files) for name, (_, files) in self._current().items()}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        models = self._current()
        if name not in models:
            raise self.not_there(name)
        return self.contents_of(name, models[name].files)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        return self._tree.read(name, path, start, stop)

    def close(self) -> None:
        """Implements `Remote.close`."""
        self._tree.stopped.set()

    def _current(self) -> Mapping[str, HeldModel]:
        """The models as of now, brought if it is another archive than before."""
        found = self._found()
        try:
            return self._tree.models(found.state, found.size, partial(self._fill, found))
        except RefusedArchive as error:
            raise Unreached(f"{self.address} cannot be used: {error}") from error

    def _found(self) -> FoundArchive:
        with library_errors(self.address):
            try:
                told = self._library.head(self._store, self._name)
            except FileNotFoundError as error:
                raise unreached(self.address, "it is not there") from error
        tag = told["e_tag"] or ""
        return FoundArchive(told["size"], tag, f"{tag} {told['last_modified']} {told['size']}")

    def _fill(self, found: FoundArchive, directory: Path) -> None:
        """Download the archive, and unpack it."""
        log.info("bringing %s: %d bytes", self.address, found.size)
        key, options = key_of(self.address, found.state, "archive"), self._options
        download = Download(self._name, found.size)
        read = partial(self._files.part, self.address, partial(self._read, found), download)
        with self._files.large(key, found.size, self.address, read, download) as draft:
            try:
                if self._found() != found:
                    raise LoadFailed(f"{self.address} has changed while it was fetched")
                archives, most = [(self._name, draft.opened())], most_unpacked(found.size, options)
                unpack(archives, directory, most, options.archive_files)
            finally:
                draft.give_up()

    def _read(self, found: FoundArchive, start: int, stop: int) -> bytes:
        """Bytes of the archive itself."""
        given: dict[str, Any] = {"range": (start, stop)} if found.size > PART else {}
        if found.tag and not found.tag.startswith("W/"):  # such are never the same
            given["if_match"] = found.tag
        with library_errors(self.address):
            return bytes(self._library.get(self._store, self._name, options=given).bytes())

    def _divided(self, root: Path, files: Mapping[str, RemoteFile]) -> Mapping[str, HeldModel]:
        """The models in a tree, by name: the tree itself, or the directories at its top.

        If there is but one directory, which is no model, they are those in it.
        """
        found = model_directories(root)
        if len(found) == 1 and found != [root]:
            found = model_directories(found[0]) or found
        if found == [root]:
            text = (root / MANIFEST).read_bytes()
            digest = digest_of(text)
            suffix = next(filter(self._name.endswith, SUFFIXES))
            own = dict(files) | {MANIFEST: RemoteFile(len(text), digest, digest)}
            return {self._name.removesuffix(suffix): HeldModel(root, own)}
        models: dict[str, HeldModel] = {}
        for directory in found:
            above = f"{directory.relative_to(root)}/"
            below = {
                path.removeprefix(above): file
                for path, file in files.items()
                if path.startswith(above)
            }
            models[directory.name] = HeldModel(directory, below)
        return models


def archive_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    remote = ArchiveRemote(address, options)
    return RemoteStore(remote, options, remote.counts)
