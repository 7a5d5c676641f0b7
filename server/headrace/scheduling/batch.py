"""Batches: the calls that run together, their inputs, and the outcome of an execution."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.core.call import (
    Call,
    InferResponse,
    Parameter,
    Timing,
)
from headrace.core.datatypes import BY_NUMPY, NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.signature import Shape, Signature, TensorSpec, fits, reshaped
from headrace.core.tensors import Array, Tensor, TensorArray, brackets, concatenated, new_tensor

log = logging.getLogger(__name__)

_BYTES = Datatype.BYTES
_BUFFER_FROM, _BUFFER_TO = (
    256 << 10,
    256 << 20,
)  # bytes of a batch's input that is put into a `BatchBuffer`


class NotStarted(Exception):
    """A batch was given back as it was: it has not been run, and any instance may run it."""


@dataclass(slots=True)
class Part:
    """The outputs of an execution for one request alone, by name; some of them may be missing."""

    arrays: Mapping[str, TensorArray]
    parameters: dict[str, Parameter]

    def response_to(
        self, signature: Signature, version: str, call: Call, timing: Timing
    ) -> InferResponse:
        """A response to one request; raises `ExecutionFailed` if it breaks the signature.

        A decoupled model answers with as many rows as it likes, and so does one without inputs,
        since nothing says how many were asked for.
        """
        rows = call.rows if signature.inputs and not signature.decoupled else None
        outputs = [
            _output(signature, spec, self.arrays[spec.name], rows)
            for spec in signature.outputs
            if spec.name in self.arrays
        ]
        return InferResponse(call.model_name, version, call.id, outputs, timing, self.parameters)


class Deferral(Enum):
    """The reason why an execution gives a request no answer now."""

    LATER = "its responses come by themselves"
    AGAIN = "it is to be run again, alone"


class NoResponse(Exception):
    """The end of a request that brings no response."""


Answer = Part | ServerError | Deferral


class Unanswered(NamedTuple):
    """A request that a batch has brought no response, and why.

    `broken` means that what the model gave for it breaks the signature.
    """

    call: Call
    reason: ServerError | Deferral
    broken: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of an execution: arrays in the order of `Batch.outputs`, or an error; times in ns.

    `parts`, where they are there, are for each request what it gets, instead of `arrays`.
    """

    arrays: Sequence[TensorArray]
    error: Exception | None
    started: int
    gathered: int
    computed: int
    parts: Sequence[Answer] | None = None


class Batch:
    """Requests that run together. `outputs`, with `names`, are all that any of them wants.

    Once it has been computed, and `take` called, `tensors` are the outputs of all its rows, made by
    `version`. Each call gets those from its `first` row on. `texts` and `raws` are what codecs
    have made of them for all; None before, False where that could not be.
    """

    __slots__ = (
        "calls", "compute_ns", "gather_ns", "names", "outputs", "raws", "rows", "signature",
        "started", "tensors", "texts", "version",
    )  # fmt: skip

    version: str
    tensors: list[Tensor]
    started: int
    compute_ns: int
    gather_ns: int
    texts: Any
    raws: Any

    def __init__(self, signature: Signature, calls: list[Call]) -> None:
        self.signature = signature
        self.calls = calls
        self.rows = calls[0].rows if len(calls) == 1 else sum([call.rows for call in calls])
        self.outputs, self.names = signature.outputs, signature.names
        for call in calls:
            if not call.outputs:
                break
        else:
            self.outputs = _wanted(signature, calls)
            self.names = [spec.name for spec in self.outputs]

    def gather(self, buffer: "BatchBuffer | None" = None) -> dict[str, TensorArray]:
        """The inputs as the model sees them; concatenated, in `buffer`, if several."""
        signature, calls = self.signature, self.calls
        arrays: dict[str, TensorArray] = {}
        first = calls[0].inputs
        for spec in signature.inputs:
            name = spec.name
            if name not in first:
                continue  # optional and absent; the batch key makes that so for all
            if len(calls) == 1:
                array = first[name].array
            else:
                parts: list[Any] = [call.inputs[name].array for call in calls]
                if spec.datatype is _BYTES:
                    array = concatenated(parts)
                else:
                    place = buffer.place(name, parts, self.rows) if buffer is not None else None
                    array = np.concatenate(parts, out=place)
            if spec.reshape is not None:
                array = reshaped(array, spec, signature.batches, to_model=True)
            arrays[name] = array
        return arrays

    def take(self, version: str, outcome: Outcome) -> None:
        """Take what was computed: it is the `outcome` of each request that has not ended.

        Raises `ExecutionFailed` if the model broke its signature.
        """
        signature, arrays = self.signature, outcome.arrays
        if len(arrays) != len(self.outputs):
            raise ExecutionFailed(
                f"model '{signature.model}' gave {len(arrays)} outputs,"
                f" asked for {len(self.outputs)}"
            )
        rows = self.rows if signature.inputs or len(self.calls) > 1 else None
        self.tensors = tensors = []
        for spec, array in zip(self.outputs, arrays, strict=True):
            if spec.datatype is _BYTES and len(self.calls) > 1:
                array[:0]  # raises for text of a worker that cannot be taken apart
            if rows is not None and signature.batches and spec.reshape is None:
                expected: Shape = (rows, *spec.dims)
                if array.shape == expected and array.dtype == NUMPY[spec.datatype]:  # mostly
                    tensors.append(new_tensor((spec.name, spec.datatype, array)))
                    continue
            tensors.append(_output(signature, spec, array, rows))
        self.version = version
        self.texts = self.raws = None
        self.started = outcome.started
        self.compute_ns = outcome.computed - outcome.started
        self.gather_ns = outcome.gathered - outcome.started
        first = 0
        for call in self.calls:
            if not call.ended:
                call.outcome = self
                call.first = first
            first += call.rows

    def response(self, call: Call) -> InferResponse:
        """The response to one of its calls: its own outputs, as views."""
        tensors = self.tensors
        if len(self.calls) > 1:
            first, names = call.first, call.outputs
            end = first + call.rows
            tensors = [
                Tensor(name, datatype, whole[first:end])
                for name, datatype, whole in tensors
                if not names or name in names
            ]
        queue_ns = self.started - call.arrived
        timing = Timing(queue_ns, self.compute_ns, self.rows, self.gather_ns)
        return InferResponse(call.model_name, self.version, call.id, tensors, timing)

    def respond_each(
        self, version: str, parts: Sequence[Answer], outcome: Outcome
    ) -> list[Unanswered]:
        """Make the response of each request from what it gets; those without one."""
        started = outcome.started
        compute, gather = outcome.computed - started, outcome.gathered - started
        others: list[Unanswered] = []
        for call, part in zip(self.calls, parts, strict=True):
            if call.ended:
                continue
            if not isinstance(part, Part):
                others.append(Unanswered(call, part))
                continue
            timing = Timing(started - call.arrived, compute, self.rows, gather)
            try:
                call.outcome = part.response_to(self.signature, version, call, timing)
            except ExecutionFailed as error:
                others.append(Unanswered(call, error, True))
        return others

    def halves(self) -> "tuple[Batch, Batch]":
        """Two batches with the same requests; only for a batch of several."""
        middle = len(self.calls) // 2
        return (
            Batch(self.signature, self.calls[:middle]),
            Batch(self.signature, self.calls[middle:]),
        )


