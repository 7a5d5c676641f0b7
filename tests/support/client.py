"""A common interface of clients for every transport, so that a test is written once.

Its methods are the protocol's operations, with answers as values independent of the transport:
documents as messages of `headrace.protocol.pb`, tensors as numpy arrays, refusals as the error
class of the server's status.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from headrace.core.datatypes import BY_NUMPY, NUMPY, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array
from headrace.protocol.pb.grpc_service_pb2 import (
    ModelMetadataResponse,
    ModelStatistics,
    RepositoryIndexResponse,
    ServerMetadataResponse,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.status import STATUS

Parameter = str | int | float | bool
Inputs = Mapping[str, Array] | Sequence["Input"]


@dataclass(frozen=True)
class Input:
    """A sent input; datatype and shape are the array's own by default."""

    name: str
    array: Array
    datatype: str = ""
    shape: Sequence[int] | None = None

    @property
    def sent_datatype(self) -> str:
        """Datatype in the request."""
        return self.datatype or BY_NUMPY[self.array.dtype].value

    @property
    def sent_shape(self) -> list[int]:
        """Shape in the request."""
        return list(self.array.shape if self.shape is None else self.shape)


@dataclass(frozen=True)
class Output:
    """A requested output; `classes` 0 requests the tensor itself."""

    name: str
    classes: int = 0


@dataclass(frozen=True)
class Answer:
    """An inference response."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Any]
    outputs: dict[str, Array]
    datatypes: dict[str, str]
    server_timing: str = field(default="", compare=False)

    def __getitem__(self, output: str) -> Array:
        return self.outputs[output]


class Client(ABC):
    """Client of the protocol, over any transport; methods raise the server's `ServerError`.

    Safe to use from several threads.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def carries(self, datatype: Datatype) -> bool:
        """True if this client's form of tensors supports `datatype`."""

    @property
    def carries_bytes(self) -> bool:
        """True if elements of BYTES may be any bytes, not only text."""
        return self.carries(Datatype.FP16)

    @abstractmethod
    def live(self) -> bool:
        """Liveness of the server."""

    @abstractmethod
    def ready(self) -> bool:
        """Readiness of the server."""

    @abstractmethod
    def model_ready(self, name: str, version: str = "") -> bool:
        """Readiness of a model."""

    @abstractmethod
    def server_metadata(self) -> ServerMetadataResponse:
        """Name, version and extensions of the server."""

    @abstractmethod
    def model_metadata(self, name: str, version: str = "") -> ModelMetadataResponse:
        """Inputs and outputs of a model."""

    @abstractmethod
    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """A model's completed configuration."""

    @abstractmethod
    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters of one version, of all versions of a model, or of all models."""

    @abstractmethod
    def index(self, ready: bool = False) -> RepositoryIndexResponse:
        """The models of the repositories."""

    @abstractmethod
    def load(
        self,
        name: str,
        repository: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a model, with overrides."""

    @abstractmethod
    def unload(self, name: str, repository: str = "", dependents: bool = False) -> None:
        """Unload a model."""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        outputs: Sequence[str] = (),
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        classes: Mapping[str, int] | None = None,
    ) -> Answer:
        """Run `model`; empty `outputs` requests all, `classes` the highest of some outputs."""
        given = (
            [Input(name, array) for name, array in inputs.items()]
            if isinstance(inputs, Mapping)
            else inputs
        )
        wanted = [Output(name, (classes or {}).get(name, 0)) for name in outputs]
        wanted += [Output(name, k) for name, k in (classes or {}).items() if name not in outputs]
        return self.send_infer(model, given, wanted, version, id, dict(parameters or {}))

    @abstractmethod
    def send_infer(
        self,
        model: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        version: str,
        id: str,
        parameters: dict[str, Parameter],
    ) -> Answer:
        """`infer` with its arguments in their plainest form."""


def error_by_http(status: int, text: str) -> ServerError:
    """The most general error with this HTTP status."""
    return next(cls for cls, row in STATUS.items() if row.http == status)(text)


def error_by_grpc(code: int, text: str) -> ServerError:
    """The most general error with this gRPC status."""
    return next(cls for cls, row in STATUS.items() if row.grpc == code)(text)


def spent_by(timing: str) -> tuple[int, int, int] | None:
    """Queue and compute nanoseconds, and rows, of a `Server-Timing`."""
    if not timing:
        return None
    queue, compute, rows = [item.rpartition("=")[2] for item in timing.split(", ")]
    return round(float(queue) * 1e6), round(float(compute) * 1e6), int(rows.strip('"'))


def to_raw(array: Array, datatype: str) -> bytes:
    """Elements of `array` in the protocol's binary form."""
    if datatype == "BYTES":
        return b"".join(len(e).to_bytes(4, "little") + e for e in array.ravel().tolist())
    return array.tobytes()


def from_raw(raw: bytes, datatype: str, shape: Sequence[int]) -> Array:
    """The array with the binary form `raw`."""
    if datatype != "BYTES":
        return np.frombuffer(raw, NUMPY[Datatype(datatype)]).reshape(shape)
    elements: list[bytes] = []
    while raw:
        end = 4 + int.from_bytes(raw[:4], "little")
        elements.append(raw[4:end])
        raw = raw[end:]
    return strings(elements, shape)


def strings(elements: Sequence[bytes], shape: Sequence[int] | None = None) -> Array:
    """A BYTES array; flat unless a shape is given."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array if shape is None else array.reshape(shape)
