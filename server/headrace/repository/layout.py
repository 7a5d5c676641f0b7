"""Models and versions in the model repositories, listed anew each time since they change.

    <repository>/<model>/config.pbtxt              optional if the model's file suffices
    <repository>/<model>/configs/<name>.pbtxt      an alternative, selected by name
    <repository>/<model>/<version>/<model file>

Names come from directory listings and are kept in a dictionary; a name from a request is only ever
looked up there and never becomes part of a path. Everything here reads directories, and may block.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.repository.config import ConfigFile
from headrace.repository.overrides import Upload

_FILE_SYSTEMS_OWN = "lost+found"  # a directory at the root of a volume
# Tools that provide an object store as a directory: by mounting, or by repeated copying.
_STORES = {
    "s3": ("Mountpoint for Amazon S3 or s3fs", "aws s3 sync"),
    "gs": ("Cloud Storage FUSE", "gcloud storage rsync"),
    "as": ("BlobFuse", "azcopy sync"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model. `versions` ascend; `ignored` are version-like directories with invalid names.

    `file` is set for a model that consists of a single file, without a directory. `problem` is the
    reason why the directory is no valid model. `override` is a configuration that replaces the
    directory's. `upload` keeps an uploaded directory, and `data_only` means that none of its files
    may contain code.
    """

    name: str
    path: Path
    config_path: Path | None
    versions: tuple[int, ...]
    ignored: tuple[str, ...] = ()
    duplicate: bool = False
    file: Path | None = None
    problem: str = ""
    override: ConfigFile | None = None
    upload: Upload | None = None
    data_only: bool = False

    @property
    def written_name(self) -> str:
        """The name that its configuration may contain: its directory's."""
        own = self.file is None and self.upload is None
        return self.path.name if own else self.name


def scan(
    repositories: Sequence[Path], config_name: str = "", namespacing: bool = False
) -> list[ModelSource]:
    """All models of the repositories, by name; one found in several is marked as duplicate.

    With `namespacing` such models get distinct names instead. Raises `LoadFailed` if a repository
    cannot be read; an invalid model has a `problem`.
    """
    places = model_places(repositories, namespacing)
    return [
        replace(read_model_directory(paths[-1], config_name), name=name, duplicate=len(paths) > 1)
        for name, paths in sorted(places.items())
    ]


def model_places(repositories: Sequence[Path], namespacing: bool = False) -> dict[str, list[Path]]:
    """The directories of all models, by name; raises `LoadFailed`.

    With `namespacing`, models whose name occurs in several repositories are named `name@space`,
    where space is the repository's directory name, with a number if that occurs twice.
    """
    return name_models([(path, model_directories(path)) for path in repositories], namespacing)


def name_models(
    listings: Sequence[tuple[Path, Iterable[Path]]], namespacing: bool = False
) -> dict[str, list[Path]]:
    """The names of the model directories found, by repository; see `model_places`."""
    found: dict[str, list[Path]] = {}
    for _, paths in listings:
        for path in paths:
            found.setdefault(path.name, []).append(path)
    if not namespacing:
        return found
    spaces = _spaces([repository for repository, _ in listings])
    named: dict[str, list[Path]] = {}
    for name, paths in found.items():
        for path in paths:
            unique = name if len(paths) == 1 else f"{name}@{spaces[path.parent]}"
            named.setdefault(unique, []).append(path)
    return named


def namespaced(name: str, names: Iterable[str]) -> list[str]:
    """The given names that stand for this model in any repository."""
    return sorted(other for other in names if other.startswith(f"{name}@"))


def _spaces(repositories: Sequence[Path]) -> Mapping[Path, str]:
    spaces: dict[Path, str] = {}
    for repository in repositories:
        name, number = repository.resolve().name, 1
        while (unique := name if number == 1 else f"{name}-{number}") in spaces.values():
            number += 1
        spaces.setdefault(repository, unique)
    return spaces


