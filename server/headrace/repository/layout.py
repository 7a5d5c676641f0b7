"""Models and versions in the model repositories, listed anew each time since they change.

    <repository>/<model>/config.pbtxt              optional if the model's file suffices
    <repository>/<model>/configs/<name>.pbtxt      an alternative, selected by name
    <repository>/<model>/<version>/<model file>

A directory that is a model itself can take a repository's place, with or without directories of
versions: `<model>/<version>/<model file>`, or `<model>/<model file>`, which is version 1.

Names come from directory listings and are kept in a dictionary; a name from a request is only ever
looked up there and never becomes part of a path. Everything here reads directories, and may block.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.repository.config import ConfigFile
from headrace.repository.overrides import Upload

_FILE_SYSTEMS_OWN = "lost+found"  # a directory at the root of a volume
# Files by which a directory is seen to be a model, besides `model.SUFFIX`.
_FILES = ("MLmodel", "saved_model.pb")
_SUFFIXES = (".onnx", ".skops", ".joblib", ".pkl", ".ubj", ".cbm", ".pt", ".pt2")
_DOCUMENTS = (".md", ".rst", ".html", ".pdf")
# What a URL's scheme stands for, and the tools that provide it as a directory: by mounting, if that
# is possible, or by copying.
_OBJECTS = "in an object store"
_STORES = {
    "s3": (_OBJECTS, "Mountpoint for Amazon S3 or s3fs", "aws s3 sync"),
    "gs": (_OBJECTS, "Cloud Storage FUSE", "gcloud storage rsync"),
    "as": (_OBJECTS, "BlobFuse", "azcopy sync"),
    "hf": ("on the Hugging Face Hub", "", "hf download --local-dir"),
    "oci": ("in an image registry", "a volume of Kubernetes' type image", "oras pull"),
    "http": ("on a web server", "", "curl"),
    "https": ("on a web server", "", "curl"),
    "models": ("in MLflow's model registry", "", "mlflow artifacts download --dst-path"),
}


class Place(NamedTuple):
    """The directory of a model, and the repository in which it was found.

    Both are the same for a directory that is a model itself.
    """

    path: Path
    repository: Path

    @property
    def alone(self) -> bool:
        """True if the model takes the repository's place."""
        return self.path == self.repository


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model. `versions` ascend; `ignored` are version-like directories with invalid names.

    `flat` means that the files of its only version are in its own directory. `renamed` means that
    the operator has chosen its name (`--model-name`). `file` is set for a model that consists of a
    single file, without a directory. `problem` is the reason why the directory is no valid model.
    `override` is a configuration that replaces the directory's. `upload` keeps an uploaded
    directory, and `data_only` means that none of its files may contain code.
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
    flat: bool = False
    renamed: bool = False

    @property
    def written_name(self) -> str:
        """The name that its configuration may contain: its directory's; "" for any."""
        if self.renamed:
            return ""
        own = self.file is None and self.upload is None
        return _own_name(self.path) if own else self.name

    def version_path(self, version: int) -> Path:
        """The directory with the files of a version."""
        return self.path if self.flat else self.path / str(version)

    def model_path(self, version: int, filename: str) -> Path:
        """The model file of a version, or the directory of this name."""
        return self.file or self.version_path(version) / filename


def scan(
    repositories: Sequence[Path], config_name: str = "", namespacing: bool = False, alone: str = ""
) -> list[ModelSource]:
    """All models of the repositories, by name; one found in several is marked as duplicate.

    With `namespacing` such models get distinct names instead. `alone` is the name of a directory
    that is a model itself. Raises `LoadFailed` if a repository cannot be read; an invalid model has
    a `problem`.
    """
    places = model_places(repositories, namespacing, alone)
    return [
        replace(read_place(found[-1], config_name, alone), name=name, duplicate=len(found) > 1)
        for name, found in sorted(places.items())
    ]


def model_places(
    repositories: Sequence[Path], namespacing: bool = False, alone: str = ""
) -> dict[str, list[Place]]:
    """The directories of all models, by name; raises `LoadFailed`.

    With `namespacing`, models whose name occurs in several repositories are named `name@space`,
    where space is the repository's directory name, with a number if that occurs twice.
    """
    found = [place for path in repositories for place in model_directories(path)]
    return name_models(repositories, found, namespacing, alone)


def name_models(
    repositories: Sequence[Path],
    found: Iterable[Place],
    namespacing: bool = False,
    alone: str = "",
) -> dict[str, list[Place]]:
    """The names of the models found in the repositories; see `model_places`."""
    named: dict[str, list[Place]] = {}
    for place in found:
        own = alone if place.alone and alone else _own_name(place.path)
        named.setdefault(own, []).append(place)
    if not namespacing:
        return named
    spaces = _spaces(repositories)
    unique: dict[str, list[Place]] = {}
    for name, places in named.items():
        for place in places:
            full = name if len(places) == 1 else f"{name}@{spaces[place.repository]}"
            unique.setdefault(full, []).append(place)
    return unique


def _own_name(directory: Path) -> str:
    """The name of a model's directory, also of one that is given as `.`."""
    return directory.name or Path(os.path.abspath(directory)).name


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


def single_file(path: Path, name: str = "") -> ModelSource:
    """A single model file, as version 1 of a model of this name, by default the file's.

    Raises `LoadFailed` if it does not exist.
    """
    if path.is_dir():
        raise LoadFailed(f"{path} is a directory; serve it with --model-repository {path}")
    if not path.is_file():
        raise LoadFailed(_elsewhere(path) or f"there is no model file {path}")
    return ModelSource(name or path.stem, path.parent, None, (1,), file=path, renamed=bool(name))


