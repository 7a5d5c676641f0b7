"""A front end: its doors, which share their ports with other front ends, and its end of the link.

Start: the first frame is the configuration; the doors open. End, when the engine asks for it:
announce the shutdown to clients, admit nothing new, finish admitted requests, close the doors, exit
0. When the time is up, the rest is answered with the server's shutdown error. Without the engine
nothing can be answered, so the process exits at once. Signals go to the engine's process, which
then requests the end.

A submitted request is in `_under_way` until its last response, its error, or its cancellation;
frames for any other request were in transit when it was cancelled.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

import orjson
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.audited import REQUEST_ID
from headrace.api.gate import AUTHORIZATION
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import HEALTH_PATHS, Category, by_procedure, handed_on
from headrace.core.blocks import BLOCKS
from headrace.core.call import Call, Raw, deliver
from headrace.core.errors import ExecutionFailed, LoadFailed, QuotaExceeded, ServerError
from headrace.core.identity import ANYONE, NO_PEER
from headrace.core.process import allow_many_files, serve_promptly
from headrace.core.tensors import Buffer
from headrace.doors.clients import (
    ACCESS,
    ClientDoors,
    DoorsConfig,
    GrpcConfig,
    HttpConfig,
    renew_tls,
)
from headrace.doors.grpc.call import Unary
from headrace.doors.grpc.services import all_handlers
from headrace.doors.http.asgi import NAMES, OPERATION, PEER
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.infer import BareRoute, Disconnected
from headrace.doors.listeners import CLOSED, bind
from headrace.engine.admission import Admission, Held
from headrace.engine.client_accounts import limit_clients
from headrace.engine.entrance import NOTHING_KNOWN, Readiness
from headrace.ipc.allocation import keep_memory
from headrace.ipc.frames import IN_FILE, INLINE, BrokenFrame, Header
from headrace.observability.audit import AuditEntry
from headrace.observability.logs import Logs, LogSettings
from headrace.observability.statistics import Grown, LatencyBounds
from headrace.plugins.frontends.channel import FrameChannel
from headrace.plugins.frontends.clients import FrontEndClients, read_document
from headrace.plugins.frontends.config import (
    IDENTITY_FIELD,
    FrontendConfig,
    LinkHeaders,
    told_of,
)
from headrace.plugins.frontends.link_infer import (
    Flag,
    LinkKind,
    LinkResponseReader,
    RequestWriter,
    numbers_rest,
    read_error,
    read_numbers,
)
from headrace.protocol.status import INTERNAL_TEXT, STATUS, error_fields
from headrace.protocol.v2_json import error_body

log = logging.getLogger(__name__)

_NUMBERS = 2**32
_HANDED_ON_SIZE = 5 << 10  # bytes of a call that was handed on, in both processes
# Yields the next piece of a request's body, and a flag for the last one.
Pieces: TypeAlias = Callable[[], Awaitable[tuple[bytes, bool]]]
# A call's answer as meta and rest, an error, or None if the engine requests the next piece of its
# body.
_Said: TypeAlias = tuple[bytes, bytes] | ServerError | None


class HandedOn:
    """A call that was handed on to the engine, which says what it wants, or the answer.

    A queue would do, but takes 3 KB; what is said before the last was heard replaces it.
    """

    __slots__ = ("_loop", "_next")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next: asyncio.Future[_Said] = loop.create_future()

    def say(self, said: _Said) -> None:
        """Pass on what the engine says."""
        if self._next.done():
            self._next = self._loop.create_future()
        self._next.set_result(said)

    async def hear(self) -> _Said:
        """Wait for what the engine says next."""
        heard = self._next
        said = await heard
        if heard is self._next:
            self._next = self._loop.create_future()
        return said


class RemoteTarget:
    """The target and owner of one call."""

    direct = None

    __slots__ = (
        "_door", "_link", "call", "decoupled", "handed", "model", "name", "nbytes", "number",
    )  # fmt: skip

    signature = None

    def __init__(self, link: "EngineSession", door: int, model: str, version: str) -> None:
        self.model = model
        self.name = version
        self.decoupled = False  # set by the engine
        self.number = 0
        self.nbytes = 0
        self.handed = False  # charged to the engine's account
        self.call: Call | None = None
        self._link = link
        self._door = door

    def submit(self, call: Call) -> None:
        """Send the call to the engine, with the headers that it requires."""
        self.call = call
        call.owner = self
        call.started = True  # for all that is known here, until the engine says otherwise
        headers: dict[str, str] = {}
        if (identity := call.context.identity) is not ANYONE:
            headers[IDENTITY_FIELD] = told_of(identity)
        if (wanted := self._link.headers) is not None:
            names = wanted.of(self.model, self.name)
            headers |= {name: value for name in names if (value := call.header(name))}
        flags = self._door
        if call.options.raw is not None:
            flags |= Flag.RAW | (Flag.ARROW if call.options.raw is Raw.ARROW else 0)
        self._link.submit(self, call, flags, headers)

    def going(self) -> None:
        """Hand the call's account over: the frame is about to be sent."""
        self._link.hand_over(self)

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        self.call = None
        self._link.cancel(self.number)

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`."""
        if self.call is not None:
            self._link.hold(self.number, held)


class EngineSession:
    """The front end's end of the link. `lost` is called when the engine is gone."""

    def __init__(
        self,
        sock: socket.socket,
        on_setup: Callable[[dict[str, Any]], None],
        on_drain: Callable[[float], None],
        lost: Callable[[str], None],
    ) -> None:
        """`on_setup` receives the configuration, `on_drain` the seconds left to end."""
        self.headers: LinkHeaders | None = None  # headers that requests must carry
        self.quotas: Sequence[Mapping[str, Any]] | None = None  # as `quotas_document`
        self._on_setup = on_setup
        self._on_drain = on_drain
        self.readiness = Readiness(lambda: self._serves)  # the server's readiness as last reported
        self._serves = False
        self.logs: LogSettings | None = None  # None until they change
        self.on_logs: Callable[[LogSettings], object] | None = None
        self.on_tls: Callable[[], object] = lambda: None
        self.rules: Sequence[HeaderRules] | None = None  # of HTTP and gRPC; None until they change
        self.on_rules: Callable[[HeaderRules, HeaderRules], object] | None = None
        self._writer = RequestWriter()
        self._reader = LinkResponseReader()
        self._under_way: dict[int, RemoteTarget | HandedOn] = {}
        self._number = 0
        self._requests = self._bytes = 0  # of the requests in `_under_way`
        self._held = Held()  # as last reported
        self._admission = Admission(0, 0)  # replaced by `watch`
        self._scheduled = False
        self._spared = 0  # bytes of reusable blocks
        self._loop = asyncio.get_running_loop()
        self._channel = FrameChannel(sock, self._take, lost, count=self._copying)

    def ready(self) -> None:
        """Report that the doors are open."""
        self._channel.send(LinkKind.READY)

    def unlogged(self, count: int) -> None:
        """Report further log lines that could not be written."""
        self._channel.send(LinkKind.UNLOGGED, count)

    def answered(self, grown: Sequence[Grown]) -> None:
        """Report the counts of answers since the last report."""
        if grown:
            self._channel.send(LinkKind.ANSWERS, 0, orjson.dumps(grown))

    def record(self, entry: AuditEntry) -> None:
        """Report an entry for the audit."""
        self._channel.send(LinkKind.AUDIT, 0, orjson.dumps(entry.document()))

    def submit(
        self, target: RemoteTarget, request: Call, flags: int, headers: Mapping[str, str]
    ) -> None:
        """Send a request with some of its headers; its target receives the responses."""
        meta, pieces = self._writer.parts(request, headers)
        target.number = number = self._next()
        target.nbytes = request.nbytes
        self._under_way[number] = target
        self._channel.send_parts(LinkKind.INFER, flags, number, meta, pieces, target.going)

    def hand_over(self, target: RemoteTarget) -> None:
        """Charge a request to the engine from now on, instead of to this process."""
        if self._under_way.get(target.number) is target:
            target.handed = True
            self._requests += 1
            self._bytes += target.nbytes
            if self._held.requests or self._held.bytes:
                self._report()  # first, or the request would be counted twice

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        if self._pop(number) is not None:
            self._channel.send(LinkKind.CANCEL, number)

    def hold(self, number: int, held: bool) -> None:
        """Pause or resume the model of a request."""
        self._channel.send(LinkKind.PAUSE if held else LinkKind.GO_ON, number)

    async def call(
        self, head: Mapping[str, object], body: Buffer = b"", pieces: Pieces | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Forward a call other than infer to the engine: its head, and its body as a whole or in
        pieces, which are sent when the engine requests them.

        Raises `ServerError`, and whatever `pieces` raises.
        """
        number = self._next()
        waiting = self._under_way[number] = HandedOn(self._loop)
        meta = orjson.dumps(head)
        if head["urgent"]:
            self._channel.send_first(LinkKind.CALL, number, meta, bytes(body))
        else:
            self._channel.send_parts(LinkKind.CALL, 0, number, meta, [body])
        try:
            while (answer := await waiting.hear()) is None:
                piece, last = (b"", True) if pieces is None else await pieces()
                flags = Flag.FINAL if last else 0
                self._channel.send_parts(LinkKind.BODY, flags, number, b"", [piece])
        finally:
            self.cancel(number)  # its answer is no longer awaited
        if isinstance(answer, ServerError):
            try:
                raise answer
            finally:
                del answer  # which has this frame, with the body, in its traceback
        meta, rest = answer
        document: dict[str, Any] = orjson.loads(meta)
        return document, rest

    def report_soon(self) -> None:
        """Report what is held here at the end of this turn, if it has changed."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._report)

    def limit_clients(self) -> None:
        """Apply the quotas that the engine has sent."""
        limit_clients(self._admission, read_document(self.quotas), FrontEndClients)

    def refused(self, counts: Counter[tuple[str, str]]) -> None:
        """Report requests refused here for quotas since the last report."""
        if counts:
            rows = [(quota, limit, count) for (quota, limit), count in counts.items()]
            self._channel.send(LinkKind.QUOTA_REFUSED, 0, orjson.dumps(rows))
            counts.clear()

    def watch(self, admission: Admission) -> None:
        """Report the counters of `admission` beyond those that the engine has."""
        self._admission = admission
        admission.when_changed(self.report_soon)

    def _report(self) -> None:
        self._scheduled = False
        admission = self._admission
        held = admission.held(self._requests, self._bytes)
        if held.requests >= 0 and held != self._held:
            self._held = held
            self._channel.send(LinkKind.HELD, 0, rest=numbers_rest(*held))
        # Memory held by the engine must not be kept for reuse here as well.
        if abs((spared := admission.unread + self._bytes) - self._spared) > INLINE:
            self._spared = spared
            BLOCKS.spare(spared)

    def _copying(self, nbytes: int) -> None:
        """Count bytes that exist twice while they are copied."""
        self._admission.count(nbytes)

    def _pop(self, number: int) -> "RemoteTarget | HandedOn | None":
        found = self._under_way.pop(number, None)
        if type(found) is RemoteTarget and found.handed:
            self._requests -= 1
            self._bytes -= found.nbytes
            self.report_soon()
        return found

    def _next(self) -> int:
        while True:
            self._number = (self._number + 1) % _NUMBERS
            if self._number not in self._under_way:
                return self._number

    def _taken(self, nbytes: int) -> None:
        """Charge a received file here, as long as it exists."""
        self._report()
        self._channel.send(LinkKind.TAKEN, rest=numbers_rest(nbytes))

    def _take(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        if header.kind is LinkKind.RESPONSE:
            self._respond(header, meta, rest)
        elif header.kind is LinkKind.FAIL:
            self._fail(header, meta, rest)
        elif header.kind is LinkKind.ANSWER:
            waiting = self._pop(header.number)
            if isinstance(waiting, HandedOn):
                waiting.say((meta, bytes(rest)))
        elif header.kind is LinkKind.MORE:
            waiting = self._under_way.get(header.number)
            if isinstance(waiting, HandedOn):
                waiting.say(None)
        elif header.kind is LinkKind.DECOUPLED:
            target = self._under_way.get(header.number)
            if isinstance(target, RemoteTarget):
                target.decoupled = True
        elif header.kind is LinkKind.BACKEND:
            target = self._under_way.get(header.number)
            if isinstance(target, RemoteTarget) and target.call is not None:
                target.call.answered_by(meta.decode())
        elif header.kind is LinkKind.FINISH:
            self._finish(header.number)
        elif header.kind is LinkKind.HEADERS:
            self.headers = LinkHeaders(**orjson.loads(meta)) or None
        elif header.kind is LinkKind.SETUP:
            document = orjson.loads(meta)
            self.quotas = document.get("quotas")
            self._on_setup(document)
        elif header.kind is LinkKind.LOGS:
            self.logs = LogSettings(**orjson.loads(meta))
            if self.on_logs is not None:
                self.on_logs(self.logs)
        elif header.kind is LinkKind.TLS:
            self.on_tls()
        elif header.kind is LinkKind.RULES:
            rules = orjson.loads(meta)
            self.rules = [HeaderRules(**rules[door]) for door in ("http_rules", "grpc_rules")]
            if self.on_rules is not None:
                self.on_rules(*self.rules)
        elif header.kind is LinkKind.QUOTAS:
            self.quotas = orjson.loads(meta)
            self.limit_clients()
        elif header.kind is LinkKind.READINESS:
            self._serves = bool(header.number)
            self.readiness.may_have_changed()
        elif header.kind is LinkKind.ELSEWHERE:
            self._admission.leave_to_others(*read_numbers(bytes(rest), 1))
        elif header.kind is LinkKind.DRAIN:
            self._on_drain(header.number / 1_000)
        else:
            raise BrokenFrame(f"unexpected frame of kind {header.kind}")
        if header.flags & IN_FILE:
            self._taken(header.data)

    def _respond(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        final = bool(header.flags & 2)  # Flag.FINAL, without the cost of its operator
        target = self._pop(header.number) if final else self._under_way.get(header.number)
        if type(target) is not RemoteTarget or target.call is None:
            return
        call = target.call
        try:
            response = self._reader.read(meta, rest)
            target.name = response.model_version
            if final:
                target.call = None
            call.respond(response, final)
        except Exception as error:  # the frames of other requests follow it
            log.error("bug in a response to a front end", exc_info=error)
            self.cancel(header.number)
            target.call = None
            deliver(call, call.fail, ExecutionFailed(INTERNAL_TEXT))

    def _finish(self, number: int) -> None:
        target = self._pop(number)
        if isinstance(target, RemoteTarget) and target.call is not None:
            call, target.call = target.call, None
            deliver(call, call.finish)

    def _fail(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        found, version = read_error(meta, bytes(rest))
        error: ServerError = found or ExecutionFailed(INTERNAL_TEXT)
        waiting = self._pop(header.number)
        if isinstance(waiting, HandedOn):
            waiting.say(error)
        elif waiting is not None and waiting.call is not None:
            waiting.name = version or waiting.name
            call, waiting.call = waiting.call, None
            call.started = not header.flags & (Flag.REFUSE | Flag.UNBEGUN)
            clients = self._admission.clients
            if isinstance(error, QuotaExceeded) and isinstance(clients, FrontEndClients):
                clients.note(call, error)
            deliver(call, call.refuse if header.flags & Flag.REFUSE else call.fail, error)


class RemoteEngine:
    """The `Entrance` of one kind of door; `door` is its flag, 0 for streams."""

    known = NOTHING_KNOWN
    access = None  # the doors of front ends have gates

    def __init__(self, link: EngineSession, admission: Admission, door: int) -> None:
        self.admission = admission
        self._link = link
        self._door = door

    @property
    def exiting(self) -> bool:
        """True once nothing new is admitted any more."""
        return self.admission.exiting

    def find(self, name: str, version: str = "") -> RemoteTarget:
        """The target of a request; its existence is only known once it is submitted."""
        return RemoteTarget(self._link, self._door, name, version)


_NO_BODY = b"0"  # the length of an empty body


def forwarding_app(link: EngineSession, routes: Sequence[BareRoute]) -> ASGIApp:
    """An application that serves the routes, and forwards everything else to the engine."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        for route in routes:
            if route.claims(scope["method"], scope["path"]):
                await route.handle(scope, receive, send)
                return
        scope[OPERATION] = ""  # counted by the engine's process
        try:
            document, content = await link.call(_head(scope), pieces=_pieces(receive))
        except Disconnected:
            return
        except ServerError as error:
            content = error_body(str(error))
            json = [("content-type", "application/json"), ("content-length", str(len(content)))]
            json += error_fields(error)
            document = {"status": STATUS[type(error)].http, "headers": json}
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in document["headers"]]
        start: dict[str, Any] = {"type": "http.response.start", "status": document["status"]}
        await send(start | {"headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def _head(scope: Scope) -> dict[str, object]:
    """A request without its body, as a JSON document, with the names that its client spelled."""
    headers = scope["headers"]
    names = scope.get(NAMES) or headers
    return {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope["raw_path"].decode("latin-1"),
        "query": scope["query_string"].decode("latin-1"),
        "headers": [(n.decode("latin-1"), v.decode("latin-1")) for n, v in names],
        "client": (scope.get("client") or ("",))[0],
        "peer": [*scope.get(PEER, NO_PEER)],
        "server": scope.get("server"),
        "body": any(
            name == b"transfer-encoding" or (name == b"content-length" and value != _NO_BODY)
            for name, value in headers
        ),
        "urgent": scope["path"] in HEALTH_PATHS,
    }


def _pieces(receive: Receive) -> Pieces:
    async def next_piece() -> tuple[bytes, bool]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        return message.get("body", b""), not message.get("more_body", False)

    return next_piece


def forwarding_handler(link: EngineSession, admission: Admission, path: str) -> Unary:
    """A procedure that is forwarded to the engine's process."""
    urgent = by_procedure()[path].category is Category.HEALTH

    async def handler(data: Buffer, call: Any) -> bytes:
        given = call.metadata().get(AUTHORIZATION)
        head = {
            "grpc": path, "given": [] if given is None else [given], "peer": [*call.peer_facts],
            "id": call.metadata().get(REQUEST_ID, ""), "urgent": urgent,
        }  # fmt: skip
        # A connection has a thousand of these, but one over HTTP.
        admission.count(_HANDED_ON_SIZE)
        try:
            _, message = await link.call(head, data)
        finally:
            admission.count(-_HANDED_ON_SIZE)
        return message

    return handler


_COUNT_SECS = 1.0  # between reports of answers and of lost log lines
_UNFINISHED_SECS = 2  # for the rest of incomplete requests


async def _open(
    doors: ClientDoors, config: DoorsConfig, link: EngineSession, admission: Admission
) -> None:
    """Open the doors; raises `OSError`."""
    limit = config.max_request_bytes
    if (http := config.http) is not None:
        entrance = RemoteEngine(link, admission, Flag.HTTP)
        generate = RemoteEngine(link, admission, Flag.GENERATE)
        app = forwarding_app(link, inference_routes(entrance, limit, doors.http_gate, generate))
        doors.open_http(http, _listeners(http), app, entrance)
    if (grpc := config.grpc) is not None:
        unary = {path: forwarding_handler(link, admission, path) for path in handed_on()}
        entrance = RemoteEngine(link, admission, Flag.UNARY)
        streams = RemoteEngine(link, admission, 0)
        handlers = all_handlers(entrance, streams, unary, link.readiness, limit, doors.grpc_gate)
        listeners = _listeners(grpc, port=grpc.transport == "native")
        await doors.open_grpc(grpc, listeners, handlers, shared=True)


def _listeners(config: HttpConfig | GrpcConfig, port: bool = True) -> list[socket.socket]:
    """A door's inherited Unix socket and, if asked for, its port; raises `OSError`."""
    found = [socket.socket(fileno=config.inherited)] if config.inherited >= 0 else []
    if port and config.address != CLOSED:
        found.append(bind(config.address, config.port, shared=True))
    return found


def main(descriptor: int) -> int:
    """Serve over the link whose end is open as `descriptor`; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    allow_many_files()
    return uvloop.run(_serve(socket.socket(fileno=descriptor)))


async def _renew_tls(doors: ClientDoors) -> None:
    _, wrong = await renew_tls(doors.tls)
    if wrong:
        log.error("TLS files stay as they are in a front end: %s", wrong)


async def _serve(sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    setup: asyncio.Future[dict[str, Any]] = loop.create_future()
    drain: asyncio.Future[float] = loop.create_future()
    link = EngineSession(sock, setup.set_result, drain.set_result, _without_engine)
    config = FrontendConfig.of(await setup)
    logs = Logs(link.logs or config.logs)
    link.on_logs = logs.apply
    admission = Admission(
        config.max_requests, config.max_bytes, config.shares, config.max_response_bytes,
        config.max_object_bytes,
        bounds=LatencyBounds(tuple(config.buckets), config.native_histograms),
    )  # fmt: skip
    link.watch(admission)
    link.limit_clients()
    doors = ClientDoors(admission, config.doors)
    if config.doors.audited:
        doors.record(link.record)
    if link.rules is not None:
        doors.change_rules(*link.rules)
    renewing = set[asyncio.Task[None]]()

    def on_tls() -> None:
        task = loop.create_task(_renew_tls(doors))
        renewing.add(task)
        task.add_done_callback(renewing.discard)

    link.on_tls = on_tls
    link.on_rules = doors.change_rules
    try:
        if path := config.doors.access_file:
            doors.follow(ACCESS.load()(path))
        await _open(doors, config.doors, link, admission)
    except (LoadFailed, OSError) as error:
        log.error("a front end cannot start: %s", error)
        return 1
    # Objects built at start-up stay for good: the garbage collector need not visit them again.
    gc.collect()
    gc.freeze()
    serve_promptly()
    keep_memory(server=True)
    link.ready()
    told = 0

    def report() -> None:
        nonlocal told
        if logs.dropped > told:
            link.unlogged(logs.dropped - told)
            told = logs.dropped
        link.answered(admission.answers.take())
        link.refused(admission.quota_refused)
        link.report_soon()  # includes connections, whose changes are not reported at once

    while not (await asyncio.wait([drain], timeout=_COUNT_SECS))[0]:
        report()
    return await _shut_down(doors, admission, drain.result(), report)


async def _shut_down(
    doors: ClientDoors, admission: Admission, seconds: float, report: Callable[[], None]
) -> int:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    await doors.announce(seconds)
    admission.close()
    unfinished = loop.call_later(_UNFINISHED_SECS, doors.end_unfinished)
    drained = asyncio.Event()
    admission.when_empty(drained.set)
    status = 0
    try:
        async with asyncio.timeout_at(deadline):
            while not drained.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), _COUNT_SECS)
                report()
    except TimeoutError:
        status = 1
    unfinished.cancel()
    await doors.close(max(deadline - loop.time(), 0.1))
    report()
    return status


def _without_engine(reason: str) -> NoReturn:
    # Silently: the engine has logged the reason, or was killed.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)
