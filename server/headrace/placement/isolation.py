"""Isolation of the server from its child processes: environment variables, and memory.

A child gets only variables that are not secret and that it needs (`passed_variables`). Linux lets a
process read the environment and memory of another one of the same user, and trace it, unless that
one is "not dumpable". Processes with CAP_SYS_PTRACE may do so nevertheless, so this process drops
that capability for itself and its children: this restricts root's workers, too.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_COMMON = (
    "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LC_*",
)  # fmt: skip
# From linux/prctl.h and linux/capability.h.
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_VERSION_3 = 0x20080522
# Each of these permits reading /proc/PID/environ and more of processes that are not dumpable.
_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}


def passed_variables(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Variables for any program, and those whose names match one of `patterns`."""
    every = (*_COMMON, *patterns)
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in every)
    }


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
