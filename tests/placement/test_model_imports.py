"""What models in the server's process import from beside themselves, and what is left of it."""

import importlib
import sys
import threading
from pathlib import Path

import pytest

from headrace.placement.local.in_process import ModelImports


def imports(root: Path, name: str, **files: str) -> ModelImports:
    """The imports of a model with some files beside it; `a__b` is `a/b.py`."""
    folder = root / name / "1"
    for file, text in files.items():
        path = folder / f"{file.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ModelImports(name, [str(folder), str(root / name)])


def test_models_with_files_of_one_name(tmp_path: Path) -> None:
    first = imports(tmp_path, "first", beside="WHOSE = 'first'")
    second = imports(tmp_path, "second", beside="WHOSE = 'second'")
    found = []
    for model in (first, second, first):
        with model.lent():
            found.append(importlib.import_module("beside"))
    assert [module.WHOSE for module in found] == ["first", "second", "first"]
    assert found[0] is found[2]  # it is imported once


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = dict(sys.modules), list(sys.path), list(sys.meta_path)
    model = imports(tmp_path, "m", beside="import json", package__part="X = 1", fails="1 / 0")
    with model.lent():
        assert importlib.import_module("package.part").X == 1  # without an __init__.py
        importlib.import_module("beside")
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("fails")
    with pytest.raises(KeyError), model.lent():
        raise KeyError
    assert (dict(sys.modules), list(sys.path), list(sys.meta_path)) == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("beside")


def test_other_threads_see_nothing_of_it(tmp_path: Path) -> None:
    model = imports(tmp_path, "m", lonely="")
    caught: list[Exception] = []

    def attempt() -> None:
        try:
            importlib.import_module("lonely")
        except ModuleNotFoundError as error:
            caught.append(error)

    with model.lent():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        importlib.import_module("lonely")
    assert len(caught) == 1


def test_what_the_server_has_imported_wins(tmp_path: Path) -> None:
    model = imports(tmp_path, "m", json="FOREIGN = True")
    with model.lent():
        assert not hasattr(importlib.import_module("json"), "FOREIGN")


def test_a_directory_does_not_hide_a_library(tmp_path: Path) -> None:
    (tmp_path / "m" / "1" / "wave").mkdir(parents=True)  # of the standard library
    with imports(tmp_path, "m").lent():
        assert importlib.import_module("wave").__file__


def test_a_model_is_forgotten(tmp_path: Path) -> None:
    model = imports(tmp_path, "forgotten")
    sys.modules["forgotten"] = sys
    model.forget()
    model.forget()
    assert "forgotten" not in sys.modules
