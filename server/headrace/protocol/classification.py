"""The classification extension: an output's highest values, as text, instead of the tensor."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.core.bytes_array import bytes_array
from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Array, Tensor
from headrace.core.texts import shown

# The largest number of classes per row that may be requested. Each becomes a text of its own, and
# an answer with more of them has no practical use.
MAX_CLASSES = 10_000
_MAX_ELEMENTS = 1_000_000
_WIDE = 4096  # elements of a row from which on partitioning before sorting pays
_UNSUPPORTED = (Datatype.FP16, Datatype.BF16, Datatype.BOOL, Datatype.BYTES)


def check_class_count(output: str, count: object) -> int:
    """Check `classification` of an output; raises `InvalidRequest` unless 1 to `MAX_CLASSES`."""
    if type(count) is not int or count < 1:
        raise InvalidRequest(
            f"'classification' of output '{output}' must be a positive integer, got {shown(count)}"
        )
    if count > MAX_CLASSES:
        raise InvalidRequest(
            f"'classification' of output '{output}' must be at most {MAX_CLASSES}, got {count}"
        )
    return count


def classify_outputs(
    response: InferResponse,
    counts: Mapping[str, int],
    labels: Mapping[str, Sequence[str]],
    batches: bool,
) -> None:
    """Replace the outputs named in `counts` by their highest classes, as many as `counts` says.

    Raises `InvalidRequest` if an output's datatype has no classes.
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
    Raises `InvalidRequest` for a datatype without classes, and for tensors of more than a million
    elements.
    """
    datatype, array = tensor.datatype, np.asarray(tensor.array)
    if datatype in _UNSUPPORTED:
        raise InvalidRequest(
            "class result not available for output due to unsupported type"
            f" '{datatype}': '{tensor.name}'"
        )
    if array.size > _MAX_ELEMENTS:
        raise InvalidRequest(
            f"classification output tensor too large: '{tensor.name}' has {array.size} elements,"
            f" at most {_MAX_ELEMENTS} are possible"
        )
    lead = array.shape[:1] if batches else ()
    width = math.prod(array.shape[len(lead) :])
    rows = array.reshape(*(lead or (1,)), width)
    count = min(count, width)
    if width > _WIDE and count < width:
        order = np.stack([_highest(row, count) for row in rows]) if len(rows) else rows[:, :0]
    else:
        order = _descending(rows)[:, :count]
    spelling = "%f" if array.dtype.kind == "f" else "%d"
    texts = [
        ":".join([spelling % value, str(index), *labels[index : index + 1]]).encode()
        for row, indices in zip(rows, order.tolist(), strict=True)
        for index, value in zip(indices, row[indices].tolist(), strict=True)
    ]
    return Tensor(tensor.name, Datatype.BYTES, bytes_array(texts, [*lead, count]))


def _descending(rows: Array) -> Array:
    """Indices of each row's elements in descending order; equal elements keep their order."""
    # Sorting the reversed row stably and reversing the result keeps the order of equal elements.
    order = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    descending: Array = rows.shape[1] - 1 - order
    return descending


def _highest(row: Array, count: int) -> Array:
    """The first `count` indices of `_descending` for one row. NaN counts as the highest value."""
    lowest = np.partition(row, len(row) - count)[len(row) - count]
    if lowest != lowest:
        return np.flatnonzero(row != row)[:count]
    above = np.flatnonzero(~(row <= lowest))
    equal = np.flatnonzero(row == lowest)[: count - len(above)]
    chosen = np.sort(np.concatenate([above, equal]))
    highest: Array = chosen[_descending(row[chosen][None])[0]]
    return highest
