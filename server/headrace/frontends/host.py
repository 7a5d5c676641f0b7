"""The engine's end of one front end's link.

All requests of one read are submitted in the same turn of the event loop, so that they run
together, whichever front ends they come from. A model that answers many times is asked to pause
while the client, or the front end itself, does not read. Invariant: `_under_way` holds exactly the
requests and calls of this front end that are not answered; admission has counted each of the
requests.
"""

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from headrace.core.errors import ServerError, Unsupported
from headrace.core.requests import Call, InferResponse, RawRequest, Sink, Ticket
from headrace.engine.admission import Held
from headrace.engine.cold_start import ColdStart, submit_raw
from headrace.engine.doors import (
    GIVE_UP_BYTES,
    GRPC_NOT_DECOUPLED,
    HTTP_NOT_DECOUPLED,
    Entrance,
    Target,
    not_read,
)
from headrace.frontends.calls import Calls, CallUnderWay, UnderWay
from headrace.frontends.channel import Channel
from headrace.frontends.wanted_headers import WantedHeaders
from headrace.wire.link_frames import BrokenLink, Flag, Frame, Kind, frame
from headrace.wire.link_infer import RequestReader, ResponseWriter, error_parts, read_held

log = logging.getLogger(__name__)

# Of `Flag`.
_FINAL, _REFUSE, _RAW, _ONE_ANSWER, _WEB = 2, 4, 8, 48, 80
_PAUSE_BYTES = 1 << 20  # that the front end has not read, from which on models are asked to pause
_BY_CLIENT, _BY_LINK = 1, 2  # who has them pause


