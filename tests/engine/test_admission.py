"""Admission of requests against the server's limits."""

import pytest

from headrace.core.errors import Overloaded, ServerExiting
from headrace.core.limits import Payer, Shares
from headrace.engine.admission import Account, Admission, ConnectionAccount, Held, ModelAccount


def connect(admission: Admission, door: str = "http", address: str = "") -> ConnectionAccount:
    """An account of an accepted connection."""
    return admission.connect(door, address)


def test_counts_go_up_and_down_to_the_limit_of_requests() -> None:
    admission = Admission(10, 1000)
    admission.enter(100)
    admission.enter(0)
    admission.grow(50)
    assert (admission.requests, admission.bytes) == (2, 150)
    admission.leave(100)
    admission.leave(50)
    assert (admission.requests, admission.bytes) == (0, 0)
    admission = Admission(2, 0)
    for account in (admission, connect(admission)):  # a connection charges the server inline
        admission.refused = 0
        account.enter(1)
        account.enter(1)
        with pytest.raises(Overloaded, match="limit of 2 requests"):
            account.enter(1)
        assert (admission.requests, admission.bytes, admission.refused) == (2, 2, 1)
        account.leave(1)
        account.enter(1)
        account.leave(1)
        account.leave(1)


def test_room_can_be_awaited_instead_of_refused() -> None:
    admission = Admission(1, 0)
    account = connect(admission)
    assert not account.full(1)
    account.enter(1)
    assert account.full(1)
    assert admission.refused == 0
    calls: list[bool] = []

    def look() -> None:
        calls.append(account.full(1))

    admission.when_next_changed(look)
    admission.when_next_changed(look)  # is called once all the same
    account.leave(1)
    assert calls == [False]
    assert not admission.watched
    account.enter(1)
    assert calls == [False]
    admission.when_empty(lambda: None)
    admission.when_next_changed(look)
    account.leave(1)
    assert calls == [False, False]
    assert admission.watched  # for the other observer


@pytest.mark.parametrize("how", ["enter", "grow"])
def test_requests_beyond_the_byte_limit(how: str) -> None:
    admission = Admission(0, 100)
    admission.enter(60)
    admission.enter(40)
    with pytest.raises(Overloaded, match="limit of 100 bytes"):
        getattr(admission, how)(1)
    assert (admission.requests, admission.bytes, admission.refused) == (2, 100, 1)


def test_a_single_request_may_be_of_any_size() -> None:
    admission = Admission(0, 100)
    admission.enter(150)
    admission.leave(150)
    admission.enter(10)
    admission.grow(140)  # the same, with a size only known after reading
    with pytest.raises(Overloaded):
        admission.enter(1)
    admission.leave(150)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_no_limits() -> None:
    admission = Admission(0, 0)
    for _ in range(1000):
        admission.enter(1 << 40)
    assert admission.requests == 1000


def test_nothing_is_admitted_after_closing() -> None:
    admission = Admission(0, 0)
    told: list[str] = []
    admission.enter(5)
    admission.watch_close(lambda: told.append("first"))
    second = told.clear
    admission.watch_close(second)
    admission.unwatch_close(second)
    admission.close()
    assert told == ["first"]
    with pytest.raises(ServerExiting):
        admission.enter(1)
    admission.grow(3)  # admitted requests continue
    admission.leave(8)
    assert admission.bytes == 0


def test_emptiness_is_reported() -> None:
    admission = Admission(0, 0)
    told: list[int] = []
    admission.enter(1)
    admission.enter(1)
    admission.when_empty(lambda: told.append(admission.requests))
    admission.leave(1)
    assert told == []
    admission.leave(1)
    assert told == [0]
    # Messages on their way keep the account from being empty.
    admission.begin(1)
    admission.when_empty(lambda: told.append(-1))
    assert told == [0]
    admission.drop(0)
    assert told == [0, -1]
    # At once if it is empty already.
    admission.when_empty(lambda: told.append(-2))
    assert told == [0, -1, -2]
    connection = connect(admission)
    connection.enter(1)
    admission.when_empty(lambda: told.append(-3))
    assert told == [0, -1, -2]
    connection.leave(1)
    assert told == [0, -1, -2, -3]
    changes: list[int] = []
    admission.when_changed(lambda: changes.append(admission.requests))
    connection.enter(1)
    connection.leave(1)
    assert changes == [1, 0]


