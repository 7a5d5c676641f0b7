"""Python interpreters of this machine: their properties, and the choice for a model."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from headrace.core.errors import LoadFailed
from headrace.plugins.environments.surroundings import build_surroundings

OLDEST = (3, 10)  # oldest Python for a worker
_NEWEST_MINOR = 20  # newest minor version that is searched for
_PROBE_SECS = 60.0
_UNFIT = "the model's interpreter cannot run it; the server's log says why"
# Valid in any Python, so that an old one is recognised as such.
_PROBE = """
import json, os, sys
told = [sys.executable, os.path.realpath(sys.executable), list(sys.version_info[:3])]
if told[2] >= [3, 10]:
    import sysconfig
    from importlib import util
    abi = "%s %s" % (sysconfig.get_config_var("SOABI"), sysconfig.get_platform())
    told += [abi, util.find_spec("numpy") is not None]
print(json.dumps(told))
"""
# Evaluated once, at import: two threads that first use `sysconfig` concurrently may get an
# incomplete result.
_ABI = f"{sysconfig.get_config_var('SOABI')} {sysconfig.get_platform()}"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter: `path` is its command, `real` the file with all links resolved.

    Compiled packages are compatible between interpreters with an equal `abi`.
    """

    path: str
    real: str
    version: tuple[int, ...]
    abi: str
    has_numpy: bool = True

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))}"


def own() -> Interpreter:
    """The server's own interpreter."""
    real = os.path.realpath(sys.executable)
    return Interpreter(sys.executable, real, tuple(sys.version_info[:3]), _ABI)


def probe(path: str) -> Interpreter:
    """Inspect an interpreter; raises `LoadFailed` if it cannot run workers."""
    try:
        ended = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECS,
            check=False, env=build_surroundings(os.environ, offline=True), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads(ended.stdout)
        executable, real, version = told[:3]
    except OSError as error:
        raise LoadFailed(f"cannot start {path}: {error.strerror}", _UNFIT) from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise LoadFailed(f"{path} does not run as a Python interpreter", _UNFIT) from error
    if tuple(version) < OLDEST:
        found, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST))
        raise LoadFailed(f"{path} is Python {found}; expected {oldest} or newer", _UNFIT)
    return Interpreter(executable, real, tuple(version), *told[3:])


def choose(requires: str) -> Interpreter:
    """The server's interpreter if it satisfies `requires`, else the newest one that does.

    Others are searched on the PATH, by their usual names. Raises `LoadFailed`.
    """
    mine = own()
    if satisfies(mine.version, requires):
        return mine
    found = [mine]
    for path in _on_path():
        try:
            candidate = probe(path)
        except LoadFailed:
            continue  # the file of that name is not a working interpreter
        if satisfies(candidate.version, requires):
            return candidate
        found.append(candidate)
    versions = ", ".join(dict.fromkeys(map(str, found)))
    raise LoadFailed(f"the model requires Python {requires}; on this machine there is {versions}")


def satisfies(version: tuple[int, ...], requires: str) -> bool:
    """True if a version satisfies a specifier such as `>=3.11,<4`.

    Raises `ValueError` for an invalid specifier.
    """
    try:
        return SpecifierSet(requires).contains(".".join(map(str, version)))
    except InvalidSpecifier:
        raise ValueError(f"{requires!r} is no version specifier such as '>=3.11'") from None


def _on_path() -> Iterator[str]:
    names = [f"python3.{minor}" for minor in range(_NEWEST_MINOR, OLDEST[1] - 1, -1)]
    for name in (*names, "python3", "python"):
        if path := shutil.which(name):
            yield path