class BatchBuffer:
    """Memory in which an instance's batches are put together, one after the other.

    Large batches only: for small ones the allocator is as quick. What is in it is valid until the
    next batch is gathered.
    """

    def __init__(self, allocate: Callable[[int], Array | None] | None = None) -> None:
        """`allocate` gives an array of so many bytes of a better kind of memory, or None."""
        self._blocks: dict[str, Array] = {}
        self._allocate = allocate

    def place(self, name: str, parts: Sequence[Array], rows: int) -> Array | None:
        """The array for input `name` of `rows` rows; None if any memory will do."""
        first = parts[0]
        size = rows * (first.nbytes // max(len(first), 1))
        if first.dtype == object or not _BUFFER_FROM <= size <= _BUFFER_TO:
            return None
        block = self._blocks.get(name)
        if block is None or block.nbytes < size:
            block = self._blocks[name] = self._block(size)
        return block[:size].view(first.dtype).reshape(rows, *first.shape[1:])

    def clear(self) -> None:
        """Free the memory."""
        self._blocks.clear()

    def _block(self, size: int) -> Array:
        found = self._allocate(size) if self._allocate is not None else None
        return np.empty(size, np.uint8) if found is None else found


class Instance(Protocol):
    """One loaded copy of a model. It gets one batch at a time."""

    @property
    def load(self) -> int:
        """Batches that would have to end before another one could begin; the least is preferred."""

    def execute(self, batch: Batch, done: "Callable[[Instance, Batch, Outcome], None]") -> None:
        """Run `batch` and call `done` exactly once, on the event-loop thread.

        That may be before this returns. Must not raise.
        """

    def close(self) -> None:
        """Give the model's resources back; no batch is under way."""


def _wanted(signature: Signature, calls: list[Call]) -> tuple[TensorSpec, ...]:
    wanted: set[str] = set()
    for call in calls:
        wanted.update(call.outputs)
    return tuple(spec for spec in signature.outputs if spec.name in wanted)


def _output(signature: Signature, spec: TensorSpec, array: TensorArray, rows: int | None) -> Tensor:
    """A model's output as a tensor; of any number of rows for None.

    One that does not fit its declaration is passed on unless the signature is strict.
    """
    if rows is None and signature.batches and array.ndim:
        rows = array.shape[0]
    expected = (rows, *spec.dims) if signature.batches else spec.dims
    if spec.reshape is None and array.shape == expected and array.dtype == NUMPY[spec.datatype]:
        return new_tensor((spec.name, spec.datatype, array))  # as nearly always
    shape = array.shape
    if signature.batches and shape[:1] != (rows,):
        raise ExecutionFailed(
            f"model '{signature.model}' gave output '{spec.name}' of shape {brackets(shape)}"
            f" for a batch of {rows} rows; axis 0 must be the number of rows"
        )
    own = shape[1:] if signature.batches else shape
    problem = ""
    if fits(own, spec.dims if spec.reshape is None else spec.reshape):
        array = reshaped(array, spec, signature.batches, to_model=False)
    else:
        problem = f"of shape {brackets(shape)}, its configuration says"
        problem += f" {brackets(signature.wire_shape(spec))}"
    datatype = BY_NUMPY.get(array.dtype)
    if datatype is not spec.datatype:
        problem = f"as {array.dtype}, its configuration says {spec.datatype}"
    if not problem:
        return Tensor(spec.name, spec.datatype, array)
    problem = f"model '{signature.model}' gave output '{spec.name}' {problem}"
    if signature.strict_outputs or datatype is None:
        raise ExecutionFailed(problem)
    if signature.differs(spec.name):
        log.warning(
            "%s; clients get it as it is, unless parameters['strict_outputs'] is 'true'", problem,
            extra={"model": signature.model},
        )  # fmt: skip
    return Tensor(spec.name, datatype, array)
