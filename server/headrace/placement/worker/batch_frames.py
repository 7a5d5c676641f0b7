"""Conversion of batches to frames, and of workers' frames to outcomes: no process, no I/O."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from headrace.core.bytes_array import COPIED, BytesArray
from headrace.core.call import NO_CONTEXT, NO_OPTIONS, Call
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
from headrace.core.signature import Signature, TensorSpec, reshaped
from headrace.core.tensors import Array, Tensor, TensorArray, raw_bytes
from headrace.core.texts import encodable
from headrace.ipc.elements import Buffer, walk
from headrace.ipc.frames import (
    ALIGNMENT,
    SHAPES,
    TIMES,
    BrokenFrame,
    batch_struct,
    offsets,
    pack_ids,
    unpack_sizes,
    unpack_times,
)
from headrace.scheduling.batch import Answer, Batch, Deferral, Outcome, Part

_FORMS = 1000  # remembered forms
# Bytes of BYTES elements whose lengths are checked, in a millisecond or two. Larger ones are
# trusted: an error is found when rows or elements of them are read.
_WALKED = 1 << 20
# By the codes of `TritonError`.
ERRORS: Sequence[type[ServerError]] = (
    Unknown, ExecutionFailed, NotFound, InvalidRequest, Unavailable, Unsupported, AlreadyExists,
    Cancelled,
)  # fmt: skip


class _Plan(NamedTuple):
    """The form of a batch: its number, and the inputs; True for numbers, False for BYTES.

    Rows of the inputs `apart` have a shape of their own in each request.
    """

    form: int
    inputs: list[tuple[str, bool]]
    apart: Sequence[TensorSpec] = ()


class _Place(NamedTuple):
    """The place of an output in the data of a result; `dtype` is None for BYTES."""

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
    """The frames of one worker, with the forms exchanged so far."""

    def __init__(self, signature: Signature, tell: Callable[[bytes], None]) -> None:
        """`tell` sends a form to the worker, as JSON."""
        self._signature = signature
        self._tell = tell
        self._names = [spec.name for spec in signature.inputs]
        self._plans: dict[object, _Plan] = {}
        self._usual: _Plan | None = None  # the only possible plan, for all outputs
        self._next = 0
        self._results: dict[int, list[tuple[str, Datatype, tuple[int, ...]]]] = {}
        self._places: dict[object, list[_Place]] = {}

    def learn(self, document: dict[str, Any]) -> None:
        """Store the form of a worker's results; malformed documents raise any exception."""
        if len(self._results) > _FORMS:
            raise BrokenFrame("too many forms")
        self._results[int(document["number"])] = [
            (str(name), BY_NAME[datatype], tuple(shape))
            for name, datatype, shape in document["outputs"]
        ]

    def pack(self, batch: Batch, number: int) -> tuple[bytes, Sequence[Buffer], int]:
        """The meta of a batch, its data in pieces, and the total size.

        Its requests are numbered from `number` on.
        """
        calls = batch.calls
        plan = self._usual
        if plan is None or batch.outputs is not self._signature.outputs:
            plan = self._plan(batch, calls[0].inputs)
        sizes: list[int] = []
        pieces: list[Buffer] = []
        total = 0
        for name, numbers in plan.inputs:
            if pad := -total % ALIGNMENT:
                pieces.append(bytes(pad))
                total += pad
            begin = total
            for call in calls:
                array = call.inputs[name].array
                small = numbers and array.nbytes <= COPIED
                piece = array.tobytes() if small else raw_bytes(array)
                pieces.append(piece)
                total += len(piece)
            sizes.append(total - begin)
        rows: list[int] = []
        ids: list[str] = []
        extras: dict[int | str, object] = {}  # special fields of requests, by index
        for index, call in enumerate(calls):
            rows.append(call.rows)
            if call.id:
                ids = ids or [other.id for other in calls]
            if (
                call.parameters
                or call.outputs
                or call.options is not NO_OPTIONS
                or (call.context is not NO_CONTEXT and call.context.told)
            ) and (special := special_of(call)):
                extras[index] = special
        if plan.apart:
            extras[SHAPES] = [[self._row(call, spec) for call in calls] for spec in plan.apart]
        names = pack_ids(ids) if ids else b""
        told = json.dumps(extras).encode() if extras else b""
        meta = batch_struct(len(rows), len(sizes)).pack(
            number, len(names), len(told), plan.form, len(rows), *rows, *sizes
        )
        return meta + names + told, pieces, total

    def inputs(self, batch: Batch) -> list[tuple[str, bool]]:
        """The names of a batch's inputs, in order; true for numbers, false for BYTES."""
        return self._plan(batch, batch.calls[0].inputs).inputs

    def _plan(self, batch: Batch, inputs: Mapping[str, Tensor]) -> "_Plan":
        """The plan for batches of this form; a new form is sent to the worker."""
        signature = self._signature
        lead = 1 if signature.batches else 0
        apart = _apart(signature, batch.calls)
        # Row shapes also tell which inputs are present, since optional ones may be absent.
        key: tuple[object, ...] = (
            batch.outputs if batch.outputs is not signature.outputs else None,
            *[inputs[n].array.shape[lead:] if n in inputs else None for n in self._names],
        )
        if apart:
            rows = zip(signature.inputs, key[1:], strict=True)
            key = key[0], *["apart" if spec in apart else row for spec, row in rows]
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        heads: list[tuple[str, Datatype, tuple[int, ...] | None]] = []
        for spec in signature.inputs:
            if spec in apart:
                heads.append((spec.name, spec.datatype, None))
            elif spec.name in inputs:  # for all calls, or for none, due to the batch key
                array = reshaped(inputs[spec.name].array, spec, signature.batches, to_model=True)
                heads.append((spec.name, spec.datatype, array.shape[lead:]))
        if len(self._plans) >= _FORMS:
            self._plans.clear()
            self._usual = None
        self._next += 1  # never the number of a batch in transit
        form = self._next
        document = {
            "number": form, "inputs": heads, "outputs": [spec.name for spec in batch.outputs],
            "batches": signature.batches,
        }  # fmt: skip
        self._tell(json.dumps(document).encode())
        plan = self._plans[key] = _Plan(
            form, [(name, datatype is not Datatype.BYTES) for name, datatype, _ in heads], apart
        )
        if signature.uniform and signature.ragged is None and batch.outputs is signature.outputs:
            self._usual = plan
        return plan

    def _row(self, call: Call, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of a row as the model sees it."""
        array = call.inputs[spec.name].array
        return reshaped(array, spec, self._signature.batches, to_model=True).shape[1:]

    def result(self, sent: int, batch: Batch, meta: bytes, data: Buffer, size: int) -> Outcome:
        """The outcome of a batch with uniform responses; malformed frames raise any exception."""
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
        """The places of the outputs in a result; malformed forms raise any exception."""
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
        """The outcome of a batch with differing responses; malformed frames raise any exception."""
        places = _places(document["sizes"], size)
        parts = [_answer(told, places, data) for told in document["responses"]]
        if len(parts) != len(batch.calls):
            raise BrokenFrame("a wrong number of responses")
        began, ended = _possible(sent, document["began"], document["ended"])
        return Outcome((), None, began, began, ended, parts)


def _apart(signature: Signature, calls: Sequence[Call]) -> Sequence[TensorSpec]:
    """The ragged inputs that have different shapes in these requests."""
    if signature.ragged is None or len(calls) == 1:
        return ()
    ragged, first = signature.ragged.inputs, calls[0].inputs
    return [
        spec
        for spec in signature.inputs
        if spec.name in ragged and spec.name in first
        if len({call.inputs[spec.name].array.shape[1:] for call in calls}) > 1
    ]


def one_answer(document: dict[str, Any], data: Buffer, size: int) -> Part | ServerError:
    """An individual response to one request; malformed frames raise any exception."""
    answer = _answer(document["response"], _places(document["sizes"], size), data)
    if isinstance(answer, Deferral):
        raise BrokenFrame("a response that is none")
    return answer


_Places = deque[tuple[int, int]]  # positions and sizes of tensors' data


def _places(sizes: Sequence[int], size: int) -> _Places:
    return deque(zip(offsets(sizes, size), sizes, strict=True))


def _answer(told: dict[str, Any], places: _Places, data: Buffer) -> Answer:
    """A worker's answer to one request."""
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


def model_error(code: int, text: object) -> ServerError:
    """The error with which a model answered a request, by its code of `TritonError`."""
    kind = ERRORS[code] if 0 <= code < len(ERRORS) else ExecutionFailed
    return kind(encodable(text))


def failed_to_process(instance: str, text: str) -> ExecutionFailed:
    """The error of a batch whose model raised, or returned anything but responses."""
    return ExecutionFailed(
        f"Failed to process the request(s) for model '{instance}', message: {encodable(text)}"
    )


def wrong_parameter(parameters: dict[str, Any]) -> ExecutionFailed | None:
    """The error for response parameters that the protocol cannot represent."""
    for name, value in parameters.items():
        good = isinstance(value, (bool, float, str)) or (
            isinstance(value, int) and -(2**63) <= value < 2**63
        )
        if (
            not good
            or encodable(name) != name
            or (isinstance(value, str) and encodable(value) != value)
        ):
            return ExecutionFailed(
                f"the model gave response parameter '{encodable(name)[:80]}' a value that the"
                " protocol cannot carry: expected text, a boolean, a number of 64 bits"
            )
    return None


def read_array(
    datatype: Datatype, shape: tuple[int, ...], data: Buffer, start: int, size: int
) -> TensorArray:
    """An array from a worker's data; raises `ValueError` for a mismatch."""
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
    """The reported execution times, clamped to possible values."""
    now = monotonic_ns()
    began = min(max(int(began), sent), now)
    return began, min(max(int(ended), began), now)


def special_of(request: Call) -> dict[str, object]:
    """Further fields of a request for the model, besides id and inputs; mostly none."""
    special: dict[str, object] = {}
    if request.context.trace:
        special["trace"] = request.context.trace
    if request.parameters:
        special["parameters"] = request.parameters
    if request.outputs:
        special["outputs"] = request.outputs
    options = request.options
    if options.priority:
        special["priority"] = options.priority
    if options.timeout:
        special["timeout"] = options.timeout
    if options.sequence_id:
        special["correlation_id"] = options.sequence_id
        special["flags"] = options.sequence_start + 2 * options.sequence_end
    return special
