"""Arrow tables to tensors and back: datatypes, shapes, nulls, and what is refused."""

import datetime
import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.protocol.arrow import batch_of, described, schema_of, tensors_of

pa = pytest.importorskip("pyarrow")

NUMBERS = [datatype for datatype in Datatype if datatype is not Datatype.BYTES]


def signature(*inputs: TensorSpec, outputs: Sequence[TensorSpec] = (), rows: int = 8) -> Signature:
    return Signature("m", rows, inputs, tuple(outputs))


def spec(datatype: str, dims: Sequence[int] = (), name: str = "x", **more: Any) -> TensorSpec:
    return TensorSpec(name, Datatype(datatype), tuple(dims), **more)


def read(column: Any, datatype: str, dims: Sequence[int] = ()) -> Any:
    batch = pa.record_batch({"x": column})
    batch.validate(full=True)
    return np.asarray(tensors_of(batch, signature(spec(datatype, dims)))["x"].array)


@given(st.data(), st.sampled_from(NUMBERS), array_shapes(min_dims=1, max_dims=4, min_side=0))
def test_numbers_come_back(data: st.DataObject, datatype: Datatype, shape: tuple[int, ...]) -> None:
    dtype = NUMPY[Datatype.UINT16 if datatype is Datatype.BF16 else datatype]
    array = data.draw(arrays(dtype, shape)).view(NUMPY[datatype])
    tensor = Tensor("x", datatype, array)
    batch = batch_of([tensor])
    batch.validate(full=True)
    found = tensors_of(batch, signature(spec(datatype, shape[1:])))["x"]
    assert found.datatype is datatype
    assert np.array_equal(
        np.asarray(found.array).astype(np.float64), array.astype(np.float64), equal_nan=True
    )


