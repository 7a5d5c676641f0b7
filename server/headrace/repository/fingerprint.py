"""What state a model's files are in, to tell whether they are what was loaded of them.

Files are told apart by `stat`, never by reading them: a model of gigabytes is looked at in
microseconds. What was written again with the same content is another state.

Which files count: those of a version for that version, whatever else lies in the model's directory
for all of them, since a label file, a module that versions share or a list of requirements may
matter to each. Not those whose names begin with a dot, nor Python's caches, nor configurations that
are not chosen. Links are followed.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from headrace.core.errors import LoadFailed
from headrace.repository import model_files
from headrace.repository.layout import ModelSource
from headrace.repository.stamps import ABSENT, Stamp, stamp_of

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
            files = {str(path): stamp_of(path) for path in model_files.parts(source.file)}
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
    """What lies at a path, and whether it is a directory."""
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
