"""Limits of a process, in one of its own."""

import subprocess
import sys

_PROGRAM = """
import resource
from pathlib import Path
from headrace.core.process import allow_many_files
soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
allow_many_files()
lines = Path("/proc/self/status").read_text().splitlines()
room = next(int(line.split()[1]) for line in lines if line.startswith("FDSize"))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most, room >= min(most, 65536))
"""


def test_the_table_of_descriptors_has_room_from_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]
