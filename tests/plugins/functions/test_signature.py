"""Signatures of functions: inputs and outputs, and calls for requests."""

# mypy: disable-error-code="empty-body"

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import pytest

from headrace import Context, Float32, Frame, Int64, N, SignatureError, Strings, Table
from headrace.plugins.functions.signature import (
    CallMode,
    FunctionSignature,
    Options,
    Packing,
    read_signature,
)


class Width: ...


class Answer(NamedTuple):
    score: Float32[N]
    label: Strings[N]


@dataclass
class Point:
    x: float
    y: float


class Keyed(TypedDict):
    total: int


class Row(TypedDict):
    age: int | None
    name: str


def signature(function: Callable[..., Any], **options: Any) -> FunctionSignature:
    return read_signature(function, "f", Options(**options))


def inputs(found: FunctionSignature) -> list[tuple[str, str, list[int], bool]]:
    """Inputs on the wire."""
    return [(p.name, p.element.datatype, p.shape, p.optional) for p in found.inputs]


def outputs(found: FunctionSignature) -> list[tuple[str, str, list[int]]]:
    """Outputs on the wire."""
    return [(p.name, p.element.datatype, p.shape) for p in found.results]


def test_a_batch_of_arrays() -> None:
    def f(text: Strings[N], x: Float32[N, Literal[4], int]) -> tuple[Float32[N], Strings[N]]: ...

    found = signature(f, max_batch_size=8)
    assert (found.mode, found.max_batch_size) == (CallMode.BATCH, 8)
    assert inputs(found) == [("text", "BYTES", [], False), ("x", "FP32", [4, -1], False)]
    assert outputs(found) == [("output0", "FP32", []), ("output1", "BYTES", [])]


def test_without_a_batch_size_arrays_are_those_of_one_request() -> None:
    def f(x: Float32[N, Width], scale: float = 1.0) -> float: ...

    found = signature(f)
    assert (found.mode, found.max_batch_size) == (CallMode.REQUEST, 0)
    assert inputs(found) == [("x", "FP32", [-1, -1], False), ("scale", "FP64", [1], True)]
    assert outputs(found) == [("output", "FP64", [1])]


def test_single_values_are_rows() -> None:
    def f(text: str, limit: int = 3) -> list[float]: ...

    found = signature(f)
    assert (found.mode, found.max_batch_size) == (CallMode.ROW, 64)
    assert inputs(found) == [("text", "BYTES", [], False), ("limit", "INT64", [], True)]
    assert outputs(found) == [("output", "FP64", [-1])]
    assert signature(f, max_batch_size=3).max_batch_size == 3
    assert signature(f, max_batch_size=0).mode is CallMode.REQUEST


def test_rows_of_arrays() -> None:
    def f(x: Float32[Width]) -> Float32[Width]: ...

    found = signature(f, per_row=True)
    assert (found.mode, inputs(found)) == (CallMode.ROW, [("x", "FP32", [-1], False)])
    assert signature(f, max_batch_size=4).mode is CallMode.BATCH
    assert signature(f, max_batch_size=4, per_row=True).mode is CallMode.ROW


def test_lists_are_several_rows() -> None:
    def f(texts: list[str]) -> list[list[float]]: ...

    found = signature(f, max_batch_size=4)
    assert (found.mode, inputs(found)) == (CallMode.BATCH, [("texts", "BYTES", [], False)])
    assert outputs(found) == [("output", "FP64", [-1])]


def test_names_of_outputs() -> None:
    def fields(text: Strings[N]) -> Answer: ...
    def data(x: float) -> Point: ...
    def keys(x: float) -> Keyed: ...
    def several(x: float) -> tuple[int, str]: ...
    def one(x: float) -> int: ...

    def names(function: Callable[..., Any], **options: Any) -> tuple[Packing, list[str]]:
        found = signature(function, **options)
        return found.packing, [port.name for port in found.results]

    assert names(fields) == (Packing.FIELDS, ["score", "label"])
    assert names(data) == (Packing.FIELDS, ["x", "y"])
    assert names(keys) == (Packing.KEYS, ["total"])
    assert names(several, outputs=("a", "b")) == (Packing.TUPLE, ["a", "b"])
    assert names(one, outputs=("a",)) == (Packing.ONE, ["a"])


def test_optional_values() -> None:
    def f(x: Int64[N], y: Int64[N] | None = None, z: Int64[N] | None = None, *, w: Int64[N] | None
          ) -> Int64[N]: ...  # fmt: skip

    found = signature(f)
    assert [port.optional for port in found.inputs] == [False, True, True, True]
    assert [value.defaulted for value in found.parameters] == [False, True, True, False]


def test_data_frames() -> None:
    def f(people: Frame[Row], limit: float = 0.5) -> Table[Row]: ...
    def g(people: Frame[Row]) -> Int64[N]: ...

    found = signature(f)
    assert inputs(found) == [
        ("age", "INT64", [-1], False), ("age.null", "BOOL", [-1], True),
        ("name", "BYTES", [-1], False), ("limit", "FP64", [1], True),
    ]  # fmt: skip
    assert [name for name, _, _ in outputs(found)] == ["age", "age.null", "name"]
    batched = signature(g, max_batch_size=4)
    assert [shape for _, _, shape, _ in inputs(batched)] == [[], [], []]