def single_file(path: Path) -> ModelSource:
    """A single model file, as version 1 of a model named like the file.

    Raises `LoadFailed` if it does not exist.
    """
    if path.is_dir():
        raise LoadFailed(f"{path} is a directory; serve it with --model-repository {path}")
    if not path.is_file():
        raise LoadFailed(_elsewhere(path) or f"there is no model file {path}")
    return ModelSource(path.stem, path.parent, None, (1,), file=path)


def nothing_in(repository: Path) -> str:
    """Message about a repository without models."""
    found = sorted(entry.name for entry in repository.iterdir())[:5]
    return (
        f"no models in {repository}: expected a file such as MODEL/VERSION/model.onnx or"
        f" MODEL/VERSION/model.py, found {', '.join(found) or 'nothing'}"
    )


def read_model_directory(path: Path, config_name: str = "") -> ModelSource:
    """The model in a directory, as of now."""
    config = path / "config.pbtxt"
    try:
        entries = [entry.name for entry in path.iterdir() if entry.is_dir()]
        if config_name and (named := path / "configs" / f"{config_name}.pbtxt").is_file():
            config = named
        configured = config.is_file()
    except OSError as error:
        return ModelSource(
            path.name, path, None, (), problem=f"its directory cannot be read: {error.strerror}"
        )
    numbers = [name for name in entries if name.isdecimal()]
    usable = [name for name in numbers if str(int(name)) == name]
    return ModelSource(
        path.name,
        path,
        config if configured else None,
        tuple(sorted(map(int, usable))),
        tuple(sorted(set(numbers) - set(usable))),
    )


def looked_at_again(source: ModelSource) -> ModelSource:
    """The model with its current versions, if some of its own are gone."""
    if source.file is not None or all(
        (source.path / str(version)).is_dir() for version in source.versions
    ):
        return source
    found = read_model_directory(source.path)
    return source if found.problem else replace(source, versions=found.versions)


def model_directories(repository: Path) -> Sequence[Path]:
    """The model directories of a repository; raises `LoadFailed` for an invalid one."""
    try:
        entries = sorted(repository.iterdir())
        found = [entry for entry in entries if entry.is_dir() and _may_be_a_model(entry.name)]
        is_model = _is_model(repository, found)
    except OSError as error:
        if repository.is_file():
            raise LoadFailed(
                f"model repository {repository} is a file; a file that is to be served by itself"
                " comes before the options, or behind --model-file"
            ) from None
        raise LoadFailed(
            _elsewhere(repository)
            or f"model repository {repository} cannot be read: {error.strerror}"
        ) from error
    if is_model:
        raise LoadFailed(
            f"{repository} is the directory of a model, not of a model repository; give the one"
            " that it lies in"
        )
    return found


def _elsewhere(path: Path) -> str:
    """The message about a URL of an object store, as Triton accepts them; "" for other paths."""
    url = str(path).replace(":/", "://")  # Path collapses double slashes
    store, colon, _ = url.partition("://")
    if not colon or store not in _STORES:
        return ""
    mount, copy = _STORES[store]
    return (
        f"{url} is in an object store, and models are read from directories: mount it"
        f" (with {mount}), or copy it to a directory and keep that up to date ({copy}), and give"
        " that directory"
    )


def _may_be_a_model(name: str) -> bool:
    """True if clients could request a directory's name, and it is not hidden."""
    is_text = not any("\ud800" <= char <= "\udfff" for char in name)
    return is_text and not name.startswith(".") and name != _FILE_SYSTEMS_OWN


def _is_model(path: Path, directories: Sequence[Path]) -> bool:
    """True if a directory that should hold models is a model itself."""
    if any(_has_versions(directory) for directory in directories):
        return False
    versions = [one for one in directories if one.name.isdecimal() and _has_entries(one)]
    return bool(versions) or (path / "config.pbtxt").is_file()


