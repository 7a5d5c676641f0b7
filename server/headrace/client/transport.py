"""Parts common to both transports: requests, streamed responses, and results."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import index
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import orjson

from headrace.api.operations import Document, Operation
from headrace.client import ClientError, ConnectionFailed, InputError, TimedOut
from headrace.client.address import Address
from headrace.client.values import ModelSignature, arrays_of
from headrace.connections.endpoint import Endpoint
from headrace.core.call import InferResponse, Parameter
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Array, Tensor, TensorArray
from headrace.core.texts import shown

T = TypeVar("T")
_MOST_WAITING = 64  # unread responses above which the server is held


class Responses(Generic[T]):
    """Responses in transit between a connection and an iterator.

    The connection is held while the iterator is slow.
    """

    def __init__(self, hold: Callable[[bool], None], seconds: float, late: TimedOut) -> None:
        """`hold` pauses or resumes reading from the connection.

        Each response may take `seconds`; `late` is the error after that.
        """
        self._hold = hold
        self._seconds = seconds or None
        self._late = late
        self._waiting: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._held = self._ended = False
        self._error: Exception | None = None

    def put(self, item: T) -> None:
        """Queue a response."""
        self._waiting.append(item)
        self._arrived.set()
        if not self._held and len(self._waiting) > _MOST_WAITING:
            self._held = True
            self._hold(True)

    def end(self, error: Exception | None = None) -> None:
        """Queue the end, with the error that caused it, if any."""
        self._ended, self._error = True, error
        self._arrived.set()

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            if self._held:
                self._held = False
                self._hold(False)
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._seconds):
                    await self._arrived.wait()
            except TimeoutError:
                raise self._late from None


def endpoint_of(address: Address) -> Endpoint:
    """An address in the form of `connections`."""
    return Endpoint(
        str(address), address.scheme, address.socket or address.host, address.port, address.host,
        address.authority, address.prefix,
    )  # fmt: skip


def header_text(headers: Mapping[str, str]) -> str:
    """Headers in wire format; raises `InputError` for an invalid one."""
    # Here, since engines need no HTTP: 3 ms of their start.
    from headrace.protocol.http1 import header_lines

    try:
        return header_lines(list(headers.items()))
    except InvalidRequest as error:
        raise InputError(str(error)) from None


def not_connected(address: Address, why: str) -> ConnectionFailed:
    """The error of a request without a connection."""
    why = why if why[:2].isupper() else why[:1].lower() + why[1:]  # TLS stays TLS
    return ConnectionFailed(f"no server at {address}: {why}", sent=False)


def hung_up(address: Address) -> ConnectionFailed:
    """The error of a request whose connection has ended."""
    return ConnectionFailed(f"{address} has closed the connection before it had answered")


def late(address: Address, seconds: float) -> TimedOut:
    """The error of a request that was not answered in time."""
    return TimedOut(f"no answer from {address} within {seconds:g} s")


def checked_text(what: str, text: Any) -> str:
    """A text of a request, which `what` names in errors.

    Raises `InputError` for one that UTF-8 cannot encode, such as half a surrogate pair.
    """
    try:
        str.encode(text)
    except (TypeError, UnicodeEncodeError):
        raise InputError(f"{what} is no text in UTF-8: {shown(text)}") from None
    return str.__str__(text)  # of numpy's text, or of an enumeration


def version_text(version: str | int) -> str:
    """A model's version as in requests; raises `InputError`."""
    if isinstance(version, int | np.integer):
        return str(int(version))
    return checked_text("the version", version or "")


def _parameter(name: str, value: object) -> Parameter:
    """A request parameter as a value of Python; raises `InputError`."""
    given = value.item() if isinstance(value, np.generic) else value
    if isinstance(given, str):
        return checked_text(f"parameter {shown(name)}", given)
    if isinstance(given, bool | float) or (isinstance(given, int) and -(2**63) <= given < 2**64):
        return given
    expected = "a text, a boolean, or a number of 64 bits"
    raise InputError(f"parameter {shown(name)} is {shown(value)}, expected {expected}")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request; an empty `version` is the server's choice.

    Without `outputs` all are requested; `classes` has, by output, the number of highest classes to
    return instead of the values. Raises `InputError` for names, an id and parameters that no
    request can have.
    """

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    id: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.outputs, str):
            raise InputError(f"outputs are a list of names, not one: {shown(self.outputs)}")
        checked_text("the model's name", self.model)
        for name in (*[tensor.name for tensor in self.inputs], *self.outputs, *self.classes):
            checked_text("the name of a tensor", name)
        for name in self.parameters:
            checked_text("the name of a parameter", name)
        put = partial(object.__setattr__, self)  # the class is frozen
        put("version", version_text(self.version))
        put("id", checked_text("the request's id", self.id or ""))
        put("classes", {name: index(count) for name, count in self.classes.items()})
        put("parameters", {name: _parameter(name, v) for name, v in self.parameters.items()})


def flat_json(document: Document) -> bytes:
    """A request of flat JSON, with NaN and infinities as bare words, which orjson writes as null.

    Raises `InputError` for values that have no JSON form.
    """
    try:
        text = orjson.dumps(document, default=_flat_value)
        return json.dumps(document, default=_flat_value).encode() if b"null" in text else text
    except TypeError as error:
        raise InputError(f"the request has no JSON form: {error}") from None


def _flat_value(value: Any) -> Any:
    """A value of numpy as one of Python, one of another type as orjson writes it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return orjson.loads(orjson.dumps(value))


