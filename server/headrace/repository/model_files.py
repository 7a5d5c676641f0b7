"""Files that a version is loaded from, and detection of their changes.

**Stamps and fingerprints.** Files are compared by `stat`, never by reading them: a model of
gigabytes takes microseconds. A file rewritten with the same content counts as changed. All files in
the model's directory outside of versions count for every version, since a label file, a shared
module or a list of requirements may matter to each. Ignored are names that begin with a dot,
Python's caches, and configurations that are not selected. Links are followed.

**Single files.** A Python file is parsed for its imports from its own directory, an ONNX file for
the files with its weights; neither is executed.

**Manifests** list the files of a model, or of a version, with their digests:

    {"files": {"1/model.onnx": "sha256:9f86d0…", "config.pbtxt": "sha256:60303a…"}}

Such a file, `headrace-manifest.json`, is in the directory to which its paths are relative. With a
manifest, the model is only loaded when every listed file exists and has its digest, so that a
partial copy is never loaded, whatever copies the files, in any order and with any pauses. Files
that are not listed are not checked.

**Origins.** Two versions of equal origin are the same, so that a serving one need not be reloaded.
The served versions, instance counts and traffic rules can change while a version serves; everything
else in a configuration is part of its origin, since a model may read any of it.
"""

import ast
import errno
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path, PurePosixPath
from threading import get_ident
from typing import NamedTuple, TypeAlias

from headrace.core.errors import LoadFailed
from headrace.placement.local.onnx_files import read_contents
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile
from headrace.repository.layout import ModelSource
from headrace.repository.validation import TRAFFIC

# Errors that mean absence, or absence for this process; any other error is inconclusive.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


class Stamp(NamedTuple):
    """State of a file by `stat`: two differ if the file may have changed.

    `changed_ns` is the time of the last change to the inode. Only that distinguishes two files with
    the same time, the same size and, one after the other, the same inode number. It also covers
    changes of permissions.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """The stamp of a `stat` result."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of the file at a path, None if absent; raises `OSError` if that is unknown."""
    try:
        return Stamp.of(path.stat())
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


_LARGEST_SOURCE = 4 << 20  # bytes; more than any hand-written file


def parts(file: Path) -> set[Path]:
    """The file itself and the files beside it that are loaded with it, as far as known."""
    if file.suffix == ".py":
        return python_files(file)
    if file.suffix == ".onnx":
        return {file, *_weights(file)}
    return {file}


def python_files(file: Path) -> set[Path]:
    """A Python file, and its direct and indirect imports from its own directory.

    Includes absent files that it would import from there: they may still appear.
    """
    root = file.parent
    found = {file}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        for name in _imports(source, root):
            for path in _modules(root, name):
                if path not in found:
                    found.add(path)
                    waiting.append(path)
    return found


def _imports(source: Path, root: Path) -> Iterator[str]:
    """The full names that a file may import; none if it cannot be read."""
    try:
        if source.stat().st_size > _LARGEST_SOURCE:
            return
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = source.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *filter(None, [node.module])))
            yield origin
            # Each imported name may be a module, too.
            yield from (f"{origin}.{alias.name}".lstrip(".") for alias in node.names)


def _modules(root: Path, name: str) -> Iterable[Path]:
    """The files of a module below `root`, and of its parent packages."""
    folder = root
    for part in filter(None, name.split(".")):
        module = folder / f"{part}.py"
        folder = folder / part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"
        elif module.is_file():
            yield module
        elif not folder.is_dir():
            if folder.parent == root and part not in sys.stdlib_module_names:
                yield module
            return


def _weights(file: Path) -> Iterator[Path]:
    try:
        locations = read_contents(file).locations
    except (OSError, ValueError, LoadFailed):
        return
    for location in locations:
        path = file.parent / location
        if not Path(location).is_absolute() and ".." not in path.parts:
            yield path


_CACHES = "__pycache__"
_CONFIGS = "configs"
_CONFIG = "config.pbtxt"


