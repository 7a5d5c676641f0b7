"""Batches: the calls that run together, their inputs, and their outcome."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.core.call import (
    Call,
    InferResponse,
    Parameter,
    Timing,
    new_timing,
)
from headrace.core.datatypes import BY_NUMPY, NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.ragged import divided, flattened, scattered
from headrace.core.signature import Shape, Signature, TensorSpec, fits, reshaped
from headrace.core.tensors import Array, Tensor, TensorArray, brackets, concatenated, new_tensor
from headrace.observability.statistics import Closed

log = logging.getLogger(__name__)

_BYTES = Datatype.BYTES
_BUFFER_FROM, _BUFFER_TO = (
    256 << 10,
    256 << 20,
)  # bytes of a batch's input from which on a `BatchBuffer` is used


class NotStarted(Exception):
    """The batch was returned without being run; any instance may run it.

    Only instances and transports that know this raise it, never a model. With a `refusal`, running
    it on this backend is pointless for now: another backend may, or its requests fail with that.
    """

    def __init__(self, refusal: ServerError | None = None) -> None:
        super().__init__(*(() if refusal is None else (str(refusal),)))
        self.refusal = refusal


@dataclass(slots=True)
class Part:
    """The outputs of an execution for one request, by name; some may be missing."""

    arrays: Mapping[str, TensorArray]
    parameters: dict[str, Parameter]

    def response_to(
        self, signature: Signature, version: str, call: Call, timing: Timing
    ) -> InferResponse:
        """The response to one request; raises `ExecutionFailed` if it breaks the signature.

        A decoupled model may answer with any number of rows, and so may one without inputs, since
        no input determines the number.
        """
        free = signature.decoupled or signature.any_rows or not signature.inputs
        rows = None if free else call.rows
        outputs = [
            _output(signature, spec, self.arrays[spec.name], rows)
            for spec in signature.outputs
            if spec.name in self.arrays
        ]
        return InferResponse(call.model_name, version, call.id, outputs, timing, self.parameters)


class Deferral(Enum):
    """The reason why an execution gives a request no response now."""

    LATER = "its responses come by themselves"
    AGAIN = "it is to be run again, alone"


class NoResponse(Exception):
    """The end of a request without a response."""


Answer = Part | ServerError | Deferral


class Unanswered(NamedTuple):
    """A request without a response from its batch, and the reason.

    `broken` means that the model's output for it breaks the signature.
    """

    call: Call
    reason: ServerError | Deferral
    broken: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of an execution: arrays in the order of `Batch.outputs`, or an error; times in ns.

    `parts`, if set, are the outputs for each request, instead of `arrays`. `rows`, if set, are all
    that were executed: those of empty slots, too.
    """

    arrays: Sequence[TensorArray]
    error: Exception | None
    started: int
    gathered: int
    computed: int
    parts: Sequence[Answer] | None = None
    rows: int = 0


class Aimed(NamedTuple):
    """The batch key of a call for one target; see `Scheduler.submit`."""

    target: object
    key: object


