"""The engine's end of one front end's link.

All requests of one read are submitted in the same turn of the event loop, so that they can share a
batch, whichever front ends they come from. A decoupled model is asked to pause while the client, or
the front end itself, does not read. Invariant: `_under_way` holds exactly the unanswered requests
and calls of this front end. The front end's account is charged for each of the requests, for data
that the front end has not taken yet, and for what it reports to hold besides.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import maxsize
from time import monotonic_ns
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Receive

from headrace.api.gate import Gate
from headrace.api.handlers import BareCall
from headrace.api.operations import by_procedure
from headrace.core.call import CallContext, InferResponse, Raw, context_of
from headrace.core.errors import ServerError, Unsupported
from headrace.core.identity import PeerFacts
from headrace.core.limits import Payer
from headrace.core.tensors import Buffer
from headrace.core.turns import TASK_SECS
from headrace.doors.grpc.call import Unary
from headrace.doors.http.asgi import NAMES, PEER
from headrace.engine.admission import Account, AccountedCall, Clients, Held
from headrace.engine.client_accounts import ClientAccount
from headrace.engine.entrance import (
    GIVE_UP_BYTES,
    GRPC_NOT_DECOUPLED,
    HTTP_NOT_DECOUPLED,
    Entrance,
    Target,
    not_read,
    submit_raw,
)
from headrace.ipc.frames import INLINE, BrokenFrame, Header
from headrace.observability.audit import AuditEntry, Record
from headrace.plugins.frontends.channel import FrameChannel
from headrace.plugins.frontends.config import (
    IDENTITY_FIELD,
    LinkHeaders,
    identity_told,
)
from headrace.plugins.frontends.link_infer import (
    Flag,
    LinkKind,
    RequestReader,
    ResponseWriter,
    deadline_of,
    error_parts,
    numbers_rest,
    origin_of,
    read_numbers,
)

log = logging.getLogger(__name__)


class ForwardedCall:
    """A call of a front end in flight: an operation other than infer.

    The front end sends the body of an HTTP request in pieces, each when it is asked for.
    """

    __slots__ = ("_asked", "_host", "_more", "_number", "_piece", "_task", "_told")

    def __init__(self, host: "FrontEndSession", number: int, head: dict[str, Any], body: Buffer):
        """`number` is the call's on the link; a large message stays where it was received."""
        self._host = host
        self._number = number
        self._more = bool(head.get("body"))  # of the body
        self._told = False  # the end of the body was reported
        self._piece: asyncio.Future[tuple[bytes, bool]] | None = None
        self._asked: tuple[dict[str, Any], Buffer] | None = (head, body)  # None once it has begun
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin the call, unless it was cancelled."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            loop = asyncio.get_running_loop()
            self._host.admission.turns.expect(loop, TASK_SECS)
            self._task = loop.create_task(self._run(*asked))

    def cancel(self) -> None:
        """Cancel: the answer is no longer awaited."""
        self._asked = None
        if self._task is not None:
            self._task.cancel()

    def take(self, piece: bytes, last: bool) -> None:
        """Receive a piece of the body that was requested."""
        if self._piece is not None and not self._piece.done():
            self._piece.set_result((piece, last))

    async def _receive(self) -> Message:
        """ASGI's `receive`. A client that disconnects is not announced: the call is cancelled."""
        if self._told:
            await asyncio.get_running_loop().create_future()
        piece = b""
        if self._more:
            self._piece = asyncio.get_running_loop().create_future()
            self._host.channel.send(LinkKind.MORE, self._number)
            piece, last = await self._piece
            self._more = not last
        self._told = not self._more
        return {"type": "http.request", "body": piece, "more_body": self._more}

    async def _run(self, head: dict[str, Any], body: Buffer) -> None:
        host, kind = self._host, LinkKind.ANSWER
        try:
            if "grpc" in head:
                given = [text.encode("latin-1", "replace") for text in head["given"]]
                permission, peer = _TABLE[head["grpc"]].permission, _peer(head["peer"])
                identity = host.gate.require(permission, lambda name: given, peer)
                call = BareCall(identity, peer, head["id"])
                meta, rest = b"{}", await host.unary[head["grpc"]](body, call)
            else:
                meta, rest = await _http(host.app, head, self._receive)
        except ServerError as error:
            kind, (meta, rest) = LinkKind.FAIL, error_parts(error, "")
        except Exception as error:
            log.error("bug in a call of a front end", exc_info=error)
            kind, meta, rest = LinkKind.FAIL, b" ", b""
        host.answer(self._number, kind, meta, rest)


