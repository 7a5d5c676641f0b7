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
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from os import sep
from os.path import realpath
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder

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
    roots = [realpath(path) for path in paths]
    standard = [realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    make = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FreshLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def hook(entry: str) -> "PathEntryFinder":
        folder = realpath(entry)
        libraries = _LIBRARIES.intersection(folder.split(sep)) or _is_in(folder, standard)
        if libraries or not _is_in(folder, roots):
            raise ImportError("left to Python's own finder", path=entry)
        return make(entry)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def _is_in(folder: str, roots: Iterable[str]) -> bool:
    """Whether it is one of `roots`, or lies beneath one."""
    return any(folder == root or folder.startswith(root.rstrip(sep) + sep) for root in roots)
