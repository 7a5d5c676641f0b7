"""The interface between doors and the engine: entrance, target, readiness, progress.

A door is in the engine's process, or in a front end, which knows nothing about models: there, a
request's model is looked up, checked and refused only after submission.

A client that sends a message, or has answers to read, must make progress by the rules of
`headrace.core.limits`, and must not leave more unread than its connection's share; otherwise it is
disconnected and counted. A connection without requests is closed after a while.

Any event that may change the server's readiness announces it; readiness is then computed once, at
the end of that turn of the loop, and only if it is watched. Nothing polls. Owned by the event-loop
thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from headrace.core.call import Call, Done, InferResponse, Raw, Stage, Submit
from headrace.core.errors import InvalidRequest, Overloaded, ServerError, Unsupported
from headrace.core.identity import Access
from headrace.core.limits import PRESSED_SECS, Charge, Patience, uncharged
from headrace.core.signature import Signature
from headrace.core.turns import TurnQueue
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.workbench import LARGE, Deferred
from headrace.protocol.arrow_ipc import decode_stream, limited
from headrace.protocol.elements import charge_objects
from headrace.protocol.generate import decode_generate
from headrace.protocol.parameters import add_timing, wants_timing
from headrace.protocol.v2_json import body_of, decode_raw, takes_long

Codec = TypeVar("Codec")

_KNOWN = 1024  # cached call layouts

CONTEXT_HEADERS = ("traceparent", "tracestate")  # the trace context of a request

# Texts for doors with a single answer that refuse a decoupled model.
HTTP_NOT_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
GRPC_NOT_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"

# Unread bytes of a request's responses above which its model is asked to pause, and above which
# the request is ended, because the model does not.
PAUSE_BYTES = 64 << 10
GIVE_UP_BYTES = 128 << 20


def not_read() -> ServerError:
    """The error of a request that is ended because its responses are not read."""
    return Overloaded(
        f"the client does not read the responses, and the model does not pause: more than"
        f" {GIVE_UP_BYTES} bytes of them were waiting"
    )


@dataclass(slots=True)
class Direct:
    """The fast path of plain calls, checked by their door, into a version's queue.

    `codecs` are those that doors have made for the version, by their class. `known` caches the
    rows of calls that have passed the check, by the door's key for calls with the same model,
    names, datatypes and shapes. `submit` takes a call with its rows, at most `most_rows`; raises
    `ServerError`. `memory` is where a long message is best received, by its size and the position
    of its first tensor; None where that makes no difference. `lend` and `join` are
    those of `Batcher`, and `lender` is the last result of the former.
    """

    of: tuple[Signature, str, str]  # the version's signature, model and name
    codecs: dict[object, Any]
    known: dict[object, int]
    most_rows: int
    submit: Submit
    memory: Callable[[int, int], memoryview | None]
    lend: Callable[[Callable[..., Any]], Any] = lambda _: None
    lender: Any = None
    join: Callable[[Any], bool] = lambda _: False

    def codec(self, kind: Callable[[Signature, str, str], Codec]) -> Codec:
        """The version's codec of a door, made when it is first needed."""
        if kind not in self.codecs:
            self.codecs[kind] = kind(*self.of)
        found: Codec = self.codecs[kind]
        return found

    def remember(self, alike: object, rows: int) -> None:
        """Cache the rows of calls with this key, unless they exceed one batch."""
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
        """True if a request may get more than one response; False where not known yet."""

    @property
    def signature(self) -> Signature | None:
        """The declared inputs and outputs; None in a front end."""

    @property
    def direct(self) -> Direct | None:
        """The fast path for calls checked by their door; None if all calls are to be submitted."""

    def submit(self, call: Call) -> None:
        """Check and queue a call; raises `ServerError`, or refuses the call later."""


class Router(Target, Protocol):
    """The target of requests without a version, for a model with traffic rules."""

    @property
    def ready(self) -> bool:
        """True if the router is still valid."""

    @property
    def obstacle(self) -> str:
        """The reason why requests are not executed; "" if they are."""

    def waits_for(self, target: object) -> bool:
        """True if a request may have to wait for those of `target`, a version, to finish."""


NOTHING_KNOWN: Mapping[tuple[str, str], Any] = MappingProxyType({})


class Entrance(Protocol):
    """The engine, or a front end's link to it."""

    @property
    def known(self) -> Mapping[tuple[str, str], Any]:
        """Cache of `find` by its arguments; an entry is valid while it is `ready`."""

    @property
    def admission(self) -> Admission:
        """The account of this process."""

    @property
    def access(self) -> Access | None:
        """The access control, for doors that have a gate of their own; None without it."""

    @property
    def exiting(self) -> bool:
        """True if no new requests are admitted."""

    def find(self, name: str, version: str = "") -> Target:
        """The target of requests for a model; raises `ServerError` if known to be absent."""


