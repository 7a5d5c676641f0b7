"""Limits and garbage collection of a process."""

import gc
import subprocess
import sys
from collections.abc import Mapping

from headrace.core.process import collect_young

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


def test_pieces_of_work_are_followed_by_collections_of_what_they_have_made() -> None:
    """However many objects have been freed meanwhile; not with the collector off."""
    collected: list[int] = []

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop":
            collected.append(info["generation"])

    before = gc.isenabled()
    gc.callbacks.append(note)
    try:
        for enabled, expected in ((False, 0), (True, 8)):
            gc.disable()
            collected.clear()
            for _ in range(64):
                if enabled:
                    gc.enable()
                collect_young(32)
                gc.disable()
            assert len(collected) == expected
    finally:
        gc.callbacks.remove(note)
        if before:
            gc.enable()
    assert 0 < sum(collected) < len(collected)  # some are of those that survived others