def test_streams() -> None:
    def tokens(prompt: str, count: int = 3) -> Iterator[str]:
        yield prompt

    async def later(prompt: str) -> AsyncIterator[tuple[str, int]]:
        yield prompt, 1

    def handed_on(prompt: str) -> Iterator[str]:
        return tokens(prompt)

    for function, count in ((tokens, 1), (handed_on, 1), (later, 2)):
        found = signature(function)
        assert (found.mode, found.max_batch_size) == (CallMode.STREAM, 0)
        assert found.asynchronous is (function is later)
        assert inputs(found)[0] == ("prompt", "BYTES", [1], False)
        assert len(found.results) == count


def test_coroutines() -> None:
    async def f(x: float) -> float: ...

    assert signature(f).asynchronous
    assert signature(f).mode is CallMode.ROW


def untyped(x) -> int: ...  # type: ignore[no-untyped-def]
def no_result(x: int): ...  # type: ignore[no-untyped-def]
def nothing(x: int) -> None: ...
def takes_nothing() -> int: ...
def many(*xs: int) -> int: ...
def only_positional(x: int, /) -> int: ...
def unknown(x: "Nowhere") -> int: ...  # type: ignore[name-defined]  # noqa: F821
def missing_result(x: int) -> int | None: ...
def endless(x: int) -> tuple[int, ...]: ...
def no_tensor(x: complex) -> int: ...
def two_rows(x: Float32[N], y: Float32[Width]) -> Float32[N]: ...
def rows_twice(x: Float32[N]) -> Float32[N, N]: ...
def fixed(x: Float32[Literal[4]]) -> Float32[N]: ...
def whole(x: Float32[N]) -> float: ...
def pair(x: int) -> tuple[int, int]: ...
def frame(x: Frame[Row]) -> int: ...
def frame_and_name(x: Frame[Row], name: str) -> int: ...
def frame_or_none(x: Frame[Row] | None) -> int: ...
def yields(x: int) -> int:  # type: ignore[misc]
    yield 1


def yields_what(x: int) -> Iterator:  # type: ignore[type-arg]
    yield 1


def stream(x: int) -> Iterator[int]:
    yield 1


async def coroutine_of(x: int) -> Iterator[int]: ...
def fields(x: int) -> Point: ...
def of_one(x: Float32[N], c: Context) -> Float32[N]: ...
def of_many(x: int, c: list[Context]) -> int: ...
def of_two(x: int, c: Context, d: Context) -> int: ...


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (untyped, {}, "parameter 'x' has no annotation"),
        (no_result, {}, "it has no return type"),
        (nothing, {}, "its return type is None, but a model has at least one output"),
        (takes_nothing, {}, "it takes nothing"),
        (many, {}, r"parameter '\*xs: int' has no name of its own"),
        (only_positional, {}, "has no name of its own"),
        (unknown, {}, "its annotations cannot be read: name 'Nowhere' is not defined"),
        (missing_result, {}, "output 'output': an output is never missing"),
        (endless, {}, "does not say how many outputs"),
        (no_tensor, {}, "parameter 'x': complex is no type of a tensor"),
        (two_rows, {"max_batch_size": 4}, "it is N in 'x' and Width in 'y'"),
        (rows_twice, {"max_batch_size": 4}, r"'output' is Float32\[N, N\].*can only come first"),
        (fixed, {"max_batch_size": 4}, r"'x' is Float32\[4\], but with max_batch_size"),
        (whole, {"max_batch_size": 4}, "'output' is float, but with max_batch_size"),
        (pair, {"outputs": ("a",)}, "`outputs` has 1 names, but the function gives 2 values"),
        (pair, {"outputs": ("a", "a")}, "there are two outputs of the name 'a'"),
        (pair, {"outputs": ("a", "")}, "output '' has no name"),
        (pair, {"max_batch_size": -1}, "max_batch_size is a number from 0 on, got -1"),
        (pair, {"max_batch_size": 0, "per_row": True}, "needs a max_batch_size of 1 or more"),
        (fields, {"outputs": ("a", "b")}, "Point names the outputs already"),
        (frame, {"per_row": True}, "'x' is a data frame, which is more than a row"),
        (frame_and_name, {}, "there are two inputs of the name 'name'"),
        (frame_or_none, {}, "a data frame is never missing"),
        (yields, {}, "it yields, so its return type is Iterator"),
        (yields_what, {}, "does not say what it yields"),
        (stream, {"max_batch_size": 4}, "answers one request at a time"),
        (coroutine_of, {}, "a coroutine gives no stream"),
        (
            of_one,
            {"max_batch_size": 4},
            r"parameter 'c': .* so that it is list\[Context\], one for",
        ),
        (of_many, {}, "parameter 'c': a call is for one request, so that it is Context"),
        (of_two, {}, "c and d are told the same: one Context is enough"),
    ],
)
def test_invalid_signatures(
    function: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SignatureError, match=f"model f: .*{says}"):
        signature(function, **options)
