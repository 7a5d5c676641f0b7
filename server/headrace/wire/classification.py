"""The classification extension: an output's highest values, as text, instead of the output."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor
from headrace.core.texts import shown
from headrace.wire.bytes_tensor import object_array

_MAX_ELEMENTS = 1_000_000
_UNSUPPORTED = (Datatype.FP16, Datatype.BF16, Datatype.BOOL, Datatype.BYTES)


def check_class_count(output: str, count: object) -> int:
    """An output's `classification` parameter; raises `InvalidRequest` unless it is positive."""
    if type(count) is not int or count < 1:
        raise InvalidRequest(
            f"'classification' of output '{output}' must be a positive integer, got {shown(count)}"
        )
    return count


def classify_outputs(
    response: InferResponse,
    counts: Mapping[str, int],
    labels: Mapping[str, Sequence[str]],
    batches: bool,
) -> None:
    """Replace the outputs named in `counts` by their so many highest classes.

    Raises `InvalidRequest` where an output has no classes.
    """
    response.outputs = [
        classify(tensor, counts[tensor.name], labels.get(tensor.name, ()), batches)
        if tensor.name in counts
        else tensor
        for tensor in response.outputs
    ]


def classify(tensor: Tensor, count: int, labels: Sequence[str], batches: bool) -> Tensor:
    """Each row's `count` highest elements, descending, as `value:index` or `value:index:label`.

    Without batching the whole tensor is one row. Equal values keep the order of their indices.
    Raises `InvalidRequest` for a datatype that has no classes, and for a tensor of over a million
    elements.
    """
    datatype, array = tensor.datatype, np.asarray(tensor.array)
    if datatype in _UNSUPPORTED:
        raise InvalidRequest(
            f"class result not available for output '{tensor.name}'"
            f" due to unsupported type '{datatype}'"
        )
    if array.size > _MAX_ELEMENTS:
        raise InvalidRequest(
            f"class result not available for output '{tensor.name}': it has {array.size} elements,"
            f" at most {_MAX_ELEMENTS} are possible"
        )
    lead = array.shape[:1] if batches else ()
    width = math.prod(array.shape[len(lead) :])
    rows = array.reshape(*(lead or (1,)), width)
    count = min(count, width)
    # Sorting the reversed row stably and reversing the result puts the first of equals first.
    last = width - 1
    order = last - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    spelling = "%f" if array.dtype.kind == "f" else "%d"
    texts = [
        ":".join([spelling % value, str(index), *labels[index : index + 1]]).encode()
        for row, indices in zip(rows, order.tolist(), strict=True)
        for index, value in zip(indices, row[indices].tolist(), strict=True)
    ]
    return Tensor(tensor.name, Datatype.BYTES, object_array(texts, [*lead, count]))
