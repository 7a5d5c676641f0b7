"""`headrace certificates`: what it writes can be used, and an authority that is there is kept."""

import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.doors.tls import DoorTls, TlsFiles, dns_names
from tests.support.command import run


def write(folder: Path, *options: str) -> str:
    """Run the command, which succeeds; returns its output."""
    ran = run("certificates", str(folder), *options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_server_and_a_client(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    said = write(folder, "--name=models.internal", "--name=10.1.2.3", "--client=web")
    assert said.startswith("wrote root.key, root.pem, server.key, server.pem, web.key, web.pem in")
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
        f"{name}.{kind}": mode
        for name in ("root", "server", "web")
        for kind, mode in (("key", 0o600), ("pem", 0o644))
    }
    assert dns_names((folder / "server.pem").read_bytes()) == ["localhost", "models.internal"]
    files = TlsFiles(
        "http", [f"{folder}/server.pem"], [f"{folder}/server.key"], f"{folder}/root.pem", True
    )
    server = DoorTls(files).current()
    client = ssl.create_default_context(cafile=f"{folder}/root.pem")
    client.load_cert_chain(folder / "web.pem", folder / "web.key")
    for host in ("localhost", "models.internal", "10.1.2.3", "127.0.0.1", "::1"):
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(back, there, server_hostname=host),
            server.wrap_bio(there, back, server_side=True),
        )
        for end in (*ends, *ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        found = ends[1].getpeercert()
        assert found is not None
        assert found["subject"] == ((("commonName", "web"),),)


def test_the_root_is_kept(tmp_path: Path) -> None:
    write(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert write(tmp_path, "--days=3").startswith("wrote server.key, server.pem in")
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.key", "server.pem"}


@pytest.mark.parametrize(("options", "status", "text"), [
    (("--client=a/b",), 1, "expected a name that can be a file's, got 'a/b'"),
    (("--client=root",), 1, "expected a name that can be a file's, got 'root'"),
    (("--days=0",), 2, "expected days from 1 to 3650, got '0'"),
])  # fmt: skip
def test_wrong_usage(tmp_path: Path, options: tuple[str, ...], status: int, text: str) -> None:
    ran = run("certificates", str(tmp_path), *options)
    assert (ran.returncode, text in ran.stderr) == (status, True), ran.stderr


def test_half_an_authority(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "root.key").unlink()
    ran = run("certificates", str(tmp_path))
    assert ran.returncode == 1
    assert "root.pem is there, and root.key is not" in ran.stderr
    (tmp_path / "root.key").write_text("no key")
    ran = run("certificates", str(tmp_path))
    assert ran.returncode == 1
    assert "cannot be read" in ran.stderr


def test_without_the_library(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None; from headrace.cli import main;"
        f"main(['certificates', {str(tmp_path)!r}])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "needs cryptography: pip install 'headrace[certificates]'" in ran.stderr
