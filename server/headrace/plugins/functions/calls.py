"""Conversion of requests to a function's calls, and of its results to responses.

Created once per model; stateless, and usable on any thread.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headrace.ipc.elements import Array
from headrace.plugins.functions.signature import (
    CallMode,
    Columns,
    Context,
    Dim,
    FunctionSignature,
    Packing,
    Port,
    Tensor,
    TensorForm,
    Value,
)
from headrace.plugins.functions.values import (
    InvalidInput,
    ResultError,
    check_shape,
    describe,
    dtype_of,
    each,
    fitted,
    from_frame,
    given,
    received,
    sent,
    to_frame,
)
from headrace.workers import triton_api as pb

Arguments = dict[str, Any]
_LARGE = 64 << 10  # bytes from which on checking whether a copy is needed pays


class Request(Protocol):
    """A request, as far as needed here; implemented by `triton_api`."""

    def inputs(self) -> Iterable[pb.Tensor]:
        """The tensors of the request."""

    def request_id(self) -> str:
        """The client's id of the request."""

    def parameters(self) -> str:
        """The parameters of the request, as JSON."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The calls for a list of requests.

    `refused` has, for each request, its response if it gets no call, or None; `rows` the number of
    rows of each of the others, and `sizes` the sizes of its named dimensions. For a function of
    batches, `groups` has the places of these others by call: ragged ones have a call by row shape.
    """

    refused: list[pb.InferenceResponse | None] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    calls: list[Arguments] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)


