"""The seam between doors and the engine, wherever the engine is: entrance, target, readiness.

A door is in the engine's process, or in a front end, which knows nothing of models: there, what a
request asks for is found, checked and refused only after it was submitted.

Who sends a message, or has answers to read, makes progress as `headrace.core.limits` has it, or is
given up; so is who leaves more unread than its connection's share. A connection without requests
goes after a while. Whoever is given up is counted.

Whatever may have changed the server's readiness announces that; it is looked at once, at the end of
that turn of the loop, and only if somebody watches. Nobody polls. Owned by the event-loop thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from headrace.core.call import Call, InferResponse, Submit
from headrace.core.errors import Overloaded, ServerError
from headrace.core.limits import PRESSED_SECS, Patience
from headrace.core.signature import Signature
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.protocol.plain_json import PlainJson
from headrace.protocol.v2_protobuf import PlainWriter

_KNOWN = 1024  # kinds of calls that are remembered

CONTEXT_HEADERS = ("traceparent", "tracestate")  # which trace a request is part of

# Why a decoupled model, which answers as often as it likes, is refused by doors with one answer.
HTTP_NOT_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
GRPC_NOT_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"

# Bytes of a request's responses that wait for its client, from which on its model is asked to pause
# and from which on the request is given up, because the model does not.
PAUSE_BYTES = 64 << 10
GIVE_UP_BYTES = 128 << 20


def not_read() -> ServerError:
    """The error of a request that is given up for the responses that wait."""
    return Overloaded(
        f"the client does not read the responses, and the model does not pause: more than"
        f" {GIVE_UP_BYTES} bytes of them were waiting"
    )


@dataclass(slots=True)
class Direct:
    """The way of plain calls into the queue of a version: their door has checked them.

    `json` reads and writes bodies, `grpc` writes messages. `known` has the rows of calls that have
    passed the check, by what a door knows those by that ask alike: the same model, names, datatypes
    and shapes. `submit` takes a call with its rows, which are at most `most_rows`; raises
    `ServerError`.
    """

    json: PlainJson
    grpc: PlainWriter
    known: dict[object, int]
    most_rows: int
    submit: Submit

    def remember(self, alike: object, rows: int) -> None:
        """Remember the rows of calls that ask alike, unless they are too many for one batch."""
        if rows > self.most_rows:
            return
        if len(self.known) >= _KNOWN:
            self.known.clear()
        self.known[alike] = rows


class Target(Protocol):
    """Target of a call: a version, a router, a cold start, or the engine behind a link."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def name(self) -> str:
        """The version; in a front end as the request names it, until it is answered."""

    @property
    def decoupled(self) -> bool:
        """True if it may answer more than once; False where that is not known yet."""

    @property
    def signature(self) -> Signature | None:
        """The declared inputs and outputs, None in a front end."""

    @property
    def direct(self) -> Direct | None:
        """The way of calls that the door has checked; None if all are to be submitted."""

    def submit(self, call: Call) -> None:
        """Check and queue a call; raises `ServerError`, or has the call refused later."""


NOTHING_KNOWN: Mapping[tuple[str, str], Any] = MappingProxyType({})


class Entrance(Protocol):
    """The engine, or the way to it."""

    @property
    def known(self) -> Mapping[tuple[str, str], Any]:
        """Targets that `find` has found, by its arguments; each stands while it is `ready`."""

    @property
    def admission(self) -> Admission:
        """Counts what this process holds."""

    @property
    def exiting(self) -> bool:
        """True if nothing new is admitted any more."""

    def find(self, name: str, version: str = "") -> Target:
        """The target of requests for a model; raises `ServerError` if that is known already."""


class Progress:
    """Patience with the client of one connection; times are in seconds of the loop's clock."""

    __slots__ = ("_account", "_reading")

    def __init__(self, account: ConnectionAccount, read_secs: float) -> None:
        self._account = account
        self._reading = Patience(read_secs)

    def sends(self, patience: Patience, subject: object, nbytes: int, now: float) -> bool:
        """True if the server should wait for more of `subject`; `nbytes` of it have arrived."""
        if patience.look(subject, nbytes, now, self._account.server.pressed):
            return True
        self._account.server.give_up("unsent")
        return False

    def reads(self, waiting: int, kept: int, moved: int, now: float) -> bool:
        """True if the server should wait for a client with `waiting` bytes unread and `moved` read.

        `kept` bytes of the client's wait for this side.
        """
        if not waiting:
            self._reading.look(None, 0, now)  # what waits next begins anew
        elif not self._reading.look(self, moved, now, self._account.server.pressed):
            return self._given_up()
        return self.within(waiting, kept)

    def within(self, waiting: int, kept: int = 0) -> bool:
        """Charge what waits; whether that is within the connection's share."""
        return self._account.owe(waiting, kept) or self._given_up()

    def idles(self, since: float, now: float, most: float) -> bool:
        """True if a connection without requests `since` then has been so for too long."""
        idle = now - since
        return idle > most or (idle > PRESSED_SECS and self._account.server.pressed)

    def _given_up(self) -> bool:
        self._account.server.give_up("unread")
        return False


class Readiness:
    """The answer of `look`, and the callbacks that are told when it changes."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._watchers: set[Callable[[], None]] = set()
        self._told = False  # what it was when they were last called, or the first one came
        self._scheduled = False

    @property
    def ready(self) -> bool:
        """True if the server takes requests."""
        return self._look()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `ready` has changed, until `unwatch`."""
        if not self._watchers:
            self._told = self._look()
        self._watchers.add(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Do not call `callback`."""
        self._watchers.discard(callback)

    def may_have_changed(self) -> None:
        """Look again at the end of this turn of the loop; free while nobody watches."""
        if self._watchers and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        ready = self._look()
        if ready is not self._told:
            self._told = ready
            for callback in list(self._watchers):
                callback()


class Awaited:
    """The way back to a future of the running event loop, for calls that are awaited."""

    __slots__ = ()

    future: asyncio.Future[InferResponse]

    def respond(self, response: InferResponse, final: bool) -> None:
        """Resolve the future."""
        if not self.future.done():
            self.future.set_result(response)

    def fail(self, error: ServerError) -> None:
        """Fail the future."""
        if not self.future.done():
            self.future.set_exception(error)


class FutureCall(Awaited, Call):
    """A copy of a call that resolves a future."""

    __slots__ = ("future",)

    def __init__(self, asked: Call) -> None:
        """Ask what `asked` does."""
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
