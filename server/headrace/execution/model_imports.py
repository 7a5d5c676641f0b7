"""What a model in the server's process imports from the files beside it.

`sys.modules` belongs to the whole process, and models have files of the same names: two of them may
both have a `preprocess.py`. So what lies beside a model can be imported only while `lent` is in
force, by the one thread that it holds for, and is taken out of `sys.modules` afterwards; the model
itself goes on using what it has imported. Nothing is added to `sys.path`. A module that the server
or another library has imported before is not imported again, and wins over a file of its name.

Any thread may load a model; they do so one after another.
"""

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_lending = threading.RLock()  # the import system is the process's, and so is what guards it


class ModelImports:
    """The modules of one model; `name` is that of the one which is the model itself."""

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        """`paths` are the directories in which the model's files lie."""
        self.name = name
        self._paths = [str(Path(path).resolve()) for path in paths]
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let this thread import what lies beside the model."""
        with _lending:
            importlib.invalidate_caches()
            finder = _Beside(self._paths)
            hidden = {name: sys.modules[name] for name in self._modules if name in sys.modules}
            sys.modules.update(self._modules)
            sys.meta_path.insert(_place(), finder)
            try:
                yield
            finally:
                sys.meta_path.remove(finder)
                self._take_back()
                sys.modules.update(hidden)

    def forget(self) -> None:
        """Let go of the model's modules; `lent` is not to be called again."""
        self._modules.clear()
        sys.modules.pop(self.name, None)

    def _take_back(self) -> None:
        for name, module in list(sys.modules.items()):
            if name != self.name and self._is_own(module):
                self._modules[name] = sys.modules.pop(name)

    def _is_own(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)
        if spec is None:
            return False
        # A package without __init__.py has no origin, only places.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return any(Path(place).is_relative_to(path) for place in places[:1] for path in self._paths)


class _Beside:
    """Finds modules in some directories before `sys.path`, for the thread that has made it."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if path is not None or threading.get_ident() != self._thread:
            return None
        # All of it: a directory counts as a package only where nothing further on is one.
        return PathFinder.find_spec(name, [*self._paths, *sys.path], target)


def _place() -> int:
    """Where a finder for files belongs: after what is built in, before what looks at `sys.path`."""
    finders: list[object] = list(sys.meta_path)
    return finders.index(PathFinder) if PathFinder in finders else len(finders)
