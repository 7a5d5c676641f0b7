"""Resource limits of a worker, set by itself before large imports.

Not by its parent: Python code between fork and exec is unsafe in a process with threads.
"""

import os
import resource
from contextlib import suppress
from typing import NamedTuple

_EASIER_TO_KILL = 500  # OOM score above the server's
_EASIEST = 1000
_SCORE = "/proc/self/oom_score_adj"


class WorkerLimits(NamedTuple):
    """`nice` as for the command, `memory` in bytes of data, `files` open at once; 0 for none.

    `processes` counts all processes and threads of the same user, and does not hold for root;
    `file_bytes` is the size of a file that may be written.
    """

    nice: int = 0
    memory: int = 0
    files: int = 0
    processes: int = 0
    file_bytes: int = 0

    def encode(self) -> str:
        """The text that `apply_limits` takes."""
        return " ".join(map(str, self))


def apply_limits(text: str) -> None:
    """Apply these limits to this process and its children; none for an empty text."""
    if not text:
        return
    nice, memory, files, processes, file_bytes = map(int, text.split())
    # When memory runs out, the server should be killed last.
    with suppress(OSError, ValueError):
        with open(_SCORE) as file:
            own = int(file.read())
        with open(_SCORE, "w") as file:
            file.write(str(min(own + _EASIER_TO_KILL, _EASIEST)))
    if nice:
        os.nice(nice)
    if memory:
        # Not RLIMIT_AS: that counts reservations, which CUDA makes for whole devices, and mapped
        # files and shared memory.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    for kind, limit in (
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        _, most = resource.getrlimit(kind)
        if limit and (most == resource.RLIM_INFINITY or limit < most):
            resource.setrlimit(kind, (limit, limit))