def nothing_in(repository: Path) -> str:
    """Message about a repository without models."""
    found = sorted(entry.name for entry in repository.iterdir())[:5]
    return (
        f"no models in {repository}: expected a file such as MODEL/VERSION/model.onnx or"
        f" MODEL/VERSION/model.py, or the files of one model, such as model.onnx; found"
        f" {', '.join(found) or 'nothing'}"
    )


def read_place(place: Place, config_name: str = "", name: str = "") -> ModelSource:
    """The model in a place, as of now; `name` is that of a directory that is a model itself."""
    source = read_model_directory(place.path, config_name)
    if not place.alone or source.problem:
        return source
    source = replace(source, renamed=bool(name))
    if source.versions or not _has_model_file(place.path):
        return source
    return replace(source, versions=(1,), flat=True)


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
        source.version_path(version).is_dir() for version in source.versions
    ):
        return source
    found = read_model_directory(source.path)
    return source if found.problem else replace(source, versions=found.versions)


def model_directories(repository: Path) -> Sequence[Place]:
    """The model directories of a repository, or itself if it is one of a model.

    Raises `LoadFailed` for one that cannot be read.
    """
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
        return [Place(repository, repository)]
    return [Place(entry, repository) for entry in found]


def _elsewhere(path: Path) -> str:
    """The message about a URL, as other servers accept them; "" for other paths."""
    scheme, colon, rest = str(path).partition(":/")
    if not colon or scheme not in _STORES:
        return ""
    what, mount, copy = _STORES[scheme]
    # Path collapses double slashes; MLflow's URLs have single ones.
    url = str(path) if scheme == "models" else f"{scheme}://{rest.replace(':/', '://')}"
    way = f"mount it (with {mount}), or copy it" if mount else "copy it"
    return (
        f"{url} is {what}, and models are read from directories: {way} to a directory"
        f" and keep that up to date ({copy}), and give that directory"
    )


def _may_be_a_model(name: str) -> bool:
    """True if clients could request a directory's name, and it is not hidden."""
    is_text = not any("\ud800" <= char <= "\udfff" for char in name)
    return is_text and not name.startswith(".") and name != _FILE_SYSTEMS_OWN


def _is_model(path: Path, directories: Sequence[Path]) -> bool:
    """True if a directory that may hold models is a model itself."""
    if any(_has_versions(directory) for directory in directories):
        return False
    versions = [one for one in directories if one.name.isdecimal() and _has_entries(one)]
    return bool(versions) or (path / "config.pbtxt").is_file() or _has_model_file(path)


def _has_model_file(path: Path) -> bool:
    """True if a model's file, or a directory in its place, lies in this directory itself."""
    return any(_is_model_file(entry) for entry in path.iterdir())


def _is_model_file(path: Path) -> bool:
    """True for the names of libraries and of Triton's backends, and for known suffixes.

    Formats that no backend here reads count as well: the load then names the file as the problem.
    """
    if path.is_file():
        named = path.stem == "model" and path.suffix not in _DOCUMENTS
        return named or path.name in _FILES or path.suffix in _SUFFIXES
    return path.stem == "model" and any((path / name).is_file() for name in (*_FILES, path.name))


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
    repositories. `name` is the name of the only model file, or of the repository if it is the
    directory of a model; "" for its own.
    """

    repositories: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    config_name: str = ""
    namespacing: bool = False
    name: str = ""

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
        sources = scan(self.repositories, self.config_name, self.namespacing, self.name)
        full = {path for source in sources for path in (source.path, source.path.parent)}
        warnings = [nothing_in(path) for path in self.repositories if path not in full]
        if self.name and sources and not any(source.renamed for source in sources):
            warnings.append(
                f"--model-name={self.name} has no effect: it is for a directory that is a model"
                f" itself, and {self.repositories[0]} is a repository, whose models have the names"
                " of their directories"
            )
        return sources + [single_file(path, self.name) for path in self.files], warnings

    def names(self) -> Mapping[str, str]:
        """All models, with the reason why one cannot be loaded, "" if unknown.

        Models of an unreadable repository are left out, which is logged.
        """
        try:
            places = self._places()
        except RepositoryError as error:
            log.warning("%s", error)
            places = {}
            for repository in self.repositories:
                with suppress(RepositoryError):
                    places |= replace(self, repositories=(repository,))._places()
        names = {name: "" if len(found) == 1 else DUPLICATE for name, found in places.items()}
        for name in (self.name or file.stem for file in self.files):
            names[name] = DUPLICATE if name in names else ""
        return names

    def read(self, name: str) -> ModelSource | None:
        """The model of this name; None if there is none.

        Raises `LoadFailed` for an ambiguous name, or if a repository cannot be read.
        """
        places = self._places()
        found = places.get(name, [])
        files = [file for file in self.files if (self.name or file.stem) == name]
        if len(found) + len(files) > 1:
            raise LoadFailed(DUPLICATE)
        if files:
            return single_file(files[0], self.name)
        if found:
            return replace(self._read(found[0]), name=name)
        alike = namespaced(name, places)
        if alike:
            raise LoadFailed(ambiguous(name, alike))
        return None

    def _places(self) -> dict[str, list[Place]]:
        return model_places(self.repositories, self.namespacing, self.name)

    def _read(self, place: Place) -> ModelSource:
        return read_place(place, self.config_name, self.name)


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
        for path in map(source.version_path, source.versions)
    ]
    return max(sizes, default=0)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported by the load
        return 0