def memory_for(
    entrance: Entrance, key: tuple[str, str], nbytes: int, begin: int
) -> memoryview | None:
    """Memory for a message of `nbytes` to a model and version; see `Direct.memory`."""
    found = entrance.known.get(key)
    direct = found.direct if found is not None and found.ready else None
    return None if direct is None else direct.memory(nbytes, begin)


_UNREAD = "unread"  # the one subject that a client has to read


class Progress:
    """Progress of the client of one connection; times are in seconds of the loop's clock."""

    __slots__ = ("_account", "_reading")

    def __init__(self, account: ConnectionAccount, read_secs: float) -> None:
        self._account = account
        self._reading = Patience(read_secs)

    def sends(self, patience: Patience, subject: object, nbytes: int, now: float) -> bool:
        """True if the server should wait for more of `subject`; `nbytes` of it have arrived."""
        if patience.look(subject, nbytes, now, self._account.server.pressed):
            return True
        self._account.server.aborted["unsent"] += 1
        return False

    def reads(self, waiting: int, kept: int, moved: int, now: float) -> bool:
        """True if the server should wait for a client with `waiting` bytes unread and `moved` read.

        `kept` bytes from the client wait to be processed.
        """
        if not waiting:
            self._reading.look(None, 0, now)  # later bytes start anew
        elif not self._reading.look(_UNREAD, moved, now, self._account.server.pressed):
            return self._given_up()
        return self.within(waiting, kept)

    def within(self, waiting: int, kept: int = 0) -> bool:
        """Charge the unread bytes; True if they are within the connection's share."""
        return self._account.owe(waiting, kept) or self._given_up()

    def idles(self, since: float, now: float, most: float) -> bool:
        """True if a connection without requests since `since` is to be closed."""
        idle = now - since
        return idle > most or (idle > PRESSED_SECS and self._account.server.pressed)

    def _given_up(self) -> bool:
        self._account.server.aborted["unread"] += 1
        return False


class Readiness:
    """The result of `look`, and callbacks for its changes."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._watchers: set[Callable[[], None]] = set()
        self._told = False  # the value at the last callback, or when watching began
        self._scheduled = False
        self._untold = TurnQueue(self._tell_one)  # of the last change

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
        """Remove a callback of `watch`."""
        self._watchers.discard(callback)

    def may_have_changed(self) -> None:
        """Compute readiness at the end of this turn of the loop; free while unwatched."""
        if self._watchers and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        ready = self._look()
        if ready is not self._told:
            self._told = ready
            self._untold.clear()
            self._untold.process(list(self._watchers))

    def _tell_one(self, callback: Callable[[], None]) -> None:
        if callback in self._watchers:
            callback()


class _Timed(Stage):
    """Adds timings to responses."""

    __slots__ = ()

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Add the timings to a response."""
        add_timing(response)


def submit_raw(found: Target, call: Call, entrance: Entrance) -> None:
    """Decode a raw call, on a thread if that is slow, and queue it.

    Its client is charged for what is decoded on a thread. Raises `ServerError`, or refuses the call
    later.
    """
    admission = entrance.admission
    signature, raw = found.signature, call.options.raw
    if "" not in call.inputs or signature is None:
        raise InvalidRequest("a raw request without a body")
    body, timeout, parameters = body_of(call), call.options.timeout, call.parameters
    most = admission.max_object_bytes

    def submit(target: Target, decoded: Call) -> None:
        decoded.bound_wait(timeout)  # from headers, too
        decoded.parameters.update(parameters)  # from headers
        call.take(decoded)
        if raw is Raw.GENERATE and wants_timing(call):
            call.enter(_Timed(), target.submit)
        else:
            target.submit(call)

    def go_on(decoded: Call) -> None:
        target = entrance.find(call.model_name, call.model_version)
        if target is not found:  # the version was replaced meanwhile
            if target.decoupled and call.refusal:
                raise Unsupported(call.refusal)
            call.pass_routed(target)
        submit(target, decoded)

    at_once = raw is not Raw.ARROW and len(body) <= LARGE  # to import pyarrow takes long
    if at_once or not (raw is not Raw.INFER or takes_long(body, "0", signature)):
        submit(found, _decoded(signature, call, uncharged, most))
    else:
        Deferred(
            admission.workbench, len(body),
            lambda charge: _decoded(signature, call, charge, most), go_on, call, call.charge,
        )  # fmt: skip


def _decoded(signature: Signature, call: Call, charge: Charge, most_objects: int) -> Call:
    names, body = (call.model_name, call.model_version), body_of(call)
    if call.options.raw is Raw.GENERATE:
        found = decode_generate(signature, *names, body, charge)
    elif call.options.raw is Raw.ARROW:
        found = decode_stream(signature, *names, body, limited(charge, most_objects))
    else:
        found = decode_raw(signature, *names, body)[0]
    charge_objects(found.inputs.values(), charge, most_objects)
    return found
