"""`headrace completion`: valid scripts, and their completions in bash."""

import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.commands.completion import SHELLS
from tests.cli.conftest import Headrace
from tests.support.server_process import ServerProcess

# The shell's calls when Tab is pressed behind these words.
_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_shtab_headrace headrace "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts(command: Headrace, shell: str, tmp_path: Path) -> None:
    ended = command("completion", shell)
    assert (ended.status, ended.err) == (0, "")
    assert "headrace" in ended.out
    if shell not in ("bash", "zsh", "fish") or shutil.which(shell) is None:
        return  # no shell to read it
    script = tmp_path / "script"
    script.write_text(ended.out)
    subprocess.run([shell, "-n", script], check=True)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash."""
    path = tmp_path_factory.mktemp("completion") / "script"
    with path.open("w") as file, redirect_stdout(file), pytest.raises(SystemExit):
        main(["completion", "bash"])
    return path


@pytest.mark.parametrize(("words", "expected"), [
    ("headrace mod", ["models"]), ("headrace models un", ["unload"]),
    ("headrace infer --lay", ["--layout"]), ("headrace infer x --layout ", ["HWC", "CHW", "HW"]),
    ("headrace infer dig", ["digits"]),
    ("headrace models load simple_", ["simple_identity", "simple_string"]),
    ("headrace completion z", ["zsh"]),
    ("headrace serve --model-control-mode ", ["none", "poll", "explicit"]),
    ("headrace serve --reload f", ["false"]), ("headrace infer digits thr", ["three.png"]),
])  # fmt: skip
def test_completions_in_bash(
    script: Path, server: ServerProcess, tmp_path: Path, words: str, expected: list[str]
) -> None:
    (tmp_path / "three.png").touch()
    folder = Path(sys.executable).parent  # where the command is
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HEADRACE_URL": server.url}
    ran = subprocess.run(
        ["bash", "-c", _TAB, "bash", script, *words.split(" ")],
        capture_output=True, check=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert ran.stdout.split() == expected


def test_without_shtab(command: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    ended = command("completion", "bash")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "headrace completion: needs shtab: pip install 'headrace[cli]'\n"


def test_an_unknown_shell(command: Headrace) -> None:
    ended = command("completion", "csh")
    assert ended.status == 2
    assert "invalid choice: 'csh'" in ended.err
