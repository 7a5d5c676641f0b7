"""Choice between uv and pip; commands of a build, and their leftovers."""

import logging
import os
import re
import sysconfig
from pathlib import Path

import psutil
import pytest

from headrace.plugins.environments.build import Progress, StepFailed, Steps, find_uv, uv_arguments
from headrace.plugins.environments.requirements import Line
from tests.support.scrape import until

UNSET = {"PIP_USER": "0", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program `uv` beside the scripts of the server's interpreter."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": str(program.parent)}.__getitem__)
    return str(program)


@pytest.mark.parametrize(
    ("choice", "settings", "found"),
    [
        ("auto", {}, True), ("auto", {"PIP_NO_CACHE_DIR": "1"}, True),
        ("auto", {"PIP_INDEX_URL": "https://host/"}, False),
        ("auto", {"PIP_CONFIG_FILE": "/some/file"}, False), ("pip", {}, False),
        ("uv", {"PIP_INDEX_URL": "https://host/"}, True),
    ],
)  # fmt: skip
def test_choice_of_the_installer(
    choice: str, settings: dict[str, str], found: bool, uv: str
) -> None:
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


def run(folder: Path, script: str, limit: float = 60, shell: str = "sh") -> str:
    """Run a script as a step of a build."""
    with (folder / "lock").open("w") as lock:
        steps = Steps(
            {"PATH": os.environ["PATH"]}, lock.fileno(), Progress("m", "1", "a test"), limit
        )
        return steps.run("it", [shell, "-c", script], folder)


def until_ended(process: int) -> None:
    """Wait until a killed process has ended."""

    def ended() -> bool:
        try:
            return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(ended, f"process {process} to end")


def test_the_last_lines_are_kept_without_secrets(tmp_path: Path) -> None:
    script = "seq 100; echo https://u:p@host/; echo >&2 error; exit 3"
    with pytest.raises(StepFailed) as caught:
        run(tmp_path, script)
    lines = str(caught.value).splitlines()
    assert lines[0] == "it failed with status 3:"
    assert lines[-2:] == ["https://***@host/", "error"]
    assert len(lines) == 16


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    script = "sleep 600 & echo $! > child; trap '' TERM; echo waiting; sleep 600"
    with pytest.raises(StepFailed, match=r"it was ended after 2 s; it said last:\nwaiting"):
        run(tmp_path, script, 2)
    until_ended(int((tmp_path / "child").read_text()))
    assert set(psutil.Process().children(recursive=True)) == before


def test_leftover_processes_of_a_command_are_ended(tmp_path: Path) -> None:
    run(tmp_path, "sleep 600 & echo $! > child")
    until_ended(int((tmp_path / "child").read_text()))
    with pytest.raises(StepFailed, match="cannot start /no/command: No such file"):
        run(tmp_path, "", shell="/no/command")


def test_progress_is_logged_at_start_and_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress("m", "1", "3 packages")
    for _ in range(100):
        progress.at("Collecting more")
    progress.done("5 packages")
    first, last = [record.getMessage() for record in caplog.records]
    assert first == "building the environment of m: 3 packages"
    assert re.fullmatch(r"built the environment of m in \d\.\d s: 5 packages", last)
