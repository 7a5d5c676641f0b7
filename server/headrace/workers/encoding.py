"""Tensors and responses as the JSON and the data of frames."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

from headrace.workers.elements import Buffer, raw, view
from headrace.workers.frames import offsets
from headrace.workers.triton_responses import InferenceResponse, TritonError
from headrace.workers.triton_tensors import Tensor, received

Told = dict[str, Any]
_TEXT = 64 << 10  # characters of a model's own error


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
    response: InferenceResponse,
    wanted: Sequence[str],
    declared: Container[str],
    blocks: list[list[Buffer]],
) -> Told:
    """A response; what nobody has asked for is left out.

    An output that is not `declared`, in place of one that is wanted, is an error: its name is
    misspelt.
    """
    error = response.error()
    if error is not None:
        return {"error": [error.code(), error.message()[:_TEXT]]}
    given = [tensor._name for tensor in response.output_tensors()]
    unknown = [name for name in given if name not in declared]
    missing = [name for name in wanted if name not in given]
    if unknown and missing:
        text = f"the model gave output '{unknown[0]}', which its configuration does not have"
        return {"error": [TritonError.INTERNAL, f"{text}, and no output '{missing[0]}'"]}
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
    response = InferenceResponse(tensors)
    response._parameters = told["parameters"]  # unchecked: other models may give any
    return response
