"""Confines this process, and then executes a command in its place, such as a worker's interpreter.

A program of its own, run by the server's interpreter: a model's may be the model's own file, and
could leave out what it were asked to do. The user has changed before. What cannot be done is told
on the last line of the output, and the exit status is `REFUSED`.
"""

import ctypes
import json
import os
import sys
from typing import Any, NoReturn

from headrace.workers.landlock import restrict
from headrace.workers.limits import apply_limits

REFUSED = 78  # as EX_CONFIG
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT = 38, 24, 47
_CLEAR_ALL = 4
_MOST_CAPABILITIES = 64
_VERSION_3 = 0x20080522


def main(given: str, command: list[str]) -> NoReturn:
    """Confine the process by `given`, see `Confinement`, and execute a command."""
    try:
        _confine(json.loads(given), command[0])
        os.execv(command[0], command)
    except OSError as error:
        _refuse(f"{command[0]}: {error.strerror}")


def _confine(given: dict[str, Any], program: str) -> None:
    readable, writable = given["readable"], given["writable"]
    for path in (*readable, *writable):
        if not os.path.exists(path):
            _refuse(f"there is no {path}, or {_who()} cannot reach it")
    for path in given["needed"]:
        if not os.access(path, os.R_OK):
            _refuse(f"{_who()} cannot read {path}")
    if not os.access(program, os.X_OK):
        _refuse(f"{_who()} cannot execute {program}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        _refuse(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    apply_limits(str(given["limits"]))
    if given["sandbox"]:
        try:
            restrict(readable, writable)
        except OSError as error:
            _refuse(f"Landlock: {error.strerror}")
    _give_up_capabilities(libc)


def _give_up_capabilities(libc: ctypes.CDLL) -> None:
    """Give up all capabilities, also for programs executed as root."""
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for number in range(_MOST_CAPABILITIES):  # an error past the last one, and without the right
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        _refuse(f"cannot give up its capabilities: {os.strerror(ctypes.get_errno())}")


def _who() -> str:
    return f"user {os.geteuid()} of group {os.getegid()}"


def _refuse(text: str) -> NoReturn:
    sys.stdout.flush()
    print(text, flush=True)
    os._exit(REFUSED)