def _peer(given: Sequence[Any]) -> PeerFacts:
    """The facts about a client, whose certificate has tuples again, which JSON lacks."""
    address, certificate, *process = given
    if certificate is not None:
        certificate = {name: _tuples(value) for name, value in certificate.items()}
    return PeerFacts(address, certificate, *process)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


async def _http(app: ASGIApp, head: Any, receive: Receive) -> tuple[bytes, bytes]:
    """Run the application; returns status and headers, and the body."""
    names = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in head["headers"]]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": head["method"],
        "path": head["path"],
        "raw_path": head["raw_path"].encode("latin-1"),
        "query_string": head["query"].encode("latin-1"),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in names],
        "client": (head["client"], 0),
        "server": head["server"],
        "state": {},
        NAMES: names,
        PEER: _peer(head["peer"]),
    }
    document: dict[str, object] = {}
    pieces: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            document["status"] = message["status"]
            document["headers"] = [
                (n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]
            ]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return orjson.dumps(document), b"".join(pieces)


# Members of `Flag`.
_FINAL, _REFUSE, _RAW, _ONE_ANSWER, _WEB, _UNBEGUN = 2, 4, 8, 48, 80, 128
_TABLE = by_procedure()
_CLIENTS = 1024  # known at once
_PAUSE_BYTES = 1 << 20  # unread by the front end above which models are asked to pause
_BY_CLIENT, _BY_LINK = 1, 2  # the reasons for pausing a model


class RemotePayer(NamedTuple):
    """A client of a front end, of which the engine knows the address alone."""

    origin: str
    requests: int = maxsize  # not known, so that none has turns before others
    weight: float = 1.0

    def take_rows(self, rows: int) -> None:
        """Implements `Payer.take_rows`."""


class FrontEndCall(AccountedCall):
    """A call from a front end."""

    __slots__ = (
        "_held_by", "_told", "account", "door", "found", "headers", "host", "origin", "refusal",
        "tag", "until", "version",
    )  # fmt: skip

    def __init__(
        self,
        host: "FrontEndSession",
        tag: int,
        flags: int,
        headers: Mapping[str, str],
        *asked: Any,
    ) -> None:
        """`tag` is the call's number on the link, `flags` are those of its frame.

        `headers` are those of the client's that the engine has asked for.
        """
        super().__init__(*asked)
        self.headers = headers
        self.host = host
        self.account = host.account
        self.origin = ""  # the client's address
        self.tag = tag
        self.door, self.refusal = "GRPC", GRPC_NOT_DECOUPLED
        if flags & _WEB:
            self.door, self.refusal = "HTTP", HTTP_NOT_DECOUPLED
        if not flags & _ONE_ANSWER:
            self.refusal = ""
        self.version = ""
        self.found: Target | None = None
        self.until = 0  # the client's deadline in ns of the monotonic clock; 0: none
        self._told = False  # the front end knows that the model is decoupled
        self._held_by = 0

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        if isinstance(self.account, ClientAccount):
            return self.account
        return RemotePayer(self.origin)

    def header(self, name: str) -> str:
        """Implements `Call.header`, for the headers that the engine has asked for."""
        return self.headers.get(name, "")

    def remaining(self) -> float:
        """Seconds until the client's deadline; 0 if it has none."""
        return max(self.until - monotonic_ns(), 1) / 1e9 if self.until else 0.0

    def routed(self, target: Target) -> None:
        """Note the target, and report it to the front end if needed."""
        self.found = target
        self.version = target.name
        if target.decoupled and not self._told:
            self._told = True
            self.host.channel.send(LinkKind.DECOUPLED, self.tag)

    def answered_by(self, backend: str) -> None:
        """Report the backend that answers."""
        self.host.channel.send(LinkKind.BACKEND, self.tag, backend.encode())

    def respond(self, response: InferResponse, final: bool) -> None:
        """Send a response, unless too much is queued already."""
        host = self.host
        try:
            host.admission.check_answer(response.model_name, response.nbytes)
        except ServerError as error:
            if not final:
                self.cancel()
            host.leave(self)
            host.send_error(self.tag, error, self.version, 0)
            return
        if final:
            host.leave(self)
        elif (waiting := host.channel.waiting) > _PAUSE_BYTES:
            if waiting > host.give_up_bytes and self._held_by & _BY_LINK:
                self.cancel()
                host.send_error(self.tag, not_read(), self.version, 0)
                return
            host.pause(self)
        meta, pieces = host.writer.parts(response)
        host.channel.send_parts(17, _FINAL if final else 0, self.tag, meta, pieces)

    def finish(self) -> None:
        """Report the end of the responses."""
        self.host.leave(self)
        self.host.channel.send(LinkKind.FINISH, self.tag)

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.host.leave(self)
        flags = 0 if self.started else _UNBEGUN
        self.host.send_error(self.tag, error, self.version, flags)

    def refuse(self, error: ServerError) -> None:
        """Send the error that refused the call."""
        self.host.leave(self)
        self.host.send_error(self.tag, error, self.version, _REFUSE)

    def cancel(self) -> None:
        """Cancel the call: the answer is no longer awaited."""
        self.host.leave(self)
        super().cancel()

    def hold_by(self, by: int, held: bool) -> None:
        """Pause a decoupled model while the client or the link asks for it."""
        if self.found is None or (self.found.name and not self.found.decoupled):
            return
        before = self._held_by
        self._held_by = before | by if held else before & ~by
        if bool(before) != bool(self._held_by):
            self.hold(held)


