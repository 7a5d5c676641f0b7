"""A process that restricts itself by Landlock, beside the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.workers.landlock import SIGNAL_ABI, abi
from tests.support.isolation import needs_landlock

pytestmark = needs_landlock

_RESTRICTED = """
import ctypes, os, sys
from headrace.workers.landlock import restrict
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
restrict([sys.argv[1]], [sys.argv[2]])
try:
    exec(sys.argv[3])
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Directories to read from, and to write to."""
    found = [tmp_path / "read", tmp_path / "write"]
    for path in (*found, tmp_path / "secret"):
        path.mkdir()
        (path / "file").write_text("text")
    return [str(path) for path in found]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(open(sys.argv[1] + '/file').read())", "text"),
        ("open(sys.argv[1] + '/file', 'a')", "PermissionError"),
        ("os.truncate(sys.argv[1] + '/file', 0)", "PermissionError"),
        ("os.unlink(sys.argv[1] + '/file')", "PermissionError"),
        ("print(open(sys.argv[2] + '/file').read())", "text"),
        ("print(open(sys.argv[2] + '/new', 'w').write('x'))", "1"),
        ("os.mkdir(sys.argv[2] + '/d'); os.rename(sys.argv[2] + '/file', 'f')", "PermissionError"),
        (
            "os.mkdir(sys.argv[2] + '/d');"
            "print(os.rename(sys.argv[2] + '/file', sys.argv[2] + '/d/f'))",
            "None",
        ),
        ("os.mknod(sys.argv[2] + '/null', 0o20600, os.makedev(1, 3))", "PermissionError"),
        ("os.listdir(sys.argv[1] + '/..')", "PermissionError"),
        ("open(sys.argv[1] + '/../secret/file')", "PermissionError"),
        ("print(open('/dev/null', 'w').write('x'))", "1"),
        ("open('/dev/shm/headrace-test', 'w')", "PermissionError"),
        ("os.system('echo executed')", "executed"),
    ],
)
def test_files(folders: list[str], code: str, told: str) -> None:
    command = [sys.executable, "-c", _RESTRICTED, *folders, code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert ended.stdout.strip() == told


@pytest.mark.skipif(abi() < SIGNAL_ABI, reason=f"signals take Landlock {SIGNAL_ABI}")
def test_signals(folders: list[str]) -> None:
    code = "print(os.kill(os.getpid(), 0)); os.kill(os.getppid(), 0)"
    command = [sys.executable, "-c", _RESTRICTED, *folders, code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["None", "PermissionError"]


def test_a_path_that_does_not_exist(folders: list[str]) -> None:
    command = [sys.executable, "-c", _RESTRICTED, *folders[:1], "/nowhere", "print('restricted')"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    assert "FileNotFoundError: [Errno 2]" in ended.stderr
