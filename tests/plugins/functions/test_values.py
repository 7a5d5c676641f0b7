"""Conversion of functions' results to their declarations, and of their arguments."""

from typing import Any

import numpy as np
import pytest

from headrace import (
    BFloat16,
    Bool,
    Bytes,
    Float16,
    Float32,
    Int8,
    Int64,
    InvalidInput,
    N,
    ResultError,
    Strings,
    UInt8,
    UInt64,
)
from headrace.ipc.elements import Array
from headrace.plugins.functions.signature import Dim, Element, Tensor, read
from headrace.plugins.functions.values import check_shape, fitted, received, sent

TEXT = Element("Strings", "BYTES", text=True)
BF16 = Element("BFloat16", "BF16")


def fit(hint: Any, value: object) -> Array:
    """The array of a value."""
    tensor, _ = read(hint)
    assert isinstance(tensor, Tensor)
    return fitted(value, tensor, "output 'y'")


@pytest.mark.parametrize(
    ("hint", "value", "dtype", "elements"),
    [
        (Float32[N], np.array([1.5], np.float64), "<f4", [1.5]),
        (Float32[N], [1, True], "<f4", [1.0, 1.0]), (Float32[N], [], "<f4", []),
        (Float32[N], np.array([np.inf, np.nan]), "<f4", [np.inf, np.nan]),
        (Float32[N], np.array([2.5], ">f4"), "<f4", [2.5]),
        (Int8[N], np.array([-128, 127]), "i1", [-128, 127]),
        (UInt8[N], np.array([255]), "u1", [255]), (Int64[N], np.array([True]), "<i8", [1]),
        (UInt64[N], [2**64 - 1], "<u8", [2**64 - 1]), (Bool[N], [np.bool_(True)], "?", [True]),
        (float, 3, "<f8", 3.0), (str, "ü", "O", "ü"),
        (list[list[int]], [[1], [2]], "<i8", [[1], [2]]),
        (Strings[N], np.array(["a", "bc"]), "O", ["a", "bc"]),
        (Strings[N], ["a\0", "bc"], "O", ["a\0", "bc"]), (Strings[N], (np.str_("a"),), "O", ["a"]),
        (Strings[N], [], "O", []), (Bytes[N], np.array([b"a"]), "O", [b"a"]),
        (Bytes[N], [b"\xff\0"], "O", [b"\xff\0"]),
        (list[list[str]], [["a"], ["b"]], "O", [["a"], ["b"]]), (BFloat16[N], [1.0], "<f4", [1.0]),
    ],
)  # fmt: skip
def test_valid_values(hint: Any, value: object, dtype: str, elements: object) -> None:
    array = fit(hint, value)
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, np.array(elements, array.dtype))


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (Int64[N], np.zeros((2, 3)), r"Int64\[N\], got an array of float64 with shape \[2, 3\]"),
        (Int8[N], [1, 128], "a list of int, of which 128 is not between -128 and 127"),
        (UInt8[N], np.array([-1]), "of which -1 is not between 0 and 255"),
        (Bool[N], [1], r"Bool\[N\], got a list of int"),
        (Float16[N], [1e9], "got numbers that are too large for it"),
        (Float32[N], ["1"], "got a list of str"),
        (Float32[N], None, "got None"),
        (Float32[N], [1j], "got a list of complex"),
        (Float32[N], [[1], [1, 2]], r"Float32\[N\], got a list of list: .*inhomogeneous"),
        (int, [1.5], "int, got float"),
        (int, [1, None], "int, got NoneType and int"),
        (int, [2**70], "int, got int"),
        (Strings[N], [b"a", "b"], r"elements of str, got bytes"),
        (Strings[N], np.zeros(1), "got float64"),
        (Strings[N], {"a": 1}, "got dict"),
        (Bytes[N], ["a"], "elements of bytes, got str"),
        (list[list[str]], [["a"], ["b", "c"]], "elements of str, got list"),
    ],
)
def test_invalid_values(hint: Any, value: object, says: str) -> None:
    with pytest.raises(ResultError, match=f"output 'y' is declared as .*{says}"):
        fit(hint, value)


def test_bfloat16() -> None:
    values = np.array([1.0, -2.5, 3.14159, 1e-40, np.inf, np.nan, 1.00390625, 3e38], np.float32)
    bits = sent(values, BF16)
    assert bits.dtype == np.dtype("<u2")
    assert bits.tolist()[:3] == [0x3F80, 0xC020, 0x4049]
    assert bits.tolist()[6] == 0x3F80  # half way: rounds to even
    back = received(bits, BF16, "x")
    assert back.dtype == np.float32
    np.testing.assert_allclose(back[:3], values[:3], rtol=2**-8)
    assert np.isinf(back[4])
    assert np.isnan(back[5])
    every = np.arange(1 << 16, dtype="<u2").reshape(256, 256)
    kept = sent(received(every, BF16, "x"), BF16)
    numbers = ~np.isnan(received(every, BF16, "x"))
    np.testing.assert_array_equal(kept[numbers], every[numbers])


def test_text() -> None:
    raw = np.array([["ü".encode()], [b""]], object)
    assert received(raw, TEXT, "x").tolist() == [["ü"], [""]]
    with pytest.raises(InvalidInput, match=r"input 'x': b'\\xff' is not UTF-8"):
        received(np.array([b"ok", b"\xff"], object), TEXT, "x")


@pytest.mark.parametrize(
    ("shape", "dims", "says"),
    [
        ((2, 3), (Dim(), Dim(size=3)), ""),
        ((2, 7), (Dim("N"), Dim("K")), ""),
        ((2,), (Dim(), Dim()), r"has 2 dimensions, \[int, int\], got shape \[2\]"),
        ((2, 4), (Dim(), Dim(size=3)), r"a dimension is 3, got 4 in shape \[2, 4\]"),
        ((2, 6), (Dim("N"), Dim("K")), r"dimension K is 7, got 6 in shape \[2, 6\]"),
    ],
)
def test_shapes(shape: tuple[int, ...], dims: tuple[Dim, ...], says: str) -> None:
    sizes = {"K": 7}
    if not says:
        check_shape(shape, dims, sizes, "x")
        assert sizes.get("N", 2) == 2
        return
    with pytest.raises(ValueError, match=f"x:? .*{says}|x: {says}"):
        check_shape(shape, dims, sizes, "x")
