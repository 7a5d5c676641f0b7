"""The gRPC transport on `grpc.aio`."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import grpc
import grpc.aio

from headrace.core.errors import ServerError
from headrace.core.identity import ANYONE, Identity, PeerFacts
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import (
    Direct,
    Handlers,
    Message,
    Noted,
    Open,
    StreamSession,
    error_text,
    log_access,
    noted_fields,
    retry_details,
)
from headrace.doors.grpc.inference import InferCall
from headrace.doors.grpc.options import LEVELS, GrpcOptions
from headrace.doors.tls import DoorTls, TlsContents
from headrace.engine.admission import Account, Admission, ConnectionAccount
from headrace.protocol.grpc import CANCELLED
from headrace.protocol.parameters import TIMING, exact_timing, time_of
from headrace.protocol.status import BEGUN, INTERNAL, INTERNAL_TEXT, STATUS, begun_field

log = logging.getLogger(__name__)

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# grpcio itself refuses larger messages, with a text that names no setting of this server. Handlers
# enforce the exact limit; this one bounds what is read before they run.
_SLACK_BYTES = 64 << 20
# Messages of a session queued for the client, and their bytes.
_IN_FLIGHT = 64
_IN_FLIGHT_BYTES = 1 << 20


class _AioCall:
    """A call of `grpc.aio`, for handlers."""

    def __init__(
        self, context: Any, account: ConnectionAccount, handlers: Handlers, path: str
    ) -> None:
        self._context = context
        self.account: Account = account
        self._handlers, self._path = handlers, path
        self._identity = ANYONE
        self._metadata: dict[str, str] | None = None
        self._trailing: list[tuple[str, str]] = []
        self.noted: Noted | None = None

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def peer_facts(self) -> PeerFacts:
        return _peer(self._context)

    def identify(self) -> Identity:
        self._identity = self._handlers.enter(self._path, self.metadata(), self.peer_facts)
        return self._identity

    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            self._metadata = {}
            for key, value in self._context.invocation_metadata() or ():
                if isinstance(value, str):
                    known = self._metadata.get(key)
                    self._metadata[key] = value if known is None else f"{known}, {value}"
        return self._metadata

    def remaining(self) -> float:
        left = self._context.time_remaining()
        return 0.0 if left is None else max(float(left), 1e-6)

    def set_trailing(self, name: str, value: str) -> None:
        self._trailing = [(known, v) for known, v in self._trailing if known != name]
        self._trailing.append((name, value))
        self._context.set_trailing_metadata(tuple(self._trailing))


class _UnaryCall(_AioCall, InferCall):
    """A unary call, answered by a direct handler while a coroutine awaits it."""

    @property
    def named_client(self) -> str:
        """Implements `MessageCall.named_client`."""
        return self.account.named(self.metadata())

    def __init__(
        self, context: Any, account: ConnectionAccount, handlers: Handlers, path: str
    ) -> None:
        super().__init__(context, account, handlers, path)
        self._future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def answer(self, message: Message, timing: bytes) -> None:
        self.set_trailing(TIMING, timing.decode())
        if not self._future.done():
            self._future.set_result(b"".join(message))

    def fail(self, error: ServerError) -> None:
        self.leave()
        if not self._future.done():
            self._future.set_exception(error)

    async def awaited(self, handler: Direct, data: Buffer) -> bytes:
        """The answer of a direct handler; cancelling the wait cancels the request."""
        try:
            handler(data, self)
            return await self._future
        except ServerError as error:
            self.set_trailing(TIMING, exact_timing(time_of(error)).decode())
            if begun := begun_field(self, error):
                self.set_trailing(BEGUN, begun)
            raise
        except asyncio.CancelledError:
            if self.entered:  # the answer may have come after the client disconnected
                self.cancel()
            raise
        finally:
            self.leave()


class _QueuePeer(_AioCall):
    """The client of a session, whose queued messages are written by an iterator."""

    def __init__(
        self, context: Any, account: ConnectionAccount, handlers: Handlers, path: str
    ) -> None:
        super().__init__(context, account, handlers, path)
        self._messages: deque[bytes] = deque()
        self._nbytes = 0
        self._news = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self._finished = False
        self._error: Exception | None = None

    @property
    def congested(self) -> bool:
        return len(self._messages) >= _IN_FLIGHT or self._nbytes >= _IN_FLIGHT_BYTES

    def send(self, message: Message) -> None:
        self._messages.append(b"".join(message))
        self._count(len(self._messages[-1]))
        self._news.set()

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.account.count(nbytes)

    def finish(self, error: Exception | None = None) -> None:
        if not self._finished:
            self._finished = True
            self._error = error
            self._news.set()
            self._released.set()

    def hold(self, held: bool) -> None:
        if held:
            self._released.clear()
        else:
            self._released.set()

    async def run(
        self, requests: AsyncIterator[Buffer], session: StreamSession
    ) -> AsyncIterator[bytes]:
        """Iterate over the session's messages, and pass it the client's, until it ends."""
        reader = asyncio.create_task(self._read(requests, session))
        try:
            while self._messages or not self._finished:
                if not self._messages:
                    self._news.clear()
                    await self._news.wait()
                    continue
                message = self._messages.popleft()
                self._count(-len(message))
                yield message
                if not self._finished:
                    session.sent()
            if (error := self._error) is not None:
                self._error = None
                try:
                    raise error
                finally:
                    del error  # which has this frame in its traceback
        finally:
            reader.cancel()
            self.finish()
            session.closed()
            self._messages.clear()  # queued messages are no longer wanted
            self._count(-self._nbytes)

    async def _read(self, requests: AsyncIterator[Buffer], session: StreamSession) -> None:
        """Pass the client's messages to the session."""
        try:
            async for message in requests:
                await self._released.wait()
                if self._finished:
                    return
                session.receive(message)
            await self._released.wait()
            if not self._finished:
                session.half_close()
        except Exception as error:  # raised to the iterator
            self.finish(error)


