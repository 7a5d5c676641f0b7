"""Functions and classes answering requests."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import pytest

from headrace import BFloat16, Bytes, Context, Float32, InvalidInput, N, ResultError, Strings, model
from headrace.ipc.elements import view
from headrace.workers import triton_api as pb
from tests.plugins.functions.requests import Request, started, values

CALLS: list[Any] = []
INVALID = pb.TritonError.INVALID_ARG


class Width: ...


class Answer(NamedTuple):
    score: Float32[N]
    label: Strings[N]


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def row(*numbers: float) -> Any:
    """Rows of one number each, as FP32."""
    return np.array(numbers, np.float32)


@model(max_batch_size=8)
def scored(text: Strings[N], bias: Float32[N] | None = None) -> Answer:
    CALLS.append((text.tolist(), bias if bias is None else bias.tolist()))
    score = np.array([len(one) for one in text]) + (0 if bias is None else bias)
    return Answer(score.astype(np.float64), np.array([one.upper() for one in text]))


def test_a_batch_is_one_call() -> None:
    requests = [Request(text=["a", "bcd"]), Request(text=[]), Request(text=["ü"])]
    assert [values(response) for response in started(scored).execute(requests)] == [
        {"score": [1.0, 3.0], "label": ["A", "BCD"]},
        {"score": [], "label": []},
        {"score": [1.0], "label": ["Ü"]},
    ]
    assert CALLS == [(["a", "bcd", "ü"], None)]
    with_bias = [Request(text=["a"], bias=row(0.5)), Request(text=["b"], bias=row(1))]
    answers = [values(response)["score"] for response in started(scored).execute(with_bias)]
    assert answers == [[1.5], [2.0]]
    assert scored(np.array(["ab"])).score.tolist() == [2]


@model(max_batch_size=8)
def summed(x: Float32[N, Width]) -> Float32[N]:
    CALLS.append(x.shape)
    total: Float32[N] = x.sum(axis=1)
    return total


def test_requests_of_a_ragged_batch_have_a_call_by_shape() -> None:
    shapes = [(1, 3), (2, 2), (1, 2), (0, 3), (1, 0)]
    requests = [Request(x=np.full(shape, n + 1, np.float32)) for n, shape in enumerate(shapes)]
    answers = [values(response)["output"] for response in started(summed).execute(requests)]
    assert answers == [[3], [4, 4], [6], [], [0]]
    assert CALLS == [(1, 3), (3, 2), (1, 0)]


@model(max_batch_size=8)
def numbered(x: Float32[N, Width], contexts: list[Context]) -> Float32[N]:
    CALLS.append([one.request_id for one in contexts])
    total: Float32[N] = x.sum(axis=1)
    return total


def test_a_ragged_batch_has_the_contexts_of_each_call() -> None:
    requests = [Request(x=np.ones(shape, np.float32)) for shape in ((1, 3), (2, 2), (1, 3))]
    for number, request in enumerate(requests):
        request.id = str(number)
    started(numbered).execute(requests)
    assert CALLS == [["0", "2"], ["1", "1"]]


def test_bad_text_is_the_error_of_its_request() -> None:
    bad = np.array([b"\xff"], object)
    first, second = started(scored).execute([Request(text=bad), Request(text=["b"])])
    assert values(first) == {"error": (INVALID, "input 'text': b'\\xff' is not UTF-8")}
    assert values(second) == {"score": [1.0], "label": ["B"]}
    assert values(started(scored).execute([Request(text=bad)])[0])["error"][0] == INVALID
    assert CALLS == [(["b"], None)]


def test_large_rows_are_not_copied() -> None:
    seen = []

    @model(max_batch_size=8)
    def f(x: Float32[N, Width]) -> Float32[N]:
        seen.append(x)
        total: Float32[N] = x.sum(axis=1)
        return total

    data = np.arange(80_000, dtype=np.float32).tobytes()
    whole = view("FP32", (4, 20_000), data, 0, len(data))  # as the worker makes it
    ready = started(f)
    ready.execute([Request(x=whole[:1]), Request(x=whole[1:4])])
    ready.execute([Request(x=whole[1:4]), Request(x=whole[:1])])
    ready.execute([Request(x=whole[:1]), Request(x=whole[2:])])
    assert np.shares_memory(seen[0], whole)
    np.testing.assert_array_equal(seen[1], np.concatenate([whole[1:], whole[:1]]))
    np.testing.assert_array_equal(seen[2], np.concatenate([whole[:1], whole[2:]]))
    assert not any(x.flags.writeable for x in seen)


@model
def described(name: str, count: int = 2, weight: np.float32 | None = None) -> tuple[str, float]:
    CALLS.append((name, count, weight))
    return name * count, float(weight or 0)


def test_a_function_of_single_values_is_called_for_each_row() -> None:
    ready = started(described)
    both = Request(name=["a", "b"], count=np.array([1, 3]), weight=row(1, 2))
    first, second = ready.execute([both, Request(name=["c"])])
    assert values(first) == {"output0": ["a", "bbb"], "output1": [1.0, 2.0]}
    assert values(second) == {"output0": ["cc"], "output1": [0.0]}
    assert CALLS == [("a", 1, 1), ("b", 3, 2), ("c", 2, None)]
    assert [type(one) for one in CALLS[0]] == [str, int, np.float32]
    assert values(ready.execute([Request(name=[])])[0]) == {"output0": [], "output1": []}


def test_a_missing_value_without_a_default_is_none() -> None:
    @model
    def f(x: float | None, y: float) -> list[float]:
        return [y if x is None else x]

    assert values(started(f).execute([Request(y=row(1, 2))])[0]) == {"output": [[1.0], [2.0]]}

    @model
    def whole(x: Float32[N] | None, y: float) -> float:
        return y if x is None else float(x.sum())

    assert values(started(whole).execute([Request(y=row(3))])[0]) == {"output": [3.0]}


@model
def normalised(x: Float32[N], by: str = "sum") -> Float32[N]:
    total: np.float32 = x.sum() if by == "sum" else x.max()
    return x / total


def test_a_function_of_arrays_gets_each_request() -> None:
    requests = [Request(x=row(1, 3)), Request(x=row(2, 4), by=["max"])]
    answers = [values(response)["output"] for response in started(normalised).execute(requests)]
    assert answers == [[0.25, 0.75], [0.5, 1.0]]


def test_dimensions_of_one_name_agree() -> None:
    @model
    def f(x: Float32[N, Width], y: Float32[Width]) -> Float32[N]:
        product: Float32[N] = x @ y
        return product[:1]

    ready = started(f)
    wrong = ready.execute([Request(x=np.ones((2, 3), "f4"), y=row(1, 2))])[0]
    text = "input 'y': dimension Width is 3, got 2 in shape [2]"
    assert values(wrong) == {"error": (INVALID, text)}
    with pytest.raises(ResultError, match=r"'output': dimension N is 2, got 1 in shape \[1\]"):
        ready.execute([Request(x=np.ones((2, 3), "f4"), y=row(1, 2, 3))])
    assert len(ready.execute([Request(x=np.ones((1, 3), "f4"), y=row(1, 2, 3))])) == 1


@model(per_row=True)
def squares(x: Float32[Width]) -> tuple[Float32[Width], list[bytes]]:
    return x * x, [bytes([int(one)]) for one in x]


def test_rows_of_arrays() -> None:
    response = started(squares).execute([Request(x=np.array([[1, 2], [3, 4]], "f4"))])[0]
    assert values(response) == {
        "output0": [[1, 4], [9, 16]], "output1": [[b"\1", b"\2"], [b"\3", b"\4"]]
    }  # fmt: skip


def test_lists() -> None:
    @model(max_batch_size=4)
    def f(texts: list[str]) -> list[str]:
        assert isinstance(texts, list)
        return [text[::-1] for text in texts]

    responses = started(f).execute([Request(texts=["ab"]), Request(texts=["cd", "e"])])
    assert [values(response) for response in responses] == [
        {"output": ["ba"]}, {"output": ["dc", "e"]}
    ]  # fmt: skip


def test_bfloat16_and_bytes() -> None:
    @model(max_batch_size=4)
    def f(x: BFloat16[N], y: Bytes[N]) -> tuple[BFloat16[N], Bytes[N]]:
        assert x.dtype == np.float32
        return x * 2, y

    half = pb.received("x", "BF16", np.array([0x3F80, 0xC000], "<u2"))
    request = Request(x=half, y=np.array([b"\xff", b"\0"], object))
    outputs = started(f).execute([request])[0].output_tensors()
    assert [tensor.triton_dtype() for tensor in outputs] == [14, 13]
    assert np.from_dlpack(outputs[0]).tolist() == [0x4000, 0xC080]
    assert outputs[1].as_numpy().tolist() == [b"\xff", b"\0"]


@dataclass
class Point:
    x: float
    y: float


class Keyed(TypedDict):
    total: int
    kind: str


def test_forms_of_several_outputs() -> None:
    @model
    def point(x: float) -> Point:
        return Point(x, -x)

    @model
    def keyed(x: float) -> Keyed:
        return {"total": int(x), "kind": "k"}

    @model(outputs=["low", "high"])
    def named(x: float) -> tuple[float, float]:
        return x - 1, x + 1

    request = Request(x=np.array([3.0]))
    assert values(started(point).execute([request])[0]) == {"x": [3.0], "y": [-3.0]}
    assert values(started(keyed).execute([request])[0]) == {"total": [3], "kind": ["k"]}
    assert values(started(named).execute([request])[0]) == {"low": [2.0], "high": [4.0]}


@model(max_batch_size=8)
class Counting:
    closed = False

    def load(self) -> None:
        self.calls = 0

    def predict(self, x: Float32[N]) -> Float32[N]:
        self.calls += 1
        return np.full(len(x), self.calls, np.float32)

    def close(self) -> None:
        CALLS.append("closed")


def test_a_class() -> None:
    ready = started(Counting)
    assert values(ready.execute([Request(x=row(1))])[0]) == {"output": [1.0]}
    assert values(ready.execute([Request(x=row(1, 1))])[0]) == {"output": [2.0, 2.0]}
    ready.finalize()
    assert CALLS == ["closed"]
    own = Counting()
    own.load()
    assert own.predict(row(1)).tolist() == [1.0]


def test_a_class_of_predict_alone() -> None:
    @model
    class Only:
        def predict(self, x: float) -> float:
            return -x

    ready = started(Only)
    assert values(ready.execute([Request(x=np.array([1.0]))])[0]) == {"output": [-1.0]}
    ready.finalize()


def give(value: Any, **options: Any) -> Any:
    """Answer of a function that returns `value` for a batch of three rows."""

    @model(max_batch_size=8, **options)
    def f(x: Float32[N]) -> Float32[N, Literal[2]]:
        return value  # type: ignore[no-any-return]

    return started(f).execute([Request(x=row(1)), Request(x=row(2, 3))])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros((2, 2)), "has 2 rows for the 3 rows that the function was called with"),
        (np.zeros(3), r"has 2 dimensions, \[N, 2\], got shape \[3\]"),
        (np.zeros((3, 4)), r"a dimension is 2, got 4 in shape \[3, 4\]"),
        (np.zeros((3, 2), complex), r"declared as Float32\[N, 2\], got an array of complex128"),
        (None, "got None"),
    ],
)
def test_results_that_differ_from_the_declaration(value: Any, says: str) -> None:
    with pytest.raises(ResultError, match=f"output 'output'.*{says}"):
        give(value)


def test_outputs_that_differ_from_the_declaration() -> None:
    @model
    def pair(x: float) -> tuple[float, float]:
        return (x,)  # type: ignore[return-value]

    @model
    def point(x: float) -> Point:
        return x  # type: ignore[return-value]

    request = Request(x=np.array([3.0]))
    with pytest.raises(ResultError, match=r"declared to give a tuple of 2, got a tuple of 1$"):
        started(pair).execute([request])
    with pytest.raises(ResultError, match=r"point is declared to give x, y, got float 3\.0"):
        started(point).execute([request])


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_an_array_where_a_single_value_is_declared(rows: bool, size: int) -> None:
    @model(max_batch_size=4 if rows else 0)
    def f(x: float) -> float:
        return np.zeros(size)  # type: ignore[return-value]

    says = rf"'output' is declared as float, got an array of float64 with shape \[{size}\]"
    with pytest.raises(ResultError, match=says):
        started(f).execute([Request(x=np.array([1.0]))])


def test_results_with_different_row_counts() -> None:
    @model
    def f(x: int) -> list[int]:
        return [0] * x

    ready = started(f)
    one, two = Request(x=np.array([1])), Request(x=np.array([2]))
    assert [values(r)["output"] for r in ready.execute([one, two])] == [[[0]], [[0, 0]]]
    with pytest.raises(ResultError, match="inhomogeneous"):
        ready.execute([Request(x=np.array([1, 2]))])


@model(max_batch_size=8)
def positive(x: Float32[N]) -> Float32[N]:
    if (x < 0).any():
        raise InvalidInput("x is negative")
    if (x > 9).any():
        raise RuntimeError("too much")
    return x


def test_exceptions_of_a_function() -> None:
    ready = started(positive)
    refused = ready.execute([Request(x=row(-1))])
    assert values(refused[0]) == {"error": (INVALID, "x is negative")}
    with pytest.raises(InvalidInput):  # of several, the invalid one is found
        ready.execute([Request(x=row(-1)), Request(x=row(1))])
    with pytest.raises(RuntimeError, match="too much"):
        ready.execute([Request(x=row(10))])


def test_coroutines_run_at_the_same_time() -> None:
    @model
    async def slow(x: float) -> float:
        await all_there.wait()
        if x < 0:
            raise InvalidInput("x is negative")
        return x * 2

    ready = started(slow)
    first, second = Request(x=np.array([1.0, 2.0])), Request(x=np.array([3.0]))
    all_there = asyncio.Barrier(3)
    answers = asyncio.run(ready.execute([first, second]))
    assert [values(answer) for answer in answers] == [{"output": [2.0, 4.0]}, {"output": [6.0]}]
    all_there = asyncio.Barrier(3)
    refused = asyncio.run(ready.execute([Request(x=np.array([-1.0, 2.0, 3.0]))]))
    assert values(refused[0]) == {"error": (INVALID, "x is negative")}
    all_there = asyncio.Barrier(3)
    with pytest.raises(InvalidInput):
        asyncio.run(ready.execute([first, Request(x=np.array([-1.0]))]))


def asked(id: str, given: dict[str, Any], **inputs: Any) -> Request:
    """A request with an id and parameters."""
    request = Request(**inputs)
    request.id, request.given = id, given
    return request


@model
def told_by_row(text: str, context: Context) -> str:
    return f"{text} {context.request_id} {dict(context.parameters)}"


@model(max_batch_size=8)
def told_by_batch(text: Strings[N], contexts: list[Context]) -> Strings[N]:
    return np.array([f"{t} {c.request_id}" for t, c in zip(text, contexts, strict=True)])


@model
def told_by_request(*, of: Context, numbers: list[float]) -> str:
    return f"{of.request_id} {of.parameters['n']} {numbers}"


def test_a_function_that_reads_ids_and_parameters() -> None:
    bad = np.array([b"\xff"], object)
    requests = [
        asked("1", {"n": 1}, text=["a", "b"]), asked("?", {}, text=bad), asked("2", {}, text=["c"]),
    ]  # fmt: skip
    first, refused, last = map(values, started(told_by_row).execute(requests))
    assert first == {"output": ["a 1 {'n': 1}", "b 1 {'n': 1}"]}
    assert last == {"output": ["c 2 {}"]}
    assert "error" in refused
    first, refused, last = map(values, started(told_by_batch).execute(requests))
    assert (first, last) == ({"output": ["a 1", "b 1"]}, {"output": ["c 2"]})
    assert "error" in refused
    assert "error" in values(started(told_by_batch).execute(requests[1:2])[0])
    [answer] = started(told_by_request).execute([asked("3", {"n": True}, numbers=np.ones(2))])
    assert values(answer) == {"output": ["3 True [1.0, 1.0]"]}
    assert told_by_row("a", Context("7")) == "a 7 {}"
