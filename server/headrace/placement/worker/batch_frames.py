"""Batches as frames, and what a worker sends back as outcomes: no process, no I/O."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from headrace.core.bytes_array import COPIED, BytesArray
from headrace.core.call import Call
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    ServerError,
    Unavailable,
    Unknown,
    Unsupported,
)
from headrace.core.signature import Signature, reshaped
from headrace.core.tensors import Array, Tensor, TensorArray, raw_bytes
from headrace.observability.trace_settings import TRACE_PARAMETER
from headrace.scheduling.batch import Answer, Batch, Deferral, Outcome, Part
from headrace.workers.elements import Buffer, walk
from headrace.workers.frames import (
    TIMES,
    BrokenFrame,
    lay_out,
    offsets,
    pack_batch,
    unpack_sizes,
    unpack_times,
)

_FORMS = 1000  # that are remembered
# Bytes of BYTES up to which they are walked through, in a millisecond or two. Of more, a worker is
# believed that each has its length: whoever takes rows or elements of them walks, and fails then.
_WALKED = 1 << 20
# By the codes of `TritonError`.
ERRORS: Sequence[type[ServerError]] = (
    Unknown, ExecutionFailed, NotFound, InvalidRequest, Unavailable, Unsupported, AlreadyExists,
    Cancelled,
)  # fmt: skip


class _Plan(NamedTuple):
    """Batches alike in form: the number of the form, and their inputs."""

    form: int
    inputs: list[str]


class _Place(NamedTuple):
    """Where an output is in the data of a result; `dtype` is None for BYTES."""

    datatype: Datatype
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _place(datatype: Datatype, shape: tuple[int, ...], start: int, nbytes: int) -> _Place:
    if datatype is Datatype.BYTES:
        return _Place(datatype, None, shape, start, nbytes)
    dtype = NUMPY[datatype]
    _check_size(datatype, shape, math.prod(shape) * dtype.itemsize, nbytes)
    return _Place(datatype, dtype, shape, start, nbytes)


class BatchFrames:
    """The frames of one worker: it knows what the two have told one another."""

    def __init__(self, signature: Signature, tell: Callable[[bytes], None]) -> None:
        """`tell` sends the worker a form, as JSON."""
        self._signature = signature
        self._tell = tell
        self._names = [spec.name for spec in signature.inputs]
        self._plans: dict[object, _Plan] = {}
        self._usual: _Plan | None = None  # of a signature that allows one alone, for all outputs
        self._next = 0
        self._results: dict[int, list[tuple[str, Datatype, tuple[int, ...]]]] = {}
        self._places: dict[object, list[_Place]] = {}

    def learn(self, document: dict[str, Any]) -> None:
        """Remember the form of a worker's results; raises what nonsense raises."""
        if len(self._results) > _FORMS:
            raise BrokenFrame("too many forms")
        self._results[int(document["number"])] = [
            (str(name), BY_NAME[datatype], tuple(shape))
            for name, datatype, shape in document["outputs"]
        ]

    def pack(self, batch: Batch, number: int) -> tuple[bytes, Sequence[Buffer], int]:
        """The meta of a batch, its data in pieces, and the size of all of these.

        Its requests get the numbers from `number` on.
        """
        calls = batch.calls
        plan = self._usual
        if plan is None or batch.outputs is not self._signature.outputs:
            plan = self._plan(batch, calls[0].inputs)
        sizes, pieces, total = lay_out(
            [[raw_bytes(call.inputs[name].array) for call in calls] for name in plan.inputs]
        )
        rows: list[int] = []
        ids: list[str] = []
        extras: dict[int, dict[str, object]] = {}  # what is special about requests, by their index
        for index, call in enumerate(calls):
            rows.append(call.rows)
            if call.id:
                ids = ids or [other.id for other in calls]
            if call.parameters or call.outputs or call.priority or call.timeout or call.sequence_id:
                extras[index] = special_of(call)
        told = json.dumps(extras).encode() if extras else b""
        return pack_batch(number, plan.form, rows, sizes, ids, told), pieces, total

    def _plan(self, batch: Batch, inputs: Mapping[str, Tensor]) -> "_Plan":
        """The plan of batches of this kind; a new one's form is sent to the worker."""
        signature = self._signature
        lead = 1 if signature.batches else 0
        # Row shapes say which of the inputs are there, too: those that are optional may not be.
        key = (
            batch.outputs if batch.outputs is not signature.outputs else None,
            *[inputs[n].array.shape[lead:] if n in inputs else None for n in self._names],
        )
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        heads: list[tuple[str, Datatype, tuple[int, ...]]] = []
        for spec in signature.inputs:
            if spec.name in inputs:  # or not: the batch key makes that so for all
                array = reshaped(inputs[spec.name].array, spec, signature.batches, to_model=True)
                heads.append((spec.name, spec.datatype, array.shape[lead:]))
        if len(self._plans) >= _FORMS:
            self._plans.clear()
            self._usual = None
        self._next += 1  # never one that a batch on its way may bear
        form = self._next
        document = {
            "number": form, "inputs": heads, "outputs": [spec.name for spec in batch.outputs],
            "batches": signature.batches,
        }  # fmt: skip
        self._tell(json.dumps(document).encode())
        plan = self._plans[key] = _Plan(form, [name for name, _, _ in heads])
        if signature.uniform and batch.outputs is signature.outputs:
            self._usual = plan
        return plan

    def result(self, sent: int, batch: Batch, meta: bytes, data: Buffer, size: int) -> Outcome:
        """The outcome of a batch whose responses are alike; raises what nonsense raises."""
        key = meta[TIMES:], size, batch.rows
        usual = batch.outputs is self._signature.outputs
        places = self._places.get(key) if usual else None
        if places is None:
            places = self._places_of(batch, meta, size)
            if usual:
                if len(self._places) >= _FORMS:
                    self._places.clear()
                self._places[key] = places
        arrays: list[TensorArray] = []
        for datatype, dtype, shape, start, nbytes in places:
            if dtype is None:
                arrays.append(read_array(datatype, shape, data, start, nbytes))
            else:
                arrays.append(np.ndarray(shape, dtype, data, start))
        began, ended = unpack_times(meta)
        if not sent <= began <= ended <= monotonic_ns():
            began, ended = _possible(sent, began, ended)
        return Outcome(arrays, None, began, began, ended)

    def _places_of(self, batch: Batch, meta: bytes, size: int) -> list[_Place]:
        """Where the outputs of a result are; raises what nonsense raises."""
        number, sizes = unpack_sizes(meta)
        heads = self._results[number]
        if [name for name, _, _ in heads] != [spec.name for spec in batch.outputs]:
            raise BrokenFrame("outputs that were not asked for")
        lead = (batch.rows,) if self._signature.batches else ()
        return [
            _place(datatype, lead + shape, start, nbytes)
            for (_, datatype, shape), start, nbytes in zip(
                heads, offsets(sizes, size), sizes, strict=True
            )
        ]

    def responses(
        self, sent: int, batch: Batch, document: dict[str, Any], data: Buffer, size: int
    ) -> Outcome:
        """The outcome of a batch whose responses differ; raises what nonsense raises."""
        places = _places(document["sizes"], size)
        parts = [_answer(told, places, data) for told in document["responses"]]
        if len(parts) != len(batch.calls):
            raise BrokenFrame("a wrong number of responses")
        began, ended = _possible(sent, document["began"], document["ended"])
        return Outcome((), None, began, began, ended, parts)


