"""Which files a model that is given as a single file is made of.

Found out by reading, never by running: a Python file is parsed for what it imports from its own
directory, an ONNX file is walked for the files that hold its weights.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.backends.onnx_files import external_files
from headrace.core.errors import LoadFailed

_LARGEST_SOURCE = 4 << 20  # bytes; nobody writes a larger one by hand


def parts(file: Path) -> set[Path]:
    """The file itself and those beside it that are loaded with it, as far as it tells."""
    if file.suffix == ".py":
        return python_files(file)
    if file.suffix == ".onnx":
        return {file, *_weights(file)}
    return {file}


def python_files(file: Path) -> set[Path]:
    """A Python file, and what it imports from its own directory, directly or not.

    Also what it would import from there if it were there: it may still come.
    """
    root = file.parent
    found = {file}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        for name in _imports(source, root):
            for path in _modules(root, name):
                if path not in found:
                    found.add(path)
                    waiting.append(path)
    return found


def _imports(source: Path, root: Path) -> Iterator[str]:
    """The full names of what a file may import; nothing of one that cannot be read."""
    try:
        if source.stat().st_size > _LARGEST_SOURCE:
            return
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = source.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *filter(None, [node.module])))
            yield origin
            # Each of the names may be a module, too.
            yield from (f"{origin}.{alias.name}".lstrip(".") for alias in node.names)


def _modules(root: Path, name: str) -> Iterable[Path]:
    """The files of a module beneath `root`, and of the packages that it lies in."""
    folder = root
    for part in filter(None, name.split(".")):
        module = folder / f"{part}.py"
        folder = folder / part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"
        elif module.is_file():
            yield module
        elif not folder.is_dir():
            if folder.parent == root and part not in sys.stdlib_module_names:
                yield module
            return


def _weights(file: Path) -> Iterator[Path]:
    try:
        locations = external_files(file)
    except (OSError, ValueError, LoadFailed):
        return
    for location in locations:
        path = file.parent / location
        if not Path(location).is_absolute() and ".." not in path.parts:
            yield path
