"""The wheel and the source archive hold the package, all of it and nothing else."""

import email
import os
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "server" / "headrace"
SHIPPED = {".py", ".pyi", ".binpb", ".typed"}

pytestmark = pytest.mark.slow


def sources() -> set[str]:
    """Every file of the package that users need, by its name in the wheel."""
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
    assert packed == sources()
    assert "headrace/py.typed" in packed


def test_console_script(wheel: ZipFile) -> None:
    entry_points = ConfigParser()
    entry_points.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"headrace": "headrace.cli:main"}


def test_metadata(wheel: ZipFile, metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in dist_info(wheel, "licenses/LICENSE")


def test_one_core_dependency_has_an_upper_bound(metadata: Message) -> None:
    """uvicorn, whose insides the fast path leans on; see tests/doors/http/test_server.py."""
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert core
    bounded = [line for line in core if "<" in line or "==" in line]
    assert [line.partition("<")[0] for line in bounded] == ["uvicorn"]


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
    assert {"LICENSE", "README.md", "pyproject.toml"} <= packed
    assert not any(name.startswith(("tests/", "model_repository/")) for name in packed)
