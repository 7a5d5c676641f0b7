"""Python interpreters of this machine: what they are, and which of them a model can have."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from operator import ge, gt, le, lt

from headrace.core.errors import LoadFailed
from headrace.placement.isolation import passed_variables

# Further variables that a build sees: more than workers, namely what pip, compilers and downloads
# are configured with. Of pip's those are left out that would have it install somewhere else.
_PASSED = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "NETRC", "SSH_AUTH_SOCK", "GIT_SSH_COMMAND", "CC", "CXX", "CFLAGS",
    "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "PYENV_ROOT", "PYENV_VERSION", "HTTP_PROXY", "HTTPS_PROXY",
    "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip
_ELSEWHERE = frozenset(
    {
        "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN",
        "PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_EDITABLE", "PIP_REPORT", "PIP_LOG",
        "PIP_VERBOSE", "PIP_QUIET", "PIP_REQUIRE_VIRTUALENV", "PIP_IGNORE_INSTALLED",
    }
)  # fmt: skip


def build_surroundings(environment: Mapping[str, str], offline: bool = False) -> dict[str, str]:
    """Environment variables of a build; `offline` takes pip its configuration, files and all."""
    found = passed_variables(environment, _PASSED if offline else (*_PASSED, "PIP_*"))
    if offline:
        found["PIP_CONFIG_FILE"] = os.devnull
    kept = {name: value for name, value in found.items() if name not in _ELSEWHERE}
    return kept | {"PIP_USER": "0", "PYTHONUNBUFFERED": "1"}


OLDEST = (3, 10)  # that a worker runs with
_NEWEST_MINOR = 20  # that is looked for
_PROBE_SECS = 60.0
_UNFIT = "the model's interpreter cannot run it; the server's log says why"
# Understood by any Python, so that an old one can be told from what is none.
_PROBE = """
import json, os, sys
told = [sys.executable, os.path.realpath(sys.executable), list(sys.version_info[:3])]
if told[2] >= [3, 10]:
    import sysconfig
    from importlib import metadata, util
    abi = "%s %s" % (sysconfig.get_config_var("SOABI"), sysconfig.get_platform())
    try:
        pip = metadata.version("pip")
    except metadata.PackageNotFoundError:
        pip = ""
    told += [abi, util.find_spec("numpy") is not None, pip]
print(json.dumps(told))
"""
# Looked up once, while the import lock is held: of two threads that ask `sysconfig` for the first
# time at once, one may get nothing.
_ABI = f"{sysconfig.get_config_var('SOABI')} {sysconfig.get_platform()}"
_ORDERS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<=": le,
    ">=": ge,
    "<": lt,
    ">": gt,
}
_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter: `path` is how it is started, `real` the file behind all links.

    Compiled packages of interpreters with an equal `abi` can be exchanged. `pip` is the version of
    its own pip, empty without one.
    """

    path: str
    real: str
    version: tuple[int, ...]
    abi: str
    has_numpy: bool = True
    pip: str = ""

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))}"

    @property
    def installs_elsewhere(self) -> bool:
        """Whether its pip can install into environments that have none, as from 22.3 on."""
        numbers = re.match(r"(\d+)\.(\d+)", self.pip)
        return numbers is not None and tuple(map(int, numbers.groups())) >= (22, 3)


def own() -> Interpreter:
    """The one that runs the server."""
    real = os.path.realpath(sys.executable)
    try:
        pip = metadata.version("pip")
    except metadata.PackageNotFoundError:
        pip = ""
    return Interpreter(sys.executable, real, tuple(sys.version_info[:3]), _ABI, True, pip)


def probe(path: str) -> Interpreter:
    """Ask an interpreter what it is; raises `LoadFailed` if it cannot run workers."""
    try:
        ended = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECS,
            check=False, env=build_surroundings(os.environ), stdin=subprocess.DEVNULL,
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
    """The server's own interpreter if it satisfies `requires`, else the newest that does.

    Others are looked for on the PATH, by the names that interpreters have. Raises `LoadFailed`.
    """
    mine = own()
    if satisfies(mine.version, requires):
        return mine
    found = [mine]
    for path in _on_path():
        try:
            candidate = probe(path)
        except LoadFailed:
            continue  # what stands there under that name runs nothing here
        if satisfies(candidate.version, requires):
            return candidate
        found.append(candidate)
    versions = ", ".join(dict.fromkeys(map(str, found)))
    raise LoadFailed(f"the model requires Python {requires}; on this machine there is {versions}")


def satisfies(version: tuple[int, ...], requires: str) -> bool:
    """Whether a version is one of those that a specifier such as `>=3.11,<4` means.

    Raises `ValueError` for one that cannot be read.
    """
    return all(_clause(version, text.strip()) for text in requires.split(",") if text.strip())


def _clause(version: tuple[int, ...], text: str) -> bool:
    match = _CLAUSE.fullmatch(text)
    operator, number, star = match.groups() if match else ("", "0", None)
    given = tuple(map(int, number.split(".")))
    if not operator or (star and operator not in ("==", "!=")):
        raise ValueError(f"{text!r} is no version specifier such as '>=3.11'")
    if operator == "~=" and len(given) < 2:
        raise ValueError(f"{text!r}: expected at least two numbers after '~='")
    asked = (*given, 0, 0, 0)[:3]
    begins = version[: len(given)] == given
    if operator in ("==", "!="):
        return (begins if star else version == asked) is (operator == "==")
    if operator == "~=":
        return version >= asked and version[: len(given) - 1] == given[:-1]
    return _ORDERS[operator](version, asked)


def _on_path() -> Iterator[str]:
    names = [f"python3.{minor}" for minor in range(_NEWEST_MINOR, OLDEST[1] - 1, -1)]
    for name in (*names, "python3", "python"):
        if path := shutil.which(name):
            yield path
