"""Resource limits of a process after `apply_limits`."""

import json
import subprocess
import sys
from pathlib import Path

from headrace.workers.limits import WorkerLimits

_TELL = """
import json, os, resource, sys
from headrace.workers.limits import apply_limits
apply_limits(sys.argv[1])
print(json.dumps([
    os.nice(0),
    resource.getrlimit(resource.RLIMIT_DATA),
    resource.getrlimit(resource.RLIMIT_NOFILE),
    int(open("/proc/self/oom_score_adj").read()),
]))
"""


def applied(limits: WorkerLimits) -> list[object]:
    found = subprocess.run(
        [sys.executable, "-c", _TELL, limits.encode()], capture_output=True, check=True, text=True
    )
    result: list[object] = json.loads(found.stdout)
    return result


def test_limits_are_the_process_own() -> None:
    nice, data, files, score = applied(WorkerLimits(3, 512 << 20, 64))
    plain_nice, plain_data, plain_files, _ = applied(WorkerLimits())
    assert isinstance(plain_nice, int)
    assert nice == min(plain_nice + 3, 19)
    assert data == [512 << 20] * 2 != plain_data
    assert files == [64, 64] != plain_files
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert score == min(own + 500, 1000)
