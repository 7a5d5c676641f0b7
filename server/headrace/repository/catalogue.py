"""Which models there are to be loaded by name: looked up anew each time, since repositories change.

Names are those that the directories have; a name from a request is compared with them and never
becomes part of a path. Everything here reads directories, and is for threads that may wait.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.repository.layout import (
    ModelSource,
    model_places,
    namespaced,
    read_model_directory,
    single_file,
)

log = logging.getLogger(__name__)

NO_SUCH = "no model of this name lies in a model repository"
DUPLICATE = "model appears in two or more repositories"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models of some repositories and model files.

    `config_name` picks configurations. `namespacing` is whether one name may stand for models of
    several repositories.
    """

    repositories: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    config_name: str = ""
    namespacing: bool = False

    def names(self) -> Mapping[str, str]:
        """All models, with the reason why one cannot be loaded, "" if nothing is known of that.

        What lies in a repository that cannot be read at present is left out, and the log says so.
        """
        try:
            places = self._places(self.repositories)
        except RepositoryError as error:
            log.warning("%s", error)
            places = {}
            for repository in self.repositories:
                places |= self._readable(repository)
        names = {name: "" if len(paths) == 1 else DUPLICATE for name, paths in places.items()}
        for file in self.files:
            names[file.stem] = DUPLICATE if file.stem in names else ""
        return names

    def read(self, name: str) -> ModelSource | None:
        """What there is under a name; None if there is nothing.

        Raises `LoadFailed` for one that does not say which model is meant, or if a repository
        cannot be read.
        """
        places = self._places(self.repositories)
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

    def _places(self, repositories: Sequence[Path]) -> dict[str, list[Path]]:
        return model_places(repositories, self.namespacing)

    def _readable(self, repository: Path) -> dict[str, list[Path]]:
        try:
            return self._places([repository])
        except RepositoryError:
            return {}


def at_start(sources: Sequence[ModelSource], names: Sequence[str]) -> list[ModelSource]:
    """Those of the models that are to be loaded at first, `*` for all; what is not there has a
    `problem`.
    """
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
    """What is wrong with a name that stands for several models, under `names` each."""
    return (
        f"There are {len(names)} identifiers of model '{name}' in global map, model namespace must"
        f" be provided to resolve ambiguity: {', '.join(names)}"
    )