class Transport(Protocol):
    """The way to a server, or to an engine in this process; methods raise `ClientError`.

    Timeouts are in seconds, 0 for none; of streams between two responses.
    """

    async def ask(
        self,
        operation: Operation,
        given: Document | None,
        parts: Mapping[str, str],
        seconds: float,
    ) -> Any:
        """The document of an operation's answer, None if it has none; see `AsyncModels.ask`."""

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """The response to a request."""

    def stream(
        self, request: InferRequest, signature: ModelSignature, seconds: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request."""

    def generate(
        self, model: str, version: str, document: Document, seconds: float
    ) -> AsyncGenerator[Document, None]:
        """The responses to a request of flat JSON."""

    async def fetch(self, path: str, seconds: float) -> bytes:
        """The content at a path of the server."""

    async def close(self) -> None:
        """Close all connections."""


class Result(Mapping[str, Array]):
    """One response: its outputs by name, as numpy arrays; those of BYTES hold `bytes`.

    Arrays are read-only views of the received bytes. An output with missing values, which another
    one named `<output>.null` marks, is a masked array, and that other one is left out.
    """

    __slots__ = ("__weakref__", "_named", "_response")

    def __init__(self, response: InferResponse) -> None:
        self._response: InferResponse | None = response
        self._named: Mapping[str, TensorArray] | None = None

    @property
    def response(self) -> InferResponse:
        """The protocol's response, with datatypes."""
        assert self._response is not None, "a result without its response. This is a bug."
        return self._response

    @property
    def model(self) -> str:
        """The name of the model that has answered."""
        return self.response.model_name

    @property
    def version(self) -> str:
        """The version that has answered."""
        return self.response.model_version

    @property
    def id(self) -> str:
        """The request's id; "" for none."""
        return self.response.id

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The response's parameters."""
        return self.response.parameters

    @property
    def _arrays(self) -> Mapping[str, TensorArray]:
        if self._named is None:
            self._named = arrays_of(self.response.outputs)
        return self._named

    def __getitem__(self, name: str) -> Array:
        return np.asanyarray(self._arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def array(self) -> Array:
        """The only output; raises `ClientError` if there are others."""
        if len(self._arrays) != 1:
            names = ", ".join(self._arrays) or "none"
            raise ClientError(f"model '{self.model}' has not just one output: {names}")
        return self[next(iter(self._arrays))]

    def texts(self, name: str = "") -> Any:
        """A BYTES output as `str`, in nested lists; without a name the only output.

        Missing texts are None.
        """
        return self.texts_array(name).tolist()

    def texts_array(self, name: str = "") -> Array:
        """A BYTES output as an array of `str`, masked where texts are missing."""
        return _texts(self[name] if name else self.array)

    def columns(self) -> dict[str, Array]:
        """The outputs as columns of a table, by name: one-dimensional, with `str` for texts.

        An output with several values a row is several columns, `<output>.0` and so on. Raises
        `ClientError` if the outputs differ in their numbers of rows.
        """
        found: dict[str, Array] = {}
        for name in self:
            array = self[name]
            if array.dtype == object:
                array = _texts(array)
            if array.ndim < 2:
                found[name] = array.reshape(-1)
                continue
            rows = array.reshape(len(array), prod(array.shape[1:]))  # -1 is no size of no rows
            if rows.shape[1] == 1:
                found[name] = rows[:, 0]
            else:
                found |= {f"{name}.{place}": rows[:, place] for place in range(rows.shape[1])}
        if len({len(column) for column in found.values()}) > 1:
            raise ClientError(f"the outputs of model '{self.model}' are not columns of one table")
        return found

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{t.name}: {t.datatype} {list(t.array.shape)}" for t in self.response.outputs
        )
        return f"<Result of {self.model} version {self.version}: {shown}>"


def _texts(array: Array) -> Array:
    """An array of `bytes` as `str`, with the same mask."""
    found: Array = np.asarray(np.frompyfunc(_decoded, 1, 1)(np.asarray(array)), object)
    return np.ma.MaskedArray(found, array.mask) if isinstance(array, np.ma.MaskedArray) else found


def _decoded(item: bytes) -> str:
    return item.decode("utf-8", "surrogateescape")
