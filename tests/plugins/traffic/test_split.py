"""The choice among versions by weight, by turns and by key."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plugins.traffic.decisions import GOLDEN, SILVER, Sequence64, Split, bound

WHOLE = 2**64
WEIGHTS = st.dictionaries(st.integers(0, 2**63 - 1), st.floats(1e-3, 1e6), min_size=1, max_size=5)
KEYS = [f"user-{number}" for number in range(4000)]


@given(WEIGHTS, st.integers(1, 300))
def test_each_has_its_share_at_any_time(weights: dict[int, float], requests: int) -> None:
    split, points = Split("m", weights), Sequence64(GOLDEN)
    counts = Counter(split.at(points.next()) for _ in range(requests))
    for number, share in split.shares.items():
        # The discrepancy of this sequence grows with the logarithm, not with the root.
        assert abs(counts[number] - share * requests) <= 6


def test_a_rhythm_of_requests_does_not_matter() -> None:
    split, points = Split("m", {1: 50, 2: 50}), Sequence64(GOLDEN)
    every_other = [split.at(points.next()) for _ in range(2000)][::2]
    assert 480 <= Counter(every_other)[1] <= 520


@pytest.mark.parametrize("step", [GOLDEN, SILVER])
def test_a_share_of_points_is_below_its_bound(step: int) -> None:
    points, limit = Sequence64(step), bound(0.25)
    assert abs(sum(points.next() < limit for _ in range(1000)) - 250) <= 3
    assert bound(1) == WHOLE


@given(WEIGHTS, st.integers(0, WHOLE - 1))
def test_every_point_and_key_has_a_version(weights: dict[int, float], point: int) -> None:
    split = Split("m", weights)
    assert split.at(point) in weights
    assert split.of(str(point)) in weights


def test_beyond_all_points_is_nothing() -> None:
    with pytest.raises(ValueError, match="beyond"):
        Split("m", {1: 1}).at(WHOLE)


def test_keys_are_divided_by_weight() -> None:
    counts = Counter(Split("m", {1: 70, 2: 20, 3: 10}).of(key) for key in KEYS)
    for number, share in ((1, 0.7), (2, 0.2), (3, 0.1)):
        assert abs(counts[number] / len(KEYS) - share) < 0.02


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ({1: 90, 2: 10}, {1: 80, 2: 20}, 0.1),
        ({1: 60, 2: 20, 3: 20}, {1: 40, 2: 40, 3: 20}, 0.2),
        ({1: 40, 2: 20, 3: 40}, {1: 60, 2: 20, 3: 20}, 0.2),
        ({1: 50, 2: 30, 3: 20}, {1: 50, 3: 20}, 0.3),  # a version goes
        ({1: 50, 2: 50}, {1: 5, 2: 5}, 0.0),
    ],
)
def test_only_those_keys_move_that_have_to(
    before: dict[int, float], after: dict[int, float], moved: float
) -> None:
    first, second = Split("m", before), Split("m", after)
    changed = sum(first.of(key) != second.of(key) for key in KEYS) / len(KEYS)
    assert moved - 0.02 <= changed <= moved + 0.06


@given(st.text(max_size=20))
def test_who_has_a_growing_version_keeps_it(key: str) -> None:
    if Split("m", {1: 90, 2: 10}).of(key) == 2:
        assert Split("m", {1: 70, 2: 30}).of(key) == 2


def test_models_divide_keys_independently() -> None:
    first, second = Split("a", {1: 50, 2: 50}), Split("b", {1: 50, 2: 50})
    alike = sum(first.of(key) == second.of(key) for key in KEYS) / len(KEYS)
    assert 0.45 < alike < 0.55


def test_the_choice_of_a_key_never_changes() -> None:
    split = Split("m", {1: 50, 2: 30, 3: 20})
    found = "".join(str(split.of(f"user-{number}")) for number in range(24))
    assert found == "123133133111311111111112"
