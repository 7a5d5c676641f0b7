"""Limits of a worker on the machine: set by itself, before it imports anything large.

Not by what starts it: code of Python's between fork and exec is not safe in a process with threads.
"""

import os
import resource
from contextlib import suppress
from typing import NamedTuple

_EASIER_TO_KILL = 500  # than the server, for the kernel when memory runs out
_EASIEST = 1000
_SCORE = "/proc/self/oom_score_adj"


class Limits(NamedTuple):
    """`nice` as in the command, `memory` in bytes of data, `files` open at once; 0 for none."""

    nice: int = 0
    memory: int = 0
    files: int = 0

    def encode(self) -> str:
        """The text that `apply_limits` takes."""
        return f"{self.nice} {self.memory} {self.files}"


def apply_limits(text: str) -> None:
    """Live under these limits from now on; what this process starts does so, too."""
    nice, memory, files = map(int, text.split())
    # If memory runs out, the server should be the last to go.
    with suppress(OSError, ValueError):
        with open(_SCORE) as file:
            own = int(file.read())
        with open(_SCORE, "w") as file:
            file.write(str(min(own + _EASIER_TO_KILL, _EASIEST)))
    if nice:
        os.nice(nice)
    if memory:
        # Not RLIMIT_AS: that counts what is only reserved, which CUDA does for whole devices, and
        # what is mapped of files and shared memory.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
