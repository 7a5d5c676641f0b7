"""Objects that can be decorated, and the model of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import headrace
from headrace import SignatureError, model
from headrace.plugins.functions import load, offered
from headrace.plugins.functions.adapter import (
    AsyncStreamModel,
    CoroutineModel,
    FunctionModel,
    PlainModel,
    StreamModel,
)


def test_the_package_offers_all_names() -> None:
    others = {
        "AsyncClient", "AsyncEngine", "Client", "ClientError", "Engine", "Runner", "ServeError",
        "__version__", "serve",
    }  # fmt: skip
    assert set(headrace.__all__) == {*offered.__all__, *others}
    assert all(getattr(headrace, name) is getattr(offered, name) for name in offered.__all__)
    missing = "nothing"
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'nothing'"):
        getattr(headrace, missing)
    assert f"{SignatureError.__module__}.{SignatureError.__qualname__}" == "headrace.SignatureError"


class NoPredict:
    predict = 3


class AsyncLoad:
    async def load(self) -> None: ...

    def predict(self, x: int) -> int:
        return x


class Untyped:
    def predict(self, x) -> int:  # type: ignore[no-untyped-def]
        return int(x)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (len, "@model takes a function or a class, got len"),
        (NoPredict, "model NoPredict: a class needs a method `predict`"),
        (AsyncLoad, "model AsyncLoad: `load` cannot be a coroutine"),
        (Untyped, "model Untyped: parameter 'x' has no annotation"),
    ],
)
def test_objects_that_cannot_be_models(target: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        model(target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outputs": "label"}, "`outputs` is a list of names, got 'label'"),
        ({"max_streams": 0}, "max_streams is a number from 1 on, got 0"),
        ({"instances": 0}, "instances is a number from 1 on, got 0"),
        ({"instances": 2.0}, "instances is a number from 1 on, got 2.0"),
    ],
)
def test_invalid_options(options: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        model(**options)


HEAD = "from collections.abc import AsyncIterator, Iterator\nfrom headrace import model\n"
ONE = "@model\ndef one(x: int) -> int: return x\n"
TWO = "@model\nasync def two(x: int) -> int: return x\n"
TRITON = "class TritonPythonModel: ...\n"


@pytest.fixture(autouse=True)
def no_model_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("model", None)


def loaded(tmp_path: Path, source: str, **parameters: str) -> Any:
    """The worker's model of a file."""
    path = tmp_path / "model.py"
    path.write_text(HEAD + dedent(source))
    return load({"file": str(path), "parameters": parameters})


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (ONE, PlainModel),
        (TWO, CoroutineModel),
        ("@model\ndef f(x: int) -> Iterator[int]: yield x", StreamModel),
        ("@model\nasync def f(x: int) -> AsyncIterator[int]: yield x", AsyncStreamModel),
        ("@model\nclass C:\n def predict(self, x: int) -> int: return x", PlainModel),
        (ONE + "again = one", PlainModel),
    ],
)
def test_the_model_of_a_file(tmp_path: Path, source: str, kind: type[FunctionModel]) -> None:
    assert issubclass(loaded(tmp_path, source), kind)


def test_choice_among_several_models(tmp_path: Path) -> None:
    assert loaded(tmp_path, ONE + TRITON).__name__ == "TritonPythonModel"
    assert loaded(tmp_path, ONE + TWO, function="two").declaration.name == "two"
    # A class that inherits from a model is not a model.
    source = "@model\nclass A:\n def predict(self, x: int) -> int: ...\nclass B(A): ..."
    assert loaded(tmp_path, source).declaration.name == "A"


def test_imported_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(HEAD + ONE)
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded(tmp_path, "from elsewhere import one").declaration.name == "one"
    assert loaded(tmp_path, "from elsewhere import one\n" + TWO).declaration.name == "two"
    del sys.modules["elsewhere"]


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


def test_a_wrapped_model(tmp_path: Path) -> None:
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
