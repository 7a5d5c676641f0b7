"""Conversion of BYTES in a worker, compared with the server's."""

import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import raw_bytes
from headrace.ipc.elements import (
    BITS,
    DTYPES,
    FEW,
    datatype_of,
    decode_bytes,
    encode_bytes,
    join,
    split,
    starts_of,
    view,
    walk,
)


def test_the_datatypes_are_the_servers() -> None:
    assert {*DTYPES, *BITS} == {datatype.value for datatype in Datatype}
    for name, dtype in DTYPES.items():
        assert NUMPY[Datatype(name)] == dtype
        assert datatype_of(dtype) == name
    assert datatype_of(np.dtype(">f4")) == "FP32"
    assert datatype_of(np.dtype("U3")) == datatype_of(np.dtype("S3")) == "BYTES"
    assert datatype_of(np.dtype(np.complex64)) is None


@given(st.lists(st.binary(max_size=30)))
def test_strings(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    data = encode_bytes(array)
    assert data == raw_bytes(array)
    assert decode_bytes(memoryview(data), (len(elements),)).tolist() == elements


def test_accepted_string_arrays() -> None:
    for array in (
        np.array(["ä", "b"]),
        np.array(["ä".encode(), b"b"]),
        np.array(["ä", "b"], object),
    ):
        assert decode_bytes(memoryview(encode_bytes(array)), (2,)).tolist() == ["ä".encode(), b"b"]
    assert decode_bytes(memoryview(encode_bytes(np.array([1.5], object))), (1,)).tolist() == [
        b"1.5"
    ]


@given(st.binary(max_size=40))
def test_arrays_that_are_not_strings(data: bytes) -> None:
    with suppress(ValueError):
        decode_bytes(memoryview(data), (3,))


def test_a_view() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    array = view("FP32", (2, 2), b"\0\0\0\0" + data, 8, 16)
    assert array.tolist() == [[1, 2], [3, 4]]
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="12 bytes for FP32 of shape"):
        view("FP32", (2, 2), data, 0, 12)


# Of one length or of several, empty, short, longer than a block of the walk, few and many.
runs = st.lists(
    st.tuples(
        st.binary(max_size=3) | st.integers(0, 300).map(bytes) | st.just(bytes(70_000)),
        st.integers(1, 3) | st.integers(1, 400),
    ).map(lambda run: [run[0]] * (run[1] if len(run[0]) < 1000 else 1)),
    max_size=6,
).map(lambda found: [element for run in found for element in run])


def plain_join(elements: Sequence[bytes]) -> bytes:
    return b"".join([len(element).to_bytes(4, "little") + element for element in elements])


def plain_walk(data: bytes, count: int) -> tuple[int, int]:
    position = 0
    for index in range(count):
        start = position + 4
        stop = start + int.from_bytes(data[position:start], "little")
        if start > len(data) or stop > len(data):
            return index, position
        position = stop
    return count, position


@given(runs, st.sampled_from([bytes, memoryview]))
def test_elements_are_read_in_place(elements: list[bytes], kind: type[bytes | memoryview]) -> None:
    data = join(elements)
    assert data == plain_join(elements)
    given, count = kind(data), len(elements)
    assert walk(given, count) == (count, len(data))
    assert split(given, count) == elements
    starts = [len(plain_join(elements[:index])) for index in range(0, count + 1, 50)]
    assert starts_of(given, count)[::50].tolist() == starts


@settings(max_examples=50)
@given(runs, st.data())
def test_damaged_data_is_read_up_to_the_damage(elements: list[bytes], data: st.DataObject) -> None:
    raw = bytearray(join(elements))
    for _ in range(data.draw(st.integers(0, 2))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))]) + data.draw(st.binary(max_size=5))
    count = data.draw(st.integers(0, len(elements) + 2))
    expected = plain_walk(cut, count)
    assert walk(cut, count) == expected
    if expected != (count, len(cut)):
        with pytest.raises(ValueError, match="elements with their lengths"):
            split(cut, count)
        with pytest.raises(ValueError, match="elements with their lengths"):
            starts_of(cut, count)


@pytest.mark.parametrize("length", [0, 1, 9, 70_000])
def test_a_length_beyond_the_end_after_equal_lengths(length: int) -> None:
    count = FEW + 40
    good = join([bytes(length)] * count)
    assert split(good, count) == [bytes(length)] * count
    for claimed in (length + 1, 2**31, 2**32 - 1):
        last = len(good) - 4 - length
        bad = good[:last] + claimed.to_bytes(4, "little") + bytes(length)
        assert walk(bad, count) == (count - 1, last)
    assert walk(good + b"\0", count) == (count, len(good))
    assert walk(good[:-1], count) == (count - 1, len(good) - 4 - length)


@pytest.mark.parametrize("lengths", [(0, 0), (5, 5), (0, 1), (3, 40)])
def test_a_walk_makes_no_object_per_element(lengths: tuple[int, int]) -> None:
    elements = [b"a" * length for length in lengths] * 50_000
    data, count = join(elements), len(elements)
    walk(data, count)
    before = sys.getallocatedblocks()
    starts = starts_of(data, count)
    assert walk(data, count) == (count, len(data))
    assert sys.getallocatedblocks() - before < 1000
    assert starts.nbytes == 8 * (count + 1)


def test_numpys_take_reads_what_it_has_written() -> None:
    # Nothing guarantees that `take` reads what it has just written. Otherwise the walk is
    # still correct, but ten times as slow: then this test says why.
    after = np.arange(1, 101)
    places = np.zeros(101, np.int64)
    after.take(places[:-1], out=places[1:], mode="clip")
    assert places[:100].tolist() == list(range(100))
