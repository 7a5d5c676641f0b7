"""Isolation of this process from those that it starts: its environment variables, its memory.

A process sees the variables that are no secrets and that it has a use for (`passed_variables`).
Linux lets a process read another one's environment and memory, and trace it, if both are of the
same user, unless that one is "not dumpable". Whoever has CAP_SYS_PTRACE may nevertheless, so this
process gives that up for itself and for all that it starts: root's workers are held off, too.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_COMMON = (
    "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LC_*",
)  # fmt: skip
# Of linux/prctl.h and linux/capability.h.
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_VERSION_3 = 0x20080522
# With each of these, /proc/PID/environ and more can be read of what is not dumpable.
_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}


def passed_variables(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Variables that any program may see, and those whose names fit one of `patterns`."""
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
    """Keep processes of the same user from reading and tracing this one; it dumps no core either.

    Gives what the kernel has refused, with the reasons. To be called before there are threads: what
    they start keeps the capabilities otherwise. What this process starts can be read again once it
    runs a program of its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    problems = []
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        problems.append(f"cannot hide its memory from processes of its user: {_error()}")
    # First the bound on what any program that is run later can gain, then what is there now.
    for name, number in _CAPABILITIES.items():
        bound = libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1
        # Who is not root gains it by no program that does not make him root as well.
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
    """True if this process is kept from others."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0)


def _error() -> str:
    return os.strerror(ctypes.get_errno())
