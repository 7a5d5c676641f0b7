"""Arrays and tensor data in a worker, beside the server's own conversion."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import raw_bytes
from headrace.workers.elements import BITS, DTYPES, datatype_of, decode_bytes, encode_bytes, view


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


def test_what_models_give_for_strings() -> None:
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
def test_what_are_no_strings(data: bytes) -> None:
    with suppress(ValueError):
        decode_bytes(memoryview(data), (3,))


def test_a_view() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    array = view("FP32", (2, 2), b"\0\0\0\0" + data, 8, 16)
    assert array.tolist() == [[1, 2], [3, 4]]
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="12 bytes for FP32 of shape"):
        view("FP32", (2, 2), data, 0, 12)
