"""The model of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from headrace.plugins.functions import load
from headrace.plugins.functions.adapter import (
    AsyncModel,
    AsyncStreamModel,
    FunctionModel,
    PlainModel,
    StreamModel,
)

HEAD = "from collections.abc import AsyncIterator, Iterator\nfrom headrace import model\n"
ONE = "@model\ndef one(x: int) -> int: return x\n"
TWO = "@model\nasync def two(x: int) -> int: return x\n"
TRITON = "class TritonPythonModel: ...\n"


@pytest.fixture(autouse=True)
def no_model_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("model", None)


def loaded(tmp_path: Path, source: str, **parameters: str) -> Any:
    """What the worker makes of a file."""
    path = tmp_path / "model.py"
    path.write_text(HEAD + dedent(source))
    return load({"file": str(path), "parameters": parameters})


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (ONE, PlainModel),
        (TWO, AsyncModel),
        ("@model\ndef f(x: int) -> Iterator[int]: yield x", StreamModel),
        ("@model\nasync def f(x: int) -> AsyncIterator[int]: yield x", AsyncStreamModel),
        ("@model\nclass C:\n def predict(self, x: int) -> int: return x", PlainModel),
        (ONE + "again = one", PlainModel),
    ],
)
def test_the_model_of_a_file(tmp_path: Path, source: str, kind: type[FunctionModel]) -> None:
    assert issubclass(loaded(tmp_path, source), kind)


def test_triton_s_class_comes_first(tmp_path: Path) -> None:
    assert loaded(tmp_path, ONE + TRITON).__name__ == "TritonPythonModel"


def test_one_of_several_by_its_name(tmp_path: Path) -> None:
    assert loaded(tmp_path, ONE + TWO, function="two").declaration.name == "two"


def test_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(HEAD + ONE)
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded(tmp_path, "from elsewhere import one").declaration.name == "one"
    assert loaded(tmp_path, "from elsewhere import one\n" + TWO).declaration.name == "two"
    del sys.modules["elsewhere"]


def test_a_class_that_inherits_from_a_model_is_none(tmp_path: Path) -> None:
    source = "@model\nclass A:\n def predict(self, x: int) -> int: ...\nclass B(A): ..."
    assert loaded(tmp_path, source).declaration.name == "A"


@pytest.mark.parametrize(
    ("source", "parameters", "says"),
    [
        ("", {}, "neither a class TritonPythonModel nor a function .*; it defines nothing"),
        ("def f(): ...\nclass C: ...\n", {}, "it defines f, C"),
        (ONE + TWO, {}, r"found one, two; parameters\['function'\] .* has to be split"),
        ("from headrace import modell", {}, "'modell' from 'headrace'; did you mean 'model'"),
        ("from headrace import nonsense", {}, "cannot import name 'nonsense' from 'headrace'$"),
        (ONE, {"function": "three"}, "no @model called three; there are: one"),
        ("", {"function": "three"}, "no @model called three; there are: none"),
    ],
)
def test_no_model(tmp_path: Path, source: str, parameters: dict[str, str], says: str) -> None:
    with pytest.raises((LookupError, ImportError), match=says):
        loaded(tmp_path, source, **parameters)


def test_a_model_that_is_wrapped(tmp_path: Path) -> None:
    source = """
        from functools import wraps
        def timed(f):
            @wraps(f)
            def g(*args, **more): return f(*args, **more)
            return g
        @timed
        @model
        def one(x: int) -> int: return x
    """
    with pytest.raises(TypeError, match="model one is wrapped by another decorator; put @model"):
        loaded(tmp_path, source)
