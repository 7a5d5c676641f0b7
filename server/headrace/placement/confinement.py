"""Confinement of a process before it executes a model: user, files, processes and capabilities.

A `Confinement` is carried out by `headrace.workers.confine`, in the new process, except for the
user, which the fork changes. The server needs capabilities for another user's processes; root has
them, unless its container has taken them.
"""

import json
import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headrace.core.model_spec import IsolationOptions
from headrace.workers.landlock import LEAST_ABI, SIGNAL_ABI, abi
from headrace.workers.limits import WorkerLimits

_PACKAGES = Path(__file__).parents[2]
_BOOT = (
    "import sys,types;"
    "m=types.ModuleType('headrace');m.__path__=[sys.argv[1]+'/headrace'];sys.modules['headrace']=m;"
    "from headrace.workers.confine import main;main(sys.argv[2],sys.argv[3:])"
)
_CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7,
}  # fmt: skip
_LARGEST_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class WorkerUser:
    """A user of this system, or a number, that models run as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "WorkerUser":
        """A user by name, or `UID:GID`; raises `ValueError` if there is none, or it is root."""
        uid, colon, gid = text.partition(":")
        if colon and uid.isdecimal() and gid.isdecimal():
            found = cls(text, int(uid), int(gid), (int(gid),))
            if max(found.uid, found.gid) > _LARGEST_ID:
                raise ValueError(f"numbers are at most {_LARGEST_ID}, got {text!r}")
        else:
            try:
                known = pwd.getpwnam(text)
            except KeyError:
                raise ValueError(
                    f"expected a user of this system, or UID:GID, got {text!r}"
                ) from None
            groups = tuple(os.getgrouplist(text, known.pw_gid))
            found = cls(text, known.pw_uid, known.pw_gid, groups)
        if found.uid == 0 or 0 in (found.gid, *found.groups):
            raise ValueError(f"{text!r} is root, or of its group, which isolates nothing")
        if found.uid == os.geteuid():
            raise ValueError(f"{text!r} is the server's own user, which isolates nothing")
        return found

    def problem(self) -> str:
        """The reason why this process cannot run others as this user; "" for none."""
        lacking = [name for name, number in _CAPABILITIES.items() if not _has(number)]
        if not lacking:
            return ""
        return (
            f"the server cannot run models as user {self.name!r}: it lacks {', '.join(lacking)};"
            " run it as root, or give it these capabilities"
        )


def _has(number: int) -> bool:
    with open("/proc/self/status", "rb") as file:
        [effective] = [line for line in file if line.startswith(b"CapEff:")]
    return bool(int(effective.split()[1], 16) >> number & 1)


@dataclass(frozen=True, slots=True)
class Confinement:
    """Restrictions of a process, which has a scratch directory of `scratch_bytes` at most.

    With `sandbox` it may read `readable` paths, besides the system's programs and libraries, and
    write to `writable` ones and its scratch directory, and nowhere else. `needed` are files that it
    has to be able to read.
    """

    user: WorkerUser | None = None
    sandbox: bool = False
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    scratch_bytes: int = 0

    def command(self, scratch: Path, command: Sequence[str]) -> list[str]:
        """The command that confines itself, and then executes `command`."""
        given = json.dumps(
            {
                "sandbox": self.sandbox,
                "readable": self.readable,
                "writable": (*self.writable, str(scratch)),
                "needed": self.needed,
                "limits": self.limits.encode(),
            }
        )
        return [sys.executable, "-I", "-S", "-c", _BOOT, str(_PACKAGES), given, *command]

    def variables(self, scratch: Path) -> Mapping[str, str]:
        """Environment variables that differ."""
        user = {} if self.user is None else {"USER": self.user.name}
        return {"TMPDIR": str(scratch), "HOME": str(scratch), **user}

    @property
    def identity(self) -> Mapping[str, Any]:
        """Arguments of `Popen` for the user."""
        user = self.user
        if user is None:
            return {}
        return {"user": user.uid, "group": user.gid, "extra_groups": user.groups}


@cache
def _abi() -> int:
    return abi()


def sandbox_problem() -> str:
    """The reason why this kernel cannot restrict access to files; "" for none."""
    found = _abi()
    if found >= LEAST_ABI:
        return ""
    has = f"only version {found} of Landlock" if found else "no Landlock, or has it disabled"
    return f"the kernel has {has}; expected version {LEAST_ABI} or newer (Linux 6.2)"


def isolation_report(options: IsolationOptions) -> tuple[list[str], list[str]]:
    """Protections of models' processes by default, and missing ones, for the log.

    Raises `ValueError` if something that is required is not possible.
    """
    told, missing = [], []
    for user in map(WorkerUser.of, options.users):
        if problem := user.problem():
            raise ValueError(problem)
        told.append(f"user {user.name} ({user.uid})")
    if options.sandbox != "off":
        problem = sandbox_problem()
        if problem and options.sandbox == "required":
            raise ValueError(f"--worker-sandbox=required: {problem}")
        if problem:
            missing.append(f"models can reach all files that their user can: {problem}")
        else:
            told.append(f"Landlock {_abi()}")
            if _abi() < SIGNAL_ABI:
                missing.append(
                    "models can signal all processes of their user: the kernel has version"
                    f" {_abi()} of Landlock, expected {SIGNAL_ABI} or newer (Linux 6.12)"
                )
    for path in (*options.readable, *options.writable):
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError(f"--sandbox-read, --sandbox-write: there is no path {path!r}")
    return told, missing