@given(st.lists(st.binary(max_size=9), max_size=200), st.integers(1, 3), st.integers(0, 2))
def test_texts_come_back(texts: list[bytes], width: int, skipped: int) -> None:
    texts = texts[: len(texts) // width * width]
    shape = (len(texts) // width, width)
    batch = batch_of([Tensor("x", Datatype.BYTES, bytes_array(texts, shape))])
    batch.validate(full=True)
    batch = batch.slice(min(skipped, len(batch)))
    found = tensors_of(batch, signature(spec("BYTES", [width])))["x"].array
    assert np.asarray(found).ravel().tolist() == texts[min(skipped, shape[0]) * width :]


def test_schema_of_a_signature() -> None:
    outputs = [
        spec("FP32", [3, -1], "a"), spec("BYTES", [], "b"), spec("INT64", [], "c"),
        spec("BOOL", [], "c.null"), spec("BOOL", [], "d.null"),
    ]  # fmt: skip
    assert schema_of(described(outputs)) == pa.schema([
        pa.field("a", pa.list_(pa.list_(pa.float32()), 3), False),
        pa.field("b", pa.binary(), False),
        pa.field("c", pa.int64(), True),
        pa.field("d.null", pa.bool_(), False),
    ])  # fmt: skip


def test_a_batch_in_the_form_of_a_signature() -> None:
    schema = schema_of(described([spec("FP32", [-1, 2])]))
    array = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    batch = batch_of([Tensor("x", Datatype.FP32, array)], schema)
    assert batch.schema == schema
    assert batch["x"].to_pylist() == array.tolist()
    with pytest.raises(ExecutionFailed, match=r"output 'x': expected list.*3 elements, not 2"):
        batch_of([Tensor("x", Datatype.FP32, np.zeros((2, 2, 3), np.float32))], schema)
    with pytest.raises(ExecutionFailed, match="dimensions of a row"):
        batch_of([Tensor("x", Datatype.FP32, np.zeros(2, np.float32))], schema)
    with pytest.raises(ExecutionFailed, match="no output 'x'"):
        batch_of([], schema)


@pytest.mark.parametrize("shapes", [[(2,), (3,)], [(2,), ()], [()]])
def test_outputs_without_one_number_of_rows_are_no_table(shapes: list[tuple[int, ...]]) -> None:
    outputs = [Tensor(str(n), Datatype.INT8, np.zeros(s, np.int8)) for n, s in enumerate(shapes)]
    with pytest.raises(ExecutionFailed, match="one number of rows"):
        batch_of(outputs)


def test_nulls_are_marked_both_ways() -> None:
    model = signature(spec("INT32"), spec("BOOL", name="x.null", optional=True))
    batch = pa.record_batch({"x": pa.array([1, None, 3], pa.int32())})
    inputs = tensors_of(batch, model)
    assert np.asarray(inputs["x.null"].array).tolist() == [False, True, False]
    assert batch_of([*inputs.values()])["x"].to_pylist() == [1, None, 3]
    texts = [Tensor("x", Datatype.BYTES, bytes_array([b"a", b""], (2,))),
             Tensor("x.null", Datatype.BOOL, np.array([False, True]))]  # fmt: skip
    assert batch_of(texts)["x"].to_pylist() == [b"a", None]
    assert [*tensors_of(pa.record_batch({"x": pa.array([1], pa.int32())}), model)] == ["x"]


FIVE = pa.array(["a", "bb", "a", "", "é"])


@pytest.mark.parametrize(
    ("column", "datatype", "dims", "wanted"),
    [
        (pa.array([1, 2], pa.int64()), "FP32", (), [1.0, 2.0]),
        (pa.array([1.5, 2.5]), "FP16", (), [1.5, 2.5]),
        (pa.array([1.0, 2.0]), "INT8", (), [1, 2]),
        (pa.array([True, False]), "UINT8", (), [1, 0]),
        (pa.array([decimal.Decimal("1.25")]), "FP64", (), [1.25]),
        (pa.array([datetime.datetime(2026, 1, 2)], pa.timestamp("s")), "INT64", (), [1767312000]),
        (pa.array([datetime.datetime(2026, 1, 2)], pa.timestamp("s", "UTC")), "BYTES", (),
         [b"2026-01-02T00:00:00"]),
        (pa.array([datetime.date(2026, 1, 2)]), "BYTES", (), [b"2026-01-02"]),
        (pa.array([1, 2]), "INT64", (1,), [[1], [2]]),
        (pa.array([[1, 2, 3, 4]]), "INT64", (2, 2), [[[1, 2], [3, 4]]]),
        (pa.array([[[1, 2]], [[3, 4]]]), "INT64", (-1, 2), [[[1, 2]], [[3, 4]]]),
        (pa.array([[1], [2, 3], [4, 5]]).slice(1), "INT64", (-1,), [[2, 3], [4, 5]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)).slice(1), "INT8", (2,), [[3, 4]]),
        (pa.array([[1, 2]], pa.large_list(pa.int8())), "INT8", (2,), [[1, 2]]),
        (pa.array([], pa.list_(pa.int8())), "INT8", (2,), []),
        (FIVE, "BYTES", (), [b"a", b"bb", b"a", b"", "é".encode()]),
        (FIVE.slice(1, 2), "BYTES", (), [b"bb", b"a"]),
        (FIVE.dictionary_encode(), "BYTES", (), [b"a", b"bb", b"a", b"", "é".encode()]),
        (FIVE.cast(pa.string_view()).slice(1, 1), "BYTES", (), [b"bb"]),
        (FIVE.cast(pa.large_string()).slice(3), "BYTES", (1,), [[b""], ["é".encode()]]),
        (pa.array([b"ab"], pa.binary(2)), "BYTES", (), [b"ab"]),
        (pa.array([7, 7]).dictionary_encode(), "INT64", (), [7, 7]),
        (pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int8(), [2, 1]),
                                        pa.array([[1, 2]], pa.list_(pa.int8(), 2))),
         "INT8", (2, 1), [[[1], [2]]]),
    ],
)  # fmt: skip
def test_columns_of_other_types(
    column: Any, datatype: str, dims: Sequence[int], wanted: list[Any]
) -> None:
    assert read(column, datatype, dims).tolist() == wanted


@pytest.mark.parametrize(
    ("column", "datatype", "dims", "text"),
    [
        (pa.array([1, None]), "FP32", (), "column 'x' has a null in row 1, and .* 'x.null'"),
        (pa.array([[1, 2], [3, None]]), "INT64", (2,), "null in row 1"),
        (pa.array([[1], None]), "INT64", (1,), "a null instead of a list in row 1"),
        (pa.array([[[1]], [None]]), "INT64", (1, 1), "a null instead of a list in row 1"),
        (pa.array([[1], [2], [3, 4]]), "INT64", (-1,), "row 2 has 2 elements, the first one 1"),
        (pa.nulls(2), "INT64", (), "without any value"),
        (pa.array([1.5]), "INT64", (), "expected INT64"),
        (pa.array([300]), "UINT8", (), "expected UINT8"),
        (pa.array([2**24 + 1]), "FP32", (), "expected FP32"),
        (pa.array(["1"]), "FP32", (), "expected numbers"),
        (pa.array([1]), "BYTES", (), "expected texts"),
        (pa.array([1]), "BOOL", (), "expected booleans"),
        (pa.array([{"a": 1}]), "INT64", (), "expected numbers"),
        (pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1]])), "INT64", (1,),
         "dictionaries have to be of numbers"),
        (pa.RunEndEncodedArray.from_arrays([10**6], [1]), "INT64", (), "expected numbers"),
        (pa.array([[1]], pa.list_view(pa.int64())), "INT64", (1,), "expected numbers"),
    ],
)  # fmt: skip
def test_refused_columns(column: Any, datatype: str, dims: Sequence[int], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read(column, datatype, dims)


def test_a_permuted_tensor_is_refused() -> None:
    kind = pa.fixed_shape_tensor(pa.int8(), [2, 1], permutation=[1, 0])
    storage = pa.array([[1, 2]], pa.list_(pa.int8(), 2))
    with pytest.raises(InvalidRequest, match="permutation"):
        read(pa.ExtensionArray.from_storage(kind, storage), "INT8", (2, 1))


def test_tables_that_do_not_fit() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no tables.*max_batch_size is 0"):
        tensors_of(pa.record_batch({"x": [1]}), signature(spec("INT64"), rows=0))
    several = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([1])], names=["x", "x"])
    with pytest.raises(InvalidRequest, match="several columns 'x'"):
        tensors_of(several, signature(spec("INT64")))
    with pytest.raises(InvalidRequest, match=r"the column 'y', but model 'm' has the inputs \['x'"):
        tensors_of(pa.record_batch({"x": [1], "y": [1]}), signature(spec("INT64")))


def test_a_column_for_each_element_of_the_only_input() -> None:
    batch = pa.record_batch({"b": [1, 2], "a": [3.5, 4.5]})
    trained = tensors_of(batch, signature(spec("FP32", [2], columns=("a", "b"))))["x"]
    assert np.asarray(trained.array).tolist() == [[3.5, 1], [4.5, 2]]
    unnamed = tensors_of(batch, signature(spec("FP64", [-1])))["x"]
    assert np.asarray(unnamed.array).tolist() == [[1, 3.5], [2, 4.5]]
    for model in (spec("FP32", [2], columns=("a", "c")), spec("FP32", [3])):
        with pytest.raises(InvalidRequest, match=r"the table has the columns \['b','a'\], but"):
            tensors_of(batch, signature(model))
    with pytest.raises(InvalidRequest, match="column 'a' has a null in row 0"):
        tensors_of(pa.record_batch({"a": [None, 1.0]}), signature(spec("FP32", [1])))
    with pytest.raises(InvalidRequest, match="is BYTES"):
        tensors_of(batch, signature(spec("BYTES", [2])))


def test_conversions_are_charged_before_they_allocate() -> None:
    charged: list[int] = []

    def charge(nbytes: int) -> None:
        charged.append(nbytes)
        if nbytes > 10**6:
            raise InvalidRequest("too much")

    long = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int8()), pa.array(["x" * 1000]))
    with pytest.raises(InvalidRequest, match="too much"):
        tensors_of(pa.record_batch({"x": long}), signature(spec("BYTES")), charge)
    assert charged == [2_000_000]
    charged.clear()
    numbers = pa.record_batch({"x": pa.array([1.0, 2.0], pa.float32())})
    array = tensors_of(numbers, signature(spec("FP32")), charge)["x"].array
    assert not charged
    assert np.shares_memory(np.asarray(array), np.asarray(numbers["x"]))
