"""Places with models, of which stores are made: their contents, their errors, and shared steps."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import NamedTuple, TypeVar

from headrace.core.errors import LoadFailed
from headrace.placement.child_process import Backoff
from headrace.repository.model_files import MANIFEST, new_manifest, parse_manifest

First = TypeVar("First")
Second = TypeVar("Second")

# Hosts that are asked without TLS if an address does not say how.
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
_AT_ONCE = 8  # requests of a store
LONGEST_TEXT = 300  # of errors
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0


class RemoteFile(NamedTuple):
    """A file: bytes, and a tag that changes with its content; its digest, if that is known."""

    size: int
    tag: str
    digest: str = ""


class ModelState(NamedTuple):
    """The state of a model, which changes with it, and the bytes of its files."""

    state: str
    size: int

    @classmethod
    def of(cls, files: Mapping[str, RemoteFile]) -> "ModelState":
        """The state of a model with these files, by path."""
        return cls(state_of(files), sum(file.size for file in files.values()))


@dataclass(frozen=True, slots=True)
class RemoteContents:
    """The files of a model in one state, by path; `manifest` is empty if it has none.

    `fresh` means that it was changed only just now, and may still be changing.
    """

    state: str
    files: Mapping[str, RemoteFile]
    manifest: bytes = b""
    fresh: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Remote:
    """A place with models. Methods are called on any threads, block, and raise `LoadFailed`.

    `address` is that of the store, without secrets. Only the first three methods must be
    implemented; `publishing` says how models get to a place whose `publish` is not.
    """

    address: str
    publishing = "it is read only"

    def models(self) -> Mapping[str, ModelState]:
        """All models as of now."""
        raise NotImplementedError

    def contents(self, name: str) -> RemoteContents:
        """The files of one model as of now."""
        raise NotImplementedError

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Part of a file, which must still have its tag."""
        raise NotImplementedError

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Replace a model, as `Store.publish`."""
        raise LoadFailed(f"{self.address} cannot be written: {self.publishing}")

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on changes, as `Store.watch`."""

    def close(self) -> None:
        """End threads and connections, as `Store.close`."""

    def contents_of(
        self, name: str, files: Mapping[str, RemoteFile], state: str = "", fresh: bool = False
    ) -> RemoteContents:
        """The contents of a model with these files: those of the manifest among them, if any.

        That is read; raises `LoadFailed` if a file of it is missing. Without one, it is made if all
        digests are known. `state` is that of the files by default.
        """
        state = state or state_of(files)
        if MANIFEST not in files:
            digests = {path: file.digest for path, file in files.items()}
            made = new_manifest(digests) if all(digests.values()) else b""
            return RemoteContents(state, files, made, fresh)
        manifest = self.read(name, MANIFEST, files[MANIFEST], 0, files[MANIFEST].size)
        listed: dict[str, RemoteFile] = {}
        for path, digest in parse_manifest(manifest).items():
            if path not in files:
                raise LoadFailed(f"{self.address}: {name}: {path} of its manifest is not there")
            listed[path] = files[path]._replace(digest=digest)
        return RemoteContents(state, listed, manifest)

    def not_there(self, name: str) -> LoadFailed:
        """The error for a model that the place does not have."""
        return LoadFailed(f"{self.address}: {name} is not there")

    def changing(self, name: str) -> LoadFailed:
        """The error for a model in another state than expected."""
        return LoadFailed(f"{self.address}: {name} is being changed; it is brought once it rests")


def pauses() -> Backoff:
    """Growing pauses between attempts that fail."""
    return Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)


class Unreached(LoadFailed):
    """A store that cannot be asked, whatever the question."""


def state_of(files: Mapping[str, RemoteFile]) -> str:
    """The state of a model by its files: by its manifest alone, if it has one."""
    if MANIFEST in files:
        files = {MANIFEST: files[MANIFEST]}
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:32]


def unreached(address: str, why: object) -> Unreached:
    """The error for a store that cannot be asked."""
    return Unreached(f"{address} cannot be reached: {why}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text without queries, which may have signatures."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\?\S*", "", text)[:LONGEST_TEXT]


@contextmanager
def client_errors(address: str) -> Iterator[None]:
    """Raise all errors of a client of many libraries as `Unreached`."""
    try:
        yield
    except Exception as error:
        raise unreached(address, first_line(error)) from error


@contextmanager
def needed(what: str, package: str) -> Iterator[None]:
    """Raise the error of an import that fails as `LoadFailed`: `what` need this `package`."""
    try:
        yield
    except ImportError as error:
        raise LoadFailed(f"{what} need the package {package}") from error


def root_url(scheme: str, host: str) -> str:
    """The URL of a host: with TLS unless it is this machine, or `scheme` says otherwise."""
    return (scheme or ("http://" if _LOOPBACK.fullmatch(host) else "https://")) + host


def is_inside(path: str) -> bool:
    """True for a relative path in its plain form, which cannot leave a directory."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and path == "/".join(parts) and "\0" not in path
    return plain and ".." not in parts and parts[0] != "/"


def run_all(
    job: Callable[[First, Second], None], arguments: Iterable[tuple[First, Second]], stopped: Event
) -> None:
    """Run a job with each of some pairs of arguments, on threads that no exit waits for.

    Raises the first error, after all have ended.
    """
    given = list(arguments)
    if len(given) == 1:
        job(*given[0])
        return
    errors: list[BaseException] = []
    numbers = count()

    def work() -> None:
        while not (errors or stopped.is_set()) and (number := next(numbers)) < len(given):
            try:
                job(*given[number])
            except BaseException as error:
                errors.append(error)

    threads = [
        Thread(target=work, name="store", daemon=True) for _ in range(min(_AT_ONCE, len(given)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if stopped.is_set():
        raise LoadFailed("the store is closed: the server is shutting down")
