"""An inference request as the body of an HTTP request, and the body of an answer as tensors.

Bodies have the layout of `protocol/v2_json.py`, seen from the other side: JSON, and the bytes of
each binary tensor behind it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.cli.client.address import BadAnswer
from headrace.cli.client.connection import Answer
from headrace.core.call import InferResponse, Parameter
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array, Buffer, Tensor
from headrace.protocol.v2_json import (
    JSON_SIZE,
    RequestWriter,
    parse_json_size,
    read_answer,
    request_headers,
)
from headrace.workers.elements import object_array


@dataclass(frozen=True, slots=True)
class Question:
    """An inference request. Without `outputs` all are wanted; `classes` has, by output, how many
    of the best classes are wanted in place of the values.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    request_id: str = ""


def divided(question: Question, most_rows: int) -> list[Question]:
    """Questions of at most so many rows each that are this one together; 0 is for any number."""
    counts = {tensor.array.shape[:1] for tensor in question.inputs}
    if not most_rows or len(counts) != 1 or counts == {()}:
        return [question]
    [(rows,)] = counts
    return [
        replace(
            question,
            inputs=[
                Tensor(tensor.name, tensor.datatype, tensor.array[start : start + most_rows])
                for tensor in question.inputs
            ],
        )
        for start in range(0, max(rows, 1), most_rows)
    ]


def joined(replies: Sequence[InferResponse]) -> InferResponse:
    """One reply with the rows of all; raises `BadAnswer` if they do not fit together."""
    first, *others = replies
    if not others:
        return first
    outputs = []
    try:
        for place, tensor in enumerate(first.outputs):
            arrays = [reply.outputs[place].array for reply in replies]
            outputs.append(Tensor(tensor.name, tensor.datatype, np.concatenate(arrays)))
    except (IndexError, ValueError) as error:
        raise BadAnswer(f"answers to parts of a request do not fit together: {error}") from error
    return replace(first, outputs=outputs)


def encode(question: Question) -> tuple[list[Buffer], dict[str, str]]:
    """The pieces of a body, and the headers that go with it."""
    inputs = [
        (tensor.name, tensor.datatype, tensor.array.shape, [tensor.array])
        for tensor in question.inputs
    ]
    parameters = {**question.parameters, "binary_data_output": True}
    pieces, size = RequestWriter(binary=True).request(
        inputs, question.outputs, parameters, question.request_id, question.classes
    )
    return pieces, request_headers(size)


def decode(answer: Answer) -> InferResponse:
    """Read an answer; raises `BadAnswer`."""
    try:
        size = parse_json_size(answer.headers.get(JSON_SIZE), len(answer.body))
        return read_answer(answer.body, size)
    except ServerError as error:
        raise BadAnswer(f"the answer is no inference response: {error}") from error


def elements(data: Any, datatype: Datatype) -> Array:
    """JSON values, nested or not, as an array; raises `ValueError` for what does not fit."""
    try:
        given = np.array(data, object if datatype is Datatype.BYTES else None)
    except (ValueError, OverflowError):
        raise ValueError("the arrays in it differ in length") from None
    return cast(given, datatype)


def cast(given: Array, datatype: Datatype) -> Array:
    """Convert values to `datatype`; raises `ValueError` where they do not fit."""
    if datatype is Datatype.BYTES:
        texts = [_text(item) for item in given.ravel().tolist()]
        return object_array([texts], given.shape)
    wanted = NUMPY[datatype]
    if given.size == 0 or given.dtype == wanted:
        return given.astype(wanted)
    if given.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers for {datatype}")
    if datatype is Datatype.BOOL:
        if not np.isin(given, (0, 1)).all():
            raise ValueError("expected true, false, 1 or 0 for BOOL")
    elif wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if given.dtype.kind == "f" and not (given == np.floor(given)).all():
            raise ValueError(f"expected whole numbers for {datatype}")
        if given.min() < limits.min or given.max() > limits.max:
            raise ValueError(f"expected numbers from {limits.min} to {limits.max} for {datatype}")
    with np.errstate(over="ignore"):  # too large for a float is infinite
        return given.astype(wanted)


def _text(item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"expected texts for BYTES, got {json.dumps(item, default=str)}")
    return item.encode("utf-8", "surrogateescape")
