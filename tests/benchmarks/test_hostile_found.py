"""Cases found by the search: each is sent to a server, which takes no harm."""

import pytest

from benchmarks.hostile.found import FOUND
from benchmarks.hostile.search import Bench


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_found_cases(front_ends: int) -> None:
    with Bench(None, front_ends) as bench:
        for name, case in FOUND.items():
            outcome = bench.send(case)
            assert outcome.alive, name
            assert outcome.ratio <= 1, f"{name}: {outcome.missed()}"
            assert outcome.refused * 2 <= outcome.asked, name
