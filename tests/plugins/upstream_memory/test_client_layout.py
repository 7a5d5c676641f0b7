"""The choice of tensors for shared memory, and their layout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.connections.placing import laid_out, needed
from headrace.core.datatypes import BY_NUMPY, Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.placement.upstream.connection import RemoteRequest
from headrace.plugins.upstream_memory.client import (
    FixedSizes,
    large_inputs,
    write,
)
from headrace.plugins.upstream_memory.regions import THRESHOLD
from headrace.protocol.v2_protobuf import RemoteInput

WIDTH = THRESHOLD // 4
WORDS = np.array([[b"x" * THRESHOLD]], object)


def given_as(name: str, *parts: Array) -> RemoteInput:
    rows = sum(len(part) for part in parts)
    datatype = Datatype.BYTES if parts[0].dtype == object else BY_NUMPY[parts[0].dtype]
    return RemoteInput(name, datatype, (rows, *parts[0].shape[1:]), parts)


def test_large_inputs_of_a_fixed_item_size() -> None:
    inputs = [
        given_as("large", np.zeros((1, WIDTH), np.float32)),
        given_as("small", np.zeros((1, WIDTH - 1), np.float32)),
        given_as("words", WORDS),
        given_as("halves", *[np.zeros((1, WIDTH // 2), np.float32)] * 2),
    ]
    assert large_inputs(RemoteRequest(inputs, [], {})) == {"large": THRESHOLD, "halves": THRESHOLD}


def test_outputs_of_known_size() -> None:
    specs = (
        TensorSpec("row", Datatype.FP32, (WIDTH // 2,)),
        TensorSpec("variable", Datatype.FP32, (WIDTH, -1)),
        TensorSpec("words", Datatype.BYTES, (WIDTH,)),
    )
    names = [spec.name for spec in specs]
    inputs = [given_as("x", np.zeros((2, 1), np.float32))]
    request = RemoteRequest(inputs, [*names, "unheard-of"], {})
    batches = FixedSizes.of(Signature("m", 4, (), specs))
    assert batches.large(request) == {"row": THRESHOLD}
    assert batches.large(RemoteRequest([], names, {})) == {}
    alone = FixedSizes.of(Signature("m", 0, (), (TensorSpec("row", Datatype.FP64, (WIDTH,)),)))
    assert alone.large(RemoteRequest([], names, {})) == {"row": 2 * THRESHOLD}


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_places_do_not_overlap(sizes: list[int]) -> None:
    named = {str(index): size for index, size in enumerate(sizes)}
    end = 0
    for name, place in laid_out(named, "r").items():
        assert place.offset >= end
        assert place.offset % 64 == 0
        assert (place.region, place.byte_size) == ("r", named[name])
        end = place.offset + place.byte_size
    assert end == needed(named)


def test_parts_are_written_in_sequence() -> None:
    turned = np.arange(6, dtype=np.int16).reshape(3, 2).T
    inputs = [given_as("a", turned, turned[:1] + 10), given_as("b", turned), given_as("c", turned)]
    sizes = {"a": 18, "b": 12}
    memory = memoryview(bytearray(needed(sizes)))
    places = laid_out(sizes, "r")
    write(inputs, places, memory)
    found = np.frombuffer(memory[:18], np.int16).reshape(3, 3)
    np.testing.assert_array_equal(found, [[0, 2, 4], [1, 3, 5], [10, 12, 14]])
    np.testing.assert_array_equal(np.frombuffer(memory[64:76], np.int16).reshape(2, 3), turned)