def test_a_message_being_received_counts_bytes_but_no_request() -> None:
    admission = Admission(0, 100)
    admission.enter(60)
    with pytest.raises(Overloaded, match="limit of 100 bytes"):
        admission.begin(41)
    admission.begin(40)
    admission.enter(40)
    assert admission.bytes == 100
    admission = Admission(1, 100)
    admission.begin(90)
    admission.grow(90, 0)
    admission.enter(10)
    assert (admission.requests, admission.messages, admission.bytes) == (1, 1, 100)
    with pytest.raises(Overloaded, match="limit of 1 requests"):
        admission.admit()
    admission.leave(10)
    admission.admit()
    assert (admission.requests, admission.messages) == (1, 0)
    admission.leave(90)
    admission.begin(5)
    admission.grow(5)
    admission.drop(5)
    assert (admission.requests, admission.messages, admission.bytes) == (0, 0, 0)
    # A single request may be of any size.
    admission = Admission(0, 100)
    admission.begin(500)
    admission.grow(90, 0)
    admission.grow(400, 90)
    admission.drop(490)
    assert admission.bytes == 0


def test_unread_answers_count_against_the_limit() -> None:
    admission = Admission(0, 100)
    account = connect(admission, "http")
    account.owe(95)
    assert (admission.bytes, admission.unread) == (95, 95)
    assert admission.pressed
    admission.enter(50)  # a request alone
    with pytest.raises(Overloaded, match="limit of 100 bytes"):
        admission.enter(10)
    account.owe(20)
    admission.enter(10)
    account.close()
    assert (admission.bytes, admission.unread) == (60, 0)


MANY = 100 << 30