def _has_versions(path: Path) -> bool:
    """True if a directory may be a model's; unreadable ones may."""
    try:
        return any(one.name.isdecimal() or one.name == "config.pbtxt" for one in path.iterdir())
    except OSError:
        return True


def _has_entries(path: Path) -> bool:
    return next(path.iterdir(), None) is not None


log = logging.getLogger(__name__)

NO_SUCH = "no model of this name lies in a model repository"
DUPLICATE = "model appears in two or more repositories"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models of the configured repositories and model files.

    `config_name` selects configurations. `namespacing` allows models of the same name in several
    repositories.
    """

    repositories: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    config_name: str = ""
    namespacing: bool = False

    @classmethod
    def of(cls, paths: Iterable[str]) -> "Catalogue":
        """The catalogue of these repositories and model files."""
        found = [Path(path) for path in paths]
        files = tuple(path for path in found if path.is_file())
        return cls(tuple(path for path in found if path not in files), files)

    def sources(self) -> tuple[list[ModelSource], list[str]]:
        """All models, and warnings about repositories without models.

        Raises `RepositoryError` for a missing repository or file.
        """
        sources = scan(self.repositories, self.config_name, self.namespacing)
        parents = {source.path.parent for source in sources}
        empty = [nothing_in(path) for path in self.repositories if path not in parents]
        return sources + [single_file(path) for path in self.files], empty

    def names(self) -> Mapping[str, str]:
        """All models, with the reason why one cannot be loaded, "" if unknown.

        Models of an unreadable repository are left out, which is logged.
        """
        try:
            places = model_places(self.repositories, self.namespacing)
        except RepositoryError as error:
            log.warning("%s", error)
            places = {}
            for repository in self.repositories:
                with suppress(RepositoryError):
                    places |= model_places([repository], self.namespacing)
        names = {name: "" if len(paths) == 1 else DUPLICATE for name, paths in places.items()}
        for file in self.files:
            names[file.stem] = DUPLICATE if file.stem in names else ""
        return names

    def read(self, name: str) -> ModelSource | None:
        """The model of this name; None if there is none.

        Raises `LoadFailed` for an ambiguous name, or if a repository cannot be read.
        """
        places = model_places(self.repositories, self.namespacing)
        paths = places.get(name, [])
        files = [file for file in self.files if file.stem == name]
        if len(paths) + len(files) > 1:
            raise LoadFailed(DUPLICATE)
        if files:
            return single_file(files[0])
        if paths:
            return replace(read_model_directory(paths[0], self.config_name), name=name)
        alike = namespaced(name, places)
        if alike:
            raise LoadFailed(ambiguous(name, alike))
        return None


def at_start(sources: Sequence[ModelSource], names: Sequence[str]) -> list[ModelSource]:
    """The models to load at start, by name, `*` for all; a missing one has a `problem`."""
    if list(names) == ["*"]:
        return list(sources)
    known = {source.name for source in sources}
    wanted = [source for source in sources if source.name in names]
    for name in dict.fromkeys(names):
        if name not in known:
            alike = namespaced(name, known)
            wanted.append(
                ModelSource(
                    name, Path(), None, (), problem=ambiguous(name, alike) if alike else NO_SUCH
                )
            )
    return wanted


def ambiguous(name: str, names: Sequence[str]) -> str:
    """The message about a name that stands for several models, with these full `names`."""
    return (
        f"There are {len(names)} identifiers of model '{name}' in global map, model namespace must"
        f" be provided to resolve ambiguity: {', '.join(names)}"
    )


def largest_version(source: ModelSource) -> int:
    """Bytes of the files of a model's largest version; vanished files count as empty."""
    if source.file is not None:
        return _file_size(source.file)
    sizes = [
        sum(_file_size(Path(top, name)) for top, _, names in os.walk(path) for name in names)
        for path in (source.path / str(number) for number in source.versions)
    ]
    return max(sizes, default=0)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported by the load
        return 0
