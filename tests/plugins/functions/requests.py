"""Requests and models for the tests of functions, without a server."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.ipc.elements import Array
from headrace.plugins.functions.adapter import FunctionModel, adapted
from headrace.plugins.functions.decorator import declared
from headrace.workers import triton_api as pb
from headrace.workers.triton_config import ModelConfig


class Request:
    """A client's request; lists of text become BYTES."""

    def __init__(self, **inputs: Any) -> None:
        self._inputs = [_tensor(name, value) for name, value in inputs.items()]
        self.id = ""
        self.given: dict[str, Any] = {}

    def inputs(self) -> Iterable[pb.Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self.id

    def parameters(self) -> str:
        return json.dumps(self.given)


def _tensor(name: str, value: Any) -> pb.Tensor:
    if isinstance(value, pb.Tensor):
        return value
    return pb.Tensor(
        name.replace("__", "."), value if isinstance(value, np.ndarray) else raw(value)
    )


def raw(texts: list[str]) -> Array:
    """Encoded text."""
    array = np.empty(len(texts), object)
    array[:] = [text.encode() for text in texts]
    return array


def started(model: object, **config: Any) -> Any:
    """A decorated function or class as the worker starts it."""
    declaration = declared(model)
    assert declaration is not None
    made: Any = adapted(declaration)()
    made.initialize({"model_config": json.dumps(completed(made, **config))})
    return made


def completed(model: FunctionModel | type[FunctionModel], **config: Any) -> dict[str, Any]:
    """The configuration that a model completes."""
    return model.auto_complete_config(ModelConfig(config)).as_dict()


def values(response: pb.InferenceResponse) -> dict[str, Any]:
    """Outputs of a response with decoded text, or its error and code."""
    if (error := response.error()) is not None:
        return {"error": (error.code(), error.message())}
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}