def test_a_connection_has_a_share() -> None:
    admission = Admission(1000, MANY, Shares(connection=20))
    one, other = connect(admission, "grpc"), connect(admission, "grpc")
    for _ in range(200):
        one.enter(1)
    with pytest.raises(Overloaded, match="connection is at its limit of 200 requests"):
        one.enter(1)
    with pytest.raises(Overloaded, match="connection is at its limit of 200 requests"):
        one.begin(1)
    other.enter(MANY // 5)
    for charge in (other.enter, other.begin, lambda nbytes: other.grow(nbytes, 0)):
        with pytest.raises(Overloaded, match=f"connection is at its limit of {MANY // 5} bytes"):
            charge(1)
    assert admission.refused == 5
    assert other.owe(MANY // 5)
    assert not other.owe(MANY // 5 + 1)
    other.leave(MANY // 5)
    for _ in range(200):
        one.leave(1)
    other.close()
    one.close()
    assert (admission.requests, admission.bytes, admission.connections.total()) == (0, 0, 0)
    # A share of low limits is zero.
    admission = Admission(4, 1000)
    account = connect(admission, "http")
    for _ in range(4):
        account.enter(250)
    with pytest.raises(Overloaded, match="the server is at its limit of 4 requests"):
        account.enter(1)


def test_unread_answers_leave_no_room_on_their_connection() -> None:
    admission = Admission(0, MANY)
    one, other = connect(admission, "grpc"), connect(admission, "grpc")
    assert one.owe(MANY // 2)
    with pytest.raises(Overloaded, match="connection is at its limit"):
        one.enter(1)
    other.enter(MANY)  # a request alone
    other.leave(MANY)
    one.owe(0)
    one.enter(MANY)
    one.leave(MANY)
    assert admission.bytes == 0


def test_a_slow_reader_leaves_room_for_answers_of_others() -> None:
    """A client may keep half of the limit unread, as long as it reads a little."""
    admission = Admission(0, MANY)
    slow, *others = (connect(admission) for _ in range(101))
    assert slow.owe(MANY // 2)
    with pytest.raises(Overloaded, match="half of the server's limit"):
        slow.grow_answer(1, 0)
    for other in others:
        other.grow_answer(MANY // 1000, 0)
        other.grow_answer(MANY // 1000, MANY // 1000)
    with pytest.raises(Overloaded, match="half of the server's limit"):
        others[0].grow_answer(MANY // 16, MANY // 500)
    assert admission.bytes < MANY * 0.75
    assert admission.refused == 2
    for other in others:
        other.leave_answer(MANY // 500)
    slow.close()
    assert (admission.bytes, admission.answering, admission.unread) == (0, 0, 0)


def test_an_address_has_a_share_if_configured() -> None:
    admission = Admission(1000, MANY, Shares(connection=50, address=10))
    accounts = [connect(admission, "http", "192.0.2.1") for _ in range(4)]
    for number in range(100):
        account = accounts[number % 4]
        account.enter(1)
    for account in accounts:
        with pytest.raises(Overloaded, match="address is at its limit of 100 requests"):
            account.enter(1)
    elsewhere = connect(admission, "http", "192.0.2.2")
    elsewhere.enter(1)
    elsewhere.leave(1)
    for account in accounts:
        for _ in range(25):
            account.leave(1)
        account.close()
    again = connect(admission, "http", "192.0.2.1")
    again.enter(1)
    address = again.above[0]
    connect(admission, "http", "192.0.2.1").close()
    assert admission.address("192.0.2.1") is address
    again.close()  # the last connection of the address
    assert admission.address("192.0.2.1") is not address


def test_connections_are_counted_and_capped() -> None:
    admission = Admission(0, 0, Shares(connections=2))
    first = connect(admission, "http")
    connect(admission, "grpc")
    with pytest.raises(Overloaded, match="--max-connections"):
        admission.connect("grpc")
    assert (admission.connections, admission.refused_connections) == ({"http": 1, "grpc": 1}, 1)
    first.close()
    admission.connect("grpc")


def test_usage_of_another_process_counts() -> None:
    admission = Admission(10, 0)
    admission.enter(5)
    now = Held(2, 30, 20, 1, 3, 4, 5, 6, 7)
    process = Account(admission)
    admission.count_process(process, Held(), now)
    assert (admission.requests, admission.bytes, admission.unread) == (3, 35, 20)
    assert admission.held(1, 5) == now
    assert (process.requests, process.bytes, process.unread) == (2, 30, 20)
    admission.count_process(process, now, Held())
    assert admission.held(1, 5) == Held()
    assert (process.requests, process.bytes, process.unread) == (0, 0, 0)


def test_the_peak_is_recorded() -> None:
    admission = Admission(0, 0)
    connection = connect(admission, "http")
    connection.enter(100)
    connection.leave(100)
    admission.enter(10)
    assert admission.peak_bytes == 100
    connection.owe(120)
    connection.owe(0)
    admission.leave(10)
    assert (admission.bytes, admission.peak_bytes) == (0, 130)


# --- models


def admit(
    admission: Admission, model: ModelAccount, nbytes: int = 0, payer: Payer | None = None
) -> str:
    """Queue a request for a model; text of the refusal, if any."""
    try:
        admission.enter(nbytes)
    except Overloaded as error:
        return str(error)
    try:
        model.admit(nbytes, payer)
    except Overloaded as error:
        admission.leave(nbytes)
        return str(error)
    return ""


def fill(
    admission: Admission, model: ModelAccount, nbytes: int = 0, payer: Payer | None = None
) -> int:
    """Queue requests for a model until one is refused; number of those admitted."""
    before = model.requests
    while not admit(admission, model, nbytes, payer):
        pass
    return model.requests - before


def test_a_model_leaves_room_for_others() -> None:
    admission = Admission(1000, 0)
    first, second = admission.model("first"), admission.model("second")
    assert fill(admission, first) == 800
    assert admission.refused == 1
    assert admit(admission, first) == (
        "model 'first' is at its share of the server's limit of 1000 requests at once, with 800"
        " under way (--max-model-share); try again later"
    )
    assert fill(admission, second) == 160  # of the 200 that are left
    # The same by bytes.
    admission = Admission(0, 100 << 20)
    first, second = admission.model("first"), admission.model("second")
    assert fill(admission, first, 1 << 20) == 80
    refusal = admit(admission, first, 1 << 20)
    assert "limit of 104857600 bytes of requests at once, with 83886080 under way" in refusal
    assert fill(admission, second, 1 << 20) == 16
    # Some requests are admitted in any case.
    admission = Admission(70, 1 << 20)
    first = admission.model("first")
    admission.model("second")
    assert fill(admission, first) == 64
    assert "(--max-model-share)" in admit(admission, first)


def test_clients_with_few_requests_find_room_beside_one_that_fills_a_model() -> None:
    admission = Admission(1000, 0)
    first, second = admission.model("first"), admission.model("second")
    busy, other = ConnectionAccount(admission, "http"), ConnectionAccount(admission, "http")
    busy.requests, other.requests = 800, 4
    assert fill(admission, first, payer=busy) == 800
    assert fill(admission, first, payer=other) == 100
    assert fill(admission, second, payer=busy) == 80


@pytest.mark.parametrize("shares", [Shares(), Shares(model=100)])
def test_a_single_model_and_one_without_a_share_may_use_everything(shares: Shares) -> None:
    admission = Admission(1000, 0, shares)
    first = admission.model("first")
    other = admission.model("other" if shares.model == 100 else "first")  # another version
    assert fill(admission, first) == 1000
    assert "(--max-admitted-requests)" in admit(admission, first)
    other.leave()


def test_model_accounts_are_added_and_removed() -> None:
    admission = Admission(1000, 0)
    first, second = admission.model("first"), admission.model("second")
    assert admission.model("second") is second  # of another version
    assert fill(admission, first) == 800
    second.leave()
    assert fill(admission, first) == 0
    second.leave()
    assert fill(admission, first) == 200
    admission.model("third")
    admission.leave(0)
    assert "(--max-model-share)" in admit(admission, first)


@pytest.mark.parametrize(("busy", "each"), [(1, 800), (2, 445), (3, 308), (4, 236)])
def test_any_number_of_busy_models_leaves_room_for_another(busy: int, each: int) -> None:
    admission = Admission(1000, 0)
    models = [admission.model(str(n)) for n in range(5)]
    for _ in range(1000):
        for model in models[:busy]:
            admit(admission, model)
    counts = {model.requests for model in models[:busy]}
    assert max(counts) == each
    assert min(counts) >= each - 1
    assert fill(admission, models[4]) >= 47
