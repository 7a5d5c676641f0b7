"""Requests as transports take them: values of Python, and no text that cannot be encoded."""

from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from headrace.client import InputError
from headrace.client.transport import InferRequest, flat_json, version_text
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor

HALF = "a\ud800"  # half a surrogate pair


class Mode(StrEnum):
    FAST = "fast"


@pytest.mark.parametrize(("given", "kept"), [
    (7, 7), (True, True), (0.5, 0.5), ("é", "é"), (np.int64(-7), -7), (np.int8(7), 7),
    (np.uint64(2**64 - 1), 2**64 - 1), (np.float32(0.5), 0.5), (np.float64(1.5), 1.5),
    (np.bool_(True), True), (np.str_("x"), "x"), (Mode.FAST, "fast"),
])  # fmt: skip
def test_parameters_are_values_of_python(given: Any, kept: object) -> None:
    [found] = InferRequest("m", [], parameters={"p": given}).parameters.values()
    assert (type(found), found) == (type(kept), kept)


@pytest.mark.parametrize(("given", "text"), [
    ({"p": HALF}, r"parameter 'p' is no text in UTF-8: 'a\\ud800'"),
    ({HALF: 1}, r"the name of a parameter is no text in UTF-8: 'a\\ud800'"),
    ({"p": 2**64}, "parameter 'p' is 18446744073709551616, expected .* number of 64 bits"),
    ({"p": np.array([1])}, r"parameter 'p' is array\(\[1\]\), expected a text, a boolean, or"),
    ({"p": b"x"}, "parameter 'p' is b'x', expected a text"),
    ({"p": None}, "parameter 'p' is None, expected a text"),
    ({1: "x"}, "the name of a parameter is no text in UTF-8: 1"),
])  # fmt: skip
def test_parameters_that_no_request_has(given: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        InferRequest("m", [], parameters=given)


@pytest.mark.parametrize(("given", "text"), [
    ({"id": HALF}, "the request's id is no text in UTF-8"),
    ({"id": 7}, "the request's id is no text in UTF-8: 7"),
    ({"model": HALF}, "the model's name is no text in UTF-8"),
    ({"version": HALF}, "the version is no text in UTF-8"),
    ({"version": 1.0}, r"the version is no text in UTF-8: 1\.0"),
    ({"outputs": [HALF]}, "the name of a tensor is no text in UTF-8"),
    ({"outputs": "Y"}, "outputs are a list of names, not one: 'Y'"),
    ({"inputs": [Tensor(HALF, Datatype.BOOL, np.array([True]))]}, "the name of a tensor"),
    ({"classes": {HALF: 1}}, "the name of a tensor is no text in UTF-8"),
])  # fmt: skip
def test_requests_that_cannot_be_sent(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        InferRequest(**{"model": "m", "inputs": []} | given)


def test_versions_are_texts() -> None:
    given: list[Any] = ["", "3", 3, np.int32(3), 0, None]
    assert [version_text(version) for version in given] == ["", "3", "3", "3", "0", ""]
    classes: dict[str, Any] = {"Y": np.int8(2)}
    assert InferRequest("m", [], classes=classes).classes == {"Y": 2}


def test_flat_json_of_numpy() -> None:
    document = {
        "a": np.int64(1), "b": np.float32(0.5), "c": np.bool_(True), "d": np.array([[1, 2]]),
    }  # fmt: skip
    assert flat_json(document) == b'{"a":1,"b":0.5,"c":true,"d":[[1,2]]}'
    document = {"a": np.float32(np.nan), "b": np.array([np.inf, 1.0]), "c": None}
    assert flat_json(document) == b'{"a": NaN, "b": [Infinity, 1.0], "c": null}'
    for value, text in ((HALF, "no JSON form: str is not valid UTF-8"), (b"x", "no JSON form")):
        with pytest.raises(InputError, match=text):
            flat_json({"a": value})
