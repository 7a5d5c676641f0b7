"""An inference request as transports send it, and its result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.client.errors import ClientError
from headrace.core.call import InferResponse, Parameter
from headrace.core.tensors import Array, Tensor


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request; an empty `version` is the server's choice.

    Without `outputs` all are wanted; `classes` has, by output, how many of the best classes are
    wanted in place of the values.
    """

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    id: str = ""
    version: str = ""


class Result(Mapping[str, Array]):
    """One response: its outputs by name, as arrays of numpy; those of BYTES hold `bytes`.

    Arrays are views into what was received, and cannot be written to.
    """

    def __init__(self, response: InferResponse) -> None:
        self.model = response.model_name
        self.version = response.model_version
        self.id = response.id
        self.parameters = response.parameters
        self.response = response  # as the protocol has it, with datatypes
        self._arrays = {tensor.name: tensor.array for tensor in response.outputs}

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def array(self) -> Array:
        """The only output; raises `ClientError` if there are others."""
        if len(self._arrays) != 1:
            names = ", ".join(self._arrays) or "none"
            raise ClientError(f"model '{self.model}' has not just one output: {names}")
        return self[next(iter(self._arrays))]

    def texts(self, name: str = "") -> Any:
        """An output of BYTES as `str`, in lists as its shape says; without a name the only one."""
        array = self[name] if name else self.array
        return np.asarray(np.frompyfunc(_decoded, 1, 1)(array), object).tolist()

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{t.name}: {t.datatype} {list(t.array.shape)}" for t in self.response.outputs
        )
        return f"<Result of {self.model} version {self.version}: {shown}>"


def _decoded(item: bytes) -> str:
    return item.decode("utf-8", "surrogateescape")
