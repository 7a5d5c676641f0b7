"""Models as programs give them to `headrace.serve` and `headrace.Engine`: laid out as files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.serving.sources import OBJECTS, ServeError, name_of, source_of

GivenModel = Any  # a function, class, ensemble, fitted estimator, or a path


@runtime_checkable
class ConfiguredModel(Protocol):
    """A model that is a configuration alone, such as an ensemble made of a function."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def config(self) -> str:
        """The text of its `config.pbtxt`."""


def lay_out(
    models: tuple[GivenModel | Mapping[str, GivenModel], ...], directory: Path
) -> tuple[list[str], list[str]]:
    """Model files, and repositories: `directory` is one if models that are no files need it.

    A model is a function, class or ensemble, a file, or a repository's directory; in a mapping,
    each has its key as its name, and may be a fitted estimator. Raises `ServeError`.
    """
    files: list[str] = []
    repositories: list[str] = []
    named: set[str] = set()
    for given in models:
        if isinstance(given, str | os.PathLike):
            path = os.fspath(given)
            (repositories if os.path.isdir(path) else files).append(os.path.abspath(path))
            continue
        if isinstance(given, ConfiguredModel):
            given = {given.name: given}
        for name in (more := given if isinstance(given, Mapping) else {name_of(given): given}):
            if name in named:
                raise ServeError(f"two models are called '{name}': name one by a mapping")
            _write(directory / name, more[name])
        named.update(more)
    if named or not (files or repositories):
        repositories.append(str(directory))
    return files, repositories


def _write(directory: Path, found: GivenModel) -> None:
    """Write the directory of one model."""
    if isinstance(found, str | os.PathLike):
        path = Path(found).absolute()
        if path.is_dir():
            directory.symlink_to(path)
            return
        (directory / "1").mkdir(parents=True)
        (directory / "1" / f"model{path.suffix}").symlink_to(path)
        return
    if isinstance(found, ConfiguredModel):
        directory.mkdir()
        lines = [line for line in found.config.splitlines() if not line.startswith("name: ")]
        (directory / "config.pbtxt").write_text("\n".join(lines), encoding="utf-8")
        return
    source = source_of(found)
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(source.text, encoding="utf-8")
    if source.objects:
        (directory / "1" / OBJECTS).write_bytes(source.objects)
    if source.function:
        which = f'parameters {{ key: "function" value {{ string_value: "{source.function}" }} }}\n'
        (directory / "config.pbtxt").write_text(which)
