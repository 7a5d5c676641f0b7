"""The choice between inline and thread by measured cost, and the runs that measure it."""

from collections.abc import Mapping, Sequence
from time import sleep

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.placement.choice import (
    BUDGET_NS,
    AutoChoice,
    InstanceKind,
    Size,
    Sizes,
    largest_batch,
    measure,
    sizes_of,
)
from headrace.placement.loaded import LoadedModel

INLINE, THREAD = InstanceKind.INLINE, InstanceKind.THREAD
BUDGET = 1_000


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        (0, INLINE),
        (BUDGET, INLINE),
        (BUDGET + 1, THREAD),
        (float("inf"), THREAD),  # it could not be measured
    ],
)
def test_the_warm_up_makes_the_first_choice(measured: float, kind: InstanceKind) -> None:
    assert AutoChoice(measured, BUDGET).kind is kind


@pytest.mark.parametrize(
    ("measured", "costs", "kind"),
    [
        (100, [900] * 50, INLINE),  # within the budget
        (100, [1_100] * 50, THREAD),  # over it for long enough
        (100, [1_100], INLINE),
        (100, [10**9] * 2, INLINE),  # two page faults are not a trend
        (100, [10**9] * 3, THREAD),
        (100, [10**9, 900, 900, 900, 900] * 50, INLINE),  # occasional load of the machine
        (100, [10**9, 900] * 5, THREAD),  # every other run is heavy
        (2_000, [900] * 2_000, THREAD),  # between the two thresholds it stays
        (2_000, [400] * 1_000, INLINE),
        (2_000, [400] * 999, THREAD),
        (2_000, [*[400] * 999, 900] * 2, THREAD),
        (float("inf"), [400] * 1_000, INLINE),
        (500, [900, 600] * 50, INLINE),
    ],
)
def test_later_runs_change_the_choice(
    measured: float, costs: list[int], kind: InstanceKind
) -> None:
    choice = AutoChoice(measured, BUDGET)
    changes = sum(choice.observe(cost) for cost in costs)
    assert choice.kind is kind
    assert changes == (kind is not AutoChoice(measured, BUDGET).kind)


def test_the_choice_does_not_flap_around_the_budget() -> None:
    choice = AutoChoice(BUDGET, BUDGET)
    assert sum(choice.observe(cost) for cost in [1_300, 700] * 100) <= 1
    assert AutoChoice(BUDGET_NS).kind is INLINE
    assert AutoChoice(BUDGET_NS + 1).kind is THREAD
    assert 100_000 <= BUDGET_NS <= 1_000_000


FP32, TEXT = Datatype.FP32, Datatype.BYTES


def signature(max_batch_size: int, *dims: int, datatype: Datatype = FP32) -> Signature:
    """One input of these dims, and one output with a number per row."""
    inputs = (TensorSpec("x", datatype, dims),)
    return Signature("m", max_batch_size, inputs, (TensorSpec("y", FP32, (1,)),))


LIGHT, HEAVY = BUDGET // 4, 3 * BUDGET


def learned(sizes: Sizes, size: Size, cost: int, times: int = 8) -> bool:
    """Run a size on the thread; True if it may run on the loop then."""
    for _ in range(times):
        sizes.ran(size, cost, None, failed=False)
    return sizes.light(size)


def test_sizes_that_were_measured_are_light() -> None:
    sizes = Sizes((8, 1, 3), BUDGET)
    assert sizes.light((8, 1, 3))
    assert sizes.light((1, 1, 3))
    assert not sizes.light((9, 1, 3))
    assert not sizes.light((1, 2, 3))
    assert not learned(sizes, (1, 100, 3), LIGHT, times=7)
    assert learned(sizes, (1, 100, 3), LIGHT, times=1)
    assert sizes.light((1, 99, 3))
    assert not sizes.light((2, 100, 3))
    assert not learned(sizes, (1, 200, 3), HEAVY, times=1_000)
    assert not Sizes(None, BUDGET).light((1,))


def test_one_overrun_ends_a_size_for_good() -> None:
    sizes = Sizes((1, 1), BUDGET)
    assert learned(sizes, (1, 100), LIGHT)
    assert learned(sizes, (4, 10), LIGHT)
    sizes.ran((1, 50), HEAVY, HEAVY, failed=False)
    for size in ((1, 50), (1, 100), (2, 60)):
        assert not learned(sizes, size, LIGHT, times=2_000)
    assert sizes.light((1, 1))
    assert sizes.light((4, 10))
    assert learned(sizes, (8, 40), LIGHT)
    sizes.ran((1, 1), HEAVY, HEAVY, failed=True)  # a failure takes time, too
    assert not sizes.light((1, 1))


