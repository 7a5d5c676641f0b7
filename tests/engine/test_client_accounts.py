from collections.abc import Sequence

import pytest

from headrace.core.call import Call, InnerCall, context_of
from headrace.core.errors import Allowance, Overloaded, QueueFull, QuotaExceeded, ServerError
from headrace.core.identity import ANYONE, EVERYTHING, Identity, Role
from headrace.core.limits import Payer
from headrace.core.quotas import Quota, Quotas
from headrace.engine.admission import Account, Admission, ConnectionAccount
from headrace.engine.client_accounts import ClientAccount, QuotaClients
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


class Within(InnerCall):
    """A call that a model makes for a client; `submitted` once it has passed the quotas."""

    def __init__(self, model: str, payer: Payer | None) -> None:
        super().__init__(model, "", "", {}, nbytes=10)
        self.context = context_of(WEB)
        self.charged = payer
        self.submitted = False

    def submit(self, call: Call) -> None:
        self.submitted = True

    def fail(self, error: ServerError) -> None: ...


def within(world: World, client: Payer | None, *models: str) -> list[Within]:
    """Calls of these models, each made by the one before, the first of them for `client`."""
    calls: list[Within] = []
    for model in models:
        call = Within(model, calls[-1].payer if calls else client)
        world.clients.submit(call, call.submit)
        assert call.submitted
        calls.append(call)
    return calls


@pytest.mark.parametrize(("patterns", "models", "count"), [
    (["*"], ["pipeline", "text"], 1),  # the request alone
    (["text"], ["pipeline", "text"], 1),  # the step alone
    (["text"], ["pipeline", "text", "other"], 1),
    (["text", "image"], ["pipeline", "text", "image"], 1),  # what is a part of another counted one
    (["image"], ["pipeline", "text", "image"], 1),
    (["pipeline", "text"], ["pipeline", "text"], 1),
    (["pipeline"], ["pipeline", "text"], 1),
    (["image"], ["pipeline", "text"], 0),
])  # fmt: skip
def test_calls_of_models_count_for_the_quotas_of_their_model_once(
    patterns: Sequence[str], models: Sequence[str], count: int
) -> None:
    world = World(Quota("q", ("*",), tuple(patterns), requests=100))
    connection = world.connect()
    probe = connection.of(WEB, patterns[0].replace("*", "m"))
    assert isinstance(probe, ClientAccount)
    account = connection.of(WEB, models[0])
    account.enter(10)
    calls = within(world, account, *models[1:])
    [quota] = probe.quotas
    assert (quota.requests, quota.bytes) == (count, 10 * count)
    assert (connection.requests, world.admission.requests) == (1, 1)
    for call in reversed(calls):
        call.pass_end(QueueFull("ended"))
    account.leave(10)
    assert (quota.requests, quota.bytes) == (0, 0)


def test_several_calls_for_one_request_count_each() -> None:
    world = World(Quota("q", ("*",), ("text",), requests=2, requests_per_sec=1, burst=3))
    account = world.connect().of(WEB, "pipeline")
    for _ in range(2):
        account.enter(1)  # of another model
    first, second = within(world, account, "text"), within(world, account, "text")
    refused = Within("text", account)
    with pytest.raises(QuotaExceeded, match=r"limit of 2 requests at once of its quota 'q'"):
        world.clients.submit(refused, refused.submit)
    assert not refused.submitted
    for call in first + second:
        call.cancel()
    [last] = within(world, account, "text")
    last.cancel()
    with pytest.raises(QuotaExceeded, match=r"limit of 1 requests/s of its quota 'q'"):
        world.clients.submit(refused, refused.submit)
    with pytest.raises(QuotaExceeded):  # and so are the client's own requests to the model
        world.connect().of(WEB, "text").enter(1)


def test_a_call_that_its_model_refuses_takes_nothing_but_the_token() -> None:
    world = World(Quota("q", ("*",), ("text",), requests=1, bytes=15))
    account = world.connect().of(WEB, "pipeline")

    def refuse(call: Call) -> None:
        raise QueueFull("full")

    for _ in range(2):
        with pytest.raises(QueueFull):
            world.clients.submit(Within("text", account), refuse)
    within(world, account, "text")


def test_bytes_of_calls_of_models() -> None:
    world = World(Quota("q", ("*",), ("text",), bytes=15))
    account = world.connect().of(WEB, "pipeline")
    within(world, account, "text")
    with pytest.raises(QuotaExceeded, match=r"limit of 15 bytes of requests at once"):
        within(world, account, "text")


def test_rows_of_calls_of_models_count_for_the_quotas_of_their_model_once() -> None:
    world = World(
        Quota("all", ("*",), rows_per_sec=10), Quota("text", ("*",), ("text",), rows_per_sec=5)
    )
    account = world.connect().of(WEB, "pipeline")
    account.enter(10)
    account.take_rows(10)
    [call] = within(world, account, "text")
    assert call.payer is not None
    call.payer.take_rows(10)  # a debt of the second quota, and none of the first
    account.enter(10)
    with pytest.raises(QuotaExceeded, match=r"limit of 5 rows/s of its quota 'text'"):
        within(world, account, "text")
    world.now += 1.0
    within(world, account, "text")


def test_the_payer_of_a_call_of_a_model_is_its_client() -> None:
    text = Quota("text", ("*",), ("text",), weight=0.5)
    world = World(text, Quota("all", ("*",), weight=2))
    account = world.connect("192.0.2.1").of(WEB, "pipeline")
    account.enter(1)
    found = [call.payer for call in within(world, account, "other", "text")]
    assert [(p and (p.origin, p.requests, p.weight)) for p in found] == [
        ("192.0.2.1", 1, 2), ("192.0.2.1", 1, 0.5),
    ]  # fmt: skip
    [call] = within(world, None, "text")  # of no client
    assert call.payer is None
