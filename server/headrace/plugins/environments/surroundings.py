"""Environment variables of builds: those of uv, compilers and downloads."""

import configparser
import os
import sys
from collections.abc import Mapping

from headrace.core.errors import LoadFailed
from headrace.placement.child_process import passed_variables
from headrace.plugins.environments.cache import CANNOT_BE_BUILT

# Besides those of workers.
_PASSED = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSL_CLIENT_CERT",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "SSH_AUTH_SOCK", "GIT_SSH_COMMAND", "CC",
    "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "PYENV_ROOT", "PYENV_VERSION",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy",
)  # fmt: skip
# These would redirect the installation, or change it unlike the environment's key.
_ELSEWHERE = frozenset({
    "UV_SYSTEM_PYTHON", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_WORKING_DIR",
    "UV_VENV_CLEAR",
})  # fmt: skip
# The best version of all indexes, since those for pip often have parts of what there is.
_AS_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
# Where pip takes packages from, under uv's names.
_FROM_PIP = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT",
    "no-index": "UV_OFFLINE",
}  # fmt: skip
_PIP_FILES = (
    "/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf",
    f"{sys.prefix}/pip.conf",
)  # fmt: skip


def build_surroundings(environment: Mapping[str, str], offline: bool = False) -> dict[str, str]:
    """The environment variables of a build; `offline` leaves out settings of uv and pip.

    Raises `LoadFailed` for invalid files of pip.
    """
    if offline:
        return passed_variables(environment, _PASSED)
    found = passed_variables(environment, (*_PASSED, "PIP_*", "UV_*"))
    kept = {name: value for name, value in found.items() if name not in _ELSEWHERE}
    return _AS_PIP | _told_to_pip(environment) | kept


def _told_to_pip(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of pip, which uv does not read, so that no package comes from elsewhere."""
    named = environment.get("PIP_CONFIG_FILE", "")
    files = configparser.RawConfigParser()
    try:
        if named != os.devnull:
            files.read(map(os.path.expanduser, (*_PIP_FILES, named)), "utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise LoadFailed(f"pip's settings cannot be read: {error}", CANNOT_BE_BUILT) from error
    found = {}
    for name, known_to_uv in _FROM_PIP.items():
        value = environment.get(f"PIP_{name.upper().replace('-', '_')}")
        for section in ("install", "global"):
            value = value or files.get(section, name, fallback="")
        if value:
            found[known_to_uv] = ("," if name == "find-links" else " ").join(value.split())
    return found
