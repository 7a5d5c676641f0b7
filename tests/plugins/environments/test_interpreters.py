"""Python version specifiers, and discovery of interpreters."""

import os
import sys
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.environments.interpreters import (
    Interpreter,
    choose,
    own,
    probe,
    satisfies,
)


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("", True), (">=3.11", True), (">= 3.11.4 , < 4", True), (">3.11", True),
        (">3.11.4", False), ("<3.11", False), ("<=3.11", False), ("==3.11", False),
        ("==3.11.4", True), ("==3.11.*", True), ("!=3.11.*", False), ("!=3.11.5", True),
        ("~=3.10", True), ("~=3.11.3", True), ("~=3.10.0", False), (">=3.11,!=3.11.4", False),
    ],
)  # fmt: skip
def test_specifiers(requires: str, fits: bool) -> None:
    assert satisfies((3, 11, 4), requires) is fits


@pytest.mark.parametrize("requires", ["3.11", ">=3.x", "=>3", "~=3", ">=3.*", ">=3.11 <4"])
def test_invalid_specifiers(requires: str) -> None:
    with pytest.raises(ValueError, match=r"is no version specifier such as"):
        satisfies((3, 11, 4), requires)


def test_a_queried_interpreter_reports_the_same_as_ours() -> None:
    assert probe(sys.executable) == own()
    assert choose("") == own()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 1", "does not run as a Python interpreter"),
        ("echo text", "does not run as a Python interpreter"),
        ("""echo '["/p", "/p", [3, 9, 1]]'""", "is Python 3.9.1; expected 3.10 or newer"),
    ],
)
def test_programs_that_are_not_interpreters(script: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(LoadFailed, match=says) as caught:
        probe(str(path))
    assert str(tmp_path) not in caught.value.public


def test_the_newest_that_fits_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("python3.20", "[9, 2, 0]"), ("python3.19", "[9, 1, 0]")):
        path = tmp_path / name
        path.write_text(f"""#!/bin/sh\necho '["/p", "/r", {version}, "abi", false]'\n""")
        path.chmod(0o755)
    (tmp_path / "python3.18").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.18").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    assert choose(">=9") == Interpreter("/p", "/r", (9, 2, 0), "abi", False)
    assert choose("==9.1.*").version == (9, 1, 0)
    with pytest.raises(LoadFailed, match=r"requires Python >=10; .*there is Python 3\."):
        choose(">=10")
