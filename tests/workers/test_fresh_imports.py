"""A model's own code is what its files say, whatever Python has compiled before."""

import importlib
import os
import py_compile
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.workers import python_loader
from headrace.workers.model_class import import_freshly


@pytest.fixture
def add_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Have Python import from a directory, during the test."""
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def add(path: Path) -> None:
        sys.path.insert(0, str(path))
        importlib.invalidate_caches()

    yield add
    for name in set(sys.modules) - known:
        del sys.modules[name]
    sys.path_importer_cache.clear()


def write_stale(file: Path, before: str, now: str) -> None:
    """A file whose compiled form is of another text, and passes for current."""
    file.parent.mkdir(parents=True, exist_ok=True)
    assert len(before) == len(now)
    file.write_text(before)
    os.utime(file, (1_000_000, 1_000_000))
    py_compile.compile(str(file))
    file.write_text(now)
    os.utime(file, (1_000_000, 1_000_000))


def test_what_lies_beneath_a_models_directory(
    tmp_path: Path, add_path: Callable[[Path], None]
) -> None:
    write_stale(tmp_path / "stale_a.py", "K = 1", "K = 2")
    write_stale(tmp_path / "stale_package" / "__init__.py", "", "")
    write_stale(tmp_path / "stale_package" / "b.py", "K = 1", "K = 2")
    import_freshly([str(tmp_path)])
    add_path(tmp_path)
    assert importlib.import_module("stale_a").K == 2
    assert importlib.import_module("stale_package.b").K == 2


def test_nothing_is_written(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    (tmp_path / "fresh_c.py").write_text("K = 1")
    import_freshly([str(tmp_path)])
    add_path(tmp_path)
    assert importlib.import_module("fresh_c").K == 1
    assert [path.name for path in tmp_path.iterdir()] == ["fresh_c.py"]


def test_libraries_are_left_to_pythons_cache(
    tmp_path: Path, add_path: Callable[[Path], None]
) -> None:
    for folder in (tmp_path / "elsewhere", tmp_path / "model" / "env" / "site-packages"):
        write_stale(folder / f"stale_{folder.name[0]}.py", "K = 1", "K = 2")
        import_freshly([str(tmp_path / "model")])
        add_path(folder)
        assert importlib.import_module(f"stale_{folder.name[0]}").K == 1


def test_the_models_own_file(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    file = tmp_path / "model.py"
    write_stale(file, "class TritonPythonModel: K = 1", "class TritonPythonModel: K = 2")
    assert python_loader.load({"file": str(file)}).K == 2
