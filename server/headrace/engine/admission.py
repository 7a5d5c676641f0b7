"""The account of what the server holds for its clients, and how much that may be.

Two things are counted: requests under way, and bytes. A message that is still on its way takes the
bytes that have come of it and no request's place; a request takes its place when it is there as a
whole, until it is answered; an answer that its client does not read takes its bytes until it is
read. At a limit the newcomer is refused at once: a longer queue would only make everyone late.

Each connection has a `ConnectionAccount` below the server's `Admission`, with a share of its
limits; so has each client's address if that is asked for. Each model has a `ModelAccount` for its
requests from when they are queued to their end. A model is held to its share of what is free, not
of the limits: with 80 % the requests of one model may be four times what is left. So one busy model
gets 80 % of a limit, two get 44 % each, and however many there are, some of it is left for the
next. (Known as dynamic thresholds, from buffers that ports of a switch share.) Owned by the
event-loop thread.
"""

from collections import Counter
from collections.abc import Callable
from sys import maxsize
from typing import NamedTuple

from headrace.core.blocks import BLOCKS
from headrace.core.errors import Overloaded, ServerExiting
from headrace.core.shares import ModelLoad, Shares
from headrace.engine.workbench import Workbench
from headrace.observability.answers import Answers

_PRESSED = 0.8  # of a limit, from which on clients that make no progress have less time
# What a client may have in any case, so that shares of low limits do not get in the way.
_LEAST_REQUESTS = 64
_LEAST_BYTES = 64 << 20
_LEAST_MODEL_BYTES = 8 << 20


class Held(NamedTuple):
    """Counts of a front end that the engine does not see itself."""

    requests: int = 0
    bytes: int = 0
    unread: int = 0
    messages: int = 0
    http_connections: int = 0
    grpc_connections: int = 0
    refused_connections: int = 0
    given_up_unread: int = 0
    given_up_unsent: int = 0
    failed_accepts: int = 0


