"""Files that a version is loaded from, and whether they have changed since.

**Stamps and fingerprints.** Files are told apart by `stat`, never by reading them: a model of
gigabytes is looked at in microseconds. What was written again with the same content is another
state. Those of a version count for that version, whatever else lies in the model's directory for
all of them, since a label file, a module that versions share or a list of requirements may matter
to each. Not counted are names that begin with a dot, Python's caches, and configurations that are
not chosen. Links are followed.

**Single files.** A Python file is parsed for what it imports from its own directory, an ONNX file
is walked for the files that hold its weights; neither is run.

**Manifests** name the files of a model, or of a version, with their content:

    {"files": {"1/model.onnx": "sha256:9f86d0…", "config.pbtxt": "sha256:60303a…"}}

Such a file, `headrace-manifest.json`, lies in the directory that its paths begin at. Where there is
one, the model is loaded only when every file that it names is there and has its digest. Whatever
copies the files, in whatever order and with whatever pauses, a half of them is never loaded. What
it does not name is not checked.

**Origins.** Two versions of equal origin are the same, so that the one that serves need not be
loaded again. Which versions are served, how many instances each has and how requests are divided
between them can be changed while a version serves; all else of a configuration is part of what it
was loaded from, since a model may read any of it.
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
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

from headrace.core.errors import LoadFailed
from headrace.placement.local.onnx_files import external_files
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile
from headrace.repository.layout import ModelSource
from headrace.repository.validation import TRAFFIC

# What says that nothing is there, or nothing for this process; any other error says nothing of it.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


class Stamp(NamedTuple):
    """State of a file by `stat`: two differ if the file may have changed.

    `changed_ns` is when anything was last done to the file. Only that tells two files apart that
    were given the same time, have the same size and, one after the other, the same number. It also
    tells of other permissions.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """The stamp of what `stat` has found."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of the file at a path, None if there is none; raises `OSError` if that is open."""
    try:
        return Stamp.of(path.stat())
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


_LARGEST_SOURCE = 4 << 20  # bytes; nobody writes a larger one by hand


def parts(file: Path) -> set[Path]:
    """The file itself and those beside it that are loaded with it, as far as it tells."""
    if file.suffix == ".py":
        return python_files(file)
    if file.suffix == ".onnx":
        return {file, *_weights(file)}
    return {file}


def python_files(file: Path) -> set[Path]:
    """A Python file, and what it imports from its own directory, directly or not.

    Also what it would import from there if it were there: it may still come.
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
    """The full names of what a file may import; nothing of one that cannot be read."""
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
            # Each of the names may be a module, too.
            yield from (f"{origin}.{alias.name}".lstrip(".") for alias in node.names)


def _modules(root: Path, name: str) -> Iterable[Path]:
    """The files of a module beneath `root`, and of the packages that it lies in."""
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
        locations = external_files(file)
    except (OSError, ValueError, LoadFailed):
        return
    for location in locations:
        path = file.parent / location
        if not Path(location).is_absolute() and ".." not in path.parts:
            yield path


_CACHES = "__pycache__"
_CONFIGS = "configs"
_CONFIG = "config.pbtxt"


# By path from the directory of the model; None for what is not there, such as where a link leads.
Stamps: TypeAlias = Mapping[str, Stamp | None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of a model's files: two are equal if nothing that can matter has changed.

    `versions` has every version of the source, `shared` what belongs to all of them, `config` the
    chosen configuration file, if there is one.
    """

    source: ModelSource
    config: Stamps = field(default_factory=dict)
    shared: Stamps = field(default_factory=dict)
    versions: Mapping[int, Stamps] = field(default_factory=dict)


def fingerprint(source: ModelSource) -> Fingerprint:
    """The state of a model's files at present.

    To be taken before the files are read: if they change after that, the next one differs. Raises
    `LoadFailed` for a place that cannot be looked at, which says nothing of what is there.
    """
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
    """The files of a directory that count, by path from there; raises `OSError`."""
    found = (_below(directory / entry, entry, frozenset()) for entry in _entries(directory))
    return [name for part in found for name, _ in part]


