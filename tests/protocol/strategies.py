"""Hypothesis strategies, builders and assertions of the codec tests."""

import math
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.tensors import Array, Tensor

T = TypeVar("T")

PROPERTY = settings(max_examples=100)

EVERY = tuple(Datatype)
IN_JSON = tuple(d for d in Datatype if d not in (Datatype.FP16, Datatype.BF16))

shapes = st.lists(st.integers(0, 4), max_size=4)
# Half surrogates too: JSON can escape them, UTF-8 cannot encode them.
any_text = st.text(st.characters(categories=None), max_size=6)


def object_array(elements: Sequence[bytes], shape: Sequence[int]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def fp32(*values: float, name: str = "y") -> Tensor:
    return Tensor(name, Datatype.FP32, np.array(values, np.float32))


def response(*outputs: Tensor, id: str = "", **members: Any) -> InferResponse:
    """A response of version 1 of model `m`."""
    return InferResponse("m", "1", id, list(outputs), Timing(0, 0, 1), **members)


def refused(part: str) -> AbstractContextManager[pytest.ExceptionInfo[InvalidRequest]]:
    """Expect an `InvalidRequest` with `part` in its text."""
    return pytest.raises(InvalidRequest, match=re.escape(part))


@contextmanager
def memory_within(nbytes: int) -> Iterator[None]:
    """Assert that the block allocates less than `nbytes` at its peak."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@st.composite
def tensors(
    draw: st.DrawFn, datatypes: Sequence[Datatype] = EVERY, utf8: bool = False, name: str = "x"
) -> Tensor:
    """Tensors of any bit pattern, with NaNs and infinities; BYTES are text if `utf8`."""
    datatype = draw(st.sampled_from(datatypes))
    shape = draw(shapes)
    count = math.prod(shape)
    if datatype is Datatype.BYTES:
        text = st.text(max_size=8).map(str.encode)
        element = text if utf8 else st.binary(max_size=8)
        elements = draw(st.lists(element, min_size=count, max_size=count))
        return Tensor(name, datatype, object_array(elements, shape))
    size = count * ITEM_SIZES[datatype]
    raw = draw(st.binary(min_size=size, max_size=size))
    if datatype is Datatype.BOOL:
        raw = bytes(byte & 1 for byte in raw)
    return Tensor(name, datatype, np.frombuffer(raw, NUMPY[datatype]).reshape(shape))


def assert_same(one: Tensor, other: Tensor, bits: bool = True) -> None:
    """Assert equal tensors; with `bits`, also equal bit patterns of NaNs."""
    assert (one.name, one.datatype) == (other.name, other.datatype)
    assert one.array.dtype == other.array.dtype == NUMPY[one.datatype]
    assert one.array.shape == other.array.shape
    if one.datatype is Datatype.BYTES:
        assert one.array.ravel().tolist() == other.array.ravel().tolist()
    elif bits:
        assert one.array.tobytes() == other.array.tobytes()
    else:
        nan_too = one.datatype in (Datatype.FP32, Datatype.FP64)
        assert np.array_equal(one.array, other.array, equal_nan=nan_too)


@st.composite
def mutations(draw: st.DrawFn, original: bytes) -> bytes:
    """`original` with some pieces replaced, removed, repeated or inserted."""
    body = original
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.integers(0, 4)))
        piece = draw(st.one_of(st.binary(max_size=4), st.just(body[start:end] * 2)))
        body = body[:start] + piece + body[end:]
    return body


def outcome(function: Callable[..., T], *arguments: Any) -> T | ServerError:
    """Result of a call, or its client error; other exceptions are raised."""
    try:
        return function(*arguments)
    except ServerError as error:
        return error
