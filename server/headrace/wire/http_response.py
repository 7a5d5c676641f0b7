"""An `InferResponse` to the body of an HTTP response.

Arrays are written by orjson and put into the answer as ready fragments.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import orjson

from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Buffer, raw_bytes
from headrace.wire.elements import json_pieces
from headrace.wire.parameters import json_parameters


@dataclass(slots=True)
class ResponseForm:
    """Which outputs are to be binary: `named` ones as each asked, all others by `binary`."""

    binary: bool = False
    named: dict[str, bool] = field(default_factory=dict)

    def encode(self, response: InferResponse) -> tuple[list[Buffer], int | None]:
        """The body as buffers, and the size of the JSON in front if binary tensors follow it.

        Raises `InvalidRequest` where an output has no JSON form.
        """
        parts = [b"{"]
        if response.id:
            parts += (b'"id":', orjson.dumps(response.id), b",")
        parts.append(model_text(response.model_name, response.model_version))
        if response.parameters:
            parts += (b'"parameters":', json_parameters(response.parameters), b",")
        parts.append(b'"outputs":[')
        buffers: list[Buffer] = [b""]
        for tensor in response.outputs:
            array = tensor.array
            if self.named.get(tensor.name, self.binary):
                raw = raw_bytes(array)
                parts += (
                    tensor_text(tensor.name, tensor.datatype, array.shape),
                    b'"parameters":{"binary_data_size":%d}},' % len(raw),
                )
                if raw:
                    buffers.append(raw)
            else:
                parts += (
                    tensor_text(tensor.name, tensor.datatype, array.shape),
                    b'"data":',
                    *json_pieces(tensor),
                    b"},",
                )
        if response.outputs:
            parts[-1] = parts[-1][:-1]  # no comma behind the last
        parts.append(b"]}")
        buffers[0] = text = b"".join(parts)
        return buffers, len(text) if len(buffers) > 1 else None


@dataclass(slots=True)
class SharedForm(ResponseForm):
    """A form of which some outputs, `shared`, are in shared memory: they come without data."""

    shared: frozenset[str] = frozenset()

    def encode(self, response: InferResponse) -> tuple[list[Buffer], int | None]:
        """As `ResponseForm.encode`, with the outputs in shared memory behind the others."""
        here = [tensor for tensor in response.outputs if tensor.name not in self.shared]
        # Not by `super`, which does not know its class in one that was made again for its slots.
        buffers, size = ResponseForm.encode(self, replace(response, outputs=here))
        texts = [
            tensor_text(tensor.name, tensor.datatype, tensor.array.shape)[:-1] + b"}"
            for tensor in response.outputs
            if tensor.name in self.shared
        ]
        comma = b"," if here and texts else b""
        buffers[0] = text = b"".join([buffers[0][:-2], comma, b",".join(texts), b"]}"])
        return buffers, None if size is None else len(text)


@lru_cache(1024)
def model_text(model: str, version: str) -> bytes:
    """The members of a response that name its model."""
    return orjson.dumps({"model_name": model, "model_version": version})[1:-1] + b","


@lru_cache(4096)
def tensor_text(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    """The beginning of an output, up to its data or parameters."""
    return orjson.dumps({"name": name, "datatype": datatype, "shape": shape})[:-1] + b","