class _Request(Sink):
    """A request of a front end under way: its sink."""

    __slots__ = ("host", "nbytes", "number", "ticket", "version")

    door = "HTTP"
    refusal = HTTP_NOT_DECOUPLED

    def __init__(self, host: "Host", number: int, nbytes: int, version: str) -> None:
        self.host = host
        self.number = number
        self.nbytes = nbytes
        self.version = version
        self.ticket: Ticket | None = None

    def respond(self, response: InferResponse, final: bool) -> None:
        """Send a response."""
        host = self.host
        if final:
            host.leave(self)
        meta, pieces = host.writer.parts(response)
        host.channel.send_parts(17, _FINAL if final else 0, self.number, meta, pieces)

    def finish(self) -> None:
        """Send that nothing more comes."""
        self.host.leave(self)
        self.host.channel.send(frame(Kind.FINISH, self.number))

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.host.leave(self)
        self.host.send_error(self.number, error, self.version, 0)

    def refuse(self, error: ServerError) -> None:
        """Send the error that the request was refused with."""
        self.host.leave(self)
        self.host.send_error(self.number, error, self.version, _REFUSE)

    def routed(self, request: Call, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.version = target.name

    def answered_by(self, backend: str) -> None:
        """Send which backend answers."""
        self.host.channel.send(frame(Kind.BACKEND, self.number, backend.encode()))

    def cancel(self) -> None:
        """Nobody wants an answer any more."""
        self.host.leave(self)
        if self.ticket is not None:
            self.ticket.cancel()


class _Streamed(_Request):
    """A request for a model that answers as often as it likes."""

    __slots__ = ("_held",)

    refusal = ""

    def __init__(self, host: "Host", number: int, nbytes: int, version: str) -> None:
        super().__init__(host, number, nbytes, version)
        self._held = 0

    def respond(self, response: InferResponse, final: bool) -> None:
        """Send a response, unless far too much waits already."""
        waiting = self.host.channel.waiting
        if not final and waiting > _PAUSE_BYTES:
            if waiting > self.host.give_up_bytes and self._held & _BY_LINK:
                self.cancel()
                self.host.send_error(self.number, not_read(), self.version, 0)
                return
            self.host.pause(self)
        super().respond(response, final)

    def hold(self, by: int, held: bool) -> None:
        """Have the model pause while anyone asks for it."""
        before = self._held
        self._held = before | by if held else before & ~by
        if self.ticket is not None and bool(before) != bool(self._held):
            self.ticket.hold(held)


class _RpcRequest(_Request):
    """The same from the other door."""

    __slots__ = ()

    door = "GRPC"
    refusal = GRPC_NOT_DECOUPLED


class _RpcStreamed(_Streamed):
    """The same from the other door."""

    __slots__ = ()

    door = "GRPC"


class _Awaited(_Streamed):
    """A request for a model that is being loaded, and may answer as often as it likes."""

    __slots__ = ("_told", "found")

    def __init__(self, host: "Host", number: int, nbytes: int, version: str) -> None:
        super().__init__(host, number, nbytes, version)
        self.found: Target | None = None
        self._told = False

    def respond(self, response: InferResponse, final: bool) -> None:
        """Send a response."""
        self._tell()
        super().respond(response, final)

    def finish(self) -> None:
        """Send that nothing more comes."""
        self._tell()
        super().finish()

    def _tell(self) -> None:
        if not self._told and self.found is not None and self.found.decoupled:
            self.host.channel.send(frame(Kind.DECOUPLED, self.number))
        self._told = True


class _RpcAwaited(_Awaited):
    """The same from the other door."""

    __slots__ = ()

    door = "GRPC"


class Host:
    """Takes one front end's frames. `ready` is called once its doors are open."""

    def __init__(
        self,
        sock: socket.socket,
        engine: Entrance,
        calls: Calls,
        ready: Callable[[], None],
        lost: Callable[[str], None],
        give_up_bytes: int = GIVE_UP_BYTES,
    ) -> None:
        """Beyond `give_up_bytes` not read, streams are given up."""
        self.writer = ResponseWriter()
        self.give_up_bytes = give_up_bytes
        self.unlogged = 0  # lines that the front end could not write into the log
        self._reader = RequestReader()
        self._engine = engine
        self._admission = engine.admission
        self._calls = calls
        self._ready = ready
        self._lost = lost
        self._held = Held()
        self._under_way: dict[int, UnderWay] = {}
        self._paused: set[_Streamed] = set()  # until the front end reads
        self.channel = Channel(sock, self._take, self._on_lost, considerate=True)

    def set_up(self, document: object) -> None:
        """Say what the front end is to be."""
        self.channel.send(frame(Kind.SETUP, 0, orjson.dumps(document)))

    def apply_logs(self, document: object) -> None:
        """Have the front end write its log by other settings."""
        self.channel.send(frame(Kind.LOGS, 0, orjson.dumps(document)))

    def tell_ready(self, ready: bool) -> None:
        """Say whether the server is ready."""
        self.channel.send(frame(Kind.READINESS, int(ready)))

    def tell_headers(self, wanted: WantedHeaders) -> None:
        """Say which headers' values requests are to bring along."""
        self.channel.send(frame(Kind.HEADERS, 0, orjson.dumps(wanted.document())))

    def drain(self, seconds: float) -> None:
        """Have the front end finish what it has, and end."""
        self.channel.send(frame(Kind.DRAIN, round(seconds * 1_000)))

    def close(self) -> None:
        """Cancel what is under way."""
        self.channel.close()
        self._cancel_all()

    def leave(self, request: _Request) -> None:
        """Count a request out."""
        if self._under_way.pop(request.number, None) is not None:
            self._admission.leave(request.nbytes)

    def _grow(self, request: _Request, nbytes: int) -> None:
        self._admission.grow(nbytes, request.nbytes)
        request.nbytes += nbytes

    def pause(self, request: _Streamed) -> None:
        """Have a model pause until the front end reads."""
        if request in self._paused:
            return
        if not self._paused:
            self.channel.when_room(_PAUSE_BYTES // 2, self._go_on)
        self._paused.add(request)
        request.hold(_BY_LINK, True)

    def _go_on(self) -> None:
        paused, self._paused = self._paused, set()
        for request in paused:
            if self._under_way.get(request.number) is request:
                request.hold(_BY_LINK, False)

    def send_error(self, number: int, error: ServerError | None, version: str, flags: int) -> None:
        """Answer with an error, None for a bug."""
        meta, text = (b" ", b"") if error is None else error_parts(error, version)
        self.channel.send_parts(Kind.FAIL, flags, number, meta, [text])

    def _on_lost(self, reason: str) -> None:
        self._cancel_all()
        self._lost(reason)

    def _cancel_all(self) -> None:
        for item in list(self._under_way.values()):
            item.cancel()
        self._under_way.clear()
        # What it has given up or refused is not undone by its end.
        none, held = Held(), self._held
        self._hold(
            none._replace(
                refused_connections=held.refused_connections,
                given_up_unread=held.given_up_unread,
                given_up_unsent=held.given_up_unsent,
                failed_accepts=held.failed_accepts,
            )
        )

    def _hold(self, held: Held) -> None:
        """The front end holds so much that is not submitted, or not read by clients."""
        before, self._held = self._held, held
        self._admission.count_process(before, held)

    def _take(self, frame: Frame, buffer: Any) -> None:
        kind = frame.kind
        if kind is Kind.INFER:
            self._infer(frame, buffer)
        elif kind is Kind.CANCEL:
            item = self._under_way.get(frame.number)
            if item is not None:
                item.cancel()
                self._under_way.pop(frame.number, None)
        elif kind is Kind.CALL:
            self._call(frame, buffer)
        elif kind is Kind.BODY:
            item = self._under_way.get(frame.number)
            if isinstance(item, CallUnderWay):
                item.take(bytes(buffer[frame.start : frame.stop]), bool(frame.flags & _FINAL))
        elif kind is Kind.PAUSE or kind is Kind.GO_ON:
            item = self._under_way.get(frame.number)
            if isinstance(item, _Streamed):
                item.hold(_BY_CLIENT, kind is Kind.PAUSE)
        elif kind is Kind.HELD:
            self._hold(Held(*read_held(bytes(buffer[frame.start : frame.stop]))))
        elif kind is Kind.REFUSED:
            self._admission.refused += frame.number
        elif kind is Kind.UNLOGGED:
            self.unlogged += frame.number
        elif kind is Kind.ANSWERS:
            try:
                self._admission.answers.add(orjson.loads(frame.meta))
            except (ValueError, TypeError, IndexError) as error:
                raise BrokenLink(f"counts that make no sense: {error}") from None
        elif kind is Kind.READY:
            self._ready()
        else:
            raise BrokenLink(f"a frame of kind {kind}")

    def _infer(self, given: Frame, buffer: Any) -> None:
        number, flags = given.number, given.flags
        if number in self._under_way:
            raise BrokenLink(f"a second request of number {number}")
        entered = -1
        try:
            request = self._reader.read(
                given.meta, buffer, given.start, given.stop, bool(flags & _RAW)
            )
            found = self._engine.find(request.model_name, request.model_version)
            kind = _Request if flags & _WEB else _RpcRequest
            if found.decoupled:
                if flags & _ONE_ANSWER:
                    raise Unsupported(kind.refusal)
                self.channel.send(frame(Kind.DECOUPLED, number))
                kind = _Streamed if flags & _WEB else _RpcStreamed
            elif type(found) is ColdStart and not flags & _ONE_ANSWER:
                kind = _Awaited if flags & _WEB else _RpcAwaited
            self._admission.enter(request.nbytes)
            entered = request.nbytes
            under_way = kind(self, number, entered, found.name)
            self._under_way[number] = under_way
            if isinstance(under_way, _Awaited):
                under_way.found = found
            if type(request) is RawRequest:
                request.generates = bool(flags & Flag.GENERATE)
            if type(request) is RawRequest and found.signature is not None:
                counted = self._admission, partial(self._grow, under_way)
                under_way.ticket = submit_raw(found, request, under_way, *counted)
            else:
                under_way.ticket = found.submit(request, under_way)
        except BrokenLink:
            raise
        except Exception as error:
            self._under_way.pop(number, None)
            if entered >= 0:
                self._admission.leave(entered)
            if not isinstance(error, ServerError):
                log.error("bug in a request of a front end", exc_info=error)
            known = error if isinstance(error, ServerError) else None
            self.send_error(number, known, "", _REFUSE)

    def _call(self, given: Frame, buffer: Any) -> None:
        number = given.number
        if number in self._under_way:
            raise BrokenLink(f"a second call of number {number}")

        def answer(meta: bytes, rest: bytes, failed: bool) -> None:
            if self._under_way.pop(number, None) is not None:
                kind = Kind.FAIL if failed else Kind.ANSWER
                self.channel.send_parts(kind, 0, number, meta, [rest])

        try:
            head = orjson.loads(given.meta)
        except orjson.JSONDecodeError as error:
            raise BrokenLink(f"a call that makes no sense: {error}") from None

        def ask() -> None:
            self.channel.send(frame(Kind.MORE, number))

        body = bytes(buffer[given.start : given.stop])
        self._under_way[number] = self._calls.begin(head, body, answer, ask)
