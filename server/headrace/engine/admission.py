"""The account of requests and bytes held for clients, with its limits.

Requests in flight and bytes are counted. A message in transit is charged for the bytes that have
arrived and for no request; it becomes a request once complete, until it is answered; an unread
answer is charged for its bytes until it is read. At a limit new requests are refused at once: a
longer queue would only delay everyone.

Accounts form a chain: what is charged to a connection is charged to its client's address, if that
has a limit, and to the server, each of which may refuse it. A client with quotas has an account
below its connection's, by `ConnectionAccount.of`, with these quotas in its chain. With front ends,
each process has such a chain: below the server's account, the engine has one per front end for
everything that this front end holds or has submitted, counted once, and tells each of them how much
the others hold.

Each model has a `ModelAccount` for its requests from queueing to their end. A model is limited to a
share of what is free, not of the limits: with 80 % the requests of one model may be four times what
is left. So one busy model gets 80 % of a limit, two get 44 % each, and however many there are, some
of it is left for the next. (Known as dynamic thresholds, from shared buffers of switch ports.)
Owned by the event-loop thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from sys import maxsize
from typing import NamedTuple, Optional, Protocol

from headrace.core.blocks import BLOCKS
from headrace.core.call import Call, InnerCall, Submit
from headrace.core.errors import (
    Overloaded,
    QuotaExceeded,
    ResponseTooLarge,
    ServerExiting,
    Unavailable,
)
from headrace.core.identity import Identity
from headrace.core.limits import FEW, ModelLoad, Payer, Shares
from headrace.core.turns import Turns
from headrace.engine.workbench import Workbench
from headrace.observability.statistics import DEFAULT_BOUNDS, Answers, LatencyBounds
from headrace.protocol.proxies import TrustedProxies

# A client that holds up to one of so many parts of the free bytes may have a large answer.
_LITTLE = 16
_PRESSED = 0.8  # share of a limit above which clients without progress have less time
# A client's minimum, so that shares of low limits do not get in the way.
_LEAST_REQUESTS = 64
_LEAST_BYTES = 64 << 20
_LEAST_MODEL_BYTES = 8 << 20


class Held(NamedTuple):
    """Counters of a front end that the engine cannot observe itself."""

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
    refused: int = 0
    refused_streams: int = 0
    streams: int = 0

    def ended(self) -> "Held":
        """The counters that outlive a front end: refusals and abandoned connections."""
        return Held(0, 0, 0, 0, 0, 0, *self[6:12])


class Account:
    """Requests and bytes held for one party; the accounts `above` include them.

    Invariant: every `enter` is followed by exactly one `leave` with all bytes entered or grown by,
    every `begin` by exactly one `admit` or `drop`. Methods that charge raise `Overloaded` if this
    account or one above is at its limit, and charge nothing then.
    """

    __slots__ = (
        "above", "bytes", "kept", "most_bytes", "most_requests", "origin", "requests", "server",
        "unread",
    )  # fmt: skip

    server: "Admission"

    @property
    def weight(self) -> float:
        """The client's share of a model's queue, relative to other clients'."""
        return 1.0

    def __init__(
        self, above: Optional["Account"], most_requests: int = maxsize, most_bytes: int = maxsize
    ) -> None:
        self.above: tuple[Account, ...] = ()
        if above is not None:
            self.above = above.lineage
            self.server = above.server
        self.most_requests = most_requests
        self.most_bytes = most_bytes
        self.origin = ""
        self.requests = 0
        self.bytes = 0  # total: requests, messages in transit, unread answers
        self.unread = 0  # of unread answers
        self.kept = 0  # received but unprocessed, as of the last `owe`

    @property
    def lineage(self) -> tuple["Account", ...]:
        """The account with all above it."""
        return (self, *self.above)

    def of(self, identity: Identity, model: str, named: str = "") -> "Account":
        """The account to charge for a client's requests to a model; raises `QuotaExceeded`.

        `named` is its address in the words of the other end, which may be a trusted proxy.
        """
        return self

    def client(self, named: str) -> str:
        """The client's address: `named` if the other end is a trusted proxy, and names one."""
        return self.origin

    def named(self, headers: Mapping[str, str]) -> str:
        """The client that a trusted proxy names in these headers; "" for none."""
        return ""

    def take_rows(self, rows: int) -> None:
        """Count the rows of a decoded request against quotas; refuses nothing."""

    # --- messages in transit

    def begin(self, expected: int) -> None:
        """Start a message; also raises `ServerExiting`.

        The announced `expected` bytes must fit, but are only charged on arrival (`grow`), so that a
        client that announces much and sends nothing takes nothing from others.
        """
        self.check(expected)
        self.server.messages += 1
        self.count(0)

    def grow(self, nbytes: int, own: int = -1) -> None:
        """Charge further bytes of a message or request.

        `own` bytes are charged for it already; -1: all that is held, if it is the only one.
        """
        if own < 0:
            own = self.bytes if self.server.requests + self.server.messages <= 1 else 0
        self._check(nbytes, own, False)
        self.count(nbytes)

    def admit(self) -> None:
        """Turn a complete message into a request."""
        self._check(0, maxsize, True)
        self.server.messages -= 1
        self.count(0, 1)

    def drop(self, nbytes: int) -> None:
        """Release a message of which `nbytes` have arrived."""
        self.server.messages -= 1
        self.count(-nbytes)

    # --- requests

    def enter(self, nbytes: int) -> None:
        """Charge a request of `nbytes`; also raises `ServerExiting`."""
        self.check(nbytes)
        self.count(nbytes, 1)

    def leave(self, nbytes: int) -> None:
        """Release a request."""
        self.count(-nbytes, -1)

    def check(self, nbytes: int) -> None:
        """Raise what `enter` would raise."""
        if self.server.exiting:
            raise ServerExiting("Server exiting")
        self._check(nbytes, 0, True)

    # --- answers

    def check_answer(self, model: str, nbytes: int) -> None:
        """Raise `ResponseTooLarge` for an answer of a model that is larger than allowed."""
        limit = min(self.server.max_response_bytes or maxsize, self.most_bytes)
        if nbytes > limit:
            raise ResponseTooLarge(
                f"the response of model '{model}' has {nbytes} bytes or more, which is larger than"
                f" --max-response-bytes ({limit}) allows; ask for fewer outputs or rows, or for"
                " binary data instead of JSON"
            )

    def grow_answer(self, nbytes: int, own: int) -> None:
        """Charge further bytes of a large answer that is being encoded; raises `Overloaded`.

        `own` bytes are charged for it already. All such answers, and those that were not read yet,
        may take half of the limit, so that requests find room beside them; beyond that only those
        of clients that hold little of what is free, since one slow reader may keep that half. A
        single answer is admitted whatever its size: another limit bounds it.
        """
        server = self.server
        held = server.answering + server.unread
        if held > own and held + nbytes > server.most_bytes // 2:
            free = server.most_bytes - server.bytes
            if (self.bytes + nbytes) * _LITTLE > free:
                server.refused += 1
                raise Overloaded(
                    "large answers that are encoded or not read yet take half of the server's limit"
                    f" of {server.max_bytes} bytes (--max-admitted-bytes); try again later"
                )
        server.answering += nbytes
        self.count(nbytes)

    def leave_answer(self, nbytes: int) -> None:
        """Release the bytes of an answer that has been encoded, or was given up."""
        self.server.answering -= nbytes
        self.count(-nbytes)

    # --- other charges

    def owe(self, nbytes: int, kept: int = 0) -> bool:
        """Set the unread bytes; True if they are within the account's limit.

        `kept` bytes were received, are not charged otherwise, and wait to be processed.
        """
        unread = nbytes - self.unread
        if unread or kept != self.kept:
            change = unread + kept - self.kept
            self.kept = kept
            self.count(change, 0, unread)
            BLOCKS.spare(self.server.unread)  # so that both together stay within the limit
        return nbytes + kept <= self.most_bytes

    def count(self, nbytes: int, requests: int = 0, unread: int = 0) -> None:
        """Charge, or release, without a check."""
        for account in (self, *self.above):
            account.requests += requests
            account.bytes += nbytes
            account.unread += unread
        server = self.server
        if server.bytes > server.peak_bytes:
            server.peak_bytes = server.bytes
        if server.watched:
            server.changed()

    def full(self, nbytes: int) -> bool:
        """True if `enter` would refuse a request of `nbytes` at a limit; refuses nothing."""
        return self._reached(nbytes, 0, True) is not None

    def _check(self, nbytes: int, own: int, place: bool) -> None:
        """Refuse bytes beyond a limit, or a request beyond the limit of requests (`place`)."""
        reached = self._reached(nbytes, own, place)
        if reached is not None:
            if isinstance(reached, Overloaded):  # quotas count their own
                self.server.refused += 1
            raise reached

    def _reached(self, nbytes: int, own: int, place: bool) -> Unavailable | None:
        """The error of a charge as in `_check` that would exceed a limit.

        A single request, with its `own` bytes, is admitted whatever its size: another limit bounds
        it.
        """
        for account in (self, *self.above):
            full = place and account.requests >= account.most_requests
            held = account.bytes
            if account is self.server:  # other clients may read late, or other processes hold bytes
                held += self.server.elsewhere - account.unread
            if full or (held > own and account.bytes + nbytes > account.most_bytes):
                return account.refusal(full)
        return None

    def refusal(self, of_requests: bool) -> Unavailable:
        """The error of a charge at the limit of requests, or of bytes."""
        return Overloaded(f"{self.limit(of_requests)}; try again later")

    def limit(self, of_requests: bool) -> str:
        """The limit that was reached, in words."""
        raise NotImplementedError