# By path relative to the model's directory; None if absent, such as the target of a dangling link.
Stamps: TypeAlias = Mapping[str, Stamp | None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of a model's files: two are equal if nothing relevant has changed.

    `versions` has every version of the source, `shared` the files common to all of them, `config`
    the selected configuration file, if any.
    """

    source: ModelSource
    config: Stamps = field(default_factory=dict)
    shared: Stamps = field(default_factory=dict)
    versions: Mapping[int, Stamps] = field(default_factory=dict)


def fingerprint(source: ModelSource) -> Fingerprint:
    """The current state of a model's files, or of its store for those that are not here.

    Take it before reading the files: if they change after that, the next one differs. Raises
    `LoadFailed` for a place that cannot be examined, which is inconclusive.
    """
    if source.is_absent:
        return Fingerprint(source)  # which its token tells
    try:
        if source.file is not None:
            files = {str(path): stamp_of(path) for path in parts(source.file)}
            return Fingerprint(source, versions={1: files})
        return _of_directory(source)
    except OSError as error:
        raise LoadFailed(
            f"{error.filename or source.path}: cannot be looked at: {error.strerror}",
            f"its files cannot be looked at: {error.strerror}",
        ) from error


def files_below(directory: Path) -> list[str]:
    """The relevant files of a directory, by relative path; raises `OSError`."""
    found = (_below(directory / entry, entry, frozenset()) for entry in _entries(directory))
    return [name for part in found for name, _ in part]


def _of_directory(source: ModelSource) -> Fingerprint:
    config = {} if source.config_path is None else {_CONFIG: stamp_of(source.config_path)}
    versions: dict[int, dict[str, Stamp | None]] = {number: {} for number in source.versions}
    shared: dict[str, Stamp | None] = {}
    for entry in _entries(source.path):
        if entry in (_CONFIG, _CONFIGS):
            continue
        found = dict(_below(source.path / entry, entry, frozenset()))
        if source.flat:
            versions[1] |= found
        elif entry.isdecimal() and int(entry) in source.versions and str(int(entry)) == entry:
            versions[int(entry)] = found
        elif not entry.isdecimal():  # a new version that appeared after the listing
            shared |= found
    return Fingerprint(source, config, shared, versions)


def _below(
    path: Path, name: str, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, Stamp | None]]:
    """All files at or below `path`, under names that begin with `name`.

    `above` are the parent directories, since links may lead back to one of them.
    """
    stamp, is_directory = _look_at(path)
    if stamp is None or not is_directory:
        yield name, stamp
        return
    own = stamp[:2]
    if own not in above:
        for entry in _entries(path):
            yield from _below(path / entry, f"{name}/{entry}", above | {own})


def _look_at(path: Path) -> tuple[Stamp | None, bool]:
    """The stamp of a path, and True if it is a directory."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in ABSENT:
            return None, False
        raise
    return Stamp.of(found), stat.S_ISDIR(found.st_mode)


def _entries(directory: Path) -> list[str]:
    try:
        return sorted(n for n in os.listdir(directory) if not n.startswith(".") and n != _CACHES)
    except OSError as error:
        if error.errno in ABSENT:  # or removed since it was listed
            return []
        raise


MANIFEST = "headrace-manifest.json"
INDEX = "headrace-index.json"  # of a directory of models that a web server offers
_LARGEST = 16 << 20  # bytes of a manifest
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TOLD = 3  # files named in a message
# A further hard link to a file, as other models with the same content get, changes its stamp, too.
_DIGEST_TRIES = 5


class Digests:
    """A cache of file digests, each computed again only when the file has changed. Thread-safe.

    Keep one as long as models are loaded.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, str]] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file; None if it is absent or being written."""
        for _ in range(_DIGEST_TRIES):
            stamp = stamp_of(path)
            if stamp is None:
                return None
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                with path.open("rb") as file:
                    digest = digest_of(file)
            except (FileNotFoundError, IsADirectoryError, PermissionError):
                return None
            if stamp_of(path) == stamp:
                self._known[path] = stamp, digest
                return digest
        return None

    def verified(self, directory: Path, versions: Iterable[int]) -> Mapping[str, str]:
        """The digests of all files in a model's manifests, by path relative to its directory.

        Files of versions other than the given ones are left out. Raises `LoadFailed` if a file is
        absent or differs, or for an invalid manifest.
        """
        chosen = {str(number) for number in versions}
        found: dict[str, str] = {}
        wrong: list[str] = []
        for prefix in ("", *sorted(chosen)):
            for name, digest in read_manifest(directory / prefix).items():
                path = str(PurePosixPath(prefix, name))
                first = PurePosixPath(path).parts[0]
                if first.isdecimal() and first not in chosen:
                    continue
                wrong += self._problem(directory, path, digest)
                found[path] = digest
        if wrong:
            more = f"; and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
            raise LoadFailed(f"{MANIFEST}: {'; '.join(wrong[:_TOLD])}{more}")
        return found

    def problems(self, directory: Path) -> list[str]:
        """The problems of the files in one manifest; raises as `verified` does."""
        named = read_manifest(directory)
        return [text for n, d in named.items() for text in self._problem(directory, n, d)]

    def _problem(self, directory: Path, name: str, expected: str) -> Iterator[str]:
        try:
            digest = self.of(directory / name)
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            return
        if digest is None:
            yield f"{name} is not there, or is being written"
        elif digest != expected:
            yield f"{name} does not hold what it is to hold"


def read_manifest(directory: Path) -> Mapping[str, str]:
    """The digests in a directory's manifest, by path; empty without one.

    Raises `LoadFailed`.
    """
    try:
        with (directory / MANIFEST).open("rb") as file:
            text = file.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise LoadFailed(f"{MANIFEST} cannot be read: {error.strerror}") from error
    return parse_manifest(text)


def parse_manifest(text: bytes) -> Mapping[str, str]:
    """The digests in a manifest, by path; raises `LoadFailed`."""
    if len(text) > _LARGEST:
        raise LoadFailed(f"{MANIFEST} is larger than {_LARGEST} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise LoadFailed(f"{MANIFEST} is no JSON, or not all of it is there") from None
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise LoadFailed(f'{MANIFEST}: expected an object with the member "files", an object')
    for name, digest in files.items():
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise LoadFailed(f"{MANIFEST}: {name!r}: expected sha256: and 64 hexadecimal digits")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or not _is_name(name):
            raise LoadFailed(f"{MANIFEST}: {name!r} is no path within its directory")
    return files


def _is_name(text: str) -> bool:
    """True if `text` is a possible path component."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def new_manifest(files: Mapping[str, str]) -> bytes:
    """A manifest with these digests, by path."""
    return json.dumps({"files": files}, indent=2).encode() + b"\n"


def digest_of(content: bytes | BufferedReader) -> str:
    """The digest of a content, or of all that is left to read of a file, as in manifests."""
    if isinstance(content, bytes):
        return f"sha256:{hashlib.sha256(content).hexdigest()}"
    return f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"


def manifest_of(directory: Path) -> bytes:
    """The manifest of a directory: its own if that lists every file as it is, or a new one.

    Raises `LoadFailed` for a file that cannot be read.
    """
    files = _digests_below(directory)
    with suppress(LoadFailed):
        if read_manifest(directory) == files and files:
            return (directory / MANIFEST).read_bytes()
    return new_manifest(files)


def write_index(repository: Path, models: Iterable[str]) -> None:
    """Write the index of a repository, with manifests of the models in it that have none.

    Raises `LoadFailed` for files that are not as their manifest has them, and `OSError`.
    """
    found: dict[str, object] = {}
    for name in models:
        directory = repository / name
        manifest = manifest_of(directory)
        if not (directory / MANIFEST).is_file():
            (directory / MANIFEST).write_bytes(manifest)
        elif (directory / MANIFEST).read_bytes() != manifest:
            raise LoadFailed(f"{directory}: {MANIFEST} does not list every file as it is")
        sizes = {path: (directory / path).stat().st_size for path in parse_manifest(manifest)}
        found[name] = {"manifest": digest_of(manifest), "sizes": sizes}
    replace_file(repository / INDEX, json.dumps({"models": found}, indent=2).encode() + b"\n")


def write_manifest(directory: Path) -> Mapping[str, str]:
    """Write the manifest of a directory in its current state, replacing any other; returns it.

    Raises `LoadFailed` for a file that cannot be read.
    """
    files = _digests_below(directory)
    replace_file(directory / MANIFEST, new_manifest(files))
    return files


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the one before, or all of it; raises `OSError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _digests_below(directory: Path) -> dict[str, str]:
    digests = Digests()
    files: dict[str, str] = {}
    for name in files_below(directory):
        if name != MANIFEST:
            digest = digests.of(directory / name)
            if digest is None:
                raise LoadFailed(f"{directory / name} cannot be read, or is being written")
            files[name] = digest
    return files


# Fields whose explicit default means something else than an unset field.
_SET_FIELDS = ("max_batch_size", "input")


@dataclass(frozen=True, slots=True)
class Content:
    """Files and configuration of a version that cannot change while it serves.

    `directory` is the origin of its files.
    `files` are stamps or, with a manifest, digests. `config` is the configuration without the
    fields that can change, as bytes; `set_fields` are the fields set in its file whose default
    differs from unset.
    """

    directory: Path
    files: Mapping[str, Stamp | str | None]
    config: bytes
    set_fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Origin:
    """`groups` are the instance groups, as bytes.

    `resizable` is true if instances can be added and removed while it serves: on the CPU only.
    """

    content: Content
    groups: bytes
    resizable: bool


def origins(
    state: Fingerprint,
    file: ConfigFile,
    config: ModelConfig,
    versions: tuple[int, ...],
    digests: Mapping[str, str],
) -> dict[int, Origin]:
    """The origin of each version; `config` is completed as far as possible without loading.

    `digests` are file contents, where known: then the identity of the file does not matter.
    """
    whole = normalise(config)
    groups = ModelConfig(instance_group=whole.instance_group).SerializeToString(deterministic=True)
    on_cpu = all(g.kind != ModelInstanceGroup.KIND_GPU for g in whole.instance_group)
    text = content_of(whole)
    fields = frozenset(path for path in _SET_FIELDS if file.sets(path))
    found = {}
    for number in versions:
        stamps = {**state.shared, **state.versions[number]}
        files = {n: digests.get(n, stamp) for n, stamp in stamps.items() if not _is_manifest(n)}
        found[number] = Origin(Content(state.source.origin, files, text, fields), groups, on_cpu)
    return found


def content_of(config: ModelConfig) -> bytes:
    """A normalised configuration without the fields that can change while a version serves."""
    fixed = deepcopy(config)
    fixed.ClearField("version_policy")
    fixed.ClearField("instance_group")
    fixed.parameters.pop(TRAFFIC, None)
    return fixed.SerializeToString(deterministic=True)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST
