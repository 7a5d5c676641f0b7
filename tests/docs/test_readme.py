"""Commands of the README and of docs/ run, and their links are valid."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest

from headrace.cli import main
from headrace.cli.serve import BY_VALUE, WITHOUT_EFFECT
from headrace.settings import OPTIONS
from tests.docs.pages import BLOCK, ROOT, blocks
from tests.support.server_process import ServerProcess, examples

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "model_repository/**/*.md")
    for page in ROOT.glob(pattern)
)
COMMANDS = (
    "serve", "infer", "models list", "models load", "models unload", "models config",
    "models graph", "models stats", "models check", "models manifest", "models push", "models pull",
    "models promote", "models verify", "models sign", "models index",
    "environments prune", "status", "top",
    "run", "stubs", "consume", "certificates", "access key", "access check", "access list",
    "activator", "replay", "explain", "tune",
)  # fmt: skip
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(examples(tmp_path_factory.mktemp("examples"))) as running:
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_commands_give_the_documented_output(server: ServerProcess) -> None:
    asked = 0
    pages = [README, *(page.read_text("utf-8") for page in ROOT.glob("model_repository/*/*.md"))]
    found = (pair for page in pages for pair in pairwise([*BLOCK.findall(page), ("", "")]))
    for (kind, command), (form, said) in found:
        name = re.search(r"/models/(\w+)/", command)
        if kind != "sh" or name is None or not (ROOT / "model_repository" / name[1]).is_dir():
            continue  # no request, or one for a model of the page itself
        asked += 1
        command = command.replace("localhost:8000", server.http)
        ran = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
        if form == "json":
            assert json.loads(ran.stdout) == json.loads(said)
        elif form == "text":
            assert ran.stdout.strip() == said.strip()
    assert asked >= 8


def test_the_client_program_classifies_the_digit(server: ServerProcess) -> None:
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    program = blocks(README, "python")[0].replace("localhost:8001", server.grpc)
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert answer.stdout.strip() == "[[3]]"


def test_the_command_line_gives_the_documented_output(server: ServerProcess) -> None:
    asked = 0
    for (kind, command), (_, said) in pairwise(BLOCK.findall(README)):
        if kind != "sh" or not command.startswith(".venv/bin/headrace infer "):
            continue
        asked += 1
        words = [sys.executable, "-m", "headrace", *shlex.split(command)[1:], f"--url={server.url}"]
        ran = subprocess.run(words, capture_output=True, check=True, text=True)
        took = re.compile(r"[\d.]+ [mµ]s$", re.MULTILINE)
        assert took.sub("", ran.stdout) == took.sub("", said)
    assert asked == 1


def test_links_lead_to_files() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert "://" in target or (page.parent / target).exists(), (page, target)


def test_the_options_that_pages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    others = (
        "benchmarks.md",
        "from-others.md",
        "CONTRIBUTING.md",
    )  # these have options of other programs
    pages = [page for page in PAGES if page.name not in others]
    named = set(re.findall(r"`(--[a-z-]+)[`=]", "".join(p.read_text("utf-8") for p in pages)))
    known = {f"--{name}" for option in OPTIONS for name in (option.name, *option.aliases)}
    for words in COMMANDS:
        with pytest.raises(SystemExit):
            main([*words.split(), "--help"])
    known |= {*WITHOUT_EFFECT, *BY_VALUE}
    known |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert named <= known


def test_the_tests_that_pages_name_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"`((?:[a-z_]+/)+test_[a-z0-9_]+\.py)(?:::(test_[a-z0-9_]+))?`", text)
    assert len(named) > 50
    for path, test in named:
        file = ROOT / "tests" / path
        assert file.exists(), path
        assert not test or re.search(rf"def {test}\(", file.read_text("utf-8")), f"{path}::{test}"


def test_the_sources_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(named) > 40
    folders = ROOT / "server" / "headrace", ROOT / "tests"
    assert [n for n in named if not any((folder / n).exists() for folder in folders)] == []
