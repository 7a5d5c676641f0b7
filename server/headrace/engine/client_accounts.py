"""The accounts of clients with quotas.

For each quota that applies to a client there is one account, whichever connections the requests
come over; it limits requests and bytes under way, and has the token buckets. A request is charged
to an account of its connection and client, whose chain is the connection, these quotas, and what is
above the connection. A token is taken when a request is admitted; rows are taken once they are
known, and may leave a debt, which refuses the requests that follow. Buckets start full, also after
a restart.

A call that a model makes for a client, such as a step of an ensemble, is charged to the quotas for
its model that do not count the request, or call, which it is a part of. So a quota for all models
counts a request once. Owned by the event-loop thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from sys import maxsize
from time import monotonic

from headrace.core.call import Call, InnerCall, Stage, Submit
from headrace.core.errors import Allowance, QuotaExceeded
from headrace.core.identity import Identity
from headrace.core.limits import Payer
from headrace.core.quotas import Quota, Quotas, Rate, network_of
from headrace.engine.admission import Account, Admission, Clients, ConnectionAccount

_KEPT = 256  # accounts of a connection's clients and models
_SWEEP = 1024  # accounts of quotas below which sweeping never pays


class QuotaAccount(Account):
    """The account of one client for one quota.

    `users` counts the connections that refer to it, `connections` those of the client.
    """

    __slots__ = (
        "_refused", "_requests_rate", "_rows_rate", "connections", "quota", "requests_full_at",
        "rows_full_at", "users",
    )  # fmt: skip

    def __init__(self, quota: Quota, refused: Counter[tuple[str, str]]) -> None:
        """`refused` counts refusals by quota and limit."""
        super().__init__(None, quota.requests or maxsize, quota.bytes or maxsize)
        self.quota = quota
        self.users = self.connections = 0
        self.requests_full_at = self.rows_full_at = 0.0
        self._requests_rate, self._rows_rate = _requests_of(quota), _rows_of(quota)
        self._refused = refused

    def idle(self, now: float) -> bool:
        """True if nothing would be lost with the account."""
        busy = self.users or self.requests or self.bytes
        return not busy and max(self.requests_full_at, self.rows_full_at) <= now

    def refusal(self, of_requests: bool) -> QuotaExceeded:
        """Implements `Account.refusal`."""
        # The units are those of the IETF's draft.
        if of_requests:
            most, text = self.most_requests, f"{self.most_requests} requests at once"
            return self._exceeded("requests", "concurrent-requests", most, text)
        most, text = self.most_bytes, f"{self.most_bytes} bytes of requests at once"
        return self._exceeded("bytes", "content-bytes", most, text)

    def check_connection(self) -> None:
        """Raise `QuotaExceeded` if the client may have no further connection."""
        if (most := self.quota.connections) and self.connections >= most:
            raise self._exceeded("connections", "connections", most, f"{most} connections")

    def check_call(self, nbytes: int, now: float) -> None:
        """Raise `QuotaExceeded` if a model's call of `nbytes` may not be charged."""
        full = self.requests >= self.most_requests
        if full or (self.bytes and self.bytes + nbytes > self.most_bytes):
            raise self.refusal(full)
        self.check_rates(now)

    def check_rates(self, now: float) -> None:
        """Raise `QuotaExceeded` without a token for a request, or with a debt of rows."""
        rate = self._requests_rate
        if rate is not None and (wait := rate.wait(self.requests_full_at, now)):
            raise self._late("requests_per_sec", "requests", rate, now, wait)
        rate = self._rows_rate
        if rate is not None and (wait := rate.wait(self.rows_full_at, now, 0)):
            raise self._late("rows_per_sec", "rows", rate, now, wait)

    def take(self, now: float) -> None:
        """Take the token of a request."""
        if self._requests_rate is not None:
            self.requests_full_at = self._requests_rate.take(self.requests_full_at, now)

    def take_rows_at(self, rows: int, now: float) -> None:
        """Take the rows of a request."""
        if self._rows_rate is not None:
            self.rows_full_at = self._rows_rate.take(self.rows_full_at, now, rows)

    def _late(self, limit: str, unit: str, rate: Rate, now: float, wait: float) -> QuotaExceeded:
        window, text = rate.window, f"{rate.per_sec:g} {unit}/s"
        most = round(rate.per_sec * window)
        return self._exceeded(limit, unit, most, text, window, now, wait)

    def _exceeded(
        self, limit: str, unit: str, most: int, text: str,
        window: int = 0, now: float = 0.0, wait: float = 0.0,
    ) -> QuotaExceeded:  # fmt: skip
        name = self.quota.name
        self._refused[name, limit] += 1
        return QuotaExceeded(
            f"this client is at the limit of {text} of its quota '{name}' ({limit}); try again"
            " later",
            max(ceil(wait), 1), Allowance(name, limit, unit, most, window), now + wait,
        )  # fmt: skip