def one_answer(document: dict[str, Any], data: Buffer, size: int) -> Part | ServerError:
    """A response to one request that has come by itself; raises what nonsense raises."""
    answer = _answer(document["response"], _places(document["sizes"], size), data)
    if isinstance(answer, Deferral):
        raise BrokenFrame("a response that is none")
    return answer


_Places = deque[tuple[int, int]]  # where the data of tensors begin, and their sizes


def _places(sizes: Sequence[int], size: int) -> _Places:
    return deque(zip(offsets(sizes, size), sizes, strict=True))


def _answer(told: dict[str, Any], places: _Places, data: Buffer) -> Answer:
    """The answer of a worker to one request."""
    if "later" in told:
        return Deferral.LATER
    if "again" in told:
        return Deferral.AGAIN
    if "error" in told:
        return model_error(*told["error"])
    arrays: dict[str, TensorArray] = {}
    for name, datatype, shape in told["outputs"]:
        start, nbytes = places.popleft()
        arrays[str(name)] = read_array(BY_NAME[datatype], tuple(shape), data, start, nbytes)
    return wrong_parameter(told["parameters"]) or Part(arrays, told["parameters"])


def printable(text: object) -> str:
    """Text as it can be sent to a client, whatever a model has put into it."""
    return str(text).encode(errors="replace").decode()


