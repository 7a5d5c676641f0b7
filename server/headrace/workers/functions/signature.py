"""A function's signature: what of it are tensors, and how requests become calls.

There are four ways to call a function. ROW: once for each row, with single values. BATCH: once for
the rows of all requests of a batch, behind one another. REQUEST: once for each request, with all
that it holds. STREAM: likewise, and whatever the function yields is a response.
"""

from dataclasses import dataclass
from enum import Enum

from headrace.workers.functions.annotations import Declared, Dim, Element


class Mode(Enum):
    """How requests become calls."""

    ROW = "row"
    BATCH = "batch"
    REQUEST = "request"
    STREAM = "stream"


class Packing(Enum):
    """How a function gives several outputs."""

    ONE = "one"
    TUPLE = "tuple"
    FIELDS = "fields"
    KEYS = "keys"


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor on the wire; `dims` without the rows, where the model batches."""

    name: str
    element: Element
    dims: tuple[Dim, ...]
    optional: bool = False

    @property
    def shape(self) -> list[int]:
        """The dimensions as a configuration declares them."""
        return [dim.size for dim in self.dims]


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter or an output of the function, and the tensors that it is on the wire.

    An optional one that has no default is None where it is missing.
    """

    name: str
    declared: Declared
    optional: bool = False
    defaulted: bool = False
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """All that is known of a function. `max_batch_size` 0 means that requests are not batched."""

    name: str
    mode: Mode
    max_batch_size: int
    asynchronous: bool
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    packing: Packing
    context: str = ""  # the parameter that is told of requests, if there is one

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The tensors of a request."""
        return tuple(port for value in self.parameters for port in value.ports)

    @property
    def results(self) -> tuple[Port, ...]:
        """The tensors of a response."""
        return tuple(port for value in self.outputs for port in value.ports)


@dataclass(frozen=True, slots=True)
class Options:
    """What the decorator was given; None where nothing."""

    max_batch_size: int | None = None
    outputs: tuple[str, ...] | None = None
    per_row: bool | None = None
