"""The client's HTTP/1.1 transport, with the codecs and connections of upstreams."""

import asyncio
import json
import ssl
from binascii import b2a_base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

import orjson

from headrace.api.operations import NAMED, Document, Operation, Route
from headrace.client import AnswerError, ClientError, InputError, StatusError
from headrace.client.address import Address
from headrace.client.memory import NOTHING, ClientMemory, SharedTensors
from headrace.client.transport import (
    InferRequest,
    Responses,
    endpoint_of,
    flat_json,
    header_text,
    hung_up,
    late,
    not_connected,
)
from headrace.client.values import Declared, ModelSignature, elements, fit
from headrace.connections.http_pool import (
    CONNECT_SECS,
    ConnectionLost,
    HttpPool,
    NoAnswer,
    NotConnected,
)
from headrace.core.call import InferResponse, Parameter, Timing
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer, Tensor
from headrace.protocol.http1 import HttpRequest, HttpResponse, request_pieces
from headrace.protocol.v2_json import (
    error_text,
    read_answer,
    request_headers,
    write_request,
)

_JSON = {"content-type": "application/json"}
_SHOWN = 200  # characters of an answer shown in errors
_UNREADY = 503


class HttpTransport:
    """A client's transport over HTTP/1.1; tensors are binary.

    Times are in seconds, 0 for no limit; for streams, per response. Raises `ClientError`.
    """

    def __init__(
        self,
        address: Address,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`headers` are sent with every request. Raises `InputError` for an invalid one."""
        common = {"host": address.authority, "user-agent": "headrace"}
        self._common = header_text(common | dict(headers))
        self._address = address
        self._pool = HttpPool(endpoint_of(address), tls)
        self._memory = ClientMemory(address.socket) if address.socket else None

    async def ask(
        self,
        operation: Operation,
        given: Document | None,
        parts: Mapping[str, str],
        seconds: float,
    ) -> Any:
        """The JSON of an operation's answer; None if it has no body."""
        routes = operation.routes
        route = next((found for found in routes if found.body is (given is not None)), routes[0])
        body = [] if route.method != "POST" else [_given_json(operation, given or {})]
        answer = await self._ask(
            HttpRequest(route.method, self._path(route, parts), _JSON, body), seconds
        )
        if answer.status != 200 and not (route.unready and answer.status == _UNREADY):
            raise _refusal(answer)
        return _parsed(answer.body, "the answer is no JSON") if answer.body else None

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """The response to a request."""
        path = self._operation_path("ModelInfer", request.model, request.version)

        async def send(given: InferRequest, shared: SharedTensors) -> InferResponse:
            inputs = [(t.name, t.datatype, t.array.shape, [t.array]) for t in given.inputs]
            parameters = {**given.parameters, "binary_data_output": True}
            pieces, size = write_request(
                inputs, given.outputs, parameters, given.id, given.classes,
                places=shared.places, rooms=shared.rooms,
            )  # fmt: skip
            asked = HttpRequest("POST", path, request_headers(size), pieces)
            return read_response(await self._ask(asked, seconds), shared.views)

        if self._memory is None:
            return await send(request, NOTHING)
        return await self._memory.infer(request, send)

    async def stream(
        self, request: InferRequest, signature: ModelSignature, seconds: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request, as flat JSON, which has no shapes."""
        document = flat_document(request.inputs, request.parameters, request.id)
        asked = self.generate(request.model, request.version, document, seconds)
        async with aclosing(asked) as responses:
            async for response in responses:
                yield _response_of(response, request, signature)

    async def generate(
        self, model: str, version: str, document: Document, seconds: float
    ) -> AsyncGenerator[Document, None]:
        """The server-sent events that answer a request of flat JSON."""
        path = self._operation_path("GenerateStream", model, version)
        asked = HttpRequest("POST", path, _JSON, [flat_json(document)])
        async with aclosing(self._events(asked, seconds)) as events:
            async for text in events:
                response = _parsed(text, "an event is no JSON")
                if not isinstance(response, dict):
                    raise AnswerError(f"an event is no JSON object: {_shown(text)}")
                error = response.get("error")
                if isinstance(error, str) and "model_name" not in response:
                    raise StatusError(200, error)
                yield response

    async def fetch(self, path: str, seconds: float) -> bytes:
        """The content at a path."""
        answer = await self._ask(HttpRequest("GET", self._address.prefix + path), seconds)
        if answer.status != 200:
            raise _refusal(answer)
        return bytes(answer.body)

    async def close(self) -> None:
        """Close all connections."""
        if self._memory is not None:
            self._memory.close()
        await self._pool.close()

    def _operation_path(self, operation: str, model: str, version: str) -> str:
        route = NAMED[operation].routes[0]
        return self._path(route, {"name": model, "version": version})

    def _path(self, route: Route, parts: Mapping[str, str]) -> str:
        return self._address.prefix + route.filled(**parts)

    async def _ask(self, request: HttpRequest, seconds: float) -> HttpResponse:
        try:
            return await self._pool.ask(request_pieces(request, self._common), seconds)
        except (NotConnected, ConnectionLost, NoAnswer, InvalidRequest) as error:
            raise self._explained(error, seconds) from error.__cause__

    async def _events(self, request: HttpRequest, seconds: float) -> AsyncGenerator[bytes, None]:
        """The data of each event of a successful answer, as it arrives."""
        pieces = request_pieces(request, self._common)
        try:
            connection = await self._pool.connection(seconds)
        except NotConnected as error:
            raise self._explained(error, seconds) from error.__cause__
        body: Responses[bytes] = Responses(connection.hold, seconds, late(self._address, seconds))
        answered = asyncio.Event()

        def done(outcome: HttpResponse | Exception) -> None:
            answered.set()
            if not isinstance(outcome, HttpResponse):
                body.end(self._explained(outcome, seconds))
            elif outcome.status != 200:
                body.end(_refusal(outcome))
            else:
                body.put(bytes(outcome.body))  # empty, unless its length was known
                body.end()

        connection.send(pieces, 0, done, body.put)
        rest = b""
        try:
            async for piece in body:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        finally:
            if not answered.is_set():
                connection.abort()

    def _explained(self, error: Exception, seconds: float) -> ClientError:
        """The client's error for a failed request."""
        match error:
            case NoAnswer():
                return late(self._address, seconds)
            case NotConnected() if (
                isinstance(error.__cause__, TimeoutError) and 0 < seconds <= CONNECT_SECS
            ):  # not the limit of connections, after which another attempt may be made
                return late(self._address, seconds)
            case NotConnected():
                return not_connected(self._address, str(error))
            case ConnectionLost():
                return hung_up(self._address)
        return AnswerError(f"what answers at {self._address} does not speak HTTP")


def read_response(
    answer: HttpResponse, shared: Mapping[str, memoryview] | None = None
) -> InferResponse:
    """Decode an inference response; raises `StatusError` and `AnswerError`.

    Outputs in `shared` without data are views of that memory.
    """
    if answer.status != 200:
        raise _refusal(answer)
    try:
        return read_answer(answer.headers, answer.body, shared or {})
    except InvalidRequest as error:
        raise AnswerError(f"the answer is no inference response: {error}") from error


def flat_document(
    inputs: Sequence[Tensor], parameters: Mapping[str, Parameter], id: str
) -> Document:
    """A request as flat JSON; raises `InputError` for bytes that are not text."""
    document: Document = {**parameters, **({"id": id} if id else {})}
    for tensor in inputs:
        values = [_plain(tensor.name, item) for item in tensor.array.ravel().tolist()]
        document[tensor.name] = values[0] if len(values) == 1 else values
    return document


def _plain(name: str, item: Any) -> Any:
    if not isinstance(item, bytes):
        return item
    try:
        return item.decode()
    except UnicodeDecodeError:
        raise InputError(
            f"input {name!r}: a stream is asked for in JSON, which takes texts in UTF-8"
            " and no other bytes"
        ) from None


def _response_of(
    document: Document, request: InferRequest, signature: ModelSignature
) -> InferResponse:
    """Decode a response of flat JSON; raises `AnswerError`."""
    wanted = request.outputs or signature.outputs
    names = [name for name in signature.outputs if name in wanted and name in document]
    try:
        outputs = [_output(signature.outputs[name], document[name]) for name in names]
    except ValueError as error:
        raise AnswerError(f"a response is not as the model declares it: {error}") from error
    model, version = str(document.get("model_name", "")), str(document.get("model_version", ""))
    found = document.get("parameters")
    return InferResponse(
        model, version, str(document.get("id", request.id)), outputs, Timing(0, 0, 0),
        found if isinstance(found, dict) else {},
    )  # fmt: skip


def _output(declared: Declared, value: Any) -> Tensor:
    array = fit(elements(value, declared.datatype), declared)
    return Tensor(declared.name, declared.datatype, array)


def _given_json(operation: Operation, given: Document) -> bytes:
    """The document of a request as JSON; raises `InputError` for values that have no JSON form."""
    try:
        return orjson.dumps(given, default=_base64)
    except TypeError as error:
        raise InputError(f"{operation.name}: {error}") from None


def _base64(content: bytes) -> str:
    """A file's content as base64 text."""
    return b2a_base64(content, newline=False).decode()


def _parsed(body: Buffer, problem: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        with suppress(ValueError, RecursionError):
            if b"NaN" in (raw := bytes(body)) or b"Infinity" in raw:  # as servers write them
                return json.loads(raw)
        raise AnswerError(f"{problem}: {_shown(body)}") from None


def _refusal(answer: HttpResponse) -> StatusError:
    text = error_text(answer.body)
    if not text:
        known = answer.status in HTTPStatus.__members__.values()
        phrase = HTTPStatus(answer.status).phrase if known else ""
        text = f"HTTP status {answer.status} {phrase}".rstrip()
        shown = _shown(answer.body)
        text += f": {shown}" if shown else ""
    return StatusError(answer.status, text)


def _shown(body: Buffer) -> str:
    text = " ".join(bytes(body).decode("utf-8", "replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
