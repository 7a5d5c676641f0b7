"""Directories as stores, and their models."""

from collections.abc import Iterable
from pathlib import Path

from headrace.repository.catalogue import Catalogue, Directory
from headrace.repository.layout import ModelSource


def catalogue(
    paths: Iterable[Path],
    files: Iterable[Path] = (),
    config_name: str = "",
    namespacing: bool = False,
    name: str = "",
) -> Catalogue:
    """The catalogue of repositories on this machine; the rest as in `Catalogue`."""
    stores = tuple(Directory(path, name) for path in paths)
    return Catalogue(stores, tuple(files), config_name, namespacing, name)


def scan(paths: Iterable[Path], config_name: str = "", name: str = "") -> list[ModelSource]:
    """The models of repositories on this machine."""
    return catalogue(paths, (), config_name, False, name).sources()[0]
