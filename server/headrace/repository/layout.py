"""Models and versions in the model repositories, listed anew each time since they change.

    <repository>/<model>/config.pbtxt              optional if the model's file suffices
    <repository>/<model>/configs/<name>.pbtxt      an alternative, selected by name
    <repository>/<model>/<version>/<model file>

A directory that is a model itself can take a repository's place, with or without directories of
versions: `<model>/<version>/<model file>`, or `<model>/<model file>`, which is version 1.

Names come from directory listings and are kept in a dictionary; a name from a request is only ever
looked up there and never becomes part of a path. Everything here reads directories, and may block.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.repository.config import ConfigFile
from headrace.repository.store import Lease, Stored

_FILE_SYSTEMS_OWN = "lost+found"  # a directory at the root of a volume
# Files by which a directory is seen to be a model, besides `model.SUFFIX`.
_FILES = ("MLmodel", "saved_model.pb")
MODEL_SUFFIXES = (".onnx", ".skops", ".joblib", ".pkl", ".ubj", ".cbm", ".pt", ".pt2")
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
    "mlflow": ("in MLflow's model registry", "", "mlflow artifacts download --dst-path"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model. `versions` ascend; `ignored` are version-like directories with invalid names.

    `flat` means that the files of its only version are in its own directory. `renamed` means that
    the operator has chosen its name (`--model-name`). `file` is set for a model that consists of a
    single file, without a directory. `problem` is the reason why the directory is no valid model.
    `override` is a configuration that replaces the directory's. A model that is `stored` has its
    directory once it is `materialised`, which `lease` keeps. `uploaded` means that a load request
    has brought its files, and `data_only` that none of them may contain code.
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
    stored: Stored | None = None
    lease: Lease | None = field(default=None, compare=False)
    uploaded: bool = False
    data_only: bool = False
    flat: bool = False
    renamed: bool = False

    @property
    def written_name(self) -> str:
        """The name that its configuration may contain: its directory's; "" for any."""
        if self.renamed:
            return ""
        if self.stored is not None:
            return self.stored.name
        return own_name(self.path) if self.file is None else self.name

    @property
    def repository(self) -> str:
        """The repository that it lies in; "" for files of a request."""
        return str(self.path.parent) if self.stored is None else self.stored.store.address

    @property
    def trouble(self) -> str:
        """The reason why its store cannot be asked at present; "" if it can."""
        return "" if self.stored is None else self.stored.store.trouble

    @property
    def origin(self) -> Path:
        """The origin of its files: its directory, or the one in its lease."""
        return self.path if self.lease is None else self.lease.origin

    @property
    def is_absent(self) -> bool:
        """True if its directory has not been brought from its store."""
        return self.stored is not None and self.lease is None

    def version_path(self, version: int) -> Path:
        """The directory with the files of a version."""
        return self.path if self.flat else self.path / str(version)

    def model_path(self, version: int, filename: str) -> Path:
        """The model file of a version, or the directory of this name."""
        return self.file or self.version_path(version) / filename


def own_name(directory: Path) -> str:
    """The name of a model's directory, also of one that is given as `.`."""
    return directory.name or Path(os.path.abspath(directory)).name


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


def alone(source: ModelSource, renamed: bool) -> ModelSource:
    """The model whose directory takes a repository's place, `renamed` by `--model-name`."""
    if source.problem:
        return source
    source = replace(source, renamed=renamed)
    if source.versions or not _has_model_file(source.path):
        return source
    return replace(source, versions=(1,), flat=True)


def materialised(source: ModelSource, may_be_flat: bool = True) -> ModelSource:
    """The model with its directory, brought from its store if it is absent.

    A store knows which of its directories are models, so that one may be without versions, `flat`.
    May block; raises `LoadFailed`.
    """
    if source.stored is None or not source.is_absent:
        return source
    lease = source.stored.lease()
    found = read_model_directory(lease.path, source.stored.config_name)
    if may_be_flat:
        found = alone(found, renamed=False)
    return replace(
        source, path=found.path, config_path=found.config_path, versions=found.versions,
        ignored=found.ignored, problem=found.problem, lease=lease, flat=found.flat,
    )  # fmt: skip


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
    """The model with its current versions, if some of its own are gone, or its current token.

    Raises `LoadFailed` for one that its store does not tell.
    """
    if source.stored is not None and source.is_absent:
        return replace(source, stored=source.stored.now())
    if source.file is not None or all(
        source.version_path(version).is_dir() for version in source.versions
    ):
        return source
    found = read_model_directory(source.path)
    return source if found.problem else replace(source, versions=found.versions)


def model_directories(repository: Path) -> Sequence[Path]:
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
    return [repository] if is_model else found


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
        f"{url} is {what}; this server has no store for that, or it stands in place of a file:"
        f" {way} to a directory"
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
        return named or path.name in _FILES or path.suffix in MODEL_SUFFIXES
    return path.stem == "model" and any((path / name).is_file() for name in (*_FILES, path.name))


def _has_versions(path: Path) -> bool:
    """True if a directory may be a model's; unreadable ones may."""
    try:
        return any(one.name.isdecimal() or one.name == "config.pbtxt" for one in path.iterdir())
    except OSError:
        return True


def _has_entries(path: Path) -> bool:
    return next(path.iterdir(), None) is not None


def largest_version(source: ModelSource) -> int:
    """Bytes of the files of a model's largest version; vanished files count as empty.

    One that is still in its store has the bytes of all its files.
    """
    if source.stored is not None and source.is_absent:
        return source.stored.store.size(source.stored.name)
    if source.file is not None:
        return _file_size(source.file)
    return max(map(size_below, map(source.version_path, source.versions)), default=0)


def size_below(directory: Path) -> int:
    """Bytes of the files below a directory; vanished files count as empty."""
    tree = os.walk(directory)
    return sum(_file_size(Path(top, name)) for top, _, names in tree for name in names)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported by the load
        return 0
