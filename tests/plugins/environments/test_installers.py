"""Which of uv and pip installs packages, and how uv is asked to do what pip does."""

import os
import sysconfig
from pathlib import Path

import pytest

from headrace.plugins.environments.build import StepFailed, find_uv, uv_arguments
from headrace.plugins.environments.requirements import Line

UNSET = {"PIP_USER": "0", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program of this name where scripts of the server's interpreter are."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": str(program.parent)}.__getitem__)
    return str(program)


@pytest.mark.parametrize(
    ("choice", "settings", "found"),
    [
        ("auto", {}, True),
        ("auto", {"PIP_NO_CACHE_DIR": "1"}, True),
        ("auto", {"PIP_INDEX_URL": "https://host/"}, False),
        ("auto", {"PIP_CONFIG_FILE": "/some/file"}, False),
        ("pip", {}, False),
        ("uv", {"PIP_INDEX_URL": "https://host/"}, True),
    ],
)
def test_what_installs(choice: str, settings: dict[str, str], found: bool, uv: str) -> None:
    assert find_uv(choice, UNSET | settings) == (uv if found else "")


def test_a_file_of_settings_has_pip_install(
    uv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip" / "pip.conf").write_text("")
    assert find_uv("auto", {"PIP_USER": "0"}) == ""


def test_no_uv(uv: str) -> None:
    Path(uv).unlink()
    assert find_uv("auto", UNSET) == ""
    with pytest.raises(StepFailed, match=r"headrace\[environments\]"):
        find_uv("uv", UNSET)


def test_arguments(tmp_path: Path) -> None:
    plain = [Line(text, text) for text in ("a==1", "--index-url https://host/")]
    usual = uv_arguments(plain, {"UV_CACHE_DIR": str(tmp_path)}, offline=False)
    assert "--no-cache" not in usual
    assert uv_arguments(plain, {"UV_CACHE_DIR": "/none"}, offline=False) == [*usual, "--no-cache"]
    assert uv_arguments(plain, {}, offline=True) == [*usual, "--no-cache", "--no-config"]
    given = ("--pre", "--prefer-binary", "--trusted-host h", "a==1 --hash=sha256:00")
    lines = [Line(text, text) for text in given]
    found = uv_arguments(lines, {"UV_CACHE_DIR": str(tmp_path)}, offline=False)
    more = ["--prerelease=allow", "--allow-insecure-host", "h", "--require-hashes"]
    assert found == [*usual, *more]
