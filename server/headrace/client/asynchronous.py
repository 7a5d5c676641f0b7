"""The client of a server for coroutines: every operation over HTTP or gRPC, whichever its URL says.

A client belongs to the event loop of its first request; its connections are kept and shared by all
tasks there. Only an attempt to connect is ever repeated: what a server may have seen is not sent
twice.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.api.operations import OPERATIONS, Document, Operation
from headrace.client.address import DEFAULT_URL, Address
from headrace.client.errors import (
    AnswerError,
    ConnectionFailed,
    InputError,
    StatusError,
    TimedOut,
)
from headrace.client.transport import InferRequest, Result
from headrace.client.values import Signature, tensor_of
from headrace.core.call import Parameter
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor

if TYPE_CHECKING:
    from headrace.client.grpc import GrpcTransport
    from headrace.client.http import HttpTransport

TIMEOUT_SECS = 30.0
_FIRST_PAUSE_SECS = 0.1  # before another attempt to connect
_LOOK_SECS = 0.05  # between two questions whether a server is ready

Inputs = Mapping[str, Any]
T = TypeVar("T")
_NOT_READY = frozenset({400, 404, 503})


class AsyncClient:
    """A client of one server, for coroutines.

    Methods raise `ClientError`. `timeout` is in seconds, for streams between two responses; None is
    the client's own, 0 any time. An empty `version` is the server's choice.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, headers: Mapping[str, str] | None = None, token: str = "",
        timeout: float = TIMEOUT_SECS, ssl_context: ssl.SSLContext | None = None,
        connect_retries: int = 0, operations: Sequence[Operation] = OPERATIONS,
    ) -> None:  # fmt: skip
        """A client of `http://`, `https://`, `grpc://`, `grpcs://`, `unix:` or `grpc+unix:`.

        `headers` go with every request, and `token` as that of a bearer. A connection is attempted
        `connect_retries` times more, with longer and longer pauses. Raises `ValueError` for a URL
        that is none.
        """
        self.address = Address.parse(url)
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._tls = ssl_context
        self._retries = connect_retries
        self._operations = {operation.name: operation for operation in operations}
        self._transport: HttpTransport | GrpcTransport | None = None
        self._signatures: dict[tuple[str, str], Signature] = {}

    async def aclose(self) -> None:
        """End all connections, with whatever is under way."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # --- inference

    def model(self, name: str, version: str = "") -> "AsyncModel":
        """A handle of a model, to be called with its inputs by their names."""
        return AsyncModel(self, name, version)

    async def infer(
        self, model: str, inputs: Inputs, *, outputs: Sequence[str] = (),
        classes: Mapping[str, int] | None = None, parameters: Mapping[str, Parameter] | None = None,
        id: str = "", version: str = "", timeout: float | None = None,
    ) -> Result:  # fmt: skip
        """Run a model once; arrays are sent in their own datatypes and shapes.

        Without `outputs` all are given; those in `classes` as so many of their best classes.
        """
        tensors = [tensor_of(name, value) for name, value in inputs.items()]
        return await self.send(
            InferRequest(
                model, tensors, outputs or list(classes or ()), classes or {}, parameters or {},
                id, version,
            ),
            timeout,
        )  # fmt: skip

    async def send(self, request: InferRequest, timeout: float | None = None) -> Result:
        """Run a model once, by a request whose tensors are made."""
        seconds = self._seconds(timeout)
        try:
            return Result(await self._retried(lambda: self._open().infer(request, seconds)))
        except InvalidRequest as error:  # of a name or parameter that cannot be written
            raise InputError(str(error)) from None

    async def stream(
        self, model: str, inputs: Inputs, *, outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None, id: str = "", version: str = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[Result, None]:  # fmt: skip
        """Run a model that answers any number of times, and give its responses as they come.

        Inputs are converted to what it declares. Over HTTP, responses travel as flat JSON: an
        output that leaves several dimensions open is as long as the last one of these.
        """
        tensors = await self.tensors(model, inputs, version)
        signature = await self.signature(model, version)
        request = InferRequest(model, tensors, outputs, {}, parameters or {}, id, version)
        found = self._open().stream(request, signature, self._seconds(timeout))
        async with aclosing(found) as responses:
            async for response in responses:
                yield Result(response)

    async def generate_stream(
        self, model: str, document: Document, *, version: str = "", timeout: float | None = None
    ) -> AsyncGenerator[Document, None]:
        """Ask a model with flat JSON over HTTP, and give its responses as they come."""
        found = self._open().generate(model, version, document, self._seconds(timeout))
        async with aclosing(found) as responses:
            async for response in responses:
                yield response

    async def signature(self, model: str, version: str = "", fresh: bool = False) -> Signature:
        """The inputs and outputs of a model, as remembered unless they are to be `fresh`."""
        known = None if fresh else self._signatures.get((model, version))
        if known is None:
            metadata, config = await asyncio.gather(
                self.model_metadata(model, version), self._config(model, version)
            )
            known = self._signatures[model, version] = Signature.of(metadata, config)
        return known

    async def tensors(self, model: str, inputs: Inputs, version: str = "") -> list[Tensor]:
        """Values as a model declares its inputs; raises `InputError` for what does not fit."""
        known = (model, version) in self._signatures
        try:
            return (await self.signature(model, version)).tensors(model, inputs)
        except InputError:
            if not known:
                raise
        # The model may have been loaded anew with another signature.
        return (await self.signature(model, version, fresh=True)).tensors(model, inputs)

    async def _config(self, model: str, version: str) -> Document:
        try:
            return await self.model_config(model, version)
        except StatusError:  # not every server of the protocol has configurations
            return {}

    # --- server and models

    async def live(self) -> bool:
        """True if the server is alive; raises `ConnectionFailed` if nothing answers."""
        return await self._holds("ServerLive", "live")

    async def ready(self, model: str = "", version: str = "") -> bool:
        """True if the server, or a model of it, takes requests."""
        if model:
            return await self._holds("ModelReady", "ready", name=model, version=version)
        return await self._holds("ServerReady", "ready")

    async def wait_ready(self, model: str = "", version: str = "", seconds: float = 60.0) -> None:
        """Wait until `ready`, also for a server that nobody has started yet; raises `TimedOut`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            try:
                if await self.ready(model, version):
                    return
                why = "not ready"
            except ConnectionFailed as error:
                why = str(error)
            if loop.time() >= until:
                what = f"model '{model}'" if model else str(self.address)
                raise TimedOut(f"{what} is not ready after {seconds:g} s: {why}")
            await asyncio.sleep(_LOOK_SECS)

    async def metadata(self) -> Document:
        """Name, version and extensions of the server."""
        return await self.document("ServerMetadata")

    async def model_metadata(self, model: str, version: str = "") -> Document:
        """Inputs, outputs and versions of a model."""
        return await self.document("ModelMetadata", name=model, version=version)

    async def model_config(self, model: str, version: str = "") -> Document:
        """The configuration of a model as the server has completed it."""
        return await self.document("ModelConfig", name=model, version=version)

    async def statistics(self, model: str = "", version: str = "") -> Document:
        """Counters of a model, or of all."""
        return await self.document("ModelStatistics", name=model, version=version)

    async def index(self, ready: bool = False) -> list[Document]:
        """The models of the server's repositories with their states, or those that are `ready`."""
        return await self.documents("RepositoryIndex", {"ready": ready})

    async def load(
        self,
        model: str,
        config: str | Document = "",
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load a model, or load it again; returns when it is ready.

        `config` takes the place of the model's own, `files` by path what is in its directory. A
        load that is not done within `timeout` goes on in the server.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        parameters: Document = {"config": text} if text else {}
        parameters |= {f"file:{path}": content for path, content in (files or {}).items()}
        await self.ask("RepositoryModelLoad", {"parameters": parameters}, timeout, name=model)

    async def unload(
        self, model: str, dependents: bool = False, timeout: float | None = None
    ) -> None:
        """Unload a model, and models that were loaded only for it if `dependents`."""
        given = {"parameters": {"unload_dependents": dependents}}
        await self.ask("RepositoryModelUnload", given, timeout, name=model)

    # --- any operation

    async def ask(
        self, operation: str, given: Document | None = None, timeout: float | None = None, /,
        **parts: str,
    ) -> Any:  # fmt: skip
        """The document that answers an operation of the protocol, None for one without.

        `given` is the request's document, None for none, and `parts` are the path's parameters;
        empty ones are left out. Over gRPC, documents are the JSON form of the messages.
        """
        found, seconds = self._operations[operation], self._seconds(timeout)
        return await self._retried(lambda: self._open().ask(found, given, parts, seconds))

    async def document(
        self, operation: str, given: Document | None = None, /, **parts: str
    ) -> Document:
        """The JSON object that answers an operation; see `ask`."""
        found = await self.ask(operation, given, **parts)
        if not isinstance(found, dict):
            raise AnswerError(f"the answer to {operation} is no JSON object")
        return found

    async def documents(self, operation: str, given: Document, /, **parts: str) -> list[Document]:
        """The JSON array of objects that answers an operation; see `ask`."""
        found = await self.ask(operation, given, **parts)
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise AnswerError(f"the answer to {operation} is no JSON array of objects")
        return found

    async def fetch(self, path: str) -> bytes:
        """The content of a path over HTTP, such as `/metrics`."""
        return await self._retried(lambda: self._open().fetch(path, self._timeout))

    async def _holds(self, operation: str, member: str, **parts: str) -> bool:
        try:
            found = await self.ask(operation, **parts)
        except StatusError as error:
            if error.status in _NOT_READY:
                return False
            raise
        return not isinstance(found, dict) or found.get(member) is not False

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    def _open(self) -> "HttpTransport | GrpcTransport":
        """The transport, made for the event loop that is running when it is first needed."""
        if self._transport is None:
            self._transport = self._made()
        return self._transport

    def _made(self) -> "HttpTransport | GrpcTransport":
        """A transport, which is imported with its codecs when it is wanted."""
        address = self.address
        tls = None
        if address.secure:
            tls = self._tls or ssl.create_default_context()
        if address.grpc:
            from headrace.client.grpc import GrpcTransport

            return GrpcTransport(address, self._headers, tls, self._operations)
        from headrace.client.http import HttpTransport

        return HttpTransport(address, self._headers, tls, self._operations)

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, with further attempts where there was no connection."""
        for attempt in range(self._retries):
            try:
                return await ask()
            except ConnectionFailed as error:
                if error.sent:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_SECS * 2**attempt)
        return await ask()


class AsyncModel:
    """A model of a server, for coroutines; made by `AsyncClient.model`.

    Inputs are converted to the datatype and shape that the model declares: arrays, scalars, lists,
    `str` and `bytes`. What does not fit raises `InputError`, and nothing is sent.
    """

    def __init__(self, client: AsyncClient, name: str, version: str = "") -> None:
        self.name = name
        self.version = version
        self._client = client

    async def __call__(self, /, **inputs: Any) -> Result:
        """Run the model once."""
        return await self.infer(inputs)

    async def infer(
        self, inputs: Inputs, *, outputs: Sequence[str] = (),
        classes: Mapping[str, int] | None = None, parameters: Mapping[str, Parameter] | None = None,
        id: str = "", timeout: float | None = None,
    ) -> Result:  # fmt: skip
        """Run the model once; see `AsyncClient.infer`."""
        tensors = await self._client.tensors(self.name, inputs, self.version)
        wanted = outputs or list(classes or ())
        request = InferRequest(
            self.name, tensors, wanted, classes or {}, parameters or {}, id, self.version
        )
        return await self._client.send(request, timeout)

    async def stream(self, /, **inputs: Any) -> AsyncGenerator[Result, None]:
        """Run the model, and give its responses as they come; see `AsyncClient.stream`."""
        found = self._client.stream(self.name, inputs, version=self.version)
        async with aclosing(found) as results:
            async for result in results:
                yield result

    async def signature(self) -> Signature:
        """The inputs and outputs that the model declares."""
        return await self._client.signature(self.name, self.version)

    async def ready(self) -> bool:
        """True if the model takes requests."""
        return await self._client.ready(self.name, self.version)
