"""The handlers carried by `grpc.aio`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from time import perf_counter
from typing import Any

import grpc
import grpc.aio

from headrace.core.errors import ServerError
from headrace.transports.grpc.call import Handlers, Stream, Unary
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS

log = logging.getLogger(__name__)
access = logging.getLogger("headrace.access")

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# grpcio refuses larger messages itself, with a text that names no setting of ours. The exact limit
# is held by the handlers; this one keeps what must be read before they are asked within bounds.
_SLACK_BYTES = 64 << 20
_MAX_TEXT = 2_000  # bytes; each may take three in a header, and clients accept 8 KiB of headers


class _AioCall:
    """A call of `grpc.aio`, as handlers see it."""

    __slots__ = ("_context", "_metadata", "_trailing", "notes")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._metadata: dict[str, str] | None = None
        self._trailing: list[tuple[str, str]] = []
        self.notes: dict[str, str] = {}

    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            pairs = self._context.invocation_metadata() or ()
            self._metadata = {key: value for key, value in pairs if isinstance(value, str)}
        return self._metadata

    def set_trailing(self, name: str, value: str) -> None:
        self._trailing.append((name, value))
        self._context.set_trailing_metadata(tuple(self._trailing))

    @property
    def client(self) -> str:
        """The client's address, without its port."""
        peer: str = self._context.peer()
        kind, _, address = peer.partition(":")
        return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer

    def note(self, name: str, value: str) -> None:
        self.notes[name] = value


class GrpcioServer:
    """A `grpc.aio` server with our handlers."""

    def __init__(self, handlers: Handlers, max_request_bytes: int, access_log: bool) -> None:
        self._access_log = access_log
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_request_bytes + _SLACK_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        methods: dict[str, dict[str, Any]] = {}
        for path, unary in handlers.unary.items():
            _, service, name = path.split("/")
            methods.setdefault(service, {})[name] = grpc.unary_unary_rpc_method_handler(
                self._unary(path, unary)
            )
        for path, stream in handlers.server_stream.items():
            _, service, name = path.split("/")
            methods.setdefault(service, {})[name] = grpc.unary_stream_rpc_method_handler(
                self._stream(path, stream, single=True)
            )
        for path, stream in handlers.bidi_stream.items():
            _, service, name = path.split("/")
            methods.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(
                self._stream(path, stream, single=False)
            )
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(name, table) for name, table in methods.items()
            )
        )

    def bind(self, address: str, port: int) -> int:
        """Listen; the port it got. Raises `OSError`."""
        host = f"[{address}]" if ":" in address else address
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from None
        if not bound:
            raise OSError(f"cannot listen on {host}:{port}")
        return bound

    async def start(self) -> None:
        """Answer from now on."""
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no more calls, and wait for those under way, at most `grace` seconds."""
        await self._server.stop(grace)

    def _unary(self, path: str, handler: Unary) -> Any:
        async def answer(data: bytes, context: Any) -> bytes:
            begun = perf_counter()
            status = 0
            call = _AioCall(context)
            try:
                return await handler(data, call)
            except ServerError as error:
                status = STATUS[type(error)].grpc
                await context.abort(_CODES[status], _text(error))
                raise
            except asyncio.CancelledError:
                status = grpc.StatusCode.CANCELLED.value[0]
                raise
            except Exception:
                log.exception("bug in %s", path)
                status = INTERNAL.grpc
                await context.abort(_CODES[status], INTERNAL_TEXT)
                raise
            finally:
                if self._access_log:
                    _log_access(call, path, status, begun)

        return answer

    def _stream(self, path: str, handler: Stream, single: bool) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[bytes]:
            begun = perf_counter()
            status = 0
            call = _AioCall(context)
            requests: AsyncIterator[bytes] = _one(request) if single else request
            try:
                async for message in handler(requests, call):
                    yield message
            except ServerError as error:
                status = STATUS[type(error)].grpc
                await context.abort(_CODES[status], _text(error))
            except (asyncio.CancelledError, GeneratorExit):
                status = grpc.StatusCode.CANCELLED.value[0]
                raise
            except Exception:
                log.exception("bug in %s", path)
                status = INTERNAL.grpc
                await context.abort(_CODES[status], INTERNAL_TEXT)
            finally:
                if self._access_log:
                    _log_access(call, path, status, begun)

        return answer


def _text(error: ServerError) -> str:
    """The error's text, cut to what fits into trailers: a client refuses longer ones altogether."""
    text = str(error).encode()
    if len(text) <= _MAX_TEXT:
        return str(error)
    return text[:_MAX_TEXT].decode(errors="ignore") + "…"


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message


def _log_access(call: _AioCall, path: str, status: int, begun: float) -> None:
    fields = {
        "client": call.client,
        "method": "gRPC",
        "path": path,
        "status": _CODES[status].name,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra=fields | call.notes,
    )
