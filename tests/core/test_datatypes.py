"""The protocol's table of datatypes."""

import numpy as np
import pytest

from headrace.core.datatypes import (
    BY_CONFIG_NUMBER,
    BY_NAME,
    BY_NUMPY,
    CONFIG_NUMBERS,
    ITEM_SIZES,
    NUMPY,
    Datatype,
)

TABLE = [  # name, number in a configuration, bytes per element, numpy's name
    ("BOOL", 1, 1, "bool"), ("UINT8", 2, 1, "uint8"), ("UINT16", 3, 2, "uint16"),
    ("UINT32", 4, 4, "uint32"), ("UINT64", 5, 8, "uint64"), ("INT8", 6, 1, "int8"),
    ("INT16", 7, 2, "int16"), ("INT32", 8, 4, "int32"), ("INT64", 9, 8, "int64"),
    ("FP16", 10, 2, "float16"), ("FP32", 11, 4, "float32"), ("FP64", 12, 8, "float64"),
    ("BYTES", 13, None, "object"), ("BF16", 14, 2, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "size", "numpy_name"), TABLE)
def test_datatype(name: str, number: int, size: int | None, numpy_name: str) -> None:
    datatype = BY_NAME[name]
    assert str(datatype) == name
    assert CONFIG_NUMBERS[datatype] == number
    assert BY_CONFIG_NUMBER[number] is datatype
    assert ITEM_SIZES.get(datatype) == size
    assert NUMPY[datatype].name == numpy_name
    assert BY_NUMPY[NUMPY[datatype]] is datatype


def test_the_table_is_complete() -> None:
    assert [name for name, *_ in TABLE] == [str(datatype) for datatype in Datatype]


def test_bf16_is_the_upper_half_of_fp32() -> None:
    halves = np.array([1.5, -2.0, np.inf], "<f4").view("<u2")[1::2]
    assert halves.view(NUMPY[Datatype.BF16]).tolist() == [1.5, -2.0, np.inf]
