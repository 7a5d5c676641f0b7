"""A table on its way through a model: cut into requests, and put together from their results.

Columns are read once, as arrays that are cut without a copy; each request's tensors are made when
it is sent, by the conversions of the client. Nothing here waits: `headrace.runner.runner` does.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from headrace.client import AnswerError, InputError
from headrace.client.tables import ColumnTable, column_of, table_of
from headrace.client.transport import InferRequest, Result
from headrace.client.values import Declared, ModelSignature
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array
from headrace.protocol.arrow import NULLS
from headrace.runner.schemas import columns_of, is_scalar
from headrace.runner.table_kinds import keep_and_add

_REQUEST_BYTES = 1 << 20  # of inputs: many rows for one batch, and soon converted
_TEXT_BYTES = 64  # assumed of a text


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model, and the columns and outputs of its tables; see `Runner`."""

    model: str
    version: str
    columns: Mapping[str, str | Sequence[str]]
    keep: Sequence[str] | Mapping[str, Any]
    outputs: Sequence[str] | None
    rows: int

    def of(self, signature: ModelSignature) -> Mapping[str, Declared]:
        """The requested outputs; raises `InputError` for one that the model has not."""
        if self.outputs is None:
            return signature.outputs
        for name in self.outputs:
            if name not in signature.outputs:
                known = ", ".join(signature.outputs)
                raise InputError(f"model '{self.model}' has no output '{name}', only {known}")
        marks = [name + NULLS for name in self.outputs if name + NULLS in signature.outputs]
        return {name: signature.outputs[name] for name in [*self.outputs, *marks]}


class TableCall:
    """A table, for one thread. Each of the `requests` has its result added, in the same order."""

    def __init__(
        self, wanted: Wanted, signature: ModelSignature, given: Any, divides: bool = False
    ) -> None:
        """`divides` tells that requests with more rows than a batch are divided by an engine here.

        Raises `InputError` for columns that are missing, or no table.
        """
        table = columns_in(given)
        if table is None:
            raise InputError(f"expected a table or a dict of arrays, got {type(given).__name__}")
        self._wanted = wanted
        self._divides = divides
        self._signature = signature
        self._given = given
        self._rows = table.rows
        self._outputs = wanted.of(signature)
        self._parts: dict[str, list[Array]] = {
            declared.name: [] for declared in columns_of(self._outputs)
        }
        for name in wanted.keep:
            _column(table, name)
            if name in self._parts:
                raise InputError(f"the kept column '{name}' has the name of an output")
        self._inputs = _inputs(wanted, signature, table)
        self._asked: deque[int] = deque()  # rows of each request without a result
        self._done = 0

    def requests(self) -> Iterator[InferRequest]:
        """The requests for all rows, in order, none for no rows; raises `InputError`."""
        wanted, signature = self._wanted, self._signature
        each = wanted.rows or _good_rows(signature, self._divides)
        outputs = [] if wanted.outputs is None else list(self._outputs)
        for start in range(0, self._rows, each):
            count = min(each, self._rows - start)
            part = {name: _cut(one, start, start + count) for name, one in self._inputs.items()}
            tensors = signature.tensors(wanted.model, part, start)
            for tensor in tensors:
                if tensor.array.shape[:1] != (count,):
                    raise InputError(
                        f"input '{tensor.name}' of model '{wanted.model}' takes no rows of a table"
                    )
            self._asked.append(count)
            yield InferRequest(wanted.model, tensors, outputs, version=wanted.version)

    def add(self, result: Result) -> None:
        """Take the result of the oldest request without one; raises `AnswerError`."""
        count = self._asked.popleft()
        for name, parts in self._parts.items():
            part = _output(result, self._outputs[name])
            if len(part) != count:
                raise AnswerError(
                    f"output '{name}' of model '{self._wanted.model}' has {len(part)} rows for"
                    f" {count} of the table"
                )
            parts.append(part)
        self._done += count

    @property
    def complete(self) -> bool:
        """True if all rows have results."""
        return self._done == self._rows

    def made(self) -> Any:
        """The table of results."""
        found = {
            name: _joined(parts) if parts else self._empty(name)
            for name, parts in self._parts.items()
        }
        return keep_and_add(self._given, self._wanted.keep, found, self._outputs)

    def _empty(self, name: str) -> Array:
        """An output without rows, masked as those with rows are."""
        array, marks = _empty(self._outputs[name]), name + NULLS
        is_masked = marks in self._outputs and marks not in self._parts
        return np.ma.MaskedArray(array) if is_masked else array