class Admission:
    """The server's account: requests and bytes against two limits; 0 means no limit.

    Invariant: every `enter` is followed by exactly one `leave` with all bytes entered or grown by,
    every `begin` by exactly one `admit` or `drop`.
    """

    def __init__(self, max_requests: int, max_bytes: int, shares: Shares | None = None) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.shares = shares or Shares()
        self.requests = 0
        self.messages = 0  # on their way
        self.bytes = 0  # of all: requests, messages on their way, answers that are not read
        self.peak_bytes = 0  # the most that `bytes` has been
        self.unread = 0  # of answers that are not read
        self.refused = 0
        self.connections: Counter[str] = Counter()  # open ones by door
        self.refused_connections = 0
        self.failed_accepts = 0
        self.aborted: Counter[str] = Counter()  # connections and calls given up, by reason
        self.answers = Answers()  # what the doors have answered
        self.exiting = False
        self.workbench = Workbench()
        self.most_requests = max_requests or maxsize
        self.most_bytes = max_bytes or maxsize
        self.watched = False  # whether `changed` is to be called after each change
        self._addresses: dict[str, _Address] = {}
        self._models: dict[str, ModelAccount] = {}
        self._on_change: Callable[[], object] | None = None
        self._on_empty: Callable[[], None] | None = None
        self._on_close: set[Callable[[], None]] = set()

    @property
    def pressed(self) -> bool:
        """Whether so much is held that clients without progress should go soon."""
        most, connections = self.max_bytes, self.shares.connections
        return bool(
            (most and self.bytes > most * _PRESSED)
            or (connections and self.connections.total() > connections * _PRESSED)
        )

    # --- connections

    def connect(self, door: str, address: str = "") -> "ConnectionAccount | None":
        """The account of a new connection; None if there are as many as there may be."""
        most = self.shares.connections
        if most and self.connections.total() >= most:
            self.refused_connections += 1
            self._changed()
            return None
        self.connections[door] += 1
        self._changed()
        return ConnectionAccount(self, door, address)

    def fail_accept(self) -> None:
        """Count a connection that could not be accepted, as without a free descriptor."""
        self.failed_accepts += 1
        self._changed()

    def disconnect(self, door: str) -> None:
        """A connection is no more."""
        self.connections[door] -= 1
        self._changed()

    def give_up(self, reason: str) -> None:
        """Count a connection, or a call, whose client makes no progress."""
        self.aborted[reason] += 1
        self._changed()

    def address(self, name: str) -> "_Address | None":
        """The account of a client address; None if addresses have no limit."""
        if self.shares.address >= 100 or not name:
            return None
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = _Address(name)
        return found

    def forget(self, address: "_Address") -> None:
        """An address without connections holds nothing."""
        self._addresses.pop(address.name, None)

    # --- models

    def model(self, name: str) -> "ModelAccount":
        """The account of a model, for one version more of it until `ModelAccount.leave`."""
        account = self._models.get(name)
        if account is None:
            account = self._models[name] = ModelAccount(self, name)
            self._limit_models()
        account.versions += 1
        return account

    def forget_model(self, name: str) -> None:
        """A model has no version any more."""
        del self._models[name]
        self._limit_models()

    def _limit_models(self) -> None:
        """Hold models to their share; not one that is alone, which takes nothing from others."""
        limited = len(self._models) > 1 and self.shares.model < 100
        for account in self._models.values():
            account.free_requests = _LEAST_REQUESTS if limited else maxsize
            account.free_bytes = _LEAST_MODEL_BYTES if limited else maxsize

    # --- messages on their way

    def begin(self, expected: int) -> None:
        """Begin a message; raises `Overloaded` or `ServerExiting`.

        `expected` bytes are announced: they must fit, but count only when they come (`grow`), so
        that a client that announces much and sends nothing takes nothing from others.
        """
        self._check_open()
        self._check_bytes(expected, 0)
        self.messages += 1
        self._changed()

    def grow(self, nbytes: int, own: int = -1) -> None:
        """Count further bytes of a message or request; raises `Overloaded` instead.

        It has `own` already; -1: all that is held, if there is one request only.
        """
        if own < 0:
            own = self.bytes if self.requests + self.messages <= 1 else 0
        self._check_bytes(nbytes, own)
        self.count(nbytes)

    def admit(self) -> None:
        """A message is there as a whole and is a request from now on; raises `Overloaded`."""
        self._check_requests()
        self.messages -= 1
        self.requests += 1
        self._changed()

    def drop(self, nbytes: int) -> None:
        """A message of which `nbytes` have come is no more."""
        self.messages -= 1
        self.bytes -= nbytes
        self._changed()

    def hold(self, nbytes: int) -> None:
        """Count a whole message that waits for the rest of its call; raises `Overloaded`."""
        self._check_bytes(nbytes, 0)
        self.count(nbytes)

    def release(self, nbytes: int) -> None:
        """Such messages go on, or are no more."""
        self.bytes -= nbytes
        self._changed()

    # --- requests

    def enter(self, nbytes: int) -> None:
        """Count a request of `nbytes` in; raises `Overloaded` or `ServerExiting`."""
        self.check(nbytes)
        self.requests += 1
        self.count(nbytes)

    def leave(self, nbytes: int) -> None:
        """Count a request out."""
        self.requests -= 1
        self.bytes -= nbytes
        self._changed()

    def check(self, nbytes: int) -> None:
        """Raise what `enter` would."""
        self._check_open()
        self._check_bytes(nbytes, 0)

    # --- what else is held

    def owe(self, nbytes: int) -> None:
        """So many bytes more, or less, of answers wait for clients to read them."""
        self.unread += nbytes
        BLOCKS.spare(self.unread)  # so that both together take no more
        self.count(nbytes)

    def count(self, nbytes: int) -> None:
        """Count bytes of a request that cannot be refused any more."""
        self.bytes += nbytes
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        self._changed()

    def adjust(self, requests: int, nbytes: int) -> None:
        """Count what another process holds: so much more or less than before."""
        self.requests += requests
        self.count(nbytes)

    def held(self, requests: int, nbytes: int) -> Held:
        """Counts for the engine, less the requests and bytes that it has counted itself."""
        return Held(
            self.requests - requests,
            max(self.bytes - nbytes, 0),
            self.unread,
            self.messages,
            self.connections["http"],
            self.connections["grpc"],
            self.refused_connections,
            self.aborted["unread"],
            self.aborted["unsent"],
            self.failed_accepts,
        )

    def count_process(self, before: Held, now: Held) -> None:
        """Count what another process holds: so much now, and so much before."""
        change = Held(*(new - old for new, old in zip(now, before, strict=True)))
        self.unread += change.unread
        self.messages += change.messages
        self.connections["http"] += change.http_connections
        self.connections["grpc"] += change.grpc_connections
        self.refused_connections += change.refused_connections
        self.aborted["unread"] += change.given_up_unread
        self.aborted["unsent"] += change.given_up_unsent
        self.failed_accepts += change.failed_accepts
        self.adjust(change.requests, change.bytes)

    def refuse(self) -> None:
        """Count a request that is refused for a limit."""
        self.refused += 1

    # --- the end

    def close(self) -> None:
        """Admit nothing from now on."""
        self.exiting = True
        for callback in list(self._on_close):
            callback()

    def watch_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is admitted any more, until `unwatch_close`."""
        self._on_close.add(callback)

    def unwatch_close(self, callback: Callable[[], None]) -> None:
        """Do not call `callback`."""
        self._on_close.discard(callback)

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the last request or message leaves; at once if there is none."""
        self._on_empty = callback
        self.watched = True
        self._changed()

    def when_changed(self, callback: Callable[[], object]) -> None:
        """Call `callback` after every change of what is held."""
        self._on_change = callback
        self.watched = True

    def changed(self) -> None:
        """Call the observers of changes."""
        if self._on_change is not None:
            self._on_change()
        if self._on_empty is not None and not (self.requests or self.messages):
            self._on_empty()

    def _changed(self) -> None:
        if self.watched:
            self.changed()

    # --- limits

    def _check_open(self) -> None:
        if self.exiting:
            raise ServerExiting("Server exiting")
        self._check_requests()

    def _check_requests(self) -> None:
        if self.max_requests and self.requests >= self.max_requests:
            self.refuse()
            raise Overloaded(
                f"the server is at its limit of {self.max_requests} requests at once"
                " (--max-admitted-requests); try again later"
            )

    def _check_bytes(self, nbytes: int, own: int) -> None:
        # A request alone is let in whatever its size: it has a limit of its own.
        held = self.bytes - self.unread
        if self.max_bytes and held > own and self.bytes + nbytes > self.max_bytes:
            self.refuse()
            raise Overloaded(
                f"the server is at its limit of {self.max_bytes} bytes of requests at once"
                " (--max-admitted-bytes); try again later"
            )


