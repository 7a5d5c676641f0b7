"""Batches: inputs of one execution, and its outputs split by request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.scheduling.batch import Batch, BatchBuffer, Outcome
from tests.scheduling.fakes import Bench, entered

FP32, INT64, BYTES = Datatype.FP32, Datatype.INT64, Datatype.BYTES

TWO = Signature(
    "two",
    8,
    (TensorSpec("a", INT64, (2,)), TensorSpec("b", INT64, (2,), optional=True)),
    (TensorSpec("y", INT64, (2,)), TensorSpec("z", INT64, (-1,))),
)
WIDE = Signature("wide", 8, (TensorSpec("a", INT64, (-1,)),), (TensorSpec("y", INT64, (2,)),))
RESHAPED = Signature(
    "reshaped",
    8,
    (TensorSpec("a", FP32, (1,), reshape=()),),
    (TensorSpec("y", FP32, (2, -1), reshape=(-1, 2)),),
)
PLAIN = Signature("plain", 0, (TensorSpec("a", FP32, ()),), (TensorSpec("y", FP32, (2,)),))


def batch(
    signature: Signature, *inputs: dict[str, Array], outputs: Sequence[Sequence[str]] = ()
) -> Batch:
    """A batch of one request per item of `inputs`; `outputs` are the requested ones."""
    calls = []
    for n, arrays in enumerate(inputs):
        tensors = {
            name: Tensor(name, signature.input(name).datatype, array)
            for name, array in arrays.items()
        }
        wanted = tuple(outputs[n]) if outputs else ()
        request = Call(signature.model, "", str(n), tensors, outputs=wanted)
        rows = signature.check(request)
        calls.append(entered(request, rows, None, 100 + n, Bench().batcher))
    return Batch(signature, calls)


def rows(*values: int, width: int = 2) -> Array:
    return np.repeat(np.array(values, np.int64).reshape(-1, 1), width, axis=1)


def split(batch: Batch, arrays: list[Any]) -> list[list[Tensor]]:
    """Each request's part of a model's arrays."""
    batch.take("1", Outcome(arrays, None, 0, 0, 0))
    parts = []
    for call in batch.calls:
        assert call.outcome is batch
        parts.append(batch.response(call).outputs)
    return parts


def test_one_request_is_passed_on_without_a_copy() -> None:
    array = rows(1, 2)
    gathered = batch(TWO, {"a": array}).gather()
    assert set(gathered) == {"a"}  # b is optional and absent
    assert gathered["a"] is array


def test_several_requests_are_joined_along_the_rows() -> None:
    joined = batch(TWO, {"a": rows(1, 2), "b": rows(5, 6)}, {"a": rows(3), "b": rows(7)})
    gathered = joined.gather()
    assert joined.rows == 3
    np.testing.assert_array_equal(gathered["a"], rows(1, 2, 3))
    np.testing.assert_array_equal(gathered["b"], rows(5, 6, 7))


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_can_be_joined(datatype: Datatype) -> None:
    signature = Signature("m", 4, (TensorSpec("a", datatype, (1,)),), ())
    filled = np.zeros((1, 1), NUMPY[datatype])
    if datatype is BYTES:
        filled[0, 0] = b"text"
    joined = batch(signature, {"a": filled}, {"a": filled}).gather()["a"]
    assert (joined.shape, joined.dtype) == ((2, 1), NUMPY[datatype])
    assert joined.tolist() == [*filled.tolist(), *filled.tolist()]


def test_large_batches_reuse_memory() -> None:
    buffer = BatchBuffer()
    large = [rows(*range(n), width=40_000) for n in (2, 3)]
    first = batch(WIDE, *[{"a": array} for array in large]).gather(buffer)["a"]
    assert np.array_equal(first, np.concatenate(large))
    address = np.asarray(first).ctypes.data
    fewer = [rows(7, width=40_000), rows(8, width=40_000)]
    second = batch(WIDE, *[{"a": array} for array in fewer]).gather(buffer)["a"]
    assert np.array_equal(second, np.concatenate(fewer))
    assert np.asarray(second).ctypes.data == address


def test_small_batches_and_bytes_allocate_memory() -> None:
    buffer = BatchBuffer()
    small = [batch(TWO, {"a": rows(1)}, {"a": rows(n)}).gather(buffer)["a"] for n in (2, 3)]
    assert [array.tolist() for array in small] == [[[1, 1], [2, 2]], [[1, 1], [3, 3]]]
    words = np.full((1, 70_000), b"word", object)
    assert buffer.place("a", [words, words], 2) is None


def test_shapes_are_relabelled_for_the_model_and_back() -> None:
    array = np.arange(3, dtype=np.float32).reshape(3, 1)
    one = batch(RESHAPED, {"a": array})
    assert one.gather()["a"].shape == (3,)
    made = np.arange(18, dtype=np.float32).reshape(3, 3, 2)
    ((y,),) = split(one, [made])
    assert y.array.shape == (3, 2, 3)
    assert y.array.ravel().tolist() == list(range(18))


def test_each_request_gets_its_own_rows_and_outputs() -> None:
    joined = batch(
        TWO, {"a": rows(1, 2)}, {"a": rows(3)}, {"a": rows(4)}, outputs=[["z"], ["y", "z"], []]
    )
    assert [spec.name for spec in joined.outputs] == ["y", "z"]
    parts = split(joined, [rows(1, 2, 3, 4), rows(1, 2, 3, 4, width=3) * 10])
    told = [[(t.name, t.array.tolist()) for t in part] for part in parts]
    assert told == [
        [("z", [[10, 10, 10], [20, 20, 20]])],
        [("y", [[3, 3]]), ("z", [[30, 30, 30]])],
        [("y", [[4, 4]]), ("z", [[40, 40, 40]])],
    ]


def test_only_wanted_outputs_are_asked_for() -> None:
    joined = batch(TWO, {"a": rows(1)}, {"a": rows(2)}, outputs=[["z"], ["z"]])
    assert [spec.name for spec in joined.outputs] == ["z"]
    alone = batch(TWO, {"a": rows(1)}, outputs=[["y"]])
    assert [t.name for t in split(alone, [rows(1)])[0]] == ["y"]


def test_a_model_that_does_not_batch_has_no_rows_to_split() -> None:
    one = batch(PLAIN, {"a": np.float32(1) * np.ones((), np.float32)})
    ((y,),) = split(one, [np.ones(2, np.float32)])
    assert y.array.shape == (2,)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([rows(1)], "gave 1 outputs, asked for 2"),
        ([rows(1), rows(1), rows(1)], "gave 3 outputs, asked for 2"),
        ([rows(1), rows(1)], r"'y' of shape \[1,2\] for a batch of 2 rows"),
        ([rows(1, 2), rows(1, 2, 3)], r"'z' of shape \[3,2\] for a batch of 2 rows"),
        ([np.array(1), rows(1, 2)], r"'y' of shape \[\] for a batch of 2 rows"),
        ([rows(1, 2, width=3), rows(1, 2)], r"'y' of shape \[2,3\], .* \[-1,2\]"),
        ([rows(1, 2)[..., None], rows(1, 2)], r"'y' of shape \[2,2,1\], .* \[-1,2\]"),
        ([rows(1, 2).astype(np.int32), rows(1, 2)], "'y' as int32, .* INT64"),
    ],
)
def test_outputs_that_break_the_signature_are_model_errors(arrays: list[Array], text: str) -> None:
    with pytest.raises(ExecutionFailed, match=text):
        split(batch(TWO, {"a": rows(1)}, {"a": rows(2)}), arrays)


@pytest.mark.parametrize(
    ("arrays", "datatype", "shape"),
    [
        ([rows(1, 2, width=3), rows(1, 2)], Datatype.INT64, (3,)),
        ([rows(1, 2)[..., None], rows(1, 2)], Datatype.INT64, (2, 1)),
        ([rows(1, 2)[:, 0], rows(1, 2)], Datatype.INT64, ()),
        ([rows(1, 2).astype(np.int32), rows(1, 2)], Datatype.INT32, (2,)),
        ([BytesArray(b"\0\0\0\0" * 2, (2,)), rows(1, 2)], Datatype.BYTES, ()),
    ],
)
def test_outputs_are_passed_on_if_the_signature_is_not_strict(
    arrays: list[Array],
    datatype: Datatype,
    shape: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    signature = replace(TWO, strict_outputs=False)
    for _ in range(2):
        joined = batch(signature, {"a": rows(1)}, {"a": rows(1)})
        for y, z in split(joined, arrays):
            assert (y.datatype, y.array.shape) == (datatype, (1, *shape))
            assert z.datatype is Datatype.INT64
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ExecutionFailed, match="as complex128"):
        split(batch(signature, {"a": rows(1)}), [np.zeros((1, 2), complex), rows(1)])
    with pytest.raises(ExecutionFailed, match="for a batch of 2 rows"):
        split(batch(signature, {"a": rows(1, 2)}), [rows(1), rows(1, 2)])


def test_a_response_has_its_timing() -> None:
    joined = batch(TWO, {"a": rows(1)}, {"a": rows(2)})
    joined.calls[0].ended = True
    outcome = Outcome([rows(1, 2), rows(1, 2)], None, 300, 310, 350)
    joined.take("7", outcome)
    assert joined.calls[0].outcome is None
    assert joined.calls[1].outcome is joined
    response = joined.response(joined.calls[1])
    assert (response.model_name, response.model_version, response.id) == ("two", "7", "1")
    timing = response.timing
    assert (timing.queue_ns, timing.compute_ns, timing.batch_rows) == (300 - 101, 50, 2)


def test_halves() -> None:
    whole = batch(TWO, *[{"a": rows(n)} for n in range(5)])
    ids = [[p.id for p in half.calls] for half in whole.halves()]
    assert ids == [["0", "1"], ["2", "3", "4"]]
