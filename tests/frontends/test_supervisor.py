"""How long a front end that has ended waits to be started again, and how many are started."""

import pytest

from headrace.frontends.supervisor import restart_delay
from headrace.settings import Settings


@pytest.mark.parametrize(
    ("early_ends", "seconds"),
    [(0, 0), (1, 0.1), (2, 0.2), (3, 0.4), (7, 6.4), (8, 10), (100, 10), (10**6, 10)],
)
def test_restart_delay(early_ends: int, seconds: float) -> None:
    assert restart_delay(early_ends) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("given", "cores", "count"),
    [
        ("0", 64, 0), ("3", 1, 3), ("auto", 1, 0), ("auto", 2, 0), ("auto", 3, 0), ("auto", 4, 2),
        ("auto", 8, 2), ("auto", 12, 3), ("auto", 16, 4), ("auto", 32, 8), ("auto", 256, 8),
    ],
)  # fmt: skip
def test_how_many(given: str, cores: int, count: int) -> None:
    assert Settings(frontends=given).frontend_count(cores) == count