class _Address:
    """The account of all connections from one client address."""

    __slots__ = ("bytes", "connections", "name", "requests")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = self.requests = self.bytes = 0


class ModelAccount(ModelLoad):
    """The account of a model."""

    def __init__(self, server: Admission, name: str) -> None:
        """`server.model` makes them."""
        super().__init__()
        self.versions = 0
        self._server = server
        self._name = name

    def leave(self) -> None:
        """A version of the model is no more."""
        self.versions -= 1
        if not self.versions:
            self._server.forget_model(self._name)

    def check(self) -> None:
        """Raise `Overloaded` if a request more would take others' share.

        The server has counted that request already.
        """
        server = self._server
        if self.requests >= self.free_requests and server.max_requests:
            self._hold_to(server.max_requests, self.requests, server.requests, "requests")
        if self.bytes >= self.free_bytes and server.max_bytes:
            self._hold_to(server.max_bytes, self.bytes, server.bytes, "bytes of requests")

    def _hold_to(self, limit: int, own: int, held: int, what: str) -> None:
        share = self._server.shares.model
        if own * (100 - share) > (limit - held) * share:
            self._server.refuse()
            raise Overloaded(
                f"model '{self._name}' is at its share of the server's limit of {limit} {what} at"
                f" once, with {own} under way (--max-model-share); try again later"
            )


