"""Commands of a build, and their leftovers."""

import logging
import os
import re
from pathlib import Path

import psutil
import pytest

from headrace.plugins.environments.build import BuildLog, StepFailed, Steps
from tests.support.scrape import until


def run(folder: Path, script: str, limit: float = 60, shell: str = "sh") -> str:
    """Run a script as a step of a build."""
    with (folder / "lock").open("w") as lock:
        steps = Steps(
            {"PATH": os.environ["PATH"]}, lock.fileno(), BuildLog("m", "1", "a test"), limit
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
    before = set(psutil.Process().children(recursive=True))  # those of earlier tests may end
    script = "sleep 600 & echo $! > child; trap '' TERM; echo waiting; sleep 600"
    with pytest.raises(StepFailed, match=r"it was ended after 2 s; it said last:\nwaiting"):
        run(tmp_path, script, 2)
    until_ended(int((tmp_path / "child").read_text()))
    assert not set(psutil.Process().children(recursive=True)) - before


def test_leftover_processes_of_a_command_are_ended(tmp_path: Path) -> None:
    run(tmp_path, "sleep 600 & echo $! > child")
    until_ended(int((tmp_path / "child").read_text()))
    with pytest.raises(StepFailed, match="cannot start /no/command: No such file"):
        run(tmp_path, "", shell="/no/command")


def test_progress_is_logged_at_start_and_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = BuildLog("m", "1", "3 packages")
    for _ in range(100):
        progress.at("Collecting more")
    progress.done("5 packages")
    first, last = [record.getMessage() for record in caplog.records]
    assert first == "building the environment of m: 3 packages"
    assert re.fullmatch(r"built the environment of m in \d\.\d s: 5 packages", last)
