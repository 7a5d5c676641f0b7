"""The asynchronous client: every operation over HTTP or gRPC, as its URL says.

A client belongs to the event loop of its first request; its connections are kept and shared by all
tasks there. In a forked process it opens its own, and leaves those of its parent alone. Only
attempts to connect are repeated: a request that the server may have seen is never sent twice.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Self, TypeVar

from headrace.api.operations import NAMED, Document
from headrace.client import (
    AnswerError,
    ConnectionFailed,
    InputError,
    StatusError,
    TimedOut,
)
from headrace.client.address import DEFAULT_URL, Address
from headrace.client.division import PARTS_AT_ONCE, divided, joined
from headrace.client.tables import ArrowStream
from headrace.client.transport import InferRequest, Result, Transport, checked_text, version_text
from headrace.client.values import ModelSignature, needs_signature, tensor_of
from headrace.connections.tls import TlsFileError, client_context_of
from headrace.core.call import Parameter
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor

TIMEOUT_SECS = 30.0
_FIRST_PAUSE_SECS = 0.1  # before another attempt to connect
_LOOK_SECS = 0.05  # between two readiness checks

Inputs = Mapping[str, Any] | ArrowStream  # by name, or a table
T = TypeVar("T")
_NOT_READY = frozenset({400, 404, 503})
_TOO_MANY_ROWS = "batch-size must be <="  # in the refusal of servers, Triton's too


class AsyncModels:
    """Models, and what serves them, for coroutines: the interface of clients and engines.

    Methods raise `ClientError`. `timeout` is in seconds, for streams between two responses; None
    means the client's own, 0 no limit. An empty `version` leaves the choice to the server.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._signatures: dict[tuple[str, str], ModelSignature] = {}

    @property
    def _place(self) -> str:
        """The server's address in error texts."""
        raise NotImplementedError

    def _open(self) -> Transport:
        """The transport, created on first use for the running event loop."""
        raise NotImplementedError

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask`, and again where that makes sense."""
        return await ask()

    async def aclose(self) -> None:
        """Cancel requests in flight, and free everything."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # --- inference

    def model(self, name: str, version: str | int = "") -> "AsyncModel":
        """A handle of a model, to be called with its inputs by name."""
        return AsyncModel(self, name, version)

    async def infer(
        self, model: str, inputs: Inputs, *, outputs: Sequence[str] = (),
        classes: Mapping[str, int] | None = None, parameters: Mapping[str, Parameter] | None = None,
        id: str = "", version: str | int = "", timeout: float | None = None,
    ) -> Result:  # fmt: skip
        """Run a model; arrays are sent in their own datatypes and shapes.

        Tables, and columns with missing values, are converted to what the model declares. Without
        `outputs` all are returned, those in `classes` as their highest classes.
        """
        if not isinstance(inputs, Mapping) or any(map(needs_signature, inputs.values())):
            tensors = await self.tensors(model, inputs, version)
        else:
            tensors = [tensor_of(name, value) for name, value in inputs.items()]
        return await self.send(
            InferRequest(
                model, tensors, outputs or list(classes or ()), classes or {}, parameters or {},
                id, version_text(version),
            ),
            timeout,
        )  # fmt: skip

    async def send(self, request: InferRequest, timeout: float | None = None) -> Result:
        """Run a model with a request of finished tensors.

        A request with more rows than the model takes is sent in parts, to one version. `timeout` is
        each part's.
        """
        known = self._signatures.get((request.model, request.version))
        if known is not None and known.most_rows:
            parts = divided(request, self._part_rows(request, known.most_rows))
            if len(parts) > 1:
                return await self._send_parts(parts, timeout)
        try:
            return await self._send(request, timeout)
        except StatusError as error:
            if _TOO_MANY_ROWS not in str(error):
                raise
            refused = error
        # Refused before anything was run, so it may be sent again.
        signature = await self.signature(request.model, request.version, fresh=True)
        parts = divided(request, signature.most_rows)
        if len(parts) < 2:
            raise refused
        return await self._send_parts(parts, timeout)

    def _part_rows(self, request: InferRequest, most_rows: int) -> int:
        """Rows of each part of a request to a model that takes `most_rows` in a batch."""
        return most_rows

    async def _send_parts(self, parts: Sequence[InferRequest], timeout: float | None) -> Result:
        """The joined responses to parts of a request, all of the version of the first one."""
        first = await self._send(parts[0], timeout)
        rest = [replace(part, version=first.version) for part in parts[1:]]
        found: list[Result | None] = [None] * len(rest)
        places = iter(range(len(rest)))

        async def work() -> None:
            for place in places:
                found[place] = await self._send(rest[place], timeout)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(PARTS_AT_ONCE, len(rest)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Result(joined([one.response for one in (first, *found) if one is not None]))

    async def _send(self, request: InferRequest, timeout: float | None) -> Result:
        seconds = self._seconds(timeout)
        try:
            return Result(await self._retried(lambda: self._open().infer(request, seconds)))
        except InvalidRequest as error:  # from a name or parameter that cannot be encoded
            raise InputError(str(error)) from None

    async def stream(
        self, model: str, inputs: Inputs, *, outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None, id: str = "", version: str | int = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[Result, None]:  # fmt: skip
        """Run a model with any number of responses; yields them as they arrive.

        Inputs are converted to the declared datatypes. Over HTTP, responses are flat JSON: of
        several variable dimensions of an output, the last one takes all elements.
        """
        tensors = await self.tensors(model, inputs, version)
        signature = await self.signature(model, version)
        request = InferRequest(
            model, tensors, outputs or (), {}, parameters or {}, id, version_text(version)
        )
        found = self._open().stream(request, signature, self._seconds(timeout))
        async with aclosing(found) as responses:
            async for response in responses:
                yield Result(response)

    async def generate_stream(
        self, model: str, document: Document, *, version: str | int = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[Document, None]:  # fmt: skip
        """Send flat JSON to a model over HTTP; yields the responses as they arrive."""
        name, number = checked_text("the model's name", model), version_text(version)
        found = self._open().generate(name, number, document, self._seconds(timeout))
        async with aclosing(found) as responses:
            async for response in responses:
                yield response

    async def signature(
        self, model: str, version: str | int = "", fresh: bool = False
    ) -> ModelSignature:
        """The inputs and outputs of a model, from the client's cache unless `fresh`."""
        version = version_text(version)
        known = None if fresh else self._signatures.get((model, version))
        if known is None:
            metadata, config = await asyncio.gather(
                self.model_metadata(model, version), self._config(model, version)
            )
            known = self._signatures[model, version] = ModelSignature.of(metadata, config)
        return known

    async def tensors(self, model: str, inputs: Inputs, version: str | int = "") -> list[Tensor]:
        """Convert values to a model's declared inputs; raises `InputError` for a mismatch."""
        version = version_text(version)
        known = (model, version) in self._signatures
        signature = await self.signature(model, version)
        if known and signature.arranges(inputs):
            # A model trained anew may have the same columns in another order, which no error tells.
            known, signature = False, await self.signature(model, version, fresh=True)
        try:
            return signature.tensors(model, inputs)
        except InputError:
            if not known:
                raise
        # The model may have been reloaded with another signature.
        return (await self.signature(model, version, fresh=True)).tensors(model, inputs)

    async def _config(self, model: str, version: str) -> Document:
        try:
            return await self.model_config(model, version)
        except StatusError:  # configurations are an extension of the protocol
            return {}

    # --- server and models

    async def live(self) -> bool:
        """True if the server is alive; raises `ConnectionFailed` without an answer."""
        return await self._holds("ServerLive", "live", None)

    async def ready(self, model: str = "", version: str | int = "") -> bool:
        """True if the server, or one of its models, takes requests."""
        return await self._ready(model, version, None)

    async def _ready(self, model: str, version: str | int, timeout: float | None) -> bool:
        if model:
            return await self._holds("ModelReady", "ready", timeout, name=model, version=version)
        return await self._holds("ServerReady", "ready", timeout)

    async def wait_ready(
        self, model: str = "", version: str | int = "", seconds: float = 60.0
    ) -> None:
        """Wait until `ready`, even for a server that is not started yet; raises `TimedOut`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            left = max(until - loop.time(), _LOOK_SECS)
            try:
                if await self._ready(model, version, min(self.timeout or left, left)):
                    return
                why = "not ready"
            except ConnectionFailed as error:
                why = str(error)
            if loop.time() >= until:
                what = f"model '{model}'" if model else self._place
                raise TimedOut(f"{what} is not ready after {seconds:g} s: {why}")
            await asyncio.sleep(_LOOK_SECS)

    async def metadata(self) -> Document:
        """Name, version and extensions of the server."""
        return await self.document("ServerMetadata")

    async def model_metadata(self, model: str, version: str | int = "") -> Document:
        """The inputs, outputs and versions of a model."""
        return await self.document("ModelMetadata", name=model, version=version)

    async def model_config(self, model: str, version: str | int = "") -> Document:
        """The configuration of a model, as completed by the server."""
        return await self.document("ModelConfig", name=model, version=version)

    async def statistics(self, model: str = "", version: str | int = "") -> Document:
        """The counters of a model, or of all models."""
        return await self.document("ModelStatistics", name=model, version=version)

    async def index(self, ready: bool = False) -> list[Document]:
        """The models of the server's repositories with their states; only `ready` ones if set."""
        return await self.documents("RepositoryIndex", {"ready": ready})

    async def load(
        self,
        model: str,
        config: str | Document = "",
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load or reload a model; returns once it is ready.

        `config` replaces the model's own, `files` by path the content of its directory. A load that
        exceeds `timeout` continues in the server.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        parameters: Document = {"config": text} if text else {}
        parameters |= {f"file:{path}": content for path, content in (files or {}).items()}
        await self.ask("RepositoryModelLoad", {"parameters": parameters}, timeout, name=model)

    async def unload(
        self, model: str, dependents: bool = False, timeout: float | None = None
    ) -> None:
        """Unload a model, and with `dependents` those that were loaded only for it."""
        given = {"parameters": {"unload_dependents": dependents}}
        await self.ask("RepositoryModelUnload", given, timeout, name=model)

    # --- any operation

    async def ask(
        self, operation: str, given: Document | None = None, timeout: float | None = None, /,
        version: str | int = "", **parts: str,
    ) -> Any:  # fmt: skip
        """The JSON document of an operation's answer; None if it has none.

        `given` is the request's document, None for none, and `parts` are the path's parameters;
        empty ones are left out. Over gRPC, documents are the JSON form of the messages.
        """
        found, seconds = NAMED[operation], self._seconds(timeout)
        texts = {name: checked_text(f"the {name}", part or "") for name, part in parts.items()}
        texts["version"] = version_text(version)
        return await self._retried(lambda: self._open().ask(found, given, texts, seconds))

    async def document(
        self, operation: str, given: Document | None = None, /, version: str | int = "",
        **parts: str,
    ) -> Document:  # fmt: skip
        """The JSON object of an operation's answer; see `ask`."""
        found = await self.ask(operation, given, version=version, **parts)
        if not isinstance(found, dict):
            raise AnswerError(f"the answer to {operation} is no JSON object")
        return found

    async def documents(self, operation: str, given: Document, /, **parts: str) -> list[Document]:
        """The JSON array of objects of an operation's answer; see `ask`."""
        found = await self.ask(operation, given, **parts)
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise AnswerError(f"the answer to {operation} is no JSON array of objects")
        return found

    async def fetch(self, path: str) -> bytes:
        """The content at an HTTP path, such as `/metrics`."""
        return await self._retried(lambda: self._open().fetch(path, self.timeout))

    async def _holds(
        self, operation: str, member: str, timeout: float | None, version: str | int = "",
        **parts: str,
    ) -> bool:  # fmt: skip
        try:
            found = await self.ask(operation, None, timeout, version=version, **parts)
        except StatusError as error:
            if error.status in _NOT_READY:
                return False
            raise
        return not isinstance(found, dict) or found.get(member) is not False

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        return 0.0 if seconds == inf else seconds


class AsyncClient(AsyncModels):
    """A client of one server for coroutines."""

    def __init__(
        self, url: str = DEFAULT_URL, *, headers: Mapping[str, str] | None = None, token: str = "",
        timeout: float = TIMEOUT_SECS, ssl_context: ssl.SSLContext | None = None,
        connect_retries: int = 0, tls_root_cert: str = "", tls_cert: str = "", tls_key: str = "",
    ) -> None:  # fmt: skip
        """A client of `http://`, `https://`, `grpc://`, `grpcs://`, `unix:` or `grpc+unix:`.

        `headers` are sent with every request, and `token` as a bearer token. A failed connection
        attempt is repeated `connect_retries` times, with growing pauses. `tls_root_cert` is a PEM
        file of authorities to trust instead of the system's, `tls_cert` and `tls_key` are those of
        a client certificate; `ssl_context` replaces all three. Raises `ValueError` for an invalid
        URL, and for options of TLS that it has no use for.
        """
        super().__init__(timeout)
        self.address = Address.parse(url)
        self._options = {
            "url": url, "headers": dict(headers or {}), "token": token, "timeout": timeout,
            "connect_retries": connect_retries, "tls_root_cert": tls_root_cert,
            "tls_cert": tls_cert, "tls_key": tls_key,
        }  # fmt: skip
        self._tls_files = tls_root_cert, tls_cert, tls_key
        if any(self._tls_files) and not self.address.secure:
            raise ValueError(
                f"{self.address} is without TLS: tls_ files are for https:// or grpcs://"
            )
        if any(self._tls_files) and ssl_context is not None:
            raise ValueError("ssl_context and tls_ files exclude each other")
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._tls = ssl_context
        self._retries = connect_retries
        self._transport: Transport | None = None
        self._process = os.getpid()  # that has opened the transport
        self._inherited: list[object] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as address and options; raises `TypeError` with an `ssl_context`."""
        return partial(type(self), **self.options()), ()

    @property
    def _place(self) -> str:
        return str(self.address)

    def options(self) -> dict[str, Any]:
        """The arguments that create an equal client; raises `TypeError` with an `ssl_context`."""
        if self._tls is not None:
            raise TypeError("a client with an ssl_context cannot be pickled: create it where it is")
        return self._options

    async def aclose(self) -> None:
        """Close all connections and cancel requests in flight."""
        self._forget_parent()
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    def _open(self) -> Transport:
        self._forget_parent()
        if self._transport is None:
            self._transport = self._made()
        return self._transport

    def _forget_parent(self) -> None:
        """In a forked process, drop the parent's transport.

        It is kept, unclosed: what its event loop watches is shared with the parent.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._inherited.append(self._transport)
            self._transport = None

    def _made(self) -> Transport:
        """Create the transport; it and its codecs are imported here."""
        address = self.address
        tls = None
        if address.secure:
            try:
                tls = self._tls or client_context_of(*self._tls_files)
            except TlsFileError as error:
                raise InputError(f"tls_{error.part}: {error}") from None
        if address.grpc:
            from headrace.client.grpc import GrpcTransport

            return GrpcTransport(address, self._headers, tls)
        from headrace.client.http import HttpTransport

        return HttpTransport(address, self._headers, tls)

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask`, and again while no connection can be made."""
        for attempt in range(self._retries):
            try:
                return await ask()
            except ConnectionFailed as error:
                if error.sent:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_SECS * 2**attempt)
        return await ask()