def model_error(code: int, text: object) -> ServerError:
    """The error that a model has answered a request with, by its code of `TritonError`."""
    kind = ERRORS[code] if 0 <= code < len(ERRORS) else ExecutionFailed
    return kind(printable(text))


def failed_to_process(model: str, text: str) -> ExecutionFailed:
    """The error of a batch whose model has raised, or given back something else than responses."""
    return ExecutionFailed(
        f"Failed to process the request(s) for model '{model}', message: {printable(text)}"
    )


def wrong_parameter(parameters: dict[str, Any]) -> ExecutionFailed | None:
    """The error of a response whose parameters the protocol cannot carry."""
    for name, value in parameters.items():
        good = isinstance(value, (bool, float, str)) or (
            isinstance(value, int) and -(2**63) <= value < 2**63
        )
        if (
            not good
            or printable(name) != name
            or (isinstance(value, str) and printable(value) != value)
        ):
            return ExecutionFailed(
                f"the model gave response parameter '{printable(name)[:80]}' a value that the"
                " protocol cannot carry: expected text, a boolean, a number of 64 bits"
            )
    return None


def read_array(
    datatype: Datatype, shape: tuple[int, ...], data: Buffer, start: int, size: int
) -> TensorArray:
    """An array of what a worker has sent; raises `ValueError` if it does not fit."""
    if datatype is Datatype.BYTES:
        raw: bytes | memoryview = memoryview(data)[start : start + size]
        if size <= COPIED:
            raw = bytes(raw)
        count = math.prod(shape)
        fits = walk(raw, count) == (count, size) if size <= _WALKED else 4 * count <= size
        if not fits:
            raise ValueError(f"{size} bytes for {datatype} of shape {list(shape)}")
        return BytesArray(raw, shape)
    array: Array = np.ndarray(shape, NUMPY[datatype], data, start)
    _check_size(datatype, shape, array.nbytes, size)
    return array


def _check_size(datatype: Datatype, shape: Sequence[int], expected: int, size: int) -> None:
    if expected != size:
        raise ValueError(f"{size} bytes for {datatype} of shape {list(shape)}")


def _possible(sent: int, began: int, ended: int) -> tuple[int, int]:
    """When a model has run, as its worker says, within what can be."""
    now = monotonic_ns()
    began = min(max(int(began), sent), now)
    return began, min(max(int(ended), began), now)


def special_of(request: Call) -> dict[str, object]:
    """Fields of a request beside its id and its inputs, for the model; mostly none."""
    special: dict[str, object] = {}
    parameters = request.parameters
    if parameters:
        if TRACE_PARAMETER in parameters:
            special["trace"] = parameters[TRACE_PARAMETER]
            parameters = {n: v for n, v in parameters.items() if n != TRACE_PARAMETER}
        if parameters:
            special["parameters"] = parameters
    if request.outputs:
        special["outputs"] = request.outputs
    if request.priority:
        special["priority"] = request.priority
    if request.timeout:
        special["timeout"] = request.timeout
    if request.sequence_id:
        special["correlation_id"] = request.sequence_id
        special["flags"] = request.sequence_start + 2 * request.sequence_end
    return special