class Calls:
    """The conversion for a function with this signature."""

    def __init__(self, signature: FunctionSignature) -> None:
        self._signature = signature
        self._inputs = signature.inputs
        self._outputs = signature.results
        self._by_rows = signature.mode in (CallMode.ROW, CallMode.BATCH)
        ports = (*self._inputs, *self._outputs)
        names = [dim.name for port in ports for dim in port.dims if dim.name]
        self._shares = len(names) > len(set(names))  # dimensions that must be equal

    def plan(self, requests: Sequence[Request]) -> CallPlan:
        """The calls for a list of requests."""
        plan = CallPlan()
        found: list[dict[str, Array]] = []
        accepted: list[Request] = []
        for request in requests:
            try:
                arrays, sizes = self._arrays(request)
            except InvalidInput as error:
                plan.refused.append(refusal(error))
                continue
            plan.refused.append(None)
            plan.rows.append(len(next(iter(arrays.values()))) if self._by_rows and arrays else 1)
            plan.sizes.append(sizes)
            found.append(arrays)
            accepted.append(request)
        if self._signature.mode is CallMode.BATCH:
            for group in _alike(found):
                plan.groups.append(group)
                plan.calls.append(self._arguments(_joined([found[place] for place in group])))
        elif self._signature.mode is CallMode.ROW:
            for arrays, rows in zip(found, plan.rows, strict=True):
                plan.calls.extend(self._row_arguments(arrays, rows))
        else:
            plan.calls.extend(self._arguments(arrays) for arrays in found)
        if self._signature.context:
            self._tell(plan, accepted)
        return plan

    def responses(self, plan: CallPlan, results: Sequence[Any]) -> list[pb.InferenceResponse]:
        """The responses to all requests of a plan; raises `ResultError`.

        `results` has the result of each of its calls.
        """
        if self._signature.mode is CallMode.BATCH:
            answered = self._split(plan, results)
        elif self._signature.mode is CallMode.ROW:
            answered = self._gathered(plan, results)
        else:
            answered = [
                self.response(result, sizes)
                for result, sizes in zip(results, plan.sizes, strict=True)
            ]
        following = iter(answered)
        return [next(following) if one is None else one for one in plan.refused]

    def response(self, result: Any, sizes: Mapping[str, int]) -> pb.InferenceResponse:
        """The response for one result; raises `ResultError`."""
        return self._response(self._results(result, -1, sizes))

    # --- requests

    def _tell(self, plan: CallPlan, requests: Sequence[Request]) -> None:
        """Add the contexts of requests to the calls."""
        name = self._signature.context
        contexts = [Context(r.request_id(), json.loads(r.parameters())) for r in requests]
        if self._signature.mode is CallMode.BATCH:
            for arguments, group in zip(plan.calls, plan.groups, strict=True):
                arguments[name] = [contexts[n] for n in group for _ in range(plan.rows[n])]
            return
        each = [one for one, rows in zip(contexts, plan.rows, strict=True) for _ in range(rows)]
        for arguments, one in zip(plan.calls, each, strict=True):
            arguments[name] = one

    def _arrays(self, request: Request) -> tuple[dict[str, Array], dict[str, int]]:
        """The tensors of a request in functions' form, and the sizes of named dimensions.

        Raises `InvalidInput`.
        """
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        arrays: dict[str, Array] = {}
        sizes: dict[str, int] = {}
        for port in self._inputs:
            tensor = tensors.get(port.name)
            if tensor is None:
                continue  # optional, or the server would have refused the request
            array = received(_raw(tensor), port.element, port.name)
            if self._shares:
                shape = array.shape[1:] if self._by_rows else array.shape
                try:
                    check_shape(shape, port.dims, sizes, f"input '{port.name}'")
                except ValueError as error:
                    raise InvalidInput(str(error)) from None
            arrays[port.name] = array
        return arrays, sizes

    def _arguments(self, arrays: Mapping[str, Array]) -> Arguments:
        arguments: Arguments = {}
        for value in self._signature.parameters:
            if isinstance(value.declared, Columns):
                arguments[value.name] = to_frame(value.declared, arrays)
            elif value.name in arrays:
                arguments[value.name] = given(_read_only(arrays[value.name]), value.declared)
            elif not value.defaulted:
                arguments[value.name] = None
        return arguments

    def _row_arguments(self, arrays: Mapping[str, Array], rows: int) -> list[Arguments]:
        columns: dict[str, list[Any]] = {}
        for value in self._signature.parameters:
            assert isinstance(value.declared, Tensor)
            if value.name in arrays:
                columns[value.name] = each(_read_only(arrays[value.name]), value.declared)
            elif not value.defaulted:
                columns[value.name] = [None] * rows
        return [{name: column[row] for name, column in columns.items()} for row in range(rows)]

    # --- results

    def _split(self, plan: CallPlan, results: Sequence[Any]) -> list[pb.InferenceResponse]:
        """Divide the result of each of a batch's calls between its requests."""
        responses: dict[int, pb.InferenceResponse] = {}
        for group, result in zip(plan.groups, results, strict=True):
            rows = sum(plan.rows[place] for place in group)
            arrays = self._results(result, rows, plan.sizes[group[0]])
            first = 0
            for place in group:
                last = first + plan.rows[place]
                part = {name: array[first:last] for name, array in arrays.items()}
                responses[place] = self._response(part)
                first = last
        return [responses[place] for place in range(len(responses))]

    def _gathered(self, plan: CallPlan, results: Sequence[Any]) -> list[pb.InferenceResponse]:
        """Gather the results of rows by request."""
        unpacked = [self._unpacked(result) for result in results]
        columns: list[list[Any]] = [list(column) for column in zip(*unpacked, strict=True)]
        columns = columns or [[] for _ in self._signature.outputs]
        whole: dict[str, Array] = {}
        for value, column in zip(self._signature.outputs, columns, strict=True):
            # Lists and arrays may have different shapes for each request.
            if isinstance(value.declared, Tensor) and not value.declared.dims:
                whole[value.name] = _gathered(value, column, {})
        responses, first = [], 0
        for count, known in zip(plan.rows, plan.sizes, strict=True):
            last, sizes = first + count, dict(known)
            arrays: dict[str, Array] = {}
            for value, column in zip(self._signature.outputs, columns, strict=True):
                there = whole.get(value.name)
                arrays[value.name] = (
                    _gathered(value, column[first:last], sizes)
                    if there is None
                    else there[first:last]
                )
            responses.append(self._response(arrays))
            first = last
        return responses

    def _results(self, result: Any, rows: int, known: Mapping[str, int]) -> dict[str, Array]:
        """The arrays of one result; `rows` is -1 if rows are not counted."""
        arrays: dict[str, Array] = {}
        sizes = dict(known)
        for value, one in zip(self._signature.outputs, self._unpacked(result), strict=True):
            where = f"output '{value.name}'"
            if isinstance(value.declared, Columns):
                arrays |= from_frame(value.declared, one, where)
                size = len(arrays[value.ports[0].name])
                if rows not in (-1, size):
                    raise ResultError(_wrong_rows(where, size, rows))
                continue
            array = fitted(one, value.declared, where)
            dims = value.declared.dims
            if array.ndim:
                _check_single(value.declared, [one], where)
            _check(array, dims, sizes, where)
            if rows >= 0 and len(array) != rows:
                raise ResultError(_wrong_rows(where, len(array), rows))
            arrays[value.name] = array if dims else array.reshape(value.ports[0].shape)
        return arrays

    def _unpacked(self, result: Any) -> Sequence[Any]:
        """The value of each output in a result; raises `ResultError`."""
        packing, outputs = self._signature.packing, self._signature.outputs
        if packing is Packing.ONE:
            return (result,)
        if packing is Packing.TUPLE:
            if isinstance(result, (tuple, list)):
                if len(result) == len(outputs):
                    return result
                got = f"a {type(result).__name__} of {len(result)}"
            else:
                got = describe(result)
            raise ResultError(
                f"{self._signature.name} is declared to give a tuple of {len(outputs)}, got {got}"
            )
        try:
            if packing is Packing.KEYS:
                return [result[value.name] for value in outputs]
            return [getattr(result, value.name) for value in outputs]
        except (AttributeError, KeyError, TypeError):
            names = ", ".join(value.name for value in outputs)
            raise ResultError(
                f"{self._signature.name} is declared to give {names}, got {describe(result)}"
            ) from None

    def _response(self, arrays: Mapping[str, Array]) -> pb.InferenceResponse:
        return pb.InferenceResponse([_tensor(port, arrays[port.name]) for port in self._outputs])


