"""Loading of a model's code, and errors in it."""

import importlib
import os
import py_compile
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.plugins.functions.offered import ResultError
from headrace.workers import python_loader
from headrace.workers.model_class import import_freshly, its_traceback, one_line
from headrace.workers.triton_requests import InferenceResponse
from headrace.workers.triton_tensors import TritonModelException


@pytest.fixture
def add_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Add a directory to the import path during the test."""
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
    """Write a module whose compiled file is of another text, and passes for current."""
    file.parent.mkdir(parents=True, exist_ok=True)
    assert len(before) == len(now)
    file.write_text(before)
    os.utime(file, (1_000_000, 1_000_000))
    py_compile.compile(str(file))
    file.write_text(now)
    os.utime(file, (1_000_000, 1_000_000))


def test_modules_of_a_models_directory(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    write_stale(tmp_path / "stale_a.py", "K = 1", "K = 2")
    write_stale(tmp_path / "stale_package" / "__init__.py", "", "")
    write_stale(tmp_path / "stale_package" / "b.py", "K = 1", "K = 2")
    import_freshly([str(tmp_path)])
    add_path(tmp_path)
    assert importlib.import_module("stale_a").K == 2
    assert importlib.import_module("stale_package.b").K == 2


def test_no_compiled_files_are_written(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    (tmp_path / "fresh_c.py").write_text("K = 1")
    import_freshly([str(tmp_path)])
    add_path(tmp_path)
    assert importlib.import_module("fresh_c").K == 1
    assert [path.name for path in tmp_path.iterdir()] == ["fresh_c.py"]


def test_libraries_use_pythons_cache(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    for folder in (tmp_path / "elsewhere", tmp_path / "model" / "env" / "site-packages"):
        write_stale(folder / f"stale_{folder.name[0]}.py", "K = 1", "K = 2")
        import_freshly([str(tmp_path / "model")])
        add_path(folder)
        assert importlib.import_module(f"stale_{folder.name[0]}").K == 1


def test_the_models_own_file(tmp_path: Path, add_path: Callable[[Path], None]) -> None:
    file = tmp_path / "model.py"
    write_stale(file, "class TritonPythonModel: K = 1", "class TritonPythonModel: K = 2")
    assert python_loader.load({"file": str(file)}).K == 2


def error_of(source: str, file: str = "model.py") -> Exception:
    """Exception raised by running a file."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        exec(compile(source, file, "exec"), {"InferenceResponse": InferenceResponse})
    return caught.value


def test_a_traceback_shows_the_models_code() -> None:
    trace = its_traceback(error_of("def f():\n    1 / 0\nf()"))
    lines = trace.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert 'File "model.py", line 2, in f' in trace
    trace = its_traceback(error_of("InferenceResponse([1])"))
    assert 'File "model.py", line 1' in trace
    assert "headrace/workers" not in trace.rpartition("\n")[0]
    assert its_traceback(LookupError("neither this nor that")) == ""


def test_a_traceback_shows_our_code_if_it_raises() -> None:
    path = Path(InferenceResponse.__module__.replace(".", "/")).with_name("x.py")
    ours = str(Path(__file__).parents[2] / "server" / path.parent / "x.py")
    code = compile("raise RuntimeError('ours')", ours, "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(code)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert "x.py" in its_traceback(caught.value)


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def _with_note() -> ValueError:
    error = ValueError("two\nlines")
    error.add_note("and a note")
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TritonModelException("no"), "TritonModelException: no"),
        (ResultError("not this"), "ResultError: not this"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (_with_note(), "ValueError: two lines and a note"),
        (_Mute(), "_Mute: <it has no text>"),
        (ImportError("cannot import name 'x' from 'm' (/secret/m.py)", path="/secret/m.py"),
         "ImportError: cannot import name 'x' from 'm'"),
        (error_of("def f(:", "/secret/m.py"), "SyntaxError: invalid syntax (m.py, line 1)"),
    ],
)  # fmt: skip
def test_an_exception_is_one_line_without_paths_and_modules(
    error: BaseException, text: str
) -> None:
    assert one_line(error) == text
