"""The number of started front ends."""

import pytest

from headrace.settings import Settings


@pytest.mark.parametrize(
    ("given", "cores", "count"),
    [
        ("0", 64, 0), ("3", 1, 3), ("auto", 1, 0), ("auto", 2, 0), ("auto", 3, 0), ("auto", 4, 2),
        ("auto", 8, 2), ("auto", 12, 3), ("auto", 16, 4), ("auto", 32, 8), ("auto", 256, 8),
    ],
)  # fmt: skip
def test_number_of_front_ends(given: str, cores: int, count: int) -> None:
    assert Settings(frontends=given).frontend_count(cores) == count
