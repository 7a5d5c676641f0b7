"""Validation of a request against a model's declared inputs and outputs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import (
    Shape,
    Signature,
    TensorSpec,
    fits,
    quoted,
    relabel,
    reshaped,
)
from headrace.core.tensors import Tensor

FP32, INT8 = Datatype.FP32, Datatype.INT8


def declared(rows: int, *inputs: TensorSpec) -> Signature:
    return Signature("m", rows, inputs, (TensorSpec("y", FP32, ()),))


ONE = [TensorSpec(name, FP32, (1,)) for name in "abc"]
PLAIN = declared(0, TensorSpec("a", FP32, (2, -1)), TensorSpec("b", INT8, ()))
BATCHING = declared(8, TensorSpec("a", FP32, (16,)), TensorSpec("b", FP32, (-1,)))
OPTIONAL = declared(8, *ONE[:2], replace(ONE[2], optional=True))
ALL_OPTIONAL = declared(8, replace(ONE[0], optional=True))


def request(outputs: Sequence[str] = (), datatype: Datatype = FP32, **shapes: Shape) -> Call:
    inputs = {
        name: Tensor(name, datatype, np.zeros(shape, NUMPY[datatype]))
        for name, shape in shapes.items()
    }
    return Call("m", "", "", inputs, tuple(outputs))


def mixed(a: Shape, b: Shape) -> Call:
    """A request for `PLAIN`, whose inputs differ in datatype."""
    given = request(a=a)
    given.inputs |= request(datatype=INT8, b=b).inputs
    return given


@pytest.mark.parametrize(("signature", "given", "rows"), [
    (PLAIN, mixed((2, 5), ()), 1), (PLAIN, mixed((2, 0), ()), 1),
    (BATCHING, request(a=(1, 16), b=(1, 3)), 1), (BATCHING, request(a=(8, 16), b=(8, 0)), 8),
    (BATCHING, request(a=(0, 16), b=(0, 3)), 0),
    (BATCHING, request(["y"], b=(2, 3), a=(2, 16)), 2),  # in any order
    (OPTIONAL, request(a=(4, 1), b=(4, 1)), 4),
    (OPTIONAL, request(a=(4, 1), c=(4, 1), b=(4, 1)), 4), (ALL_OPTIONAL, request(), 1),
])  # fmt: skip
def test_rows_of_a_request_that_fits(signature: Signature, given: Call, rows: int) -> None:
    assert signature.check(given) == rows


@pytest.mark.parametrize(("signature", "given", "parts"), [
    # 1. an unknown output
    (BATCHING, request(["z"], a=(1, 16), b=(1, 3)), ["inference output 'z' for model 'm'"]),
    # 2. too few or too many inputs
    (BATCHING, request(a=(1, 16)),
     ["expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'],"
     " but missing required input(s) ['b']. Please provide all required input(s)."]),
    (BATCHING, request(), ["expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [],",
     "['a','b']"]),
    (BATCHING, request(a=(1, 16), b=(1, 3), z=(1,)),
     ["expected 2 inputs but got 3 inputs for model 'm'", "['z'] are not inputs"]),
    (OPTIONAL, request(a=(1, 1)),
     ["expected number of inputs between 2 and 3 but got 1 inputs for model 'm'", "['b']"]),
    (OPTIONAL, request(a=(1, 1), c=(1, 1)),
     ["expected number of inputs between 2 and 3 but got 2 inputs for model 'm'",
     "missing required input(s) ['b']"]),
    # 3. no batch dimension, or different ones
    (BATCHING, request(a=(), b=(1, 3)),
     ["input 'a' has no shape but model requires batch dimension for 'm'"]),
    (BATCHING, request(a=(2, 16), b=(3, 3)),
     ["input 'b' batch size does not match other inputs for 'm'", "3 rows after 2"]),
    (BATCHING, request(a=(0, 16), b=(3, 3)), ["input 'b' batch size does not match"]),
    # 4. too many rows
    (BATCHING, request(a=(9, 16), b=(9, 3)), ["inference request batch-size must be <= 8 for 'm'",
     "got 9 (its limit is the max_batch_size of its configuration)"]),
    # 5. an unknown input
    (BATCHING, request(a=(1, 16), z=(1, 3)), ["unexpected inference input 'z' for model 'm'",
     "['a','b']"]),
    # 6. a wrong datatype
    (BATCHING, request(datatype=INT8, a=(1, 16), b=(1, 3)),
     ["inference input 'a' data-type is 'INT8', but model 'm' expects 'FP32'"]),
    # 7. a wrong shape; only batched models get the note
    (BATCHING, request(a=(1, 8), b=(1, 3)),
     ["unexpected shape for input 'a' for model 'm'. Expected [-1,16], got [1,8].",
     "NOTE: Setting a non-zero max_batch_size"]),
    (BATCHING, request(a=(16,), b=(1, 3)), ["Expected [-1,16], got [16]."]),
    (BATCHING, request(a=(1, 16, 1), b=(1, 3)), ["Expected [-1,16], got [1,16,1]."]),
    (PLAIN, mixed((3, 5), ()),
     ["unexpected shape for input 'a' for model 'm'. Expected [2,-1], got [3,5]."]),
    (PLAIN, mixed((2, 5), (1,)), ["input 'b' for model 'm'. Expected [], got [1]."]),
])  # fmt: skip
def test_mismatches_are_named(signature: Signature, given: Call, parts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        signature.check(given)
    for part in parts:
        assert part in str(raised.value)
    assert ("NOTE" in str(raised.value)) <= signature.batches


def test_declared_signature() -> None:
    assert BATCHING.wire_shape(BATCHING.inputs[0]) == (-1, 16)  # clients see the batch dimension
    assert PLAIN.wire_shape(PLAIN.inputs[0]) == (2, -1)
    assert (BATCHING.batches, PLAIN.batches) == (True, False)
    assert PLAIN.input("b") is PLAIN.inputs[1]
    twin = Signature(PLAIN.model, PLAIN.max_batch_size, PLAIN.inputs, PLAIN.outputs)
    assert twin == PLAIN
    assert twin != BATCHING


@pytest.mark.parametrize(("signature", "one", "other", "together"), [
    (BATCHING, request(a=(1, 16), b=(1, 3)), request(a=(5, 16), b=(5, 3)), True),
    (BATCHING, request(a=(1, 16), b=(1, 3)), request(a=(1, 16), b=(1, 4)), False),
    (OPTIONAL, request(a=(1, 1), b=(1, 1)), request(a=(2, 1), b=(2, 1)), True),
    (OPTIONAL, request(a=(1, 1), b=(1, 1)), request(a=(1, 1), b=(1, 1), c=(1, 1)), False),
    (OPTIONAL, request(a=(1, 1), b=(1, 1), c=(1, 1)), request(c=(2, 1), b=(2, 1), a=(2, 1)), True),
])  # fmt: skip
def test_requests_that_may_share_a_batch(
    signature: Signature, one: Call, other: Call, together: bool
) -> None:
    assert (signature.batch_key(one) == signature.batch_key(other)) is together


def test_fixed_shapes_need_no_key() -> None:
    fixed = Signature("m", 8, (TensorSpec("a", FP32, (16,)),), ())
    assert fixed.batch_key(request(a=(1, 16))) is None


@pytest.mark.parametrize(("shape", "dims", "does"), [
    ((), (), True), ((3, 4), (3, 4), True), ((3, 4), (-1, 4), True), ((0, 4), (-1, 4), True),
    ((3, 5), (-1, 4), False), ((3,), (3, 4), False), ((3, 4, 5), (3, 4), False), ((), (-1,), False),
])  # fmt: skip
def test_matching_shapes(shape: Shape, dims: Shape, does: bool) -> None:
    assert fits(shape, dims) is does


@pytest.mark.parametrize(("shape", "source", "target", "result"), [
    ((1,), (1,), (), ()), ((6,), (6,), (2, 3), (2, 3)), ((4, 5), (-1, -1), (-1, 1, -1), (4, 1, 5)),
    ((4, 2, 5), (-1, 2, -1), (2, -1, -1), (2, 4, 5)),
])  # fmt: skip
def test_relabel(shape: Shape, source: Shape, target: Shape, result: Shape) -> None:
    assert relabel(shape, source, target) == result


@pytest.mark.parametrize(("spec", "batches", "client", "model"), [
    (TensorSpec("a", FP32, (1,), reshape=()), True, (7, 1), (7,)),
    (TensorSpec("a", FP32, (6,), reshape=(2, 3)), True, (7, 6), (7, 2, 3)),
    (TensorSpec("a", FP32, (6,), reshape=(2, 3)), True, (0, 6), (0, 2, 3)),
    (TensorSpec("a", FP32, (-1, 2), reshape=(2, -1)), False, (5, 2), (2, 5)),
    (TensorSpec("a", FP32, (6,)), False, (6,), (6,)),
])  # fmt: skip
def test_reshaped_both_ways(spec: TensorSpec, batches: bool, client: Shape, model: Shape) -> None:
    array = np.arange(np.prod(client), dtype=np.float32).reshape(client)
    inside = reshaped(array, spec, batches, to_model=True)
    assert inside.shape == model
    assert np.array_equal(reshaped(inside, spec, batches, to_model=False), array)


def test_quoted() -> None:
    assert quoted([]) == "[]"
    assert quoted(["a", "b"]) == "['a','b']"


def test_a_request_may_have_the_rows_of_several_batches() -> None:
    divided = replace(BATCHING, parts=3, limit="--an-option")
    assert divided.check(request(a=(24, 16), b=(24, 3))) == 24
    text = (
        r"batch-size must be <= 24 for 'm', got 25"
        r" \(a request may take 3 batches, whose size is --an-option\)"
    )
    with pytest.raises(InvalidRequest, match=text):
        divided.check(request(a=(25, 16), b=(25, 3)))
    divided.check_tensor("a", Datatype.FP32, (24, 16))
    with pytest.raises(InvalidRequest, match=text):
        divided.check_tensor("a", Datatype.FP32, (25, 16))
