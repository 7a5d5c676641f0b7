"""Grants of resources: tables, exact shares of turns, and random schedules."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plugins.rate_limiter.decisions import (
    GLOBAL,
    Contender,
    Resource,
    ResourceShares,
    limit_of,
    read_limits,
)

R, S = Resource("R", 0), Resource("S", 0)


def contender(priority: int = 1, **needs: int) -> Contender:
    return Contender({Resource(name, 0): count for name, count in needs.items()}, priority)


def shared(limits: Mapping[str, int], *contenders: Contender) -> ResourceShares:
    shares = ResourceShares({(name, None): count for name, count in limits.items()})
    for one in contenders:
        shares.add(one)
    return shares


def test_resources_that_are_free_are_granted_at_once() -> None:
    one, other = contender(R=1), contender(R=1)
    shares = shared({"R": 2}, one, other)
    assert shares.ask(one) == [one]
    assert shares.ask(other) == [other]
    assert shares.used[R] == 2


def test_the_largest_need_is_the_capacity_by_default() -> None:
    one, other = contender(R=2), contender(R=3)
    shares = shared({}, one, other)
    assert shares.capacity(R) == 3
    assert shares.ask(one) == [one]
    assert shares.ask(other) == []
    assert shares.give_back(one) == [other]


def test_a_large_need_is_not_starved_by_small_ones() -> None:
    one, small, large = contender(R=1), contender(R=1), contender(R=2)
    shares = shared({"R": 2}, one, small, large)
    shares.ask(one)
    assert shares.ask(large) == []
    assert shares.ask(small) == []
    assert shares.give_back(one) == [large]
    assert shares.give_back(large) == [small]


def test_other_resources_are_not_kept() -> None:
    one, both, other = contender(R=1), contender(R=1, S=1), contender(S=1)
    free = contender(T=1)
    shares = shared({}, one, both, other, free)
    shares.ask(one)
    shares.ask(both)
    assert shares.ask(other) == []  # the one before it needs the same
    assert shares.ask(free) == [free]


def test_a_withdrawn_instance_lets_others_pass() -> None:
    one, large, small = contender(R=1), contender(R=2), contender(R=1)
    shares = shared({"R": 2}, one, large, small)
    shares.ask(one)
    shares.ask(large)
    shares.ask(small)
    assert shares.withdraw(large) == [small]


def test_a_grant_that_was_not_used_costs_no_turn() -> None:
    one, other = contender(R=1), contender(R=1)
    shares = shared({}, one, other)
    shares.ask(one)
    assert shares.ask(other) == []
    assert shares.withdraw(one) == [other]
    assert (one.turn, shares.used[R]) == (0, 1)


def test_instances_that_leave_free_their_resources() -> None:
    one, other = contender(R=1), contender(R=1)
    shares = shared({}, one, other)
    shares.ask(one)
    shares.ask(other)
    assert shares.remove(one) == [other]
    assert shares.remove(other) == []
    assert (shares.used[R], shares.resources) == (0, set())


def test_a_global_resource_is_one_for_all_devices() -> None:
    needs = {Resource("R", GLOBAL): 1}
    one, other = Contender(needs, 1), Contender(needs, 1)
    shares = shared({}, one, other)
    assert shares.ask(one) == [one]
    assert shares.ask(other) == []
    apart = [Contender({Resource("R", device): 1}, 1) for device in (0, 1)]
    shares = shared({}, *apart)
    assert [shares.ask(each) for each in apart] == [[apart[0]], [apart[1]]]


def turns(priorities: Sequence[int], runs: int) -> Counter[int]:
    """Runs of instances that always wait for one resource."""
    contenders = [contender(priority, R=1) for priority in priorities]
    shares = shared({}, *contenders)
    granted: list[Contender] = []
    for one in contenders:
        granted += shares.ask(one)
    counted: Counter[int] = Counter()
    for _ in range(runs):
        (running,) = granted
        counted[contenders.index(running)] += 1
        granted = list(shares.give_back(running, again=True))
    return counted


@pytest.mark.parametrize(
    ("priorities", "runs", "shares"),
    [
        ((1, 1), 100, (50, 50)),
        ((1, 2), 300, (200, 100)),
        ((0, 2), 300, (200, 100)),  # 0 is 1
        ((1, 2, 4), 700, (400, 200, 100)),
        ((3, 3, 6), 500, (200, 200, 100)),
    ],
)
def test_priorities_are_shares(priorities: Sequence[int], runs: int, shares: Sequence[int]) -> None:
    counted = turns(priorities, runs)
    assert all(abs(counted[n] - share) <= 1 for n, share in enumerate(shares)), counted


def test_nobody_catches_up_on_turns_without_waiting() -> None:
    busy, late = contender(R=1), contender(R=1)
    shares = shared({}, busy, late)
    shares.ask(busy)
    for _ in range(1_000):
        shares.give_back(busy, again=True)
    shares.ask(late)
    counted: Counter[Contender] = Counter()
    running = busy
    for _ in range(10):
        (running,) = shares.give_back(running, again=True)
        counted[running] += 1
    assert sorted(counted.values()) == [5, 5]


COUNTS = st.dictionaries(st.sampled_from("RST"), st.integers(1, 3), max_size=3)
STEPS = st.lists(st.tuples(st.sampled_from("awgA"), st.integers(0, 4)), max_size=60)


@given(st.lists(st.tuples(COUNTS, st.integers(0, 3)), min_size=5, max_size=5), COUNTS, STEPS)
def test_random_schedules(
    kinds: Sequence[tuple[Mapping[str, int], int]],
    limits: Mapping[str, int],
    steps: Sequence[tuple[str, int]],
) -> None:
    """Invariants: no use beyond a capacity; the first that waits does not fit."""
    limits = {name: max(count, 3) for name, count in limits.items()}
    contenders = [contender(priority, **needs) for needs, priority in kinds]
    shares = shared(limits, *contenders)
    running: set[Contender] = set()
    for step, index in steps:
        one = contenders[index]
        if step == "a":
            granted = shares.ask(one)
        elif step == "w" and one not in running:
            granted = shares.withdraw(one)
        elif one in running:
            granted = shares.give_back(one, again=step == "A")
            running.discard(one)
        else:
            continue
        assert not running.intersection(granted)
        running.update(granted)
        assert {each for each in contenders if each.granted} == running
        used: Counter[Resource] = Counter()
        for each in running:
            used.update(each.needs)
        for resource in shares.resources:
            assert used[resource] == shares.used[resource] <= shares.capacity(resource)
        waiting = [each for each in contenders if each.waits]
        if waiting:
            first = min(waiting, key=lambda each: (each.turn, each.order))
            assert any(
                used[resource] + count > shares.capacity(resource)
                for resource, count in first.needs.items()
            )
    for each in list(running):
        running.discard(each)
        running.update(shares.give_back(each))
    while running:
        each = running.pop()
        running.update(shares.give_back(each))
    assert not any(each.waits for each in contenders)
    assert not any(shares.used.values())


def test_configured_capacities() -> None:
    limits = read_limits(["R:4", "R:2:1", "S:0"])
    assert limits == {("R", None): 4, ("R", 1): 2, ("S", None): 0}
    expected = {("R", 0): 4, ("R", 1): 2, ("R", GLOBAL): 4, ("S", 0): 0, ("T", 0): None}
    for (name, device), limit in expected.items():
        assert limit_of(limits, Resource(name, device)) == limit


@pytest.mark.parametrize("text", ["R", ":1", "R:x", "R:1:", "R:1:x", "R:-1"])
def test_malformed_capacities(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected NAME:COUNT\[:DEVICE\]"):
        read_limits([text])


def test_capacities_are_given_once() -> None:
    with pytest.raises(ValueError, match="'R' is given twice"):
        read_limits(["R:1", "R:2"])