def columns_in(given: Any) -> ColumnTable | None:
    """A table or a dict of columns; None for anything else. Raises `InputError`."""
    if not isinstance(given, Mapping):
        return table_of(given)
    try:
        lengths = {name: len(column) for name, column in given.items()}
    except TypeError:
        raise InputError("the values of a dict are columns: expected arrays or lists") from None
    if len(rows := set(lengths.values())) != 1:
        raise InputError(f"the columns differ in their numbers of rows: {lengths}")
    return ColumnTable(given, rows.pop())


def _inputs(wanted: Wanted, signature: ModelSignature, table: ColumnTable) -> Mapping[str, Any]:
    """The inputs' columns, or tables of several, ready to be cut."""
    given: Mapping[str, Any]
    if wanted.columns:
        given = {
            name: _chosen(table, names, signature.inputs.get(name))
            for name, names in wanted.columns.items()
        }
    else:
        used = set(signature.inputs).union(*(one.columns for one in signature.inputs.values()))
        rest = {
            name: column for name, column in table.columns.items()
            if name in used or name not in wanted.keep
        }  # fmt: skip
        given = signature.named(wanted.model, ColumnTable(rest, table.rows, table.named))
    return {name: _read(one) for name, one in given.items()}


def _chosen(table: ColumnTable, names: str | Sequence[str], declared: Declared | None) -> Any:
    """One column, or several in the given order, or in that of the training if it names them."""
    if isinstance(names, str):
        return _column(table, names)
    columns = {name: _column(table, name) for name in names}
    trained = declared is not None and set(declared.columns) == set(names)
    return ColumnTable(columns, table.rows, trained)


def _column(table: ColumnTable, name: str) -> Any:
    try:
        return table.columns[name]
    except KeyError:
        known = ", ".join(table.columns)
        raise InputError(f"the table lacks the column '{name}', it has {known}") from None


def _read(column: Any) -> Any:
    """A column as an array, masked where values are missing; tables of such."""
    if isinstance(column, ColumnTable):
        read = {name: _read(one) for name, one in column.columns.items()}
        return ColumnTable(read, column.rows, column.named)
    found = column_of(column, nan_misses=False)  # what NaN means is the model's matter
    if found is None:
        return column
    array, missing = found
    if missing is None:
        return array
    shape = (len(missing), *[1] * (array.ndim - 1))
    return np.ma.MaskedArray(array, np.broadcast_to(missing.reshape(shape), array.shape))


def _cut(value: Any, start: int, stop: int) -> Any:
    if not isinstance(value, ColumnTable):
        return value[start:stop]
    cut = {name: column[start:stop] for name, column in value.columns.items()}
    return ColumnTable(cut, stop - start, value.named)


def _good_rows(signature: ModelSignature, divides: bool) -> int:
    """Rows of a request, as many as fit into some bytes and a batch, or as a model insists on.

    Several whole batches, if requests are divided.
    """
    each, rows = 0, signature.most_rows
    for declared in signature.inputs.values():
        datatype = declared.datatype
        size = _TEXT_BYTES if datatype is Datatype.BYTES else NUMPY[datatype].itemsize
        each += size * prod(max(length, 1) for length in declared.shape[1:])
        if declared.shape and declared.shape[0] > 0:
            return declared.shape[0]
    fitting = max(_REQUEST_BYTES // max(each, 1), 1)
    if not rows or fitting <= rows:
        return fitting
    return fitting // rows * rows if divides else rows


def _output(result: Result, declared: Declared) -> Array:
    """An output with rows first, and without dimensions after them for one value a row."""
    name = declared.name
    if name not in result:
        raise AnswerError(f"model '{result.model}' has not answered with output '{name}'")
    array = result.texts_array(name) if declared.datatype is Datatype.BYTES else result[name]
    if declared.datatype is Datatype.BF16:
        array = array.astype(np.float32)  # which tables have
    return array.reshape(-1) if is_scalar(declared) else array


def _joined(parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        rows = [row for part in parts for row in part]
        ragged = np.empty(len(rows), object)
        ragged[:] = rows
        return ragged
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        found: Array = np.ma.concatenate(parts)  # type: ignore[no-untyped-call]
        return found
    return np.concatenate(parts)


def _empty(declared: Declared) -> Array:
    dims = () if is_scalar(declared) else tuple(max(length, 0) for length in declared.shape[1:])
    dtype: Any = object if declared.datatype is Datatype.BYTES else NUMPY[declared.datatype]
    return np.empty((0, *dims), np.float32 if declared.datatype is Datatype.BF16 else dtype)
