"""A model as a value: called like a function, wherever it runs.

A runner is a place, a model, and which columns go in and out; it is small, and can be pickled. What
it asks, an engine of this process or a client, is shared by all runners of a place, and opened
again in each process (`headrace.runner.places`). Tables are asked in requests of some thousand
rows (`headrace.runner.tables`), several in flight: the caller's thread converts the next ones, and
joins results, while others run.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from weakref import finalize

from headrace.client import ConnectionFailed, InputError, StatusError, TimedOut
from headrace.client.address import is_address
from headrace.client.asynchronous import TIMEOUT_SECS, AsyncModels
from headrace.client.blocking import BlockingModels
from headrace.client.tables import table_of
from headrace.client.transport import InferRequest, Result, version_text
from headrace.client.values import ModelSignature
from headrace.runner.places import SharedModels, places
from headrace.runner.schemas import ddl_of, meta_of, table_schema
from headrace.runner.tables import TableCall, Wanted

T = TypeVar("T")
_IN_FLIGHT = 4
_RETRIES = 6  # with pauses of 6.3 seconds in all: a server may start again
_FIRST_PAUSE_SECS = 0.1
_AGAIN = frozenset({502, 503})  # of servers that are full, stop, or start


class Runner:
    """A model, called with arrays or tables, in this process or at a server.

    For any number of threads. Methods raise `ClientError`; `ServeError` if a model cannot be loaded
    here. What a runner asks is opened by its first call in each process, and closed when the last
    runner of the place is gone.
    """

    def __init__(
        self, place: str | os.PathLike[str], model: str, version: str | int = "", *,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        keep: Sequence[str] | Mapping[str, Any] = (), outputs: Sequence[str] | None = None,
        timeout: float = TIMEOUT_SECS, rows: int = 0, in_flight: int = _IN_FLIGHT,
        retries: int = _RETRIES, **settings: Any,
    ) -> None:  # fmt: skip
        """`place` is a model repository, for an engine of this process, or a server's address.

        `columns` are by the name of an input the column of tables, or those of its matrix; without
        them each input has a column, or all are the only input. The columns `keep` pass through; a
        mapping gives them types of Arrow, which `schema` needs. Without `outputs` all are computed.

        A table is asked in requests of `rows` rows, 0 for as many as suit, with `in_flight` of them
        under way, each within `timeout` seconds. A request is repeated up to `retries` times, with
        growing pauses, if the connection is lost or the server refuses it for now: 0 for models
        that must not see a row twice. `settings` are those of `headrace.Engine`, or the options of
        `headrace.Client`.
        """
        for name, number, least in (("rows", rows, 0), ("in_flight", in_flight, 1)):
            if number < least:
                raise ValueError(f"{name} is {number}, and must be at least {least}")
        if isinstance(keep, str) or isinstance(outputs, str):
            raise TypeError("keep and outputs are lists of names, not one")
        place = os.fspath(place)
        # An address of a store has a colon; a directory may be named from another one later.
        self.place = place if ":" in place else os.path.abspath(place)
        self.timeout = timeout
        self.in_flight = in_flight
        self.retries = retries
        self.settings = settings
        self.wanted = Wanted(
            model, version_text(version), dict(columns or {}),
            dict(keep) if isinstance(keep, Mapping) else list(keep),
            None if outputs is None else list(outputs), rows,
        )  # fmt: skip
        self._unpickled = False
        self._entered: tuple[int, SharedModels] | None = None  # by this process

    def __reduce__(self) -> tuple[Any, ...]:
        wanted = self.wanted
        options = {
            "columns": wanted.columns, "keep": wanted.keep, "outputs": wanted.outputs,
            "timeout": self.timeout, "rows": wanted.rows, "in_flight": self.in_flight,
            "retries": self.retries, **self.settings,
        }  # fmt: skip
        return _unpickled, (type(self), self.place, wanted.model, wanted.version, options)

    def __repr__(self) -> str:
        return f"Runner({self.place!r}, {self.wanted.model!r}, {self.wanted.version!r})"

    def __call__(self, /, *args: Any, **inputs: Any) -> Any:
        """Run the model.

        Arrays by the names of inputs, or in their order, give a `Result`. A table or a dict of
        arrays gives a table of the same kind, with the kept columns and the outputs.
        """
        if (table := _only_table(args, inputs)) is not None:
            [found] = self.tables([table])
            return found
        models, wanted = self._models(), self.wanted
        given = _by_name(self.signature, wanted.model, args, inputs) if args else inputs
        local = not is_address(self.place)
        if local and wanted.outputs is None and self.timeout == TIMEOUT_SECS:  # the short way
            return models.model(wanted.model, wanted.version)(**given)
        return models.begin(partial(self._ask, given)).result()

    async def call(self, /, *args: Any, **inputs: Any) -> Any:
        """Run the model for a coroutine; see `__call__`."""
        if (table := _only_table(args, inputs)) is not None:
            return await asyncio.to_thread(self, table)
        wanted, entered = self.wanted, self._entered
        models = entered[1].opened(wanted.model) if entered else None
        if models is None or entered is None or entered[0] != os.getpid():
            models = await asyncio.to_thread(self._models)
        given: Mapping[str, Any] = inputs
        if args:
            known = models.begin(lambda them: them.signature(wanted.model, wanted.version))
            given = _by_name(await asyncio.wrap_future(known), wanted.model, args, inputs)
        return await asyncio.wrap_future(models.begin(partial(self._ask, given)))

    def tables(self, tables: Iterable[T]) -> Iterator[T]:
        """Run the model with the rows of tables; yields a table of results for each, in order.

        No more tables are taken than the requests in flight need. An error is raised after the
        tables before it.
        """
        models = self._models()
        wanted = self.wanted
        # Not one of an earlier stream: the model may have been loaded anew since.
        signature = models.signature(wanted.model, wanted.version, fresh=True)
        divides = not is_address(self.place)
        under_way = _UnderWay()
        sending: TableCall | None = None
        try:
            for given in tables:
                sending = TableCall(wanted, signature, given, divides)
                under_way.tables.append(sending)
                for request in sending.requests():
                    while len(under_way.requests) >= self.in_flight:
                        yield from under_way.settle()
                    future = models.begin(partial(self._send, request))
                    under_way.requests.append((sending, future))
                sending = None
                yield from under_way.complete()
                while under_way.requests and under_way.requests[0][1].done():
                    yield from under_way.settle()
            while under_way.requests:
                yield from under_way.settle()
        except Exception:
            while under_way.requests and under_way.requests[0][0] is not sending:
                yield from under_way.settle()
            raise
        finally:
            under_way.cancel()

    @property
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the model."""
        return self._models().signature(self.wanted.model, self.wanted.version)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The model's metadata, with its served versions."""
        wanted = self.wanted
        found: Mapping[str, Any] = self._models().model_metadata(wanted.model, wanted.version)
        return found

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of tables of results.

        Raises `InputError` if columns are kept whose types are not given.
        """
        keep = self.wanted.keep
        if keep and not isinstance(keep, Mapping):
            example = dict.fromkeys(keep, "int64")
            raise InputError(f"the kept columns have no types, such as keep={example}")
        return table_schema(
            self.wanted.of(self.signature), keep if isinstance(keep, Mapping) else {}
        )

    @property
    def ddl(self) -> str:
        """The schema in the words of Spark; raises `InputError` as `schema`."""
        return ddl_of(self.schema)

    @property
    def meta(self) -> Any:
        """The schema as an empty pandas frame, for Dask; raises `InputError` as `schema`."""
        return meta_of(self.schema, self.wanted.of(self.signature))

    async def _ask(self, given: Mapping[str, Any], models: AsyncModels) -> Result:
        wanted = self.wanted
        tensors = await models.tensors(wanted.model, given, wanted.version)
        outputs = wanted.outputs or ()
        request = InferRequest(wanted.model, tensors, outputs, version=wanted.version)
        return await self._send(request, models)

    async def _send(self, request: InferRequest, models: AsyncModels) -> Result:
        """The result of a request, which is repeated where that may help."""
        for attempt in range(self.retries):
            try:
                return await models.send(request, self.timeout)
            except ConnectionFailed as error:
                if isinstance(error, TimedOut) or not error.sent:  # the client has tried again
                    raise
            except StatusError as error:
                if error.status not in _AGAIN:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_SECS * 2**attempt)
        return await models.send(request, self.timeout)

    def _models(self) -> BlockingModels[Any]:
        """The engine or client of this process; opened by the first call."""
        entered = self._entered
        if entered is None or entered[0] != os.getpid():
            entered = self._enter()
        return entered[1].models(self.wanted.model)

    def _enter(self) -> tuple[int, SharedModels]:
        process, here = os.getpid(), places()
        settings = self.settings
        if is_address(self.place):
            settings = {"connect_retries": self.retries, **settings}
        with here.lock:
            if self._entered is None or self._entered[0] != process:
                key, place = here.enter(self.place, settings)
                self._entered = process, place
                leave = finalize(self, here.leave, key, process, self._unpickled)
                leave.atexit = False  # engines and clients end by themselves
            return self._entered


class _UnderWay:
    """Tables that wait for results, and requests under way, both in order."""

    def __init__(self) -> None:
        self.tables: deque[TableCall] = deque()
        self.requests: deque[tuple[TableCall, Future[Result]]] = deque()

    def settle(self) -> Iterator[Any]:
        """Wait for the oldest request; yields results of tables that are complete by it."""
        table, future = self.requests.popleft()
        try:
            table.add(future.result())
        except BaseException:
            self.cancel()
            raise
        yield from self.complete()

    def complete(self) -> Iterator[Any]:
        """The results of the oldest tables, as far as they are complete."""
        while self.tables and self.tables[0].complete:
            yield self.tables.popleft().made()

    def cancel(self) -> None:
        """Cancel all requests."""
        while self.requests:
            self.requests.pop()[1].cancel()


def _unpickled(
    kind: type[Runner], place: str, model: str, version: str, options: Mapping[str, Any]
) -> Runner:
    runner = kind(place, model, version, **options)
    runner._unpickled = True
    return runner


def _only_table(args: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
    """The table that is the only argument; None for arrays."""
    if len(args) != 1 or inputs:
        return None
    [given] = args
    return given if isinstance(given, Mapping) or table_of(given) is not None else None


def _by_name(
    signature: ModelSignature, model: str, args: Sequence[Any], inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Positional values by the names of inputs; raises `InputError`."""
    names = list(signature.inputs)
    if len(args) > len(names):
        known = ", ".join(names) or "none"
        raise InputError(f"model '{model}' got {len(args)} values for its inputs: {known}")
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & inputs.keys():
        raise InputError(f"input '{min(twice)}' is given by position and by name")
    return {**given, **inputs}