class Clients(Protocol):
    """The clients that have quotas, and their accounts."""

    def account(self, connection: Account, identity: Identity, address: str, model: str) -> Account:
        """The account below `connection` to charge for requests to a model.

        `connection` itself for a client without quotas. Raises `QuotaExceeded`.
        """

    def submit(self, call: InnerCall, submit: Submit) -> None:
        """Submit a call that a model makes for a client, charged to the quotas for its own model.

        Raises `QuotaExceeded`, and what `submit` raises.
        """

    def connect(self, connection: "ConnectionAccount") -> None:
        """Count a new connection; raises `QuotaExceeded` if its address has as many as it may."""

    def leave(self, connection: Account) -> None:
        """Forget what is kept for a connection that closes."""


class Admission(Account):
    """The server's account, with its limits; 0 means no limit. It knows all other accounts."""

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        shares: Shares | None = None,
        max_response_bytes: int = 0,
        max_object_bytes: int = 0,
        max_request_bytes: int = 0,
        bounds: LatencyBounds = DEFAULT_BOUNDS,
    ) -> None:
        super().__init__(None, max_requests or maxsize, max_bytes or maxsize)
        self.max_response_bytes = max_response_bytes
        self.max_request_bytes = max_request_bytes  # of doors that are plugins
        self.max_object_bytes = max_object_bytes  # of the elements of a request's BYTES inputs
        self.answering = 0  # bytes of large answers that are being encoded
        self.server = self
        self._lineage = (self,)
        self.clients: Clients | None = None  # None without quotas
        self.proxies: TrustedProxies | None = None
        self.quota_refused: Counter[tuple[str, str]] = Counter()  # by quota and limit
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.shares = shares or Shares()
        self.elsewhere = 0  # bytes held by other processes below the same limit
        self.messages = 0  # messages in transit
        self.peak_bytes = 0  # the maximum of `bytes` so far
        self.refused = 0
        self.connections: Counter[str] = Counter()  # open ones by door
        self.refused_connections = 0
        self.streams = 0  # room for gRPC calls beyond the first few of each connection
        self.refused_streams = 0
        self.failed_accepts = 0
        self.aborted: Counter[str] = Counter()  # abandoned connections and calls, by reason
        self.answers = Answers(bounds)  # counters of the doors' answers
        self.exiting = False
        self.turns = Turns()
        self.workbench = Workbench(self.turns)
        self.watched = False  # true if `changed` is called after each change
        self._once: set[Callable[[], object]] = set()
        self._addresses: dict[str, _Address] = {}
        self._models: dict[str, ModelAccount] = {}
        self._on_change: Callable[[], object] | None = None
        self._on_empty: Callable[[], None] | None = None
        self._on_close: set[Callable[[], None]] = set()

    @property
    def lineage(self) -> tuple[Account, ...]:
        """One tuple for all accounts of connections."""
        return self._lineage

    @property
    def pressed(self) -> bool:
        """True if so much is held that clients without progress should be dropped soon."""
        most, connections, streams = self.max_bytes, self.shares.connections, self.shares.streams
        return bool(
            (most and self.bytes + self.elsewhere > most * _PRESSED)
            or (connections and self.connections.total() > connections * _PRESSED)
            or (streams and self.streams > streams * _PRESSED)
        )

    def limit(self, of_requests: bool) -> str:
        """Implements `Account.limit`."""
        what = "requests" if of_requests else "bytes of requests"
        most = self.max_requests if of_requests else self.max_bytes
        option = f"--max-admitted-{'requests' if of_requests else 'bytes'}"
        return f"the server is at its limit of {most} {what} at once ({option})"

    # --- connections

    def connect(self, door: str, address: str = "") -> "ConnectionAccount":
        """The account of a new connection.

        Raises `Overloaded` at the server's limit of connections, and `QuotaExceeded` at that of its
        client.
        """
        if not self.has_room():
            raise Overloaded("the server has as many connections as it may (--max-connections)")
        self.connections[door] += 1
        account = ConnectionAccount(self, door, address)
        if self.clients is not None:
            try:
                self.clients.connect(account)
            except QuotaExceeded:
                account.close()
                self.refused_connections += 1
                raise
        return account

    def has_room(self, connecting: int = 0) -> bool:
        """True if a further connection is allowed beside those that are open or `connecting`."""
        most = self.shares.connections
        if most and self.connections.total() + connecting >= most:
            self.refused_connections += 1
            return False
        return True

    def reserve(self, streams: int) -> bool:
        """Take room for further gRPC calls; false, and refused, if there is not enough."""
        most = self.shares.streams
        if most and self.streams + streams > most:
            self.refused_streams += 1
            return False
        self.streams += streams
        return True

    def release(self, streams: int) -> None:
        """Give room of `reserve` back."""
        self.streams -= streams

    def fail_accept(self) -> None:
        """Count a connection that could not be accepted, for example without a free descriptor."""
        self.failed_accepts += 1

    def limit_clients(self, clients: Clients | None) -> None:
        """Apply quotas to all further requests and connections; None for none."""
        self.clients = clients

    def address(self, name: str) -> Account:
        """The account of a client address; the server's if addresses have no limit."""
        if self.shares.address >= 100 or not name:
            return self
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = _Address(self, name)
        return found

    def forget(self, address: "_Address") -> None:
        """Remove the account of an address without connections."""
        self._addresses.pop(address.key, None)

    # --- models

    def model(self, name: str) -> "ModelAccount":
        """The account of a model, for a further version until `ModelAccount.leave`."""
        account = self._models.get(name)
        if account is None:
            account = self._models[name] = ModelAccount(self, name)
            # The second one limits the first.
            self._limit_models([account] if len(self._models) > 2 else self._models.values())
        account.versions += 1
        return account

    def forget_model(self, name: str) -> None:
        """Remove a model without versions."""
        del self._models[name]
        if len(self._models) == 1:
            self._limit_models(self._models.values())

    def _limit_models(self, accounts: Iterable["ModelAccount"]) -> None:
        """Apply shares to models; a single model is not limited, since it takes from no other."""
        limited = len(self._models) > 1 and self.shares.model < 100
        for account in accounts:
            account.free_requests = _LEAST_REQUESTS if limited else maxsize
            account.free_bytes = _LEAST_MODEL_BYTES if limited else maxsize

    # --- other processes

    def held(self, requests: int, nbytes: int) -> Held:
        """Counters for the engine, less the requests and bytes that it has counted itself."""
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
            self.refused,
            self.refused_streams,
            self.streams,
        )

    def count_process(self, account: Account, before: Held, now: Held) -> None:
        """Update another process's account from its earlier to its current counters."""
        change = Held(*(new - old for new, old in zip(now, before, strict=True)))
        self.messages += change.messages
        self.connections["http"] += change.http_connections
        self.connections["grpc"] += change.grpc_connections
        self.refused_connections += change.refused_connections
        self.aborted["unread"] += change.given_up_unread
        self.aborted["unsent"] += change.given_up_unsent
        self.failed_accepts += change.failed_accepts
        self.refused += change.refused
        self.refused_streams += change.refused_streams
        self.streams += change.streams
        account.count(change.bytes, change.requests, change.unread)

    def leave_to_others(self, nbytes: int) -> None:
        """Set the bytes that other processes hold below the common limit."""
        self.elsewhere = nbytes
        if self.max_bytes:
            self.most_bytes = self.max_bytes - nbytes

    # --- shutdown

    def close(self) -> None:
        """Refuse everything from now on."""
        self.exiting = True
        for callback in list(self._on_close):
            callback()

    def watch_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` on `close`, until `unwatch_close`."""
        self._on_close.add(callback)

    def unwatch_close(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `watch_close`."""
        self._on_close.discard(callback)

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the last request or message leaves.

        At once if there are none.
        """
        self._on_empty = callback
        self.watched = True
        self.changed()

    def when_changed(self, callback: Callable[[], object]) -> None:
        """Call `callback` after every change."""
        self._on_change = callback
        self.watched = True

    def when_next_changed(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, after the next change: for those who wait until not `full`."""
        self._once.add(callback)
        self.watched = True

    def changed(self) -> None:
        """Call the observers of changes."""
        if self._once:
            once, self._once = self._once, set()
            self.watched = self._on_change is not None or self._on_empty is not None
            for callback in once:
                callback()
        if self._on_change is not None:
            self._on_change()
        if self._on_empty is not None and not (self.requests or self.messages):
            self._on_empty()


class ModelAccount(ModelLoad):
    """The account of a model."""

    def __init__(self, server: Admission, name: str) -> None:
        """Only for `Admission.model`."""
        super().__init__()
        self.versions = 0
        self._server = server
        self._name = name

    def leave(self) -> None:
        """Note that a version of the model is gone."""
        self.versions -= 1
        if not self.versions:
            self._server.forget_model(self._name)

    def check(self, payer: Payer | None) -> None:
        """Raise `Overloaded` if another request would take from other models' shares.

        The server has already charged that request. Half of what a share leaves to other models is
        for connections with few requests, beside those that have filled the share.
        """
        server, share = self._server, self._server.shares.model
        if payer is not None and payer.requests <= FEW:
            share = (share + 100) // 2
        if self.requests >= self.free_requests and server.max_requests:
            self._hold_to(server.max_requests, share, self.requests, server.requests, "requests")
        if self.bytes >= self.free_bytes and server.max_bytes:
            self._hold_to(server.max_bytes, share, self.bytes, server.bytes, "bytes of requests")

    def _hold_to(self, limit: int, share: int, own: int, held: int, what: str) -> None:
        if own * (100 - share) > (limit - held) * share:
            self._server.refused += 1
            raise Overloaded(
                f"model '{self._name}' is at its share of the server's limit of {limit} {what} at"
                f" once, with {own} under way (--max-model-share); try again later"
            )


class _Share(Account):
    """An account limited to a share of the server's limits, with a minimum."""

    __slots__ = ()

    name = ""

    def __init__(self, above: Account, percent: int) -> None:
        server = above.server
        super().__init__(
            above,
            _share(server.max_requests, percent, _LEAST_REQUESTS),
            _share(server.max_bytes, percent, _LEAST_BYTES),
        )

    def limit(self, of_requests: bool) -> str:
        """Implements `Account.limit`."""
        most = self.most_requests if of_requests else self.most_bytes
        what = "requests" if of_requests else "bytes of requests"
        option = f"--max-{self.name}-share"
        return f"this client's {self.name} is at its limit of {most} {what} at once ({option})"


class _Address(_Share):
    """The account of all connections from one client address."""

    __slots__ = ("connections", "key")

    name = "address"

    def __init__(self, server: Admission, key: str) -> None:
        super().__init__(server, server.shares.address)
        self.key = key
        self.connections = 0


class ConnectionAccount(_Share):
    """The account of one connection."""

    __slots__ = ("_alone", "_door", "_kept_by", "trusted")

    name = "connection"

    def __init__(self, server: Admission, door: str, address: str = "") -> None:
        """Only for `Admission.connect`; without a `door`, for a connection that was refused."""
        # A proxy's connection has requests of many clients.
        self.trusted = server.proxies is not None and server.proxies.trusts(address)
        above = server if self.trusted else server.address(address)
        super().__init__(above, server.shares.connection)
        self.origin = address
        self._alone = above is server
        self._door = door
        self._kept_by: Clients | None = None  # has to be told of the end
        if isinstance(above, _Address):
            above.connections += 1

    def close(self) -> None:
        """Note that the connection is closed; its requests in flight may leave later."""
        self.owe(0)
        if self._door:
            self.server.connections[self._door] -= 1
        if self._kept_by is not None:
            self._kept_by.leave(self)
        if isinstance(address := self.above[0], _Address):
            address.connections -= 1
            if not address.connections:
                self.server.forget(address)

    def of(self, identity: Identity, model: str, named: str = "") -> Account:
        """Implements `Account.of`."""
        clients = self.server.clients
        if clients is None:
            return self
        return clients.account(self, identity, self.client(named), model)

    def client(self, named: str) -> str:
        """Implements `Account.client`."""
        return (named if self.trusted else "") or self.origin

    def named(self, headers: Mapping[str, str]) -> str:
        """Implements `Account.named`."""
        proxies = self.server.proxies
        return "" if proxies is None or not self.trusted else proxies.client(headers)

    def kept_by(self, clients: Clients) -> None:
        """Report the end of the connection to `clients`, instead of to earlier ones."""
        before, self._kept_by = self._kept_by, clients
        if before is not None and before is not clients:
            before.leave(self)

    # Called for each request; these charge the server's account inline.

    def enter(self, nbytes: int) -> None:
        """Charge a request of `nbytes`; raises `Overloaded` or `ServerExiting`."""
        server = self.server
        requests, held, total = self.requests + 1, self.bytes + nbytes, server.bytes + nbytes
        if (
            requests > self.most_requests
            or held > self.most_bytes
            or server.requests >= server.most_requests
            or total > server.most_bytes
            or server.exiting
            or not self._alone
        ):
            super().enter(nbytes)
            return
        self.requests, self.bytes = requests, held
        server.requests += 1
        server.bytes = total
        if total > server.peak_bytes:
            server.peak_bytes = total
        if server.watched:
            server.changed()

    def leave(self, nbytes: int) -> None:
        """Release a request of `nbytes`."""
        server = self.server
        if not self._alone:
            super().leave(nbytes)
            return
        self.requests -= 1
        self.bytes -= nbytes
        server.requests -= 1
        server.bytes -= nbytes
        if server.watched:
            server.changed()


def _share(limit: int, percent: int, least: int) -> int:
    """A share of a limit, at least `least`; unlimited if the server's own limit is as low."""
    share = max(limit * percent // 100, least)
    return share if share < limit else maxsize


class AccountedCall(Call):
    """A call of a client, whose `account` is charged for it."""

    __slots__ = ()

    account: Account

    def charge(self, nbytes: int) -> None:
        """Implements `Call.charge`; raises `Overloaded`."""
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes
