"""Creation of clients for a model's endpoints, by protocol and scheme."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.connections.endpoint import Endpoint
from headrace.connections.tls import TlsFileError, client_context
from headrace.core.plugins import OptionalPart, resolve
from headrace.core.signature import Signature
from headrace.core.texts import invalid
from headrace.placement.upstream.connection import ProtocolClient
from headrace.placement.upstream.options import Credentials, RemoteOptions

if TYPE_CHECKING:
    from headrace.placement.upstream.grpc_client import GrpcMessages

T = TypeVar("T")
# Makes a client that shares memory with its server, for a model of this signature.
MakeSharingClient = Callable[
    [Endpoint, "GrpcMessages", ssl.SSLContext | None, memoryview, Signature], ProtocolClient
]
UPSTREAM_MEMORY: OptionalPart[Callable[[], MakeSharingClient]] = OptionalPart("upstream_memory")
_GRPC = ("grpc", "grpcs")


class ProtocolClients:
    """Creates the clients of one model's endpoints.

    `model` is the local name of the model, for errors. `signature` is the configured one, which is
    set before inference, for protocols whose responses lack it.
    """

    def __init__(
        self, options: RemoteOptions, model: str, signature: Signature | None = None
    ) -> None:
        """May block: reads files, and imports modules, whose memory servers without such models
        need not spend. Raises `InvalidOption`.
        """
        self.model = model
        self.options = options
        self.signature = signature or Signature(model, 0, (), ())
        self._contexts: dict[str, ssl.SSLContext] = {}
        for scheme in {url.scheme for url in options.urls}:
            if scheme in _GRPC:
                self._shared = self._grpc_parts()
            if scheme in ("grpcs", "https"):
                self._contexts[scheme] = tls_context(options.credentials)
        if "grpcs" in self._contexts:
            self._contexts["grpcs"].set_alpn_protocols(["h2"])
        self._sharing = UPSTREAM_MEMORY.load()() if options.shared_memory else None

    def renewed(self) -> "ProtocolClients | None":
        """Clients with new credentials if these have changed. Blocks; raises `InvalidOption`."""
        options = self.options.renewed()
        return None if options is None else ProtocolClients(options, self.model, self.signature)

    def connect(self, endpoint: Endpoint) -> ProtocolClient:
        """A client for the event loop, on which all of them share messages and a receive buffer.

        It shares memory with the upstream, if configured.
        """
        if self._sharing is None:
            return self._client(endpoint, shared=True)
        messages, buffer = self._shared
        context = self._contexts.get(endpoint.scheme)
        return self._sharing(endpoint, messages, context, buffer, self.signature)

    def visit(self, endpoint: Endpoint, ask: Callable[[ProtocolClient], Awaitable[T]]) -> T:
        """The result of `ask`, with a client on a temporary event loop; for threads without one."""

        async def visited() -> T:
            client = self._client(endpoint, shared=False)
            try:
                return await ask(client)
            finally:
                await client.close()

        return asyncio.run(visited())

    def _client(self, endpoint: Endpoint, shared: bool) -> ProtocolClient:
        context = self._contexts.get(endpoint.scheme)
        if endpoint.scheme in _GRPC:
            from headrace.placement.upstream.grpc_client import GrpcClient

            messages, buffer = self._shared if shared else self._grpc_parts()
            return GrpcClient(endpoint, messages, context, buffer)
        from headrace.placement.upstream.http_client import HttpClient

        rest = resolve(self.options.protocol.rest)(self.options, self.model, self.signature)
        return HttpClient(endpoint, rest, context)

    def _grpc_parts(self) -> "tuple[GrpcMessages, memoryview]":
        from headrace.connections.grpc_channel import receive_buffer

        return resolve(self.options.protocol.grpc)(self.options, self.model), receive_buffer()


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """The TLS context of connections; with the system's roots by default.

    Blocks while reading files. Raises `InvalidOption`.
    """
    try:
        return client_context(credentials.root, credentials.certificate, credentials.key)
    except TlsFileError as error:
        raise invalid(f"tls_{error.part}", str(error)) from None