def test_a_run_that_others_have_interrupted_is_no_overrun() -> None:
    sizes = Sizes((1, 1), BUDGET)
    sizes.ran((1, 1), 15 * BUDGET, LIGHT, failed=False)
    assert sizes.light((1, 1))
    sizes.ran((1, 1), 25 * BUDGET, LIGHT, failed=False)  # it has slept, or the machine is hopeless
    assert not sizes.light((1, 1))


def test_failures_on_the_thread_teach_nothing() -> None:
    sizes = Sizes(None, BUDGET)
    for _ in range(100):
        sizes.ran((1,), LIGHT, None, failed=True)
    assert not sizes.light((1,))


def test_clients_cannot_fill_the_memory_with_sizes() -> None:
    sizes = Sizes((1, 1), BUDGET)
    for number in range(2, 300):  # each larger in one axis and smaller in the other
        assert learned(sizes, (number, 300 - number), LIGHT)
    assert not sizes.light((2, 298))
    for number in range(2, 300):
        sizes.ran((number, 300 - number), HEAVY, HEAVY, failed=False)
    assert not learned(sizes, (1, 1), LIGHT)  # it has been wrong too often


RUNS = st.tuples(
    st.tuples(st.integers(1, 5), st.integers(1, 5)), st.sampled_from([LIGHT, BUDGET, HEAVY])
)


@given(st.lists(RUNS, max_size=200))
def test_a_size_overruns_once_at_most(runs: list[tuple[Size, int]]) -> None:
    sizes, overrun = Sizes((1, 1), BUDGET), set[Size]()
    for size, cost in runs:
        inline = sizes.light(size)
        assert not (
            inline and any(known[0] <= size[0] and known[1] <= size[1] for known in overrun)
        )
        sizes.ran(size, cost, cost if inline else None, failed=False)
        if inline and cost == HEAVY:
            overrun.add(size)


@pytest.mark.parametrize(
    ("declared", "sized"),
    [
        (signature(64, 4), False), (signature(0, 4), False), (signature(64, -1), True),
        (signature(0, -1), True), (signature(2**31 - 1, 4), True),  # more rows than are measured
    ],
)  # fmt: skip
def test_models_of_any_size(declared: Signature, sized: bool) -> None:
    assert (sizes_of(declared, 0) is not None) is sized


class Recorder(LoadedModel):
    """A model that records the shapes of its runs and fails from `limit` rows on.

    Its first run takes `first` seconds.
    """

    def __init__(self, limit: float = float("inf"), first: float = 0) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._limit = limit
        self._first = first

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        if not self.shapes:
            sleep(self._first)
        self.shapes.append(inputs["x"].shape)
        if inputs["x"].shape[0] >= self._limit:
            raise MemoryError
        return []


@pytest.mark.parametrize(
    ("declared", "rows"),
    [
        (signature(0, 4), 1),
        (signature(1, 4), 1),
        (signature(64, 4), 64),
        (signature(64, -1, 224, 224, 3), 64),
        (signature(4096, 4), 4096),
        (signature(2**31 - 1, 4), 4096),
        (signature(2**31 - 1, 1 << 20), 15),  # 64 MiB by 4 MiB and an output
        (signature(2**31 - 1, 1 << 20, datatype=TEXT), 1),
        (signature(64, 1 << 24), 1),  # 64 MiB alone
        (signature(64, 1 << 24, 2), 0),
        (signature(0, 2**62, 2**62), 0),
    ],
)
def test_measured_row_counts(declared: Signature, rows: int) -> None:
    assert largest_batch(declared) == rows


def test_one_row_and_the_largest_batch_are_run() -> None:
    model = Recorder()
    assert measure(model.infer, signature(8, -1, 2)) < float("inf")
    assert set(model.shapes) == {(1, 1, 2), (8, 1, 2)}
    # A slow first run is not conclusive.
    slow = Recorder(first=0.1)
    assert measure(slow.infer, signature(8, 2)) < 100_000_000
    assert (8, 2) in slow.shapes


@pytest.mark.slow
def test_one_run_that_takes_a_second_is_enough() -> None:
    model = Recorder(first=1.1)
    assert measure(model.infer, signature(8, 2)) > 1_000_000_000
    assert model.shapes == [(1, 2)]


def test_a_model_that_cannot_be_measured_is_too_heavy() -> None:
    model = Recorder()
    assert measure(model.infer, signature(0, 2**62, 2**62)) == float("inf")
    assert model.shapes == []
    model = Recorder(limit=8)
    assert measure(model.infer, signature(8, 2)) == float("inf")
    assert model.shapes[-1] == (8, 2)