def _gathered(value: Value, column: list[Any], sizes: dict[str, int]) -> Array:
    """One output as an array, from its values row by row."""
    declared = value.declared
    assert isinstance(declared, Tensor)
    rows: Any = column
    if not rows:
        shape = 0, *(max(dim.size, 0) for dim in declared.dims)
        rows = np.empty(shape, dtype_of(declared.element))
    where = f"output '{value.name}'"
    array = fitted(rows, declared, where)
    if array.ndim > 1:
        _check_single(declared, column, where)
    _check(array, (Dim(), *declared.dims), sizes, where)
    return array


def refusal(error: Exception) -> pb.InferenceResponse:
    """The error response to a request."""
    if isinstance(error, InvalidInput):
        return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return pb.InferenceResponse(error=pb.TritonError(text))


def _check(array: Array, dims: Sequence[Dim], sizes: dict[str, int], where: str) -> None:
    try:
        check_shape(array.shape, dims, sizes, where)
    except ValueError as error:
        raise ResultError(str(error)) from None


def _check_single(declared: Tensor, values: Sequence[Any], where: str) -> None:
    """Refuse values with a shape where single values are declared."""
    if declared.form is TensorForm.SINGLE:
        for value in values:
            if np.ndim(value):
                raise ResultError(f"{where} is declared as {declared}, got {describe(value)}")


def _wrong_rows(where: str, got: int, expected: int) -> str:
    return f"{where} has {got} rows for the {expected} rows that the function was called with"


def _alike(found: Sequence[Mapping[str, Array]]) -> Iterable[list[int]]:
    """The places of requests whose rows have the same shapes."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for place, arrays in enumerate(found):
        key = tuple(array.shape[1:] for array in arrays.values())
        groups.setdefault(key, []).append(place)
    return groups.values()


def _joined(found: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Concatenate the rows of all requests, which have the same inputs."""
    if len(found) == 1:
        return dict(found[0])
    return {name: _concatenated([arrays[name] for arrays in found]) for name in found[0]}


def _concatenated(pieces: Sequence[Array]) -> Array:
    """Concatenate pieces; large ones that are already contiguous are not copied."""
    base = pieces[0].base
    if (
        isinstance(base, np.ndarray)
        and base.nbytes >= _LARGE
        and base.shape == (sum(map(len, pieces)), *pieces[0].shape[1:])
        and all(piece.base is base for piece in pieces)
    ):
        starts = [piece.__array_interface__["data"][0] for piece in pieces]
        if starts == sorted(starts):
            return base.view()
    return np.concatenate(pieces)


def _read_only(array: Array) -> Array:
    """Make an input read-only, so that a function sees copied and shared inputs alike."""
    array.flags.writeable = False
    return array


def _raw(tensor: pb.Tensor) -> Array:
    return tensor._array if tensor.datatype() == "BF16" else tensor.as_numpy()


def _tensor(port: Port, array: Array) -> pb.Tensor:
    return pb.received(port.name, port.element.datatype, sent(array, port.element))
