"""Division of requests with more rows than a model takes, and joining of the responses."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.client import AnswerError
from headrace.client.transport import InferRequest
from headrace.core.call import InferResponse
from headrace.core.tensors import Tensor

PARTS_AT_ONCE = 4  # requests in flight
_SEQUENCE = "sequence_id"  # parameter of requests whose number and order have a meaning


def divided(request: InferRequest, most_rows: int) -> list[InferRequest]:
    """Divide a request into requests of at most `most_rows` rows; 0: no limit."""
    counts = {tensor.array.shape[:1] for tensor in request.inputs}
    if not most_rows or len(counts) != 1 or counts == {()} or request.parameters.get(_SEQUENCE):
        return [request]
    [(rows,)] = counts
    return [
        replace(
            request,
            inputs=[
                Tensor(tensor.name, tensor.datatype, tensor.array[start : start + most_rows])
                for tensor in request.inputs
            ],
        )
        for start in range(0, max(rows, 1), most_rows)
    ]


def joined(replies: Sequence[InferResponse]) -> InferResponse:
    """Concatenate the rows of responses; raises `AnswerError` if they do not match."""
    first, *others = replies
    if not others:
        return first
    outputs = []
    try:
        for place, tensor in enumerate(first.outputs):
            arrays = [reply.outputs[place].array for reply in replies]
            outputs.append(Tensor(tensor.name, tensor.datatype, np.concatenate(arrays)))
    except (IndexError, ValueError) as error:
        raise AnswerError(f"answers to parts of a request do not fit together: {error}") from error
    return replace(first, outputs=outputs)