class FrontEndSession:
    """Processes one front end's frames. `ready` is called once its doors are open."""

    def __init__(
        self,
        sock: socket.socket,
        engine: Entrance,
        app: ASGIApp,
        unary: Mapping[str, Unary],
        ready: Callable[[], None],
        lost: Callable[[str], None],
        give_up_bytes: int = GIVE_UP_BYTES,
        moved: Callable[[], object] = int,
        record: Record | None = None,
    ) -> None:
        """All but inference goes to `app` and the handlers in `unary`, by path.

        Streams with more than `give_up_bytes` unread are ended.
        `moved` is called after a change of the account that other front ends should know, `record`
        with requests that the front end has refused.
        """
        self.writer = ResponseWriter()
        self.app = app
        self.unary = unary
        self.give_up_bytes = give_up_bytes
        self.unlogged = 0  # log lines that the front end could not write
        self._reader = RequestReader()
        self._engine = engine
        self.gate = Gate(access=engine.access)
        self._audit = record
        self._contexts: dict[str, CallContext] = {}  # of clients, by what the link says of them
        self.admission = engine.admission
        self.account = Account(engine.admission)
        self._clients: Clients | None = None  # those that keep accounts for this link
        self._moved = moved
        self._ready = ready
        self._lost = lost
        self._held = Held()
        self._elsewhere = 0  # bytes held by others, as last reported
        self._under_way: dict[int, FrontEndCall | ForwardedCall] = {}
        self._paused: set[FrontEndCall] = set()  # calls paused until the front end reads
        self._unread = Account(self.account)
        self.channel = FrameChannel(
            sock, self._take, self._on_lost, self._unread.owe, self.account.count
        )

    def set_up(self, document: object) -> None:
        """Send the front end its configuration."""
        self.channel.send(LinkKind.SETUP, 0, orjson.dumps(document))

    def apply_logs(self, document: object) -> None:
        """Send the front end new log settings."""
        self.channel.send(LinkKind.LOGS, 0, orjson.dumps(document))

    def renew_tls(self) -> None:
        """Make the front end read certificate and key again."""
        self.channel.send(LinkKind.TLS, 0)

    def change_rules(self, document: Mapping[str, object]) -> None:
        """Send the front end other header rules: `http_rules` and `grpc_rules`."""
        self.channel.send(LinkKind.RULES, 0, orjson.dumps(document))

    def tell_quotas(self, document: Sequence[Mapping[str, Any]] | None) -> None:
        """Send quotas of connections, None for no quotas."""
        self.channel.send(LinkKind.QUOTAS, 0, orjson.dumps(document))

    def tell_ready(self, ready: bool) -> None:
        """Send the server's readiness."""
        self.channel.send(LinkKind.READINESS, int(ready))

    def tell_headers(self, wanted: LinkHeaders) -> None:
        """Send the headers that requests must carry."""
        self.channel.send(LinkKind.HEADERS, 0, orjson.dumps(wanted.document()))

    def tell_elsewhere(self) -> None:
        """Send the bytes held by others, if they changed by 1/64 of the limit."""
        server = self.admission
        now, told = server.bytes - self.account.bytes, self._elsewhere
        step = max(server.max_bytes // 64, 1)
        if server.max_bytes and (abs(now - told) >= step or (told and not now)):
            self._elsewhere = now
            self.channel.send(LinkKind.ELSEWHERE, rest=numbers_rest(now))

    def drain(self, seconds: float) -> None:
        """Ask the front end to finish its requests and to exit."""
        self.channel.send(LinkKind.DRAIN, round(seconds * 1_000))

    def close(self) -> None:
        """Cancel all calls."""
        self.channel.close()
        self._cancel_all()

    def leave(self, call: FrontEndCall) -> None:
        """Remove a call from the account."""
        if self._under_way.pop(call.tag, None) is not None:
            call.account.leave(call.nbytes)
            if call.nbytes > INLINE:
                self._moved()

    def pause(self, call: FrontEndCall) -> None:
        """Pause a model until the front end reads again."""
        if call in self._paused:
            return
        if not self._paused:
            self.channel.when_room(_PAUSE_BYTES // 2, self._go_on)
        self._paused.add(call)
        call.hold_by(_BY_LINK, True)

    def _go_on(self) -> None:
        paused, self._paused = self._paused, set()
        for call in paused:
            if self._under_way.get(call.tag) is call:
                call.hold_by(_BY_LINK, False)

    def send_error(self, number: int, error: ServerError | None, version: str, flags: int) -> None:
        """Answer with an error; None means a bug."""
        meta, text = (b" ", b"") if error is None else error_parts(error, version)
        self.channel.send_parts(LinkKind.FAIL, flags, number, meta, [text])

    def _on_lost(self, reason: str) -> None:
        self._cancel_all()
        self._lost(reason)

    def _cancel_all(self) -> None:
        for item in list(self._under_way.values()):
            item.cancel()
        self._under_way.clear()
        self._unread.owe(0)
        self._forget_clients(None)
        # Counts of requests given up or refused remain after its end.
        self._hold(self._held.ended())

    def _hold(self, held: Held) -> None:
        """Note what the front end holds: requests not submitted, or answers not read by clients."""
        before, self._held = self._held, held
        self.admission.count_process(self.account, before, held)
        self._moved()

    def _take(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        kind = header.kind
        if kind is LinkKind.INFER:
            self._infer(header, meta, rest)
        elif kind is LinkKind.CANCEL:
            item = self._under_way.get(header.number)
            if item is not None:
                item.cancel()
                self._under_way.pop(header.number, None)
        elif kind is LinkKind.CALL:
            self._call(header.number, meta, rest)
            self._moved()
        elif kind is LinkKind.BODY:
            item = self._under_way.get(header.number)
            if isinstance(item, ForwardedCall):
                item.take(bytes(rest), bool(header.flags & _FINAL))
                self._moved()
        elif kind is LinkKind.PAUSE or kind is LinkKind.GO_ON:
            item = self._under_way.get(header.number)
            if isinstance(item, FrontEndCall):
                item.hold_by(_BY_CLIENT, kind is LinkKind.PAUSE)
        elif kind is LinkKind.HELD:
            self._hold(Held(*read_numbers(bytes(rest), len(Held()))))
        elif kind is LinkKind.TAKEN:
            self.channel.taken(*read_numbers(bytes(rest), 1))
        elif kind is LinkKind.UNLOGGED:
            self.unlogged += header.number
        elif kind is LinkKind.ANSWERS:
            try:
                self.admission.answers.add(orjson.loads(meta))
            except (ValueError, TypeError, IndexError) as error:
                raise BrokenFrame(f"counts that make no sense: {error}") from None
        elif kind is LinkKind.AUDIT:
            self._record(meta)
        elif kind is LinkKind.QUOTA_REFUSED:
            try:
                for quota, limit, count in orjson.loads(meta):
                    self.admission.quota_refused[quota, limit] += count
            except (ValueError, TypeError) as error:
                raise BrokenFrame(f"counts that make no sense: {error}") from None
        elif kind is LinkKind.READY:
            self._ready()
        else:
            raise BrokenFrame(f"a frame of kind {kind}")

    def _infer(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        number, flags = header.number, header.flags
        if number in self._under_way:
            raise BrokenFrame(f"a second request of number {number}")
        entered, call = -1, None
        raw: Raw | None = None
        if flags & _RAW:
            raw = Raw.GENERATE if flags & Flag.GENERATE else Raw.INFER
            raw = Raw.ARROW if flags & Flag.ARROW else raw
        try:
            call = self._reader.read(
                meta, rest, raw,
                partial(FrontEndCall, self, number, flags),
            )  # fmt: skip
            call.until = deadline_of(rest)
            call.origin = origin_of(rest)
            if told := call.headers.get(IDENTITY_FIELD):
                call.context = self._context(told)
            found = self._engine.find(call.model_name, call.model_version)
            if found.decoupled and call.refusal:
                raise Unsupported(call.refusal)
            call.routed(found)
            call.account = self._account_of(call)
            call.account.enter(call.nbytes)
            entered = call.nbytes
            if entered > INLINE:
                self._moved()
            self._under_way[number] = call
            if raw is not None and found.signature is not None:
                submit_raw(found, call, self._engine)
            else:
                found.submit(call)
        except Exception as error:  # also of a frame that cannot be read: others follow it
            self._under_way.pop(number, None)
            if entered >= 0 and call is not None:
                call.account.leave(entered)
            if not isinstance(error, ServerError):
                log.error("bug in a request of a front end", exc_info=error)
            # A second name of it would be a cycle by way of its traceback, and keep the request.
            self.send_error(number, error if isinstance(error, ServerError) else None, "", _REFUSE)

    def _record(self, meta: bytes) -> None:
        """Record a request that the front end has refused."""
        try:
            entry = AuditEntry.of(orjson.loads(meta))
        except (ValueError, TypeError, KeyError) as error:
            raise BrokenFrame(f"an entry that makes no sense: {error}") from None
        if self._audit is not None:
            self._audit(entry)

    def _account_of(self, call: FrontEndCall) -> Account:
        """The account of a call's client below the front end's; raises `QuotaExceeded`."""
        clients = self.admission.clients
        if clients is not self._clients:
            self._forget_clients(clients)
        if clients is None:
            return self.account
        return clients.account(self.account, call.context.identity, call.origin, call.model_name)

    def _forget_clients(self, clients: Clients | None) -> None:
        if self._clients is not None:
            self._clients.leave(self.account)
        self._clients = clients

    def _context(self, told: str) -> CallContext:
        """The context of a client's calls; they have passed the gate in the front end."""
        found = self._contexts.get(told)
        if found is None:
            if len(self._contexts) >= _CLIENTS:
                self._contexts.clear()
            found = self._contexts[told] = context_of(identity_told(told))
        return found

    def _call(self, number: int, meta: bytes, rest: Buffer) -> None:
        if number in self._under_way:
            raise BrokenFrame(f"a second call of number {number}")

        try:
            head = orjson.loads(meta)
        except orjson.JSONDecodeError as error:
            raise BrokenFrame(f"an invalid call: {error}") from None
        if type(head) is not dict:
            raise BrokenFrame("a call that is no object")
        call = self._under_way[number] = ForwardedCall(self, number, head, rest)
        # Clients may have sent thousands in the same instant, whose tasks all begin in a turn.
        if head.get("urgent"):
            call.begin()
        else:
            self.admission.turns.put_off(call.begin)

    def answer(self, number: int, kind: LinkKind, meta: bytes, rest: bytes) -> None:
        """Send the answer to a call, unless it was cancelled."""
        if self._under_way.pop(number, None) is not None:
            self.channel.send_parts(kind, 0, number, meta, [rest])
