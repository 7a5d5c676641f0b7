"""Versions of uvicorn that the fast path supports."""

import re
import tomllib
from pathlib import Path

import uvicorn

from headrace.doors.http.server import TESTED_UVICORN

_PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_no_uvicorn_is_installed_that_the_fast_path_was_not_tested_with() -> None:
    (first, (major, minor)) = TESTED_UVICORN
    allowed = f"uvicorn>={first[0]}.{first[1]},<{major}.{minor + 1}"
    assert allowed in tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]


def test_the_installed_uvicorn_is_a_tested_one() -> None:
    first, last = TESTED_UVICORN
    found = re.match(r"(\d+)\.(\d+)", uvicorn.__version__)
    assert found is not None
    assert first <= (int(found[1]), int(found[2])) <= last
