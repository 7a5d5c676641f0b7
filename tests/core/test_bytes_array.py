import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray, bytes_array
from headrace.core.tensors import concatenated, raw_bytes
from headrace.ipc.elements import join

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3) | st.just([100, 2])
elements_of = st.binary(max_size=8) | st.just(b"x" * 300)


@st.composite
def arrays(draw: st.DrawFn, row: list[int] | None = None) -> BytesArray:
    shape = draw(shapes) if row is None else [draw(st.integers(0, 5)), *row]
    count = math.prod(shape)
    few = draw(st.lists(elements_of, min_size=1, max_size=7))
    return BytesArray(join([few[i % len(few)] for i in range(count)]), shape)


def as_objects(array: BytesArray) -> np.ndarray:
    """The array of objects that it is like."""
    objects = np.empty(array.shape, object)
    position = 0
    for index in np.ndindex(array.shape):
        stop = position + 4 + int.from_bytes(array.data[position : position + 4], "little")
        objects[index] = bytes(array.data[position + 4 : stop])
        position = stop
    return objects


@given(arrays())
def test_equals_an_array_of_objects(array: BytesArray) -> None:
    objects = as_objects(array)
    assert (array.shape, array.ndim, array.size) == (objects.shape, objects.ndim, objects.size)
    assert (len(array), array.dtype) == (len(objects), objects.dtype)
    assert array.tolist() == objects.tolist() == np.asarray(array).tolist()
    assert array.ravel().tolist() == objects.ravel().tolist()
    assert raw_bytes(array) == raw_bytes(objects) == array.tobytes() == array.copy().data
    assert array.nbytes == len(array.data)


@given(arrays(), st.integers(-6, 210), st.integers(-6, 210))
def test_rows(array: BytesArray, start: int, stop: int) -> None:
    rows, objects = array[start:stop], as_objects(array)[start:stop]
    assert rows.shape == objects.shape
    assert rows.tolist() == objects.tolist()
    assert raw_bytes(rows) == raw_bytes(objects)


@given(st.data())
def test_joining_and_splitting(data: st.DataObject) -> None:
    row = data.draw(st.lists(st.integers(0, 3), max_size=2))
    parts = data.draw(st.lists(arrays(row), min_size=1, max_size=4))
    whole = concatenated(parts)
    assert raw_bytes(whole) == b"".join(map(raw_bytes, parts))
    start = 0
    for part in parts:
        stop = start + len(part)
        assert whole[start:stop].tolist() == part.tolist()
        start = stop
    assert whole.shape == (start, *row)
    mixed = concatenated([parts[0], *map(as_objects, parts[1:])])
    assert (mixed.shape, raw_bytes(mixed)) == (whole.shape, raw_bytes(whole))


def test_only_arrays_of_objects_stay_arrays_of_objects() -> None:
    objects = np.array([b"a", b"b"], object)
    whole = concatenated([objects, objects])
    assert isinstance(whole, np.ndarray)
    assert whole.tolist() == [b"a", b"b", b"a", b"b"]


def test_reshape() -> None:
    array = BytesArray(join([b"a", b"b", b"c", b"d"]), (4,))
    assert array.reshape((2, 2)).tolist() == [[b"a", b"b"], [b"c", b"d"]]
    with pytest.raises(ValueError, match="4 elements do not have the shape"):
        array.reshape((3, 2))
    with pytest.raises(ValueError, match="one after the other"):
        array[::2]


def test_rows_of_large_arrays_are_views() -> None:
    array = BytesArray(join([bytes(1000)] * 100), (100,))
    rows = array[10:90]
    assert isinstance(rows.data, memoryview)
    assert rows.data.obj is array.data
    assert isinstance(array[10:12].data, bytes)  # and keeps nothing else in memory


def test_many_elements_stay_encoded() -> None:
    many = bytes_array([b"x"] * 1000, [10, 100])
    assert isinstance(many, BytesArray)
    assert many.tolist() == [[b"x"] * 100] * 10
    few = bytes_array([b"x", b"yy"], [2, 1])
    assert isinstance(few, np.ndarray)
    assert few.tolist() == [[b"x"], [b"yy"]]


def test_batching_makes_no_objects_of_elements() -> None:
    array = BytesArray(join([b"a", b"bcd"] * 50_000), (100_000,))
    before = sys.getallocatedblocks()
    whole = concatenated([array, array])
    halves = [whole[:100_000], whole[100_000:]]
    assert sys.getallocatedblocks() - before < 1000
    assert [raw_bytes(half) for half in halves] == [array.data] * 2