def _requests_of(quota: Quota) -> Rate | None:
    """The bucket of requests; without a `burst` it holds those of a second, at least one."""
    per_sec = quota.requests_per_sec
    return Rate(per_sec, max(quota.burst or per_sec, 1.0)) if per_sec else None


def _rows_of(quota: Quota) -> Rate | None:
    """The bucket of rows, which holds those of a second."""
    return Rate(quota.rows_per_sec, quota.rows_per_sec) if quota.rows_per_sec else None


def _weight_of(quotas: Iterable[QuotaAccount], otherwise: float) -> float:
    """The weight of the first quota with one."""
    return next((one.quota.weight for one in quotas if one.quota.weight), otherwise)


class ClientAccount(Account):
    """The account of one client's requests over one connection to models with the same quotas."""

    __slots__ = ("_clock", "quotas")

    def __init__(
        self, connection: Account, quotas: tuple[QuotaAccount, ...], clock: Callable[[], float],
        address: str,
    ) -> None:  # fmt: skip
        super().__init__(connection, most_bytes=connection.most_bytes)
        self.above = (connection, *quotas, *connection.above)
        self.origin = address
        self.quotas = quotas
        self._clock = clock

    @property
    def weight(self) -> float:
        """Implements `Account.weight`: that of the first quota with one."""
        return _weight_of(self.quotas, 1.0)

    def check(self, nbytes: int) -> None:
        """Raise what `enter` would raise."""
        super().check(nbytes)
        now = self._clock()
        for quota in self.quotas:
            quota.check_rates(now)

    def begin(self, expected: int) -> None:
        """Start a message, which takes the request's tokens."""
        super().begin(expected)
        self._take()

    def enter(self, nbytes: int) -> None:
        """Charge a request of `nbytes`, with its tokens."""
        super().enter(nbytes)
        self._take()

    def _take(self) -> None:
        now = self._clock()
        for quota in self.quotas:
            quota.take(now)

    def take_rows(self, rows: int) -> None:
        """Implements `Account.take_rows`."""
        now = self._clock()
        for quota in self.quotas:
            quota.take_rows_at(rows, now)

    def release(self) -> None:
        """Note that the connection refers to the quotas no more."""
        for quota in self.quotas:
            quota.users -= 1


class InnerCallAccount(Stage):
    """The account of one call that a model makes for a client: its payer, and a stage of it.

    `quotas` are all that count it, or what it is a part of.
    """

    __slots__ = ("_client", "_clock", "_nbytes", "_own", "origin", "quotas", "weight")
    passive = True

    def __init__(
        self, client: Payer, quotas: Sequence[QuotaAccount], clock: Callable[[], float]
    ) -> None:
        """`client` pays for what the call is a part of, `quotas` are those for the call."""
        counted = client.quotas if isinstance(client, ClientAccount | InnerCallAccount) else ()
        self.origin = client.origin
        own = self._own = tuple(one for one in quotas if one not in counted)
        self.weight = _weight_of(own, client.weight)
        self.quotas: tuple[QuotaAccount, ...] = (*counted, *own)
        self._client = client
        self._clock = clock
        self._nbytes = 0

    @property
    def requests(self) -> int:
        """Implements `Payer.requests`."""
        return self._client.requests

    def submit(self, call: InnerCall, submit: Submit) -> None:
        """Charge the call until its end; raises `QuotaExceeded`, and what `submit` raises."""
        now, nbytes = self._clock(), call.nbytes
        for quota in self._own:
            quota.check_call(nbytes, now)
        call.charged = self
        if not self._own:
            submit(call)
            return
        self._nbytes = nbytes
        for quota in self._own:
            quota.take(now)
            quota.requests += 1
            quota.bytes += nbytes
        call.enter(self, submit)

    def take_rows(self, rows: int) -> None:
        """Implements `Payer.take_rows`."""
        now = self._clock()
        for quota in self._own:
            quota.take_rows_at(rows, now)

    def over(self, call: Call) -> None:
        """Charge the call no more."""
        for quota in self._own:
            quota.requests -= 1
            quota.bytes -= self._nbytes


class _Kept:
    """The state of one connection: accounts of its clients, and quotas that count it."""

    __slots__ = ("accounts", "counted")

    def __init__(self) -> None:
        self.accounts: dict[tuple[Identity, str, str], Account] = {}
        self.counted: set[QuotaAccount] = set()


