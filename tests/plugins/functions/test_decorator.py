"""What can be decorated."""

from typing import Any

import pytest

import headrace
from headrace import SignatureError, model
from headrace.plugins.functions import offered


def test_the_package_offers_all_names() -> None:
    others = {"AsyncClient", "Client", "ClientError", "ServeError", "__version__", "serve"}
    assert set(headrace.__all__) == {*offered.__all__, *others}
    assert all(getattr(headrace, name) is getattr(offered, name) for name in offered.__all__)
    missing = "nothing"
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'nothing'"):
        getattr(headrace, missing)


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
def test_what_cannot_be_a_model(target: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        model(target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outputs": "label"}, "`outputs` is a list of names, got 'label'"),
        ({"max_streams": 0}, "max_streams is at least 1, got 0"),
    ],
)
def test_options_that_cannot_be(options: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        model(**options)


def test_an_error_is_told_under_the_name_that_users_know() -> None:
    assert f"{SignatureError.__module__}.{SignatureError.__qualname__}" == "headrace.SignatureError"
