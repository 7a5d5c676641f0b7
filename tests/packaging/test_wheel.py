"""The wheel and the source archive: complete, and without other files."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
from configparser import ConfigParser
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from headrace.core.plugins import OWN

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "server" / "headrace"
SHIPPED = {".py", ".pyi", ".binpb", ".typed", ".js", ".gz", ".txt", ".css", ".html"}
EXAMPLES = "headrace/example_models/"

pytestmark = pytest.mark.slow


def sources() -> set[str]:
    """Files of the package that users need, by their names in the wheel."""
    return {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in SHIPPED
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = "wheel --no-deps --no-build-isolation --no-index --quiet --wheel-dir"
    subprocess.run(
        [sys.executable, "-m", "pip", *command.split(), directory, REPO],
        check=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (path,) = directory.iterdir()
    assert path.name == "headrace-0.1.0-py3-none-any.whl"
    return ZipFile(path)


def dist_info(wheel: ZipFile, name: str) -> str:
    return wheel.read(f"headrace-0.1.0.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return email.message_from_string(dist_info(wheel, "METADATA"))


def test_wheel_holds_the_package_and_nothing_else(wheel: ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    examples = {name for name in packed if name.startswith(EXAMPLES)}
    assert packed - examples == sources()
    assert "headrace/py.typed" in packed
    assert f"{EXAMPLES}storyteller/1/corpus.txt" in examples
    assert not any(name.endswith("requirements.txt") for name in examples)


def test_examples_are_served_without_a_source_tree(wheel: ZipFile, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = ("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q")
    assert wheel.filename is not None
    subprocess.run([sys.executable, *install, wheel.filename], check=True)
    # Its dependencies are among the tests' packages; their own headrace is not, as it is editable.
    [site] = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(python.with_name("headrace")), "serve", "--example", "--http-port=0"]
    with subprocess.Popen(
        [*command, "--grpc-port=0", "--metrics-port=0"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            printed = ""
            while not re.search("^ready after", printed, re.MULTILINE):
                printed += server.stdout.readline() or pytest.fail(printed)
            assert "storyteller" in printed
            [url] = re.findall(r"^HTTP +(\S+)", printed, re.MULTILINE)
            tensor = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
            asked = {"inputs": [tensor | {"name": "INPUT0"}, tensor | {"name": "INPUT1"}]}
            body = json.dumps(asked).encode()
            with urllib.request.urlopen(f"{url}/v2/models/simple/infer", body) as answer:
                first, second = json.load(answer)["outputs"]
            assert (first["data"], second["data"]) == (list(range(0, 32, 2)), [0] * 16)
        finally:
            server.terminate()
    assert server.returncode == 0


def test_the_command_and_the_plugins_are_entry_points(wheel: ZipFile) -> None:
    entry_points = ConfigParser()
    entry_points.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"headrace": "headrace.cli:main"}
    declared = {group: dict(found) for group, found in entry_points.items() if "." in group}
    assert declared == {group: own for group, own in OWN.items() if own}


def test_metadata(wheel: ZipFile, metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in dist_info(wheel, "licenses/LICENSE")
    notice = "server/headrace/plugins/openapi/swagger_ui/NOTICE.txt"
    assert "SmartBear" in dist_info(wheel, f"licenses/{notice}")


def test_the_readme_has_no_broken_link(metadata: Message) -> None:
    """Relative links would be broken on a package index; see hatch_build.py."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert "](#walk-through-the-source)" in text
    assert re.findall(r"\]\((?!https?:|#)[^()\s]+\)", text) == []


def test_links_of_the_readme_lead_to_the_sources() -> None:
    url = "https://forge.invalid/headrace/blob/v1"
    ended = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"], cwd=REPO, check=True,
        env=os.environ | {"HEADRACE_SOURCE_URL": url}, stdout=subprocess.PIPE,
    )  # fmt: skip
    told = json.loads(ended.stdout)
    assert told["urls"]["Changelog"] == f"{url}/CHANGELOG.md"
    assert f"]({url}/docs/configuration.md)" in told["readme"]["text"]


# Runs the hook as if by an older Python, where the package cannot be imported.
OLDER = """
import sys, typing
from hatch_build import PackageMetadata
sys.version_info = (3, 10, 13, "final", 0)
del typing.Self
PackageMetadata(".", {}).update({"requires-python": ">=3.11"})
"""


def test_an_older_python_is_named_in_one_sentence() -> None:
    ended = subprocess.run([sys.executable, "-c", OLDER], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "headrace needs Python 3.11 or newer, this is 3.10.13\n"


def test_no_core_dependency_has_an_upper_bound(metadata: Message) -> None:
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert core
    assert [line for line in core if "<" in line or "==" in line] == []


def test_source_archive_builds_the_same_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path],
        cwd=REPO,
        check=True,
    )
    (path,) = tmp_path.iterdir()
    root = "headrace-0.1.0/"
    with tarfile.open(path) as archive:
        packed = {name.removeprefix(root) for name in archive.getnames()}
    assert {name for name in packed if name.startswith("server/")} == {
        f"server/{name}" for name in sources()
    }
    assert {"LICENSE", "README.md", "pyproject.toml", "hatch_build.py"} <= packed
    assert "model_repository/simple/1/model.onnx" in packed
    assert not any(name.startswith("tests/") for name in packed)
