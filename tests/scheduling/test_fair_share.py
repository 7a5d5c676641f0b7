"""The order of fair shares, against a slow reference, and queues that have it."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import pytest

from headrace.core.call import Call, CallContext
from headrace.core.identity import EVERYTHING, Identity, Role
from headrace.scheduling.fair_share import FairQueue, share_of
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from headrace.scheduling.queue import RequestQueue

ROLE = Role("r", EVERYTHING)
CLIENTS = [Identity(name, "key", [ROLE]) for name in "abcd"]
NOBODY = Identity("anonymous", "anonymous", [ROLE])


class Client:
    """A payer with a weight."""

    requests = 1

    def __init__(self, weight: float = 1.0, origin: str = "192.0.2.1") -> None:
        self.weight = weight
        self.origin = origin

    def take_rows(self, rows: int) -> None:
        """Without quotas."""


class Asked(Call):
    """A waiting request of a client."""

    def __init__(self, identity: Identity, rows: int = 1, payer: Client | None = None) -> None:
        super().__init__("m", "", "", {})
        self.context = CallContext(identity=identity)
        self.rows, self.key, self.arrived, self.level, self.deadline = rows, None, 0, 1, None
        self._payer = payer or Client()

    @property
    def payer(self) -> Client:
        return self._payer


@dataclass
class Slow:
    """Start-time fair queueing, in the words of its definition."""

    time: float = 0.0
    waiting: dict[str, list[Call]] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def append(self, call: Call) -> None:
        name = share_of(call)[0]
        if name not in self.order:
            self.order.append(name)
        calls = self.waiting.setdefault(name, [])
        if not calls:
            self.starts[name] = max(self.starts.get(name, self.time), self.time)
        calls.append(call)

    def popleft(self) -> Call:
        able = [name for name in self.order if self.waiting.get(name)]
        name = min(able, key=lambda name: (self.starts[name], self.order.index(name)))
        call = self.waiting[name].pop(0)
        if not call.ended:
            self.time = max(self.time, self.starts[name])
            self.starts[name] += call.rows / share_of(call)[1]
        return call


def test_random_schedules_like_the_reference() -> None:
    random = Random(27)
    for _ in range(100):
        weights = {one.name: random.choice([0.5, 1.0, 4.0]) for one in CLIENTS}
        queue, slow = FairQueue(), Slow()
        for _ in range(200):
            if random.random() < 0.55 or not len(queue):
                who = random.choice(CLIENTS)
                call = Asked(who, random.randint(1, 4), Client(weights[who.name]))
                queue.append(call)
                slow.append(call)
            elif random.random() < 0.2:
                random.choice(list(queue)).ended = True
            else:
                ahead = list(islice(queue, 3))
                taken = [queue.popleft() for _ in ahead]
                assert taken == ahead
                back = len(taken) - random.randint(1, len(taken))
                if any(call.ended for call in taken):
                    back = 0  # those that have ended are never put back
                queue.extendleft(reversed(taken[len(taken) - back :]))
                if back:  # the order of what is left is as before
                    assert list(islice(queue, back)) == taken[len(taken) - back :]
                    taken = [*taken[: len(taken) - back], *(queue.popleft() for _ in range(back))]
                assert taken == [slow.popleft() for _ in taken]
        assert len(queue) == len(list(queue))


def test_rows_by_weight() -> None:
    queue = FairQueue()
    for _ in range(1_000):
        queue.append(Asked(CLIENTS[0], 1, Client(3.0)))
        queue.append(Asked(CLIENTS[1], 2, Client(1.0)))
    rows: Counter[str] = Counter()
    for _ in range(700):
        call = queue.popleft()
        rows[call.context.identity.name] += call.rows
    assert rows["a"] / rows["b"] == pytest.approx(3, rel=0.02)


def test_silence_earns_nothing() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.append(Asked(CLIENTS[0]))
    for _ in range(50):
        queue.popleft()
    for _ in range(50):
        queue.append(Asked(CLIENTS[1]))
    names = [queue.popleft().context.identity.name for _ in range(20)]
    assert names.count("b") == pytest.approx(10, abs=1)


def test_clients_without_an_identity_are_their_addresses() -> None:
    queue = FairQueue()
    origins = ["2001:db8::1", "2001:db8::2", "2001:db8::1", "2001:db8::3", "2001:db8:0:1::1"]
    calls = [Asked(NOBODY, 1, Client(origin=origin)) for origin in origins]
    for call in calls:
        queue.append(call)
    assert [queue.popleft() for _ in range(2)] == [calls[0], calls[4]]


def test_a_queue_with_fair_shares() -> None:
    queue = RequestQueue(SchedulingPolicy(BatchPolicy(4), fair_share=True))
    many = [Asked(CLIENTS[0]) for _ in range(600)]
    for call in many:
        queue.append(call)
    few = [Asked(CLIENTS[1]) for _ in range(2)]
    for call in few:
        queue.append(call, light=True)  # no turns beside fair shares
    assert set(queue.take(0)[0]) == {*many[:2], *few}
    for call in many[2:590]:
        call.ended = True
        queue.discard(call)
    assert queue.take(0)[0] == many[590:594]
    other = Asked(CLIENTS[2])
    other.key = "other"  # of another shape: those passed for it keep their places
    queue.append(other)
    assert queue.take(0)[0] == [other]
    assert queue.take(0)[0] == many[594:598]
    assert queue.waiting == 2
    assert queue.take(0)[0] == many[598:]


def slowest(fair: bool, others: int) -> float:
    """The 99th percentile of a client's latencies, in runs of 10 units of a simulated clock.

    The client sends a request every 37 units, another one `others` times as many; an instance runs
    up to 8 rows in 10 units.
    """
    queue = RequestQueue(SchedulingPolicy(BatchPolicy(8), fair_share=fair))
    random = Random(27)
    arrivals = [(at * 37.0, CLIENTS[0]) for at in range(200)]
    arrivals += [(random.uniform(0, 7_400), CLIENTS[1]) for _ in range(200 * others)]
    arrivals.sort(key=lambda arrival: arrival[0])
    now, latencies, came = 0.0, list[float](), dict[Call, float]()
    while arrivals or queue.waiting:
        while arrivals and arrivals[0][0] <= now:
            at, who = arrivals.pop(0)
            call = Asked(who)
            came[call] = at
            queue.append(call)
        if not queue.waiting:
            now = arrivals[0][0]
            continue
        calls, _, _ = queue.take(0)
        now += 10
        latencies += [now - came[one] for one in calls if one.context.identity is CLIENTS[0]]
    return sorted(latencies)[len(latencies) * 99 // 100]


def test_a_client_beside_one_with_fifty_times_as_many_requests() -> None:
    alone = slowest(fair=True, others=0)
    assert alone == 10
    assert slowest(fair=True, others=50) <= 2 * alone
    assert slowest(fair=False, others=50) > 100 * alone