def _of_directory(source: ModelSource) -> Fingerprint:
    config = {} if source.config_path is None else {_CONFIG: stamp_of(source.config_path)}
    versions: dict[int, Stamps] = {number: {} for number in source.versions}
    shared: dict[str, Stamp | None] = {}
    for entry in _entries(source.path):
        if entry in (_CONFIG, _CONFIGS):
            continue
        found = dict(_below(source.path / entry, entry, frozenset()))
        if entry.isdecimal() and int(entry) in source.versions and str(int(entry)) == entry:
            versions[int(entry)] = found
        elif not entry.isdecimal():  # that would be a version that came after the listing
            shared |= found
    return Fingerprint(source, config, shared, versions)


def _below(
    path: Path, name: str, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, Stamp | None]]:
    """All files at or below `path`, by names that begin with `name`.

    `above` are the directories on the way there, since links may lead back to one of them.
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
    """Stamp of a path, and whether it is a directory."""
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
        if error.errno in ABSENT:  # or it has gone since it was listed
            return []
        raise


MANIFEST = "headrace-manifest.json"
_LARGEST = 16 << 20  # bytes of a manifest
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TOLD = 3  # of the files that are wrong, so that a message stays short


class Digests:
    """Digests of files, each read again only when its state has changed. For any thread.

    To be kept for as long as models are loaded.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, str]] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file, None if it is not there or is being written."""
        stamp = stamp_of(path)
        if stamp is None:
            return None
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            with path.open("rb") as file:
                digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return None
        if stamp_of(path) != stamp:
            return None
        self._known[path] = stamp, digest
        return digest

    def verified(self, directory: Path, versions: Iterable[int]) -> Mapping[str, str]:
        """The digests of all files that a model's manifests name, by path from its directory.

        Files of other versions than those given are left out. Raises `LoadFailed` if one is not
        there or holds something else, or for a manifest that makes no sense.
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
        """Problems of the files that one manifest names; raises as `verified` does."""
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
    """The digests that a directory's manifest gives, by path; none without one.

    Raises `LoadFailed`.
    """
    try:
        with (directory / MANIFEST).open("rb") as file:
            text = file.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise LoadFailed(f"{MANIFEST} cannot be read: {error.strerror}") from error
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
    """True if it is text, without what no path has."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def write_manifest(directory: Path) -> Mapping[str, str]:
    """Make the manifest of a directory as it is now, in place of any other; what it says.

    Raises `LoadFailed` for a file that cannot be read.
    """
    digests = Digests()
    files: dict[str, str] = {}
    for name in files_below(directory):
        if name != MANIFEST:
            digest = digests.of(directory / name)
            if digest is None:
                raise LoadFailed(f"{directory / name} cannot be read, or is being written")
            files[name] = digest
    written = directory / f".{MANIFEST}.{os.getpid()}"
    try:
        written.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        written.replace(directory / MANIFEST)
    finally:
        written.unlink(missing_ok=True)
    return files


# Fields that a file may name with their default, which is then another than if it did not.
_SET_FIELDS = ("max_batch_size", "input")


@dataclass(frozen=True, slots=True)
class Content:
    """Files and configuration of a version that cannot change while it serves.

    `files` are stamps or, where a manifest gives them, digests. `config` is the configuration
    without what can, as bytes; `set_fields` are those of the fields that its file names which mean
    something else if they are not named than if they are set to their default.
    """

    directory: Path
    files: Mapping[str, Stamp | str | None]
    config: bytes
    set_fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Origin:
    """`groups` are the instance groups, as bytes.

    `resizable` is whether instances can come and go while it serves: those on the CPU can.
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
    """The origin of each of the versions; `config` is completed as far as it is without loading.

    `digests` tell what files hold, where that is known: then it does not matter which file it is.
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
        found[number] = Origin(Content(state.source.path, files, text, fields), groups, on_cpu)
    return found


def content_of(config: ModelConfig) -> bytes:
    """A normalised configuration without what can change while a version serves."""
    fixed = deepcopy(config)
    fixed.ClearField("version_policy")
    fixed.ClearField("instance_group")
    fixed.parameters.pop(TRAFFIC, None)
    return fixed.SerializeToString(deterministic=True)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST
