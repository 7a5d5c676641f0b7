"""Imports of a model's own code that see the files as they are.

Python keeps compiled code beside a source file and takes it for current if the time of the last
change, in whole seconds, and the size are the same: after two quick changes a model would run what
it was before. So what lies in a model's directories is compiled each time, which takes milliseconds
and writes nothing into a model repository. Libraries in an environment beneath them are left to
Python's cache.
"""

import sys
import sysconfig
from collections.abc import Iterable
from importlib.abc import PathEntryFinder
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from os.path import realpath
from pathlib import PurePath
from types import CodeType

_LIBRARIES = {"site-packages", "dist-packages"}


class FreshLoader(SourceFileLoader):
    """Compiles a source file whenever it is imported."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of a module; raises `ImportError`, `SyntaxError`."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_freshly(paths: Iterable[str]) -> None:
    """Have what lies beneath `paths` imported from its source, from now on."""
    roots = [PurePath(realpath(path)) for path in paths]
    standard = [PurePath(realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")]
    make = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FreshLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def hook(entry: str) -> PathEntryFinder:
        folder = PurePath(realpath(entry))
        libraries = _LIBRARIES.intersection(folder.parts) or any(
            map(folder.is_relative_to, standard)
        )
        if libraries or not any(map(folder.is_relative_to, roots)):
            raise ImportError("left to Python's own finder", path=entry)
        return make(entry)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