class AsyncModel:
    """A model, for coroutines; created by `AsyncModels.model`.

    Inputs are converted to the declared datatype and shape: arrays, scalars, lists, `str` and
    `bytes`. A mismatch raises `InputError`, and nothing is sent.
    """

    def __init__(self, client: AsyncModels, name: str, version: str | int = "") -> None:
        self.name = name
        self.version = version_text(version)
        self._client = client

    async def __call__(self, table: Any = None, /, **inputs: Any) -> Result:
        """Run the model with its inputs by name, or with a table."""
        return await self.infer(inputs if table is None else table)

    async def infer(
        self, inputs: Inputs, *, outputs: Sequence[str] = (),
        classes: Mapping[str, int] | None = None, parameters: Mapping[str, Parameter] | None = None,
        id: str = "", timeout: float | None = None,
    ) -> Result:  # fmt: skip
        """Run the model; see `AsyncModels.infer`."""
        tensors = await self._client.tensors(self.name, inputs, self.version)
        wanted = outputs or list(classes or ())
        request = InferRequest(
            self.name, tensors, wanted, classes or {}, parameters or {}, id, self.version
        )
        return await self._client.send(request, timeout)

    async def stream(self, /, **inputs: Any) -> AsyncGenerator[Result, None]:
        """Run the model; yields its responses as they arrive; see `AsyncModels.stream`."""
        found = self._client.stream(self.name, inputs, version=self.version)
        async with aclosing(found) as results:
            async for result in results:
                yield result

    async def signature(self) -> ModelSignature:
        """The declared inputs and outputs."""
        return await self._client.signature(self.name, self.version)

    async def ready(self) -> bool:
        """True if the model takes requests."""
        return await self._client.ready(self.name, self.version)
