"""Rules for traffic, held against the versions that are ready."""

from dataclasses import replace

import pytest

from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec, difference
from headrace.plugins.traffic.decisions import arrange
from headrace.plugins.traffic.rules import Shadow, TrafficRules

X = TensorSpec("X", Datatype.FP32, (4,))
Y = TensorSpec("Y", Datatype.FP32, (2,))
SAME = Signature("m", 8, (X,), (Y,))
OTHER = replace(SAME, inputs=(replace(X, dims=(5,)),))
SPLIT = TrafficRules({1: 90.0, 2: 10.0}, 1)
COPIED = replace(SPLIT, shadow=Shadow(3))


@pytest.mark.parametrize(
    ("rules", "ready", "weights", "reference", "shadow", "fallback"),
    [
        (SPLIT, {1: SAME, 2: SAME}, {1: 90, 2: 10}, 1, 0, False),
        (SPLIT, {1: SAME}, {1: 90}, 1, 0, False),
        (SPLIT, {2: SAME}, {2: 10}, 2, 0, False),
        (SPLIT, {1: SAME, 2: OTHER}, {1: 90}, 1, 0, False),
        (SPLIT, {3: SAME, 4: OTHER}, {4: 1}, 4, 0, True),
        (COPIED, {1: SAME, 2: SAME, 3: SAME}, {1: 90, 2: 10}, 1, 3, False),
        (COPIED, {1: SAME, 2: SAME}, {1: 90, 2: 10}, 1, 0, False),
        (COPIED, {1: SAME, 3: OTHER}, {1: 90}, 1, 0, False),
        (COPIED, {3: SAME}, {3: 1}, 3, 0, True),
        (COPIED, {3: SAME, 0: SAME}, {0: 1}, 0, 3, True),
        (TrafficRules(shadow=Shadow(3)), {1: SAME, 2: SAME, 3: SAME}, {2: 1}, 2, 3, False),
        (TrafficRules({1: 0.0, 2: 5.0}, 1), {1: SAME, 2: SAME}, {2: 5}, 2, 0, False),
    ],
)
def test_who_gets_what(
    rules: TrafficRules,
    ready: dict[int, Signature],
    weights: dict[int, float],
    reference: int,
    shadow: int,
    fallback: bool,
) -> None:
    found = arrange(rules, ready)
    assert found is not None
    assert (found.weights, found.reference, found.shadow) == (weights, reference, shadow)
    assert found.fallback is fallback


def test_nothing_is_ready() -> None:
    assert arrange(SPLIT, {}) is None


def test_reasons() -> None:
    found = arrange(COPIED, {1: SAME, 2: OTHER})
    assert found is not None
    assert found.reasons[3] == "is not ready"
    assert "its input 'X' is missing, or of another datatype or shape" in found.reasons[2]
    alone = arrange(COPIED, {3: SAME})
    assert alone is not None
    assert "no other version is ready" in alone.reasons[3]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (SAME, ""),
        (replace(SAME, max_batch_size=4), ""),
        (replace(SAME, outputs=(Y, replace(Y, name="Z"))), ""),
        (replace(SAME, inputs=(X, replace(X, name="Z", optional=True))), ""),
        (replace(SAME, inputs=(replace(X, optional=True),)), ""),
        (replace(SAME, inputs=(X, replace(X, name="Z"))), "it needs the input 'Z'"),
        (replace(SAME, outputs=()), "its output 'Y' is missing"),
        (replace(SAME, outputs=(replace(Y, datatype=Datatype.FP64),)), "its output 'Y'"),
        (replace(SAME, decoupled=True), "it is decoupled"),
        (replace(SAME, max_batch_size=0), "it does not batch"),
    ],
)
def test_difference(other: Signature, why: str) -> None:
    assert why in difference(SAME, other)
    assert bool(why) == bool(difference(SAME, other))


def test_an_input_that_only_the_baseline_does_without() -> None:
    optional = replace(SAME, inputs=(replace(X, optional=True),))
    assert "it needs the input 'X'" in difference(optional, SAME)
