"""Where requests of sequences go, and what is known afterwards."""

import pytest

from headrace.scheduling.upstreams import Ending, Pin, Way, after, way

HERE = Pin("here")
LOST = Pin(lost=True)


@pytest.mark.parametrize(
    ("pin", "start", "usable", "expected"),
    [
        (None, True, False, Way.ANY),
        (HERE, False, True, Way.PINNED),
        (HERE, False, False, Way.NOWHERE),
        (HERE, True, True, Way.PINNED),
        (HERE, True, False, Way.ANY),
        (LOST, False, False, Way.NOWHERE),
        (LOST, True, False, Way.ANY),
    ],
)
def test_ways(pin: Pin | None, start: bool, usable: bool, expected: Way) -> None:
    assert way(pin, start, usable) is expected


@pytest.mark.parametrize(
    ("pin", "end", "ending", "expected"),
    [
        (None, False, Ending.RUN, HERE),
        (None, True, Ending.RUN, None),
        (HERE, True, Ending.RUN, None),
        (LOST, False, Ending.RUN, HERE),
        (None, False, Ending.REFUSED, None),
        (HERE, True, Ending.REFUSED, HERE),
        (LOST, False, Ending.REFUSED, LOST),
        (None, False, Ending.UNSURE, LOST),
        (HERE, True, Ending.UNSURE, LOST),
    ],
)
def test_what_is_known_afterwards(
    pin: Pin | None, end: bool, ending: Ending, expected: Pin | None
) -> None:
    assert after(pin, "here", end, ending) == expected
