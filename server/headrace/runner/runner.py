"""A model as a value: called like a function, wherever it runs.

A runner is a place, a model, and which columns go in and out; it is small, and can be pickled. What
it asks, an engine of this process or a client, is shared by all runners of a place, and opened
again in each process (`headrace.runner.places`). Tables are asked in requests of some thousand
rows, several in flight, each converted while others run.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from typing import Any, TypeVar
from weakref import finalize

import numpy as np

from headrace.client import AnswerError, InputError
from headrace.client.asynchronous import TIMEOUT_SECS
from headrace.client.blocking import BlockingModels
from headrace.client.tables import ColumnTable, column_of, table_of
from headrace.client.transport import InferRequest, Result
from headrace.client.values import Declared, ModelSignature
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array
from headrace.runner.outcomes import table_like
from headrace.runner.places import Place, places
from headrace.runner.schemas import columns_of, ddl_of, is_scalar, meta_of, schema_of

T = TypeVar("T")
_REQUEST_BYTES = 1 << 20  # of inputs, for the rows of a request
_TEXT_BYTES = 64  # assumed of a text
_IN_FLIGHT = 4

Columns = Mapping[str, str | Sequence[str]]
_Part = tuple[int, int, "Future[Result]"]


class Runner:
    """A model, called with arrays or tables, in this process or at a server.

    For any number of threads. Opened by its first call in each process.
    """

    def __init__(
        self, place: str | os.PathLike[str], model: str, version: str = "", *,
        columns: Columns | None = None, keep: Sequence[str] | Mapping[str, Any] = (),
        outputs: Sequence[str] | None = None, timeout: float = TIMEOUT_SECS, rows: int = 0,
        in_flight: int = _IN_FLIGHT, **settings: Any,
    ) -> None:  # fmt: skip
        """`place` is a model repository, of this process, or the address of a server.

        `columns` has the columns of a table that are an input, by its name, and `keep` those that
        pass through; as a mapping, with their types of Arrow, which `schema` needs. A table is
        asked in requests of `rows` rows, 0 for as many as are good, of which `in_flight` run at
        once. `settings` are those of `headrace.Engine`, or of `headrace.Client`.
        """
        if rows < 0 or in_flight < 1:
            raise ValueError(f"rows={rows} and in_flight={in_flight} must be at least 0 and 1")
        self.place = os.fspath(place)
        self.model = model
        self.version = version
        self.columns = dict(columns or {})
        self.keep: Sequence[str] | Mapping[str, Any] = keep
        self.outputs = None if outputs is None else list(outputs)
        self.timeout = timeout
        self.rows = rows
        self.in_flight = in_flight
        self.settings = settings
        self._lingers = False
        self._entered: tuple[int, Place] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "columns": self.columns, "keep": self.keep, "outputs": self.outputs,
            "timeout": self.timeout, "rows": self.rows, "in_flight": self.in_flight,
            **self.settings,
        }  # fmt: skip
        return _unpickled, (type(self), self.place, self.model, self.version, options)

    def __repr__(self) -> str:
        return f"Runner({self.place!r}, {self.model!r})"

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model; raises `ClientError`.

        Arrays are given by the inputs' names, or in their order, and give a `Result`. A table or a
        dict of arrays gives the same kind of table, with the kept columns and the outputs.
        """
        if (table := _only_table(args, inputs)) is not None:
            [found] = self.tables([table])
            return found
        models = self._models()
        given = self._named(models, args, inputs)
        if not self.outputs:
            return models.model(self.model, self.version)(**given)
        return models.model(self.model, self.version).infer(given, outputs=self.outputs)

    async def call(self, *args: Any, **inputs: Any) -> Any:
        """Run the model from a coroutine; see `__call__`."""
        if (table := _only_table(args, inputs)) is not None:
            return await asyncio.to_thread(self, table)
        models = await asyncio.to_thread(self._models)
        given = await asyncio.to_thread(self._named, models, args, inputs) if args else inputs
        request = partial(
            models._asynchronous.model(self.model, self.version).infer,
            given, outputs=self.outputs or (),
        )  # fmt: skip
        return await asyncio.wrap_future(models._begin(request()))

    def tables(self, tables: Iterable[T]) -> Iterator[T]:
        """Run the model with the rows of tables; yields a table of results for each, in order.

        Requests of several tables are in flight at once; no more of `tables` is taken than they
        need. Raises as `__call__`.
        """
        models = self._models()
        signature = models.signature(self.model, self.version, fresh=True)
        under_way: deque[_Table] = deque()
        flying: deque[Future[Result]] = deque()
        try:
            for given in tables:
                table = _Table(self, given, signature)
                under_way.append(table)
                for request in table.requests():
                    while len(flying) >= self.in_flight:
                        _done(flying.popleft())
                        while under_way[0] is not table and under_way[0].finished():
                            yield under_way.popleft().made()
                    future = models.submit(request)
                    flying.append(future)
                    table.asked(future)
            while under_way:
                table = under_way.popleft()
                yield table.made()
        finally:
            for future in flying:
                future.cancel()

    @property
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the model."""
        return self._models().signature(self.model, self.version)

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of tables of results.

        Raises `InputError` if columns are kept whose types are unknown.
        """
        if self.keep and not isinstance(self.keep, Mapping):
            example = {name: "int64" for name in self.keep}
            raise InputError(f"the kept columns need types of Arrow, such as keep={example}")
        kept = self.keep if isinstance(self.keep, Mapping) else {}
        return schema_of(self.wanted(self.signature), kept)

    @property
    def ddl(self) -> str:
        """The schema in the words of Spark; raises `InputError` as `schema`."""
        return ddl_of(self.schema)

    @property
    def meta(self) -> Any:
        """The schema as an empty pandas frame, for Dask; raises `InputError` as `schema`."""
        return meta_of(self.schema, self.wanted(self.signature))

    def wanted(self, signature: ModelSignature) -> Mapping[str, Declared]:
        """The requested outputs; raises `InputError` for one that the model has not."""
        if self.outputs is None:
            return signature.outputs
        for name in self.outputs:
            if name not in signature.outputs:
                known = ", ".join(signature.outputs)
                raise InputError(f"model '{self.model}' has no output '{name}', only {known}")
        return {name: signature.outputs[name] for name in self.outputs}

    def _models(self) -> BlockingModels[Any]:
        entered = self._entered
        if entered is None or entered[0] != os.getpid():
            entered = self._enter()
        return entered[1].models(self.model)

    def _enter(self) -> tuple[int, Place]:
        process, here = os.getpid(), places()
        with here.lock:
            if self._entered is None or self._entered[0] != process:
                settings = {**self.settings, "timeout": self.timeout}
                key, place = here.enter(self.place, settings)
                self._entered = process, place
                finalize(self, here.leave, key, process, self._lingers)
            return self._entered

    def _named(
        self, models: BlockingModels[Any], args: Sequence[Any], inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        if not args:
            return inputs
        names = list(models.signature(self.model, self.version).inputs)
        if len(args) > len(names):
            raise InputError(f"model '{self.model}' has the inputs {', '.join(names)}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & inputs.keys():
            raise InputError(f"input '{min(twice)}' is given by position and by name")
        return given | inputs


class _Table:
    """A table on its way through the model."""

    def __init__(self, runner: Runner, given: Any, signature: ModelSignature) -> None:
        self._runner = runner
        self._given = given
        self._signature = signature
        self._futures: list[Future[Result]] = []
        table = _columns(given)
        if table is None:
            raise InputError(f"expected a table or a dict of arrays, got {type(given).__name__}")
        self._rows = table.rows
        self._keep = list(runner.keep)
        for name in self._keep:
            if name not in table.columns:
                raise InputError(f"the table lacks the column '{name}', which is to be kept")
        self._inputs = _inputs(runner, signature, table)

    def requests(self) -> Iterator[InferRequest]:
        """The requests for the rows, in order; each is converted when it is taken."""
        runner, signature = self._runner, self._signature
        each = runner.rows or _good_rows(signature)
        wanted = runner.outputs or ()
        for start in range(0, max(self._rows, 1), each):
            part = {name: _sliced(one, start, start + each) for name, one in self._inputs.items()}
            tensors = signature.tensors(runner.model, part)
            yield InferRequest(runner.model, tensors, wanted, version=runner.version)

    def asked(self, future: "Future[Result]") -> None:
        self._futures.append(future)

    def finished(self) -> bool:
        return all(future.done() for future in self._futures)

    def made(self) -> Any:
        """The table of results; raises the first error."""
        runner = self._runner
        results = [future.result() for future in self._futures]
        wanted = runner.wanted(self._signature)
        found: dict[str, Array] = {}
        for declared in columns_of(wanted):
            name = declared.name
            parts = [_column(result, declared) for result in results]
            whole = parts[0] if len(parts) == 1 else _concatenated(parts)
            if len(whole) != self._rows:
                raise AnswerError(
                    f"output '{name}' of model '{runner.model}' has {len(whole)} rows for"
                    f" {self._rows} of the table"
                )
            if name in self._keep:
                raise InputError(f"the kept column '{name}' is called like an output")
            found[name] = whole
        return table_like(self._given, self._keep, found, lambda: schema_of(wanted, {}))


def _unpickled(
    kind: type[Runner], place: str, model: str, version: str, options: Mapping[str, Any]
) -> Runner:
    runner = kind(place, model, version, **options)
    runner._lingers = True
    return runner


def _only_table(args: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
    """The table that is the only argument; None for arrays."""
    if len(args) != 1 or inputs:
        return None
    [given] = args
    return given if isinstance(given, Mapping) or table_of(given) is not None else None


def _columns(given: Any) -> ColumnTable | None:
    if not isinstance(given, Mapping):
        return table_of(given)
    try:
        rows = {len(column) for column in given.values()}
    except TypeError:
        raise InputError("the values of a dict are columns: expected arrays or lists") from None
    if len(rows) != 1:
        raise InputError(f"the columns differ in length: {sorted(rows)}")
    return ColumnTable(given, rows.pop())


def _inputs(runner: Runner, signature: ModelSignature, table: ColumnTable) -> Mapping[str, Any]:
    """The columns for each input, as arrays."""
    columns = table.columns
    if runner.columns:
        given: Mapping[str, Any] = {
            name: _chosen(table, names) for name, names in runner.columns.items()
        }
    else:
        taken = set(signature.inputs).union(*(one.columns for one in signature.inputs.values()))
        rest = {n: c for n, c in columns.items() if n in taken or n not in runner.keep}
        rest_table = ColumnTable(rest, table.rows, table.named)
        given = signature.named(runner.model, rest_table)
    return {
        name: _settled_table(one) if isinstance(one, ColumnTable) else _settled(one)
        for name, one in given.items()
    }


def _chosen(table: ColumnTable, names: str | Sequence[str]) -> Any:
    for name in [names] if isinstance(names, str) else names:
        if name not in table.columns:
            raise InputError(f"the table lacks the column '{name}'")
    if isinstance(names, str):
        return table.columns[names]
    return ColumnTable({name: table.columns[name] for name in names}, table.rows)


def _settled_table(table: ColumnTable) -> ColumnTable:
    found = {name: _settled(column) for name, column in table.columns.items()}
    return ColumnTable(found, table.rows, table.named)


def _settled(column: Any) -> Any:
    """A column in a form that is sliced without a copy: an array, masked where values miss."""
    found = column_of(column)
    if found is None:
        return column
    array, missing = found
    if missing is None:
        return array
    if array.ndim > 1:
        shaped = missing.reshape(-1, *[1] * (array.ndim - 1))
        missing = np.broadcast_to(shaped, array.shape)
    return np.ma.MaskedArray(array, missing)


def _sliced(value: Any, start: int, stop: int) -> Any:
    if not isinstance(value, ColumnTable):
        return value[start:stop]
    found = {name: column[start:stop] for name, column in value.columns.items()}
    return ColumnTable(found, min(stop, value.rows) - start, value.named)


def _good_rows(signature: ModelSignature) -> int:
    """Rows of a request: few enough to be converted while others run, and for one batch."""
    each = 0
    for declared in signature.inputs.values():
        datatype = declared.datatype
        size = _TEXT_BYTES if datatype is Datatype.BYTES else NUMPY[datatype].itemsize
        each += size * prod(max(length, 1) for length in declared.shape[1:])
    fitting = max(_REQUEST_BYTES // max(each, 1), 1)
    return min(fitting, signature.most_rows) if signature.most_rows else fitting


def _column(result: Result, declared: Declared) -> Array:
    array = result[declared.name]
    if declared.datatype is Datatype.BYTES:
        array = result.texts_array(declared.name)
    return array.reshape(-1) if is_scalar(declared) else array


def _concatenated(parts: Sequence[Array]) -> Array:
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        found: Array = np.ma.concatenate(parts)
        return found
    return np.concatenate(parts)


def _done(future: "Future[Result]") -> None:
    future.exception()
