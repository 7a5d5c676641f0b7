"""Cases found by the search: each is sent to a server, which takes no harm."""

from collections.abc import Iterator

import pytest

from benchmarks.hostile.found import FOUND
from benchmarks.hostile.search import Bench


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.whole)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    # Seldom: how soon health is answered is no question here, and the machine is busy.
    with Bench(None, request.param, every=0.1) as opened:
        yield opened


# Cases for servers with explicit model control follow the others, so that each kind shares one.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for explicit in (False, True) for name in FOUND if FOUND[name].explicit is explicit],
)
def test_found_case(bench: Bench, name: str) -> None:
    outcome = bench.send(FOUND[name])
    if outcome.ratio > 1:  # of a server of its own all that is charged is known, not samples
        outcome = bench.send(FOUND[name], fresh=True)
    assert outcome.alive
    assert outcome.ratio <= 1, outcome.missed()
    assert outcome.refused * 2 <= outcome.asked
