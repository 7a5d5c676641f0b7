"""Which of the server's environment variables those see that build environments.

More than workers: what pip, compilers and downloads are configured with. Of pip's settings those
are left out that would have it install somewhere else. Other variables may be secrets.
"""

import os
from collections.abc import Mapping

_PASSED = frozenset(
    {
        "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "SSH_AUTH_SOCK", "GIT_SSH_COMMAND",
        "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "PYENV_ROOT", "PYENV_VERSION",
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
        "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    }
)  # fmt: skip
_ELSEWHERE = frozenset(
    {
        "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN",
        "PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_EDITABLE", "PIP_REPORT", "PIP_LOG",
        "PIP_VERBOSE", "PIP_QUIET", "PIP_REQUIRE_VIRTUALENV", "PIP_IGNORE_INSTALLED",
    }
)  # fmt: skip


def build_surroundings(environment: Mapping[str, str], offline: bool = False) -> dict[str, str]:
    """What to start a build with; `offline` takes pip its configuration, files and all."""
    found = {
        name: value
        for name, value in environment.items()
        if name in _PASSED or name.startswith("LC_") or (not offline and _is_for_pip(name))
    }
    if offline:
        found["PIP_CONFIG_FILE"] = os.devnull
    return found | {"PIP_USER": "0", "PYTHONUNBUFFERED": "1"}


def _is_for_pip(name: str) -> bool:
    return name.startswith("PIP_") and name not in _ELSEWHERE
