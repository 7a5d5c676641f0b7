"""What a request to load a model means: which files, under which configuration.

Reads directories and writes files, and is for threads that may wait.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from headrace.core.errors import InvalidConfig
from headrace.core.model_spec import LoadParameters
from headrace.engine.opening import Opened
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, parse_json_config
from headrace.repository.layout import Catalogue, ModelSource, read_model_directory
from headrace.repository.overrides import Uploads, checked_paths, of_own_files, overridden

_NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class LoadOverrides(IntEnum):
    """What load requests may bring along, each with what is before it.

    `CONFIG` is how a model of the repository is served, `FILES` are models that are data, and
    `CODE` is anything: whoever may load models may run code on this machine then.
    """

    NONE = 0
    CONFIG = 1
    FILES = 2
    CODE = 3


@dataclass(frozen=True, slots=True)
class Sources:
    """Finds what a request asks for; `open` reads and checks the configuration of a model."""

    catalogue: Catalogue
    allowed: LoadOverrides
    uploads: Uploads
    open: Callable[[ModelSource], Opened]

    def read(self, name: str, parameters: LoadParameters) -> ModelSource | None:
        """What is to be loaded; None if nothing of this name lies in a repository.

        Raises `RepositoryError` for what cannot be, and `InvalidRequest` for files that must not
        be.
        """
        if parameters.files:
            return self._with_files(name, parameters)
        found = self.catalogue.read(name)
        if found is None or found.problem or parameters.config is None:
            return found
        self._check(LoadOverrides.CONFIG, "a configuration")
        return replace(found, override=self._override(found, parameters.config))

    def _override(self, source: ModelSource, text: str) -> ConfigFile:
        """The configuration of a request for a model that lies in a repository."""
        file = parse_json_config(text, _called(source.name))
        if file.config.name == source.name:  # by which clients know it
            file.config.name = source.written_name
        if self.allowed is LoadOverrides.CODE:
            return file
        opened = self.open(source)
        return overridden(opened.file, normalise(opened.config), file)

    def _with_files(self, name: str, parameters: LoadParameters) -> ModelSource:
        self._check(LoadOverrides.FILES, "files")
        if not _NEW_NAME.fullmatch(name) and name not in self.catalogue.names():
            raise InvalidConfig(
                "a new model is called by 1 to 128 letters, digits and any of . _ @ + -, beginning"
                " with a letter or digit"
            )
        if parameters.config is None:
            raise InvalidConfig("files have to come with a 'config', {} at least")
        file = parse_json_config(parameters.config, _called(name))
        restricted = self.allowed is not LoadOverrides.CODE
        if restricted:
            of_own_files(file)
        upload = self.uploads.write(checked_paths(parameters.files))
        source = read_model_directory(upload.path)
        return replace(
            source, name=name, config_path=None, override=file, upload=upload, data_only=restricted
        )

    def _check(self, needed: LoadOverrides, what: str) -> None:
        if self.allowed < needed:
            raise InvalidConfig(
                f"{what} in a load request {'is' if needed is LoadOverrides.CONFIG else 'are'} not"
                f" taken by this server; --load-overrides={needed.name.lower()} takes them"
            )


def _called(name: str) -> str:
    """What messages call the configuration of a request."""
    return f"config of {name}"
