"""Protocols over HTTP/1.1, for upstreams, on the event loop; V2 is one of them.

A protocol is a `Rest`, without the connection: what it has to ask goes through a function of its
client.
"""

import asyncio
import json
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import Message

from headrace.connections.endpoint import Endpoint
from headrace.connections.http_pool import (
    ConnectionLost,
    HttpConnection,
    HttpPool,
    NoAnswer,
    NotConnected,
    deadline_in,
    seconds_left,
)
from headrace.core.errors import InvalidRequest, PayloadTooLarge, ServerError, Unsupported
from headrace.core.signature import Signature
from headrace.placement.upstream.connection import (
    CallFailed,
    Receiver,
    RemoteDescription,
    RemoteRequest,
    RemoteStream,
    StreamReceiver,
    UpstreamCall,
    nonsense,
    with_headers,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.compression import ANSWER_RATIO, LARGE, compress, decompress
from headrace.protocol.elements import NOT_IN_JSON
from headrace.protocol.http1 import HttpRequest, HttpResponse, header_lines, request_pieces
from headrace.protocol.json_text import parse_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.status import (
    BEGUN,
    Failure,
    Fate,
    begun_told,
    http_failure_of,
    late,
    lost,
    too_large,
    unsent,
)
from headrace.protocol.v2_json import (
    error_text,
    read_answer,
    request_headers,
    write_request,
)
from headrace.protocol.v2_protobuf import RemoteAnswer

log = logging.getLogger(__name__)


class TaskCall:
    """An inference call as a task of the running loop; implements `connection.Call`."""

    def __init__(self, work: Coroutine[Any, Any, RemoteAnswer], receiver: Receiver) -> None:
        """`work` returns the response, or raises `CallFailed`."""
        self._receiver: Receiver | None = receiver
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the task."""
        self._receiver = None
        self._task.cancel()

    def _done(self, task: "asyncio.Task[RemoteAnswer]") -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        try:
            answer = task.result()
        except asyncio.CancelledError:  # cancelled by the end of the loop
            return
        except Exception as error:
            receiver.failed(error)
        else:
            receiver.answered(answer)


M = TypeVar("M", bound=Message)
T = TypeVar("T")
HttpAsk: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Rest(ABC):
    """A protocol over HTTP, for one model on one upstream. Methods raise `CallFailed`."""

    def __init__(self, options: RemoteOptions, model: str, signature: Signature) -> None:
        """`model` is the local name of the model, for errors; `signature` the configured one."""
        self.options = options
        self.model = model
        self.signature = signature
        self.learned = False

    @abstractmethod
    async def describe(self, ask: HttpAsk) -> RemoteDescription:
        """Query the model's description."""

    @abstractmethod
    async def ready(self, ask: HttpAsk) -> bool:
        """Query the model's readiness."""

    async def learn(self, ask: HttpAsk) -> None:
        """Query properties of the server needed by `request`; by default none."""
        self.learned = True

    @abstractmethod
    def request(self, request: RemoteRequest) -> HttpRequest:
        """The HTTP request of an inference call."""

    @abstractmethod
    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The outputs in a response."""

    async def load(self, ask: HttpAsk, config: str) -> None:
        """Load the model; see `headrace.placement.upstream.connection.ProtocolClient`."""
        raise failed_by(Unsupported("this protocol has no way to have models loaded"))

    async def unload(self, ask: HttpAsk) -> None:
        """Unload the model."""
        await self.load(ask, "")


def failed_by(error: ServerError) -> CallFailed:
    """The failure of a call that fails wherever it is sent."""
    return CallFailed(Failure(Fate.ANSWERED, error), str(error))


def json_of(model: str, response: HttpResponse) -> Any:
    """The JSON of a successful response; raises `CallFailed`."""
    if response.status != 200:
        raise refusal(model, response)
    try:
        return parse_json(response.body)
    except InvalidRequest as error:
        raise nonsense(model, error) from None


def refusal(model: str, response: HttpResponse) -> CallFailed:
    """The failure for an error response."""
    said = error_text(response.body)
    text = bytes(response.body[:2000]).decode(errors="replace")
    begun = begun_told(response.headers.get(_BEGUN, b""))
    failure = http_failure_of(model, response.status, said, text, begun)
    return CallFailed(failure, f"status {response.status}: {said or ' '.join(text.split())[:120]}")


def message_of(model: str, document: Any, message: M) -> M:
    """Convert JSON to a message, ignoring unknown fields; raises `CallFailed`."""
    try:
        return json_format.ParseDict(document, message, ignore_unknown_fields=True)
    except (json_format.ParseError, AttributeError, TypeError) as error:
        raise nonsense(model, error) from None


_BEGUN = BEGUN.encode()
_LONG = 8 << 10  # bytes of JSON that become a message in less than a millisecond


async def read_description(response: HttpResponse, read: Callable[[], T]) -> T:
    """The result of `read`, which makes messages of a response; on a thread if it is long."""
    return await asyncio.to_thread(read) if len(response.body) > _LONG else read()


_ENCODING = b"content-encoding"


class HttpClient:
    """Implements `headrace.placement.upstream.connection.ProtocolClient` over HTTP."""

    def __init__(self, endpoint: Endpoint, rest: Rest, tls: ssl.SSLContext | None) -> None:
        """`rest` is the protocol, for this server alone; `tls` is None for none."""
        self._endpoint = endpoint
        self._options = options = rest.options
        self._headers = [("host", endpoint.authority), ("user-agent", "headrace")]
        if options.compression:
            self._headers.append(("accept-encoding", "gzip, deflate"))
        if options.credentials.authorization:
            self._headers.append(("authorization", options.credentials.authorization))
        self._common = header_lines(self._headers)
        self._pool = HttpPool(endpoint, tls, options.largest_response)
        self._rest = rest

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> UpstreamCall:
        """Start an inference call."""
        connection = None
        if self._rest.learned and not self._options.compression:
            try:
                common = self._lines_for(request)
                placed = self._placed(self._rest.request(request))
                connection = self._pool.take()
            except CallFailed:  # reported by the task, after this has returned
                pass
        if connection is None:
            return TaskCall(self.infer(request, seconds), receiver)
        call = UpstreamHttpCall(connection, self._read, self._failed, receiver)
        connection.send(request_pieces(placed, common), seconds, call.done)
        return call

    def stream(
        self, request: RemoteRequest, seconds: float, receiver: StreamReceiver
    ) -> RemoteStream:
        """Raise `Unsupported`: decoupled models are not loaded from upstreams over HTTP."""
        raise Unsupported("there are no streams over HTTP/1.1")

    async def ready(self, seconds: float) -> bool:
        """True if the upstream reports the model as ready; raises `CallFailed`."""
        until = deadline_in(seconds)
        ready = await self._rest.ready(self._asking(until))
        if ready and not self._rest.learned:
            await self._rest.learn(self._asking(until))
        return ready

    async def describe(self, seconds: float) -> RemoteDescription:
        """The model's metadata and configuration; raises `CallFailed`."""
        return await self._rest.describe(self._asking(deadline_in(seconds)))

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """The response of one call; raises `CallFailed`."""
        until = deadline_in(seconds)
        common = self._lines_for(request)
        if not self._rest.learned:
            await self._rest.learn(self._asking(until))
        return self._rest.answer(await self._ask(self._rest.request(request), until, common))

    async def load(self, config: str, seconds: float) -> None:
        """Load the model; raises `CallFailed`."""
        await self._rest.load(self._asking(deadline_in(seconds)), config)

    async def unload(self, seconds: float) -> None:
        """Unload the model; raises `CallFailed`."""
        await self._rest.unload(self._asking(deadline_in(seconds)))

    async def close(self) -> None:
        """Close all connections, including those in use."""
        await self._pool.close()

    def _lines_for(self, request: RemoteRequest) -> str:
        """The header lines of a call; raises `CallFailed`."""
        if not request.headers:
            return self._common
        try:
            return header_lines(with_headers(self._headers, request.headers))
        except InvalidRequest as error:
            raise failed_by(error) from None

    def _asking(self, until: float) -> HttpAsk:
        return partial(self._ask, until=until)

    async def _ask(self, request: HttpRequest, until: float, common: str = "") -> HttpResponse:
        large = sum(map(len, request.body)) > LARGE
        loop = asyncio.get_running_loop()
        if large and self._options.compression:
            request = await loop.run_in_executor(None, self._placed, request)
        else:
            request = self._placed(request)
        pieces = request_pieces(request, common or self._common)
        try:
            response = await self._pool.ask(pieces, seconds_left(until) or 0.0)
        except (NotConnected, ConnectionLost, NoAnswer, InvalidRequest) as error:
            raise self._failed(error) from None
        if takes_long(response):
            return await loop.run_in_executor(None, self._unpacked, response)
        return self._unpacked(response)

    def _placed(self, request: HttpRequest) -> HttpRequest:
        """A request with the server's path prefix, and its body compressed if configured."""
        headers, body, encoding = request.headers, request.body, self._options.compression
        if body and encoding:
            headers = {**headers, "content-encoding": encoding}
            body = [compress(b"".join(body), encoding)]
        return HttpRequest(request.method, self._endpoint.path + request.path, headers, body)

    def _read(self, response: HttpResponse) -> RemoteAnswer:
        return self._rest.answer(self._unpacked(response))

    def _unpacked(self, response: HttpResponse) -> HttpResponse:
        """A response with its body decompressed; raises `CallFailed`."""
        encoding = response.headers.get(_ENCODING)
        if encoding is None:
            return response
        try:
            name, largest = encoding.decode("latin-1"), self._options.largest_response
            body = decompress(response.body, name, largest, "answer", max_ratio=ANSWER_RATIO)
        except ServerError as error:
            raise self._failed(error, grown=True) from None
        return HttpResponse(response.status, response.headers, body, response.reusable)

    def _failed(self, error: Exception, grown: bool = False) -> CallFailed:
        """The failure of a call without a usable response."""
        model = self._rest.model
        if isinstance(error, NotConnected):
            return CallFailed(unsent(model), str(error))
        if isinstance(error, NoAnswer):
            return CallFailed(late(model), "no answer in time")
        if isinstance(error, ConnectionLost):
            return CallFailed(lost(model), str(error))
        log.error("model %s: the answer of server %s cannot be used: %s", model,
                  self._endpoint.name, error, extra={"model": model})  # fmt: skip
        if isinstance(error, PayloadTooLarge):
            limit = self._options.largest_response
            return CallFailed(too_large(model, limit, grown), str(error))
        return nonsense(model, error)


def takes_long(response: HttpResponse) -> bool:
    """True if a response should be decompressed on a thread."""
    return _ENCODING in response.headers and len(response.body) > LARGE


class UpstreamHttpCall:
    """A request on an idle connection; implements `connection.Call`."""

    def __init__(
        self,
        connection: HttpConnection,
        read: Callable[[HttpResponse], RemoteAnswer],
        failed: Callable[[Exception], CallFailed],
        receiver: Receiver,
    ) -> None:
        """`read` decodes a response or raises; `failed` maps an error to its failure."""
        self._connection = connection
        self._read = read
        self._failed = failed
        self._receiver: Receiver | None = receiver
        self._reading: TaskCall | None = None  # decoding of a large response

    def cancel(self) -> None:
        """Close the connection, unless the response has arrived."""
        if self._receiver is not None:
            self._receiver = None
            self._connection.abort()
        elif self._reading is not None:
            self._reading.cancel()

    def done(self, outcome: HttpResponse | Exception) -> None:
        """Process the outcome of the request."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if not isinstance(outcome, HttpResponse):
            receiver.failed(self._failed(outcome))
            return
        if takes_long(outcome):
            work = asyncio.to_thread(self._read, outcome)
            self._reading = TaskCall(work, receiver)
            return
        try:
            answer = self._read(outcome)
        except Exception as error:  # any error concerns this call alone
            receiver.failed(error)
        else:
            receiver.answered(answer)


_BINARY = "binary_tensor_data"  # the extension's name
_NOT_OFFERED = frozenset({400, 404, 405, 501})


class V2Rest(Rest):
    """The V2 protocol, with the extensions for configurations, binary tensors and repositories."""

    def __init__(self, options: RemoteOptions, model: str, signature: Signature) -> None:
        super().__init__(options, model, signature)
        version = f"/versions/{options.version}" if options.version else ""
        name = quote(options.model, safe="")
        self._path = f"/v2/models/{name}{version}"
        self._repository = f"/v2/repository/models/{name}"
        self._binary = True
        self._only_binary: Collection[str] = ()  # outputs without a JSON form

    async def describe(self, ask: HttpAsk) -> RemoteDescription:
        """Query the model's metadata, and its configuration if the server provides it."""
        metadata = await self._metadata(ask)
        response = await ask(HttpRequest("GET", f"{self._path}/config"))
        if response.status in _NOT_OFFERED:
            return RemoteDescription(metadata, None)

        def read() -> RemoteDescription:
            document = json_of(self.model, response)
            return RemoteDescription(metadata, message_of(self.model, document, ModelConfig()))

        return await read_description(response, read)

    async def learn(self, ask: HttpAsk) -> None:
        """Query whether tensors can be binary."""
        self._binary = self.options.tensors == "binary"
        if not self.options.tensors:
            response = await ask(HttpRequest("GET", "/v2"))
            self._binary = response.status == 200 and _BINARY in _extensions(response)
        self._only_binary = [s.name for s in self.signature.outputs if s.datatype in NOT_IN_JSON]
        self.learned = True

    def request(self, request: RemoteRequest) -> HttpRequest:
        """The request in a form that the server supports."""
        try:
            body, size = write_request(
                request.inputs, request.outputs, request.parameters, request.id,
                binary=self._binary, only_binary=self._only_binary,
            )  # fmt: skip
        except InvalidRequest as error:
            raise failed_by(error) from None
        return HttpRequest("POST", f"{self._path}/infer", request_headers(size), body)

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The outputs, binary or not."""
        if response.status != 200:
            raise refusal(self.model, response)
        try:
            found = read_answer(response.headers, response.body)
        except ServerError as error:
            log.error("model %s: a server has sent an invalid response: %s", self.model, error,
                      extra={"model": self.model})  # fmt: skip
            raise nonsense(self.model, error) from None
        arrays = {tensor.name: tensor.array for tensor in found.outputs}
        return RemoteAnswer(arrays, found.parameters)

    async def load(self, ask: HttpAsk, config: str) -> None:
        """Load the model, by an extension of the protocol."""
        document = {"parameters": {"config": config}} if config else {}
        await self._change(ask, "load", json.dumps(document).encode())

    async def unload(self, ask: HttpAsk) -> None:
        """Unload the model."""
        await self._change(ask, "unload", b"{}")

    async def ready(self, ask: HttpAsk) -> bool:
        """Query the readiness: Triton answers with the status alone, others in the body, too."""
        response = await ask(HttpRequest("GET", f"{self._path}/ready"))
        if response.status in (400, 404, 503):
            return False
        if response.status != 200:
            raise refusal(self.model, response)
        try:
            document = parse_json(response.body) if response.body else None
        except InvalidRequest:
            return True  # the protocol only defines the status
        return not isinstance(document, dict) or document.get("ready") is not False

    async def _change(self, ask: HttpAsk, what: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        response = await ask(HttpRequest("POST", f"{self._repository}/{what}", headers, [body]))
        if response.status != 200:
            raise refusal(self.model, response)

    async def _metadata(self, ask: HttpAsk) -> pb.ModelMetadataResponse:
        response = await ask(HttpRequest("GET", self._path))
        if response.status != 200:
            raise refusal(self.model, response)
        document = _document(response)
        if document is None:
            text = f"GET {self._path} is not answered as the V2 protocol has it"
            raise nonsense(self.model, InvalidRequest(text))
        known = {name: document.get(name) for name in ("name", "inputs", "outputs")}
        return await read_description(
            response, lambda: message_of(self.model, known, pb.ModelMetadataResponse())
        )


def _document(response: HttpResponse) -> dict[str, object] | None:
    """The JSON object in a response; None if there is none."""
    try:
        document = parse_json(response.body)
    except InvalidRequest:
        return None
    return document if isinstance(document, dict) else None


def _extensions(response: HttpResponse) -> list[object]:
    found = (_document(response) or {}).get("extensions")
    return found if isinstance(found, list) else []