class ConnectionAccount:
    """The account of one connection: as `Admission`, with a share of its limits."""

    __slots__ = (
        "_address", "_door", "_most_bytes", "_most_requests", "bytes", "requests", "server",
        "unread",
    )  # fmt: skip

    def __init__(self, server: Admission, door: str, address: str = "") -> None:
        """`server.connect` makes them; without a `door`, that of a connection that was refused."""
        share = server.shares.connection
        self.server = server
        self.requests = self.bytes = self.unread = 0
        self._door = door
        self._most_requests = _share(server.max_requests, share, _LEAST_REQUESTS)
        self._most_bytes = _share(server.max_bytes, share, _LEAST_BYTES)
        self._address = server.address(address)
        if self._address is not None:
            self._address.connections += 1

    def close(self) -> None:
        """The connection is no more; requests that are under way may leave later."""
        self.owe(0)
        if self._door:
            self.server.disconnect(self._door)
        if (address := self._address) is not None:
            address.connections -= 1
            if not address.connections:
                self.server.forget(address)

    def begin(self, expected: int) -> None:
        """`Admission.begin`."""
        self._check(expected, self.bytes == 0, True)
        self.server.begin(expected)

    def grow(self, nbytes: int, own: int = -1) -> None:
        """`Admission.grow`."""
        self._check(nbytes, self.bytes <= own or own < 0, False)
        self.server.grow(nbytes, own)
        self._count(0, nbytes)

    def admit(self) -> None:
        """`Admission.admit`."""
        self._check(0, True, True)
        self.server.admit()
        self._count(1, 0)

    def drop(self, nbytes: int) -> None:
        """`Admission.drop`."""
        self._count(0, -nbytes)
        self.server.drop(nbytes)

    def hold(self, nbytes: int) -> None:
        """`Admission.hold`."""
        self._check(nbytes, self.bytes == 0, False)
        self.server.hold(nbytes)
        self._count(0, nbytes)

    def release(self, nbytes: int) -> None:
        """`Admission.release`."""
        self._count(0, -nbytes)
        self.server.release(nbytes)

    # These two are called for each request, and count with the server themselves.

    def enter(self, nbytes: int) -> None:
        """`Admission.enter`."""
        server = self.server
        requests, held, total = self.requests + 1, self.bytes + nbytes, server.bytes + nbytes
        if (
            requests > self._most_requests
            or held > self._most_bytes
            or server.requests >= server.most_requests
            or total > server.most_bytes
            or server.exiting
            or self._address is not None
        ):
            self._check(nbytes, self.bytes == 0, True)
            server.check(nbytes)
            if self._address is not None:
                self._address.requests += 1
                self._address.bytes += nbytes
        self.requests, self.bytes = requests, held
        server.requests += 1
        server.bytes = total
        if total > server.peak_bytes:
            server.peak_bytes = total
        if server.watched:
            server.changed()

    def leave(self, nbytes: int) -> None:
        """`Admission.leave`."""
        self.requests -= 1
        self.bytes -= nbytes
        if self._address is not None:
            self._address.requests -= 1
            self._address.bytes -= nbytes
        server = self.server
        server.requests -= 1
        server.bytes -= nbytes
        if server.watched:
            server.changed()

    def count(self, nbytes: int) -> None:
        """`Admission.count`."""
        self._count(0, nbytes)
        self.server.count(nbytes)

    def owe(self, nbytes: int) -> bool:
        """So many bytes wait now for the client to read them; whether that is within its share."""
        change = nbytes - self.unread
        if change:
            self.unread = nbytes
            self._count(0, change)
            self.server.owe(change)
        return nbytes <= self._most_bytes

    @property
    def pressed(self) -> bool:
        """`Admission.pressed`."""
        return self.server.pressed

    def _count(self, requests: int, nbytes: int) -> None:
        self.requests += requests
        self.bytes += nbytes
        if (address := self._address) is not None:
            address.requests += requests
            address.bytes += nbytes

    def _check(self, nbytes: int, alone: bool, request: bool) -> None:
        """Refuse what goes beyond the connection's or its address's share."""
        own = self._most_requests, self._most_bytes
        self._hold_to(self, *own, nbytes, alone, request, "connection")
        if (address := self._address) is not None:
            server, share = self.server, self.server.shares.address
            requests = _share(server.max_requests, share, _LEAST_REQUESTS)
            most = _share(server.max_bytes, share, _LEAST_BYTES)
            self._hold_to(address, requests, most, nbytes, alone, request, "address")

    def _hold_to(
        self,
        holder: "ConnectionAccount | _Address",
        most_requests: int,
        most_bytes: int,
        nbytes: int,
        alone: bool,
        request: bool,
        what: str,
    ) -> None:
        reached = ""
        if request and holder.requests >= most_requests:
            reached = f"{most_requests} requests"
        elif not alone and holder.bytes + nbytes > most_bytes:
            reached = f"{most_bytes} bytes of requests"
        if reached:
            self.server.refuse()
            raise Overloaded(
                f"this client's {what} is at its limit of {reached} at once"
                f" (--max-{what}-share); try again later"
            )


Account = Admission | ConnectionAccount


def _share(limit: int, percent: int, least: int) -> int:
    """A share of a limit, but `least`; without end where the server's own is as low."""
    share = max(limit * percent // 100, least)
    return share if share < limit else maxsize
