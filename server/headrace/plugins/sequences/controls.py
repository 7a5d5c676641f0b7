"""The tensors that a model is given with each request of a sequence, besides its client's inputs.

Control inputs say what the request is to its sequence; their tensors are made once, those of an id
once for each sequence. A slot without a request has READY false, and zeros.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Array, Tensor
from headrace.plugins.sequences.decisions import Id
from headrace.repository.sequence_batching import CORRELATION

LONGEST_ID = 128  # characters


class Kind(Enum):
    """The meaning of a control input, by its number in the configuration."""

    START = 0
    READY = 1
    END = 2
    CORRID = 3


@dataclass(frozen=True, slots=True)
class ControlInput:
    """A control input; `values` are those of false and true, none for an id."""

    name: str
    kind: Kind
    datatype: Datatype
    values: Sequence[int | float | bool] = ()


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A tensor that is carried from an output of the model to its input in the next request.

    Clients get it, too, if it is `shown`.
    """

    input: str
    output: str
    initial: Tensor
    shown: bool


class Controls:
    """The control inputs of a model, as tensors by name."""

    def __init__(self, model: str, controls: Sequence[ControlInput], batches: bool) -> None:
        """`batches` means that the first axis of the model's tensors counts rows."""
        self._model = model
        self._shape = (1, 1) if batches else (1,)
        self._id = next((one for one in controls if one.kind is Kind.CORRID), None)
        flags = [one for one in controls if one.kind is not Kind.CORRID]
        # By start and end.
        self._flags = {
            (start, end): self._tensors(flags, {Kind.START: start, Kind.END: end, Kind.READY: True})
            for start, end in product((False, True), repeat=2)
        }
        self.idle = self._tensors(flags, {}) | self.of_id(0)

    def flags(self, start: bool, end: bool) -> dict[str, Tensor]:
        """The tensors of a request, without that of its id."""
        return self._flags[start, end]

    def check(self, id: Id) -> None:
        """Check the id of a sequence; raises `InvalidRequest`."""
        if isinstance(id, str) and len(id) > LONGEST_ID:
            raise InvalidRequest(
                f"string correlation ID cannot be longer than {LONGEST_ID} characters in length,"
                f" got {len(id)}"
            )
        text = isinstance(id, str)
        if self._id is not None and text is not (self._id.datatype is Datatype.BYTES):
            found = "TYPE_STRING" if text else "TYPE_UINT64"
            expected = f"TYPE_{CORRELATION[self._id.datatype]}"
            raise InvalidRequest(
                f"sequence batching control '{self._id.name}' data-type is '{found}', but model"
                f" '{self._model}' expects '{expected}'"
            )

    def told(self, id: int) -> Id:
        """An id that the server has chosen, as the model is told."""
        number = id & (2**64 - 1)
        text = self._id is not None and self._id.datatype is Datatype.BYTES
        return str(number) if text else number

    def of_id(self, id: Id) -> dict[str, Tensor]:
        """The tensor of an id, if the model has an input for it; 0 stands for no sequence.

        Of an id that has more bits than the datatype, the lowest are given.
        """
        if self._id is None:
            return {}
        name, datatype = self._id.name, self._id.datatype
        array: Array
        if datatype is Datatype.BYTES:
            array = np.empty(self._shape, object)
            array.fill(id.encode() if isinstance(id, str) else b"")
        else:
            lowest = np.array(int(id) & (2**64 - 1), np.uint64)
            array = np.full(self._shape, lowest.astype(NUMPY[datatype]))
        return {name: Tensor(name, datatype, array)}

    def _tensors(
        self, flags: Sequence[ControlInput], true: Mapping[Kind, bool]
    ) -> dict[str, Tensor]:
        """The tensors of flags that are false, but for those that are `true`."""
        return {
            one.name: Tensor(
                one.name, one.datatype,
                np.full(self._shape, one.values[true.get(one.kind, False)], NUMPY[one.datatype]),
            )
            for one in flags
        }  # fmt: skip
