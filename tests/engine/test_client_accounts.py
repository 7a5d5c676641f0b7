import pytest

from headrace.core.errors import Allowance, Overloaded, QuotaExceeded
from headrace.core.identity import ANYONE, EVERYTHING, Identity, Role
from headrace.core.quotas import Quota, Quotas
from headrace.engine.admission import Account, Admission, ConnectionAccount
from headrace.engine.client_accounts import QuotaClients
from headrace.protocol.status import rate_limit

WEB = Identity("web", "key", [Role("scorer", EVERYTHING)])
BATCH = Identity("batch", "key", [Role("scorer", EVERYTHING)])


class World:
    """An admission with quotas, and a clock that is set by hand."""

    def __init__(self, *quotas: Quota, max_requests: int = 0) -> None:
        self.now = 1000.0
        self.admission = Admission(max_requests, 0)
        self.clients = self.limit(*quotas)

    def limit(self, *quotas: Quota) -> QuotaClients:
        before = self.admission.clients
        assert before is None or isinstance(before, QuotaClients)
        clients = QuotaClients(
            Quotas(quotas), self.admission.quota_refused, before, lambda: self.now
        )
        self.admission.limit_clients(clients)
        return clients

    def connect(self, address: str = "192.0.2.1") -> ConnectionAccount:
        account = self.admission.connect("http", address)
        assert account is not None
        return account

    def admits(self, account: Account, nbytes: int = 1) -> int:
        """Requests until one is refused, at most 100."""
        for count in range(100):
            try:
                account.enter(nbytes)
            except QuotaExceeded:
                return count
        return 100


def test_a_client_without_quotas_is_charged_to_its_connection() -> None:
    world = World(Quota("q", ("web",), requests=1))
    connection = world.connect()
    assert connection.of(ANYONE, "m") is connection
    assert connection.of(WEB, "m") is not connection
    world.admission.limit_clients(None)
    assert connection.of(WEB, "m") is connection


def test_requests_and_bytes_under_way_are_counted_over_connections() -> None:
    world = World(Quota("q", ("*",), requests=3, bytes=100))
    first, second = (world.connect().of(WEB, "m") for _ in range(2))
    first.enter(1)
    second.enter(1)
    with pytest.raises(QuotaExceeded, match=r"100 bytes of requests at once of its quota 'q'"):
        second.enter(99)
    first.enter(1)
    for account in first, second:
        with pytest.raises(QuotaExceeded, match=r"limit of 3 requests at once") as raised:
            account.enter(1)
        assert raised.value.allowance == Allowance("q", "requests", "concurrent-requests", 3)
    world.connect().of(BATCH, "m").enter(1)  # another client
    assert world.admission.requests == 4
    second.leave(1)
    first.begin(5)  # a message, which becomes a request
    first.grow(5)
    first.admit()
    assert world.admission.refused == 0  # these are others'
    assert world.admission.quota_refused == {("q", "bytes"): 1, ("q", "requests"): 2}


def test_requests_a_second_with_a_burst() -> None:
    world = World(Quota("q", ("*",), requests_per_sec=2, burst=5))
    connection = world.connect()
    account = connection.of(WEB, "m")
    assert world.admits(account) == 5
    assert connection.requests == world.admission.requests == 5
    world.now += 1.1
    account.begin(3)
    account.drop(0)
    assert world.admits(world.connect().of(WEB, "m")) == 1
    world.now += 0.1
    with pytest.raises(QuotaExceeded) as raised:
        account.begin(3)
    error = raised.value
    assert error.until == pytest.approx(1001.5)
    assert rate_limit(error) == {
        "ratelimit-policy": '"q";q=6;qu="requests";w=3',
        "ratelimit": '"q";r=0;t=1',
    }


def test_a_refusal_of_the_server_takes_no_token() -> None:
    world = World(Quota("q", ("*",), requests_per_sec=1, burst=2), max_requests=1)
    account = world.connect().of(WEB, "m")
    account.enter(1)
    for _ in range(3):
        with pytest.raises(Overloaded):
            account.enter(1)
    account.leave(1)
    account.enter(1)


def test_rows_may_leave_a_debt() -> None:
    world = World(Quota("q", ("*",), rows_per_sec=10))
    account = world.connect().of(WEB, "m")
    account.enter(1)
    account.take_rows(35)
    with pytest.raises(QuotaExceeded, match="10 rows/s") as raised:
        account.enter(1)
    assert raised.value.retry_after == 3
    world.now += 2.6
    account.enter(1)


def test_quotas_of_models_apply_beside_those_of_all() -> None:
    world = World(Quota("all", ("*",), requests=5), Quota("text", ("*",), ("t*",), requests=2))
    connection = world.connect()
    assert world.admits(connection.of(WEB, "text")) == 2
    assert world.admits(connection.of(WEB, "digits")) == 3


def test_connections_of_an_address_and_of_an_identity() -> None:
    world = World(Quota("a", ("address",), connections=3), Quota("w", ("web",), connections=1))
    first, second, third = (world.connect() for _ in range(3))
    with pytest.raises(QuotaExceeded, match="3 connections of its quota 'a'"):
        world.admission.connect("http", "192.0.2.1")
    assert world.admission.refused_connections == 1
    assert world.admission.connections["http"] == 3
    first.of(WEB, "m")
    first.of(WEB, "other")
    with pytest.raises(QuotaExceeded, match="1 connections"):
        second.of(WEB, "m")
    first.close()
    second.of(WEB, "m")
    world.connect()
    third.close()
    second.close()
    assert world.admission.connections["http"] == 1


def test_buckets_outlive_connections_and_other_quotas() -> None:
    quota = Quota("q", ("*",), requests_per_sec=1, burst=3)
    world = World(quota)
    connection = world.connect()
    assert world.admits(connection.of(WEB, "m")) == 3
    connection.close()
    again = world.connect()
    assert world.admits(again.of(WEB, "m")) == 0
    world.limit(Quota("new", ("batch",), requests=1), quota)
    assert world.admits(again.of(WEB, "m")) == 0
    world.limit(quota._replace(burst=4))
    assert world.admits(again.of(WEB, "m")) == 4  # a changed one begins anew


def test_many_clients_that_have_left_are_forgotten() -> None:
    world = World(Quota("q", ("*",), requests_per_sec=10, requests=2))
    held = world.connect("10.0.0.1").of(ANYONE, "m")
    for _ in range(2):
        held.enter(1)
    for number in range(5_000):
        connection = world.connect(f"10.1.{number // 256}.{number % 256}")
        connection.of(ANYONE, "m").enter(1)
        connection.of(ANYONE, "m").leave(1)
        connection.close()
        world.now += 0.01
    assert world.clients.known < 2_500
    with pytest.raises(QuotaExceeded, match="2 requests at once"):
        world.connect("10.0.0.1").of(ANYONE, "m").enter(1)


def test_many_models_on_one_connection() -> None:
    world = World(Quota("q", ("*",), requests=2))
    connection = world.connect()
    account = connection.of(WEB, "m")
    account.enter(1)
    for number in range(1_000):
        connection.of(WEB, f"m{number}")
    assert world.admits(connection.of(WEB, "m")) == 1
    account.leave(1)
    assert world.admits(connection.of(WEB, "m")) == 1


def test_clients_are_known_by_name_or_by_address() -> None:
    assert WEB.client("192.0.2.1") == WEB.client("192.0.2.2") == "=web"
    assert ANYONE.client("192.0.2.1") == "192.0.2.1"
    assert ANYONE.client("2001:db8::1") == ANYONE.client("2001:db8::2") != ANYONE.client("2002::1")
    assert ANYONE.client("") == ""
