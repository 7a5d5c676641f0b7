"""Tensors and responses as the JSON and the data of frames."""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.workers.elements import Buffer, raw, view
from headrace.workers.frames import offsets
from headrace.workers.triton_responses import InferenceResponse, TritonError
from headrace.workers.triton_tensors import Tensor, received

Told = dict[str, Any]


def tell_tensors(
    tensors: Iterable[Tensor], blocks: list[list[Buffer]]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, datatypes and shapes; their data are added to `blocks`."""
    told = []
    for tensor in tensors:
        array, datatype = tensor._array, tensor._datatype
        told.append((tensor._name, datatype, array.shape))
        blocks.append([raw(array, datatype)])
    return told


def read_tensors(
    told: Iterable[Sequence[Any]], sizes: Sequence[int], data: Buffer, size: int
) -> list[Tensor]:
    """The tensors in `size` bytes of `data`; raises what nonsense raises."""
    starts = offsets(sizes, size)
    return [
        received(name, datatype, view(datatype, shape, data, start, nbytes))
        for (name, datatype, shape), start, nbytes in zip(told, starts, sizes, strict=True)
    ]


def tell_response(
    response: InferenceResponse, wanted: Sequence[str], blocks: list[list[Buffer]]
) -> Told:
    """A response; what nobody has asked for is left out."""
    error = response.error()
    if error is not None:
        return {"error": [error.code(), error.message()]}
    outputs = [tensor for tensor in response.output_tensors() if tensor._name in wanted]
    return {
        "outputs": tell_tensors(outputs, blocks),
        "parameters": response.parameter_values(),
    }


def read_response(told: Told, sizes: Sequence[int], data: Buffer, size: int) -> InferenceResponse:
    """A response of another model; raises what nonsense raises."""
    if "error" in told:
        code, text = told["error"]
        return InferenceResponse(error=TritonError(text, code))
    tensors = read_tensors(told["outputs"], sizes, data, size)
    return InferenceResponse(tensors, parameters=told["parameters"])