# Unary handlers for this transport: its calls suit direct handlers, too.
_Unary = Callable[[Buffer, _UnaryCall], Awaitable[bytes]]


class _Peers:
    """The accounts of clients with calls in flight: the library exposes no connections."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._open: dict[str, tuple[ConnectionAccount, int]] = {}

    @contextmanager
    def account(self, peer: str) -> Iterator[ConnectionAccount]:
        """The account of a peer during a call; raises as `Admission.connect`."""
        account, calls = self._open.get(peer, (None, 0))
        if account is None:
            account = self._admission.connect("grpc", _address(peer))
        self._open[peer] = account, calls + 1
        try:
            yield account
        finally:
            account, calls = self._open.pop(peer)
            if calls > 1:
                self._open[peer] = account, calls - 1
            else:
                account.close()


class GrpcioServer:
    """A `grpc.aio` server with this server's handlers."""

    def __init__(
        self,
        handlers: Handlers,
        admission: Admission,
        max_request_bytes: int,
        access_log: bool,
        options: GrpcOptions,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes listen on the same port."""
        self._access_log = access_log
        self._peers = _Peers(admission)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_request_bytes + _SLACK_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(shared)),
                *_channel_arguments(options),
            ]
        )
        self._answers = admission.answers
        self._handlers = handlers
        unaries: dict[str, _Unary] = dict(handlers.unary)
        for path, direct in handlers.direct.items():
            unaries[path] = lambda data, call, direct=direct: call.awaited(direct, data)  # type: ignore[misc]
        methods: dict[str, dict[str, Any]] = {}
        for path, unary in unaries.items():
            _, service, name = path.split("/")
            methods.setdefault(service, {})[name] = grpc.unary_unary_rpc_method_handler(
                self._unary(path, unary)
            )
        for path, opened in handlers.sessions.items():
            _, service, name = path.split("/")
            methods.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(
                self._stream(path, opened)
            )
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(name, table) for name, table in methods.items()
            )
        )

    def bind(self, address: str, port: int, tls: DoorTls | None = None) -> int:
        """Listen; returns the port. Raises `OSError`."""
        host = f"[{address}]" if ":" in address else address
        try:
            if tls is None:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            else:
                credentials = _Certificates(tls).credentials()
                bound = self._server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from None
        if not bound:
            raise OSError(f"cannot listen on {host}:{port}")
        return bound

    async def start(self) -> None:
        """Start serving."""
        await self._server.start()

    async def announce(self, grace: float) -> None:
        """Do nothing: the library cannot send GOAWAY without cancelling new calls."""

    def end_unfinished(self) -> None:
        """Do nothing: the library tells of calls once their message is complete."""

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and wait for those in flight, at most `grace` seconds."""
        await self._server.stop(grace)

    def _unary(self, path: str, handler: _Unary) -> Any:
        answers = self._answers.of("grpc", self._handlers.counted(path))

        async def answer(data: bytes, context: Any) -> bytes:
            begun, status = perf_counter(), 0
            noted: Noted | None = None
            try:
                try:
                    with self._peers.account(context.peer()) as account:
                        call = _UnaryCall(context, account, self._handlers, path)
                        try:
                            call.identify()
                            return await handler(data, call)
                        finally:
                            noted = call.noted
                            del call  # refers to the decoded message; see below
                except (asyncio.CancelledError, GeneratorExit):
                    status = CANCELLED
                    raise
                except Exception as error:
                    status, text = _told(path, context, error)
                # grpcio keeps the exception raised by abort, and by its traceback this frame, which
                # must not keep the message alive, not even by the error above.
                data = b""
                await context.abort(_CODES[status], text)
                raise AssertionError("abort raises")
            finally:
                answers[status] += 1
                self._log(context, path, status, begun, noted)

        return answer

    def _stream(self, path: str, opened: Open) -> Any:
        answers = self._answers.of("grpc", self._handlers.counted(path))

        async def answer(requests: AsyncIterator[Buffer], context: Any) -> AsyncIterator[bytes]:
            begun, status, call = perf_counter(), 0, None
            try:
                try:
                    with self._peers.account(context.peer()) as account:
                        call = _QueuePeer(context, account, self._handlers, path)
                        call.identify()
                        async for message in call.run(requests, opened(call)):
                            yield message
                    return
                except (asyncio.CancelledError, GeneratorExit):
                    status = CANCELLED
                    raise
                except Exception as error:
                    status, text = _told(path, context, error)
                await context.abort(_CODES[status], text)
            finally:
                answers[status] += 1
                self._log(context, path, status, begun, None if call is None else call.noted)

        return answer

    def _log(self, context: Any, path: str, status: int, begun: float, noted: Noted | None) -> None:
        if self._access_log:
            log_access(_address(context.peer()), path, status, begun, noted_fields(noted))


def _peer(context: Any) -> PeerFacts:
    """The facts about a client; of its certificate, the names that the library tells."""
    found = context.auth_context()
    names = [each.decode("utf-8", "replace") for each in found.get("x509_common_name", ())]
    others = [
        each.decode("utf-8", "replace") for each in found.get("x509_subject_alternative_name", ())
    ]
    certificate = None
    if names or others:
        certificate = {
            "subject": tuple((("commonName", name),) for name in names),
            "subjectAltName": tuple(("URI" if "://" in each else "DNS", each) for each in others),
        }
    return PeerFacts(_address(context.peer()), certificate)


def _told(path: str, context: Any, error: Exception) -> tuple[int, str]:
    """The status and text of an error; its details are added to the trailers."""
    if not isinstance(error, ServerError):
        log.error("bug in %s", path, exc_info=error)
        return INTERNAL.grpc, INTERNAL_TEXT
    status, text = STATUS[type(error)].grpc, error_text(error)
    if details := retry_details(error, status, text):
        before = context.trailing_metadata() or ()
        context.set_trailing_metadata((*before, ("grpc-status-details-bin", details)))
    return status, text


def _channel_arguments(options: GrpcOptions) -> list[tuple[str, int]]:
    rules = options.keep_alive
    found = [
        ("grpc.keepalive_time_ms", round(rules.interval * 1_000)),
        ("grpc.keepalive_timeout_ms", round(rules.timeout * 1_000)),
        ("grpc.keepalive_permit_without_calls", int(rules.without_calls)),
        ("grpc.http2.max_pings_without_data", rules.pings_without_data),
        ("grpc.http2.min_ping_interval_without_data_ms", round(rules.least_interval * 1_000)),
        ("grpc.http2.max_ping_strikes", rules.strikes),
        ("grpc.max_concurrent_streams", options.streams),
    ]
    if level := list(LEVELS).index(options.compression):
        # For all procedures; grpcio chooses an algorithm that the client accepts, if any.
        found.append(("grpc.default_compression_level", level))
    if rules.age:
        found.append(("grpc.max_connection_age_ms", round(rules.age * 1_000)))
    if rules.grace:
        found.append(("grpc.max_connection_age_grace_ms", round(rules.grace * 1_000)))
    return found


def _address(peer: str) -> str:
    """The address of a peer, without its port."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer


class _Certificates:
    """The certificates, keys and roots of a server, which the library asks for at each handshake.

    The library chooses among certificates by the host that the client names.
    """

    def __init__(self, tls: DoorTls) -> None:
        self._tls = tls
        self._given: TlsContents | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server."""
        first = self._next()
        return grpc.dynamic_ssl_server_credentials(first, self._next, self._tls.files.mutual)

    def _next(self) -> Any:
        """Configuration for a handshake, None if it has not changed; called on other threads."""
        contents = self._tls.contents
        if contents is self._given:
            return None
        self._given = contents
        pairs = [(key, certificate) for certificate, key in contents.pairs]
        return grpc.ssl_server_certificate_configuration(pairs, contents.roots or None)