class Batch:
    """Requests that run together. `outputs`, with `names`, are all that any of them requests.

    After the execution and `take`, `tensors` are the outputs of all rows, computed by `version`;
    each call gets those from its `first` row on. `encoded` is as in `Computed`. `again` is true
    if its calls have run before. From `free` on, in nanoseconds, an instance could have run it.
    `closed` is the reason why it has no further calls, None if it was not formed from a queue.
    """

    __slots__ = (
        "again", "calls", "closed", "compute_ns", "encoded", "free", "gather_ns", "names",
        "outputs", "rows", "signature", "started", "tensors", "version",
    )  # fmt: skip

    version: str
    tensors: list[Tensor]
    started: int
    compute_ns: int
    gather_ns: int
    encoded: dict[object, Any]

    def __init__(
        self,
        signature: Signature,
        calls: list[Call],
        again: bool = False,
        free: int = 0,
        closed: Closed | None = None,
    ) -> None:
        self.signature = signature
        self.calls = calls
        self.again = again
        self.free = free
        self.closed = closed
        self.rows = calls[0].rows if len(calls) == 1 else sum([call.rows for call in calls])
        self.outputs, self.names = signature.outputs, signature.names
        for call in calls:
            if not call.outputs:
                break
        else:
            self.outputs = _wanted(signature, calls)
            self.names = [spec.name for spec in self.outputs]

    @property
    def target(self) -> object:
        """The target that its instance has to serve; None if any instance may run it."""
        key = self.calls[0].key
        return key.target if type(key) is Aimed else None

    def gather(self, buffer: "BatchBuffer | None" = None) -> dict[str, TensorArray]:
        """The inputs as the model sees them; concatenated, in `buffer`, if there are several."""
        signature, calls = self.signature, self.calls
        arrays: dict[str, TensorArray] = {}
        first, ragged = calls[0].inputs, signature.ragged
        for spec in signature.inputs:
            name = spec.name
            if name not in first:
                continue  # optional and absent, for all requests due to the batch key
            if ragged is not None and name in ragged.inputs:
                arrays[name] = flattened([call.inputs[name].array for call in calls])
                continue
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
        if ragged is not None:
            arrays |= ragged.computed_from(self._shapes())
        return arrays

    def scattered(self, arrays: Sequence[TensorArray]) -> list[Part] | None:
        """The outputs by request, if some are cut by the shapes of inputs; None without such ones.

        Raises `ExecutionFailed` for an output of another size.
        """
        signature = self.signature
        if signature.ragged is None or not signature.ragged.scattered:
            return None
        sources, shapes = signature.ragged.scattered, self._shapes()
        parts: list[dict[str, TensorArray]] = [{} for _ in self.calls]
        for spec, array in zip(self.outputs, arrays, strict=True):
            problem = ""
            if spec.name in sources:
                told = [each[sources[spec.name]] for each in shapes]
                pieces = scattered(array, spec.dims, told)
                if isinstance(pieces, str):
                    problem, pieces = pieces, ()
            elif array.shape[:1] != (self.rows,):
                problem, pieces = f"of shape {brackets(array.shape)}, for {self.rows} rows", ()
            else:
                pieces = divided(array, [call.rows for call in self.calls])
            if problem:
                raise ExecutionFailed(
                    f"model '{signature.model}' gave output '{spec.name}' {problem}"
                )
            for call, part, piece in zip(self.calls, parts, pieces, strict=True):
                if not call.outputs or spec.name in call.outputs:
                    part[spec.name] = piece
        return [Part(part, {}) for part in parts]

    def _shapes(self) -> list[dict[str, Shape]]:
        """The shapes of inputs by name, of each request."""
        return [{n: t.array.shape for n, t in call.inputs.items()} for call in self.calls]

    def take(self, version: str, outcome: Outcome) -> None:
        """Store the outcome; it becomes the `outcome` of each request that has not ended.

        Raises `ExecutionFailed` if the model broke its signature.
        """
        signature, arrays = self.signature, outcome.arrays
        if len(arrays) != len(self.outputs):
            raise ExecutionFailed(
                f"model '{signature.model}' gave {len(arrays)} outputs,"
                f" asked for {len(self.outputs)}"
            )
        free = signature.any_rows or not signature.inputs
        rows = None if free and len(self.calls) == 1 else self.rows
        self.tensors = tensors = []
        for spec, array in zip(self.outputs, arrays, strict=True):
            if spec.datatype is _BYTES and len(self.calls) > 1:
                array[:0]  # raises for malformed BYTES of a worker
            if rows is not None and signature.batches and spec.reshape is None:
                expected: Shape = (rows, *spec.dims)
                if array.shape == expected and array.dtype == NUMPY[spec.datatype]:  # mostly
                    tensors.append(new_tensor((spec.name, spec.datatype, array)))
                    continue
            tensors.append(_output(signature, spec, array, rows))
        self.version = version
        self.encoded = {}
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
        """The response to one of the calls: its rows of the outputs, as views."""
        tensors = self.tensors
        if len(self.calls) > 1:
            first, names = call.first, call.outputs
            end = first + call.rows
            tensors = []
            for name, datatype, whole in self.tensors:
                if not names or name in names:
                    tensors.append(new_tensor((name, datatype, whole[first:end])))
        queue_ns = self.started - call.arrived
        timing = new_timing((queue_ns, self.compute_ns, self.rows, self.gather_ns))
        return InferResponse(call.model_name, self.version, call.id, tensors, timing, {})

    def respond_each(
        self, version: str, parts: Sequence[Answer], outcome: Outcome
    ) -> list[Unanswered]:
        """Make each request's response from its part; returns the requests without one."""
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
            Batch(self.signature, self.calls[:middle], again=True),
            Batch(self.signature, self.calls[middle:], again=True),
        )


class BatchBuffer:
    """Reused memory in which an instance's batches are assembled.

    For large batches only: for small ones the allocator is as fast. The content is valid until the
    next batch is gathered.
    """

    def __init__(self, allocate: Callable[[int], Array | None] | None = None) -> None:
        """`allocate` returns an array of a preferred kind of memory, or None."""
        self._blocks: dict[str, Array] = {}
        self._allocate = allocate

    def place(self, name: str, parts: Sequence[Array], rows: int) -> Array | None:
        """The array for input `name` of `rows` rows; None if ordinary memory will do."""
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
    """One loaded instance of a model. It runs one batch at a time."""

    @property
    def load(self) -> int:
        """Batches that must end before another one can begin; the lowest is preferred."""

    def execute(self, batch: Batch, done: "Callable[[Instance, Batch, Outcome], None]") -> None:
        """Run `batch` and call `done` exactly once, on the event-loop thread.

        That may be before this returns. Must not raise.
        """

    def serves(self, target: object) -> bool:
        """True if it may run the calls for `target`."""

    def close(self) -> None:
        """Release the model's resources; no batch is in progress."""


@runtime_checkable
class NamedInstance(Instance, Protocol):
    """An instance of an instance group; several of one name never stand for different ones."""

    @property
    def name(self) -> str:
        """The name of the instance, unique in its version."""


def _wanted(signature: Signature, calls: list[Call]) -> tuple[TensorSpec, ...]:
    wanted: set[str] = set()
    for call in calls:
        wanted.update(call.outputs)
    return tuple(spec for spec in signature.outputs if spec.name in wanted)


def _output(signature: Signature, spec: TensorSpec, array: TensorArray, rows: int | None) -> Tensor:
    """A model's output as a tensor; any number of rows if `rows` is None.

    One that does not fit its declaration is passed on unless the signature is strict.
    """
    if rows is None and signature.batches and array.ndim:
        rows = array.shape[0]
    expected = (rows, *spec.dims) if signature.batches else spec.dims
    if spec.reshape is None and array.shape == expected and array.dtype == NUMPY[spec.datatype]:
        return new_tensor((spec.name, spec.datatype, array))  # as nearly always
    shape = array.shape
    if signature.batches and rows is not None and shape[:1] != (rows,):
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
