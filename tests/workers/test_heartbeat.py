"""A counter shared by two processes."""

import os
import select
import subprocess
import sys

import pytest

from headrace.workers.heartbeat import BEAT_SECS, Heartbeat, beat
from tests.support.scrape import until


@pytest.mark.slow
def test_the_other_end_counts() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.count == 0
    beat(heartbeat.descriptor)
    until(lambda: heartbeat.count >= 3, "three beats", 60 * BEAT_SECS)


def test_a_worker_ends_with_its_server() -> None:
    """Also during a computation."""
    worker = (
        "import time; from headrace.workers.heartbeat import Heartbeat, beat;"
        "beat(Heartbeat().descriptor, 0.1); print('begun', flush=True); time.sleep(600)"
    )
    server = (
        "import subprocess, sys;"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE);"
        "worker.stdout.readline(); print(worker.pid)"
    )
    made = subprocess.run([sys.executable, "-c", server], capture_output=True, check=True)
    try:
        descriptor = os.pidfd_open(int(made.stdout))
    except ProcessLookupError:
        return
    with open(descriptor) as process:
        assert select.select([process], [], [], 60)[0]


def test_the_size_of_the_counter_file_is_fixed() -> None:
    heartbeat = Heartbeat()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(heartbeat.descriptor, size)
    os.close(heartbeat.descriptor)
    heartbeat.close()
