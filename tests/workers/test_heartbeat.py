"""A count that two ends share."""

import os
from time import monotonic, sleep

import pytest

from headrace.workers.heartbeat import BEAT_SECS, Heartbeat, beat


@pytest.mark.slow
def test_the_other_end_counts() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.count == 0
    beat(heartbeat.descriptor)
    deadline = monotonic() + 60 * BEAT_SECS
    while heartbeat.count < 3:
        assert monotonic() < deadline
        sleep(BEAT_SECS / 10)


def test_its_size_is_fixed() -> None:
    heartbeat = Heartbeat()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(heartbeat.descriptor, size)
    os.close(heartbeat.descriptor)
    heartbeat.close()