class QuotaClients(Clients):
    """All clients with quotas."""

    def __init__(
        self, quotas: Quotas, refused: Counter[tuple[str, str]],
        before: "QuotaClients | None" = None, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        """`refused` counts refused requests by quota and limit.

        The accounts of quotas that were there `before`, and have not changed, are kept.
        """
        self.quotas = quotas
        self._refused = refused
        self._accounts: dict[tuple[Quota, str], QuotaAccount] = {}
        self._kept: dict[Account, _Kept] = {}
        self._sweep_at = _SWEEP
        self._clock = clock
        if before is not None:
            kept = before._accounts.items()
            self._accounts = {key: account for key, account in kept if key[0] in quotas.all}

    @property
    def known(self) -> int:
        """The number of clients' accounts."""
        return len(self._accounts)

    def account(self, connection: Account, identity: Identity, address: str, model: str) -> Account:
        """Implements `Clients.account`."""
        kept = self._kept.get(connection)
        if kept is None:
            kept = self._kept[connection] = _Kept()
            if isinstance(connection, ConnectionAccount):
                connection.kept_by(self)
        key = identity, address, model
        found = kept.accounts.get(key)
        if found is None:
            self._sweep()
            quotas = tuple(self._quotas_of(identity, address, model))
            self._count(kept, quotas)
            if len(kept.accounts) >= _KEPT:
                self._release(kept)
            found = connection
            if quotas or address != connection.origin:
                for quota in quotas:
                    quota.users += 1
                found = ClientAccount(connection, quotas, self._clock, address)
            kept.accounts[key] = found
        return found

    def submit(self, call: InnerCall, submit: Submit) -> None:
        """Implements `Clients.submit`."""
        if (client := call.payer) is None:
            submit(call)
            return
        self._sweep()
        quotas = self._quotas_of(call.context.identity, client.origin, call.model_name)
        InnerCallAccount(client, tuple(quotas), self._clock).submit(call, submit)

    def connect(self, connection: ConnectionAccount) -> None:
        """Implements `Clients.connect`, for quotas of addresses."""
        limited = [quota for quota in self.quotas.all if quota.by_address and quota.connections]
        if not (limited and connection.origin) or connection.trusted:
            return
        self._sweep()
        connection.kept_by(self)
        kept = self._kept[connection] = _Kept()
        key = network_of(connection.origin)
        self._count(kept, [self._quota(quota, key) for quota in limited])

    def leave(self, connection: Account) -> None:
        """Implements `Clients.leave`."""
        kept = self._kept.pop(connection, None)
        if kept is not None:
            self._release(kept)
            for quota in kept.counted:
                quota.connections -= 1
                quota.users -= 1

    def _count(self, kept: _Kept, quotas: Sequence[QuotaAccount]) -> None:
        """Count a connection for quotas that have not counted it; raises `QuotaExceeded`."""
        new = [one for one in quotas if one.quota.connections and one not in kept.counted]
        for quota in new:
            quota.check_connection()
        for quota in new:
            quota.connections += 1
            quota.users += 1
        kept.counted.update(new)

    def _release(self, kept: _Kept) -> None:
        for account in kept.accounts.values():
            if isinstance(account, ClientAccount):
                account.release()
        kept.accounts.clear()

    def _quotas_of(self, identity: Identity, address: str, model: str) -> Iterator[QuotaAccount]:
        for quota in self.quotas.applying(identity.answers_to, model):
            if key := network_of(address) if quota.by_address else identity.client(address):
                yield self._quota(quota, key)

    def _quota(self, quota: Quota, key: str) -> QuotaAccount:
        found = self._accounts.get((quota, key))
        if found is None:
            found = self._accounts[quota, key] = QuotaAccount(quota, self._refused)
        return found

    def _sweep(self) -> None:
        """Forget the clients that have used nothing for long enough, if there are many."""
        if len(self._accounts) < self._sweep_at:
            return
        now = self._clock()
        items = self._accounts.items()
        self._accounts = {key: account for key, account in items if not account.idle(now)}
        self._sweep_at = max(2 * len(self._accounts), _SWEEP)


def limit_clients(
    admission: Admission, quotas: Quotas | None, kind: type[QuotaClients] = QuotaClients
) -> None:
    """Apply quotas from now on, also to open connections; None for none.

    Those that have not changed keep their clients' accounts. `kind` says what keeps these.
    """
    before = admission.clients if isinstance(admission.clients, QuotaClients) else None
    clients = None if quotas is None else kind(quotas, admission.quota_refused, before)
    admission.limit_clients(clients)
