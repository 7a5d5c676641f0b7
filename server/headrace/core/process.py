"""Limits, garbage collection, threads and privacy of engine and front ends, set at its start."""

import ctypes
import fcntl
import gc
import os
import resource
import sys
from contextlib import suppress

# Allocations between garbage collections, collections of the youngest objects between those of the
# next ones, and so on. Requests leave no cycles behind, so that the collector need not run often: a
# batch of 64 has a thousand live objects, more than trigger a collection by default. 7 500 objects
# at once take some 5 ms; all of those that a hostile client can keep alive take 100.
_COLLECT_AFTER = 2_500, 2, 10_000
_WORK = 256  # requests, of some twenty objects each, after which young objects are collected
_SWITCH_SECS = 0.001
_FILES = 1 << 16  # for which the table of descriptors has room from the start
# From linux/prctl.h and linux/capability.h.
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_VERSION_3 = 0x20080522
# Each of these permits reading /proc/PID/environ and more of processes that are not dumpable.
_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit.

    Connections, workers, mapped files and large tensors in transit each take descriptors. The
    process' table of descriptors, 8 bytes each, gets room for many at once: Linux doubles it as
    needed, and with several threads each step takes 20 to 50 ms of whoever opens the file.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_FILES, most) - 1))


def serve_promptly() -> None:
    """Set the garbage collector and the interpreter's lock for a process that serves requests.

    The event loop gives the lock up between callbacks, and then waits for a thread that decodes a
    request: up to 5 ms each time by default.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_SECS)


class _Young:
    """Work done since the collector has visited what was made lately, in this process."""

    done = 0

    def collect(self, work: int) -> None:
        """Note so many requests, or pieces of similar work, and visit what they have made."""
        self.done += work
        if self.done >= _WORK and gc.isenabled():
            self.done = 0
            gc.collect(1 if gc.get_count()[1] > _COLLECT_AFTER[1] else 0)


# For work that makes many objects. The collector counts objects made less those freed: while old
# requests end as new ones come, it would wait, and then visit a hundred thousand at once, for 50 to
# 90 ms.
collect_young = _Young().collect


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def make_private() -> list[str]:
    """Prevent processes of the same user from reading and tracing this one; disables core dumps.

    Linux lets a process read the environment and memory of another one of the same user, and trace
    it, unless that one is "not dumpable". Processes with CAP_SYS_PTRACE may do so nevertheless, so
    this process drops that capability for itself and its children: this restricts root's workers,
    too.

    Returns what the kernel refused, with the reasons. Call it before any thread starts: threads
    keep their capabilities otherwise. Child processes become readable again when they execute a
    program.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    problems = []
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        problems.append(f"cannot hide its memory from processes of its user: {_error()}")
    # First the bounding set for programs executed later, then the current capabilities.
    for name, number in _CAPABILITIES.items():
        bound = libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1
        # Other users gain it only by a program that makes them root.
        if bound and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) and os.geteuid() == 0:
            problems.append(f"cannot take {name} from what it starts: {_error()}")
    header, sets = _Header(_VERSION_3, 0), (_Set * 2)()
    if libc.capget(ctypes.byref(header), sets):
        return [*problems, f"cannot read its capabilities: {_error()}"]
    for number in _CAPABILITIES.values():
        of_word, kept = sets[number // 32], ~(1 << number % 32)
        of_word.effective &= kept
        of_word.permitted &= kept
        of_word.inheritable &= kept
    if libc.capset(ctypes.byref(header), sets):
        problems.append(f"cannot give up {', '.join(_CAPABILITIES)}: {_error()}")
    return problems


def is_private() -> bool:
    """True if this process is protected from reading."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0)


def _error() -> str:
    return os.strerror(ctypes.get_errno())
