"""SIGHUP: settings, TLS files and repositories are read again, and nothing ends."""

import os
import pty
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.requests import infer
from tests.models import onnx_graphs
from tests.support.busy_model import write_busy_model
from tests.support.raw_clients import get
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

TLS = Path(__file__).parents[1] / "support" / "tls"
DONE = "SIGHUP: settings and repositories were read again"


def add_model(root: Path, name: str) -> None:
    onnx_graphs.write_model(root, name, onnx_graphs.identity())


async def status(server: ServerProcess, model: str) -> int:
    return (await get(server.http, f"/v2/models/{model}/ready")).status


async def test_settings_and_repositories_are_read_again(tmp_path: Path) -> None:
    root, settings = tmp_path / "models", tmp_path / "settings.toml"
    write_busy_model(root)
    add_model(root, "old")
    settings.write_text("log-verbose = 0\n")
    with ServerProcess(root, options=[f"--config-file={settings}"]) as server:
        add_model(root, "new")
        shutil.rmtree(root / "old")
        settings.write_text("log-verbose = 2\nhttp-port = 1\nmax-request-bytes = 12345\n")
        server.send(signal.SIGHUP)
        server.await_logged(DONE)
        assert "SIGHUP: changed: --log-verbose" in server.log
        # The port is given on the command line, which takes precedence.
        assert "SIGHUP: in effect after a restart only: --max-request-bytes\n" in server.log
        server.await_logged("loaded new version 1")
        server.await_logged("unloaded old version 1")
        assert "loaded busy version 1 again" not in server.log
        assert await infer(server, "busy", 3) == 3
        assert [await status(server, name) for name in ("new", "old")] == [200, 503]
        assert server.stop() == 0


@pytest.mark.slow
async def test_unreadable_files_change_nothing(tmp_path: Path) -> None:
    root, settings = tmp_path / "models", tmp_path / "settings.toml"
    write_busy_model(root)
    settings.write_text("")
    with ServerProcess(root, options=[f"--config-file={settings}"]) as server:
        settings.write_text("log-verbos = 2\n")
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: settings stay as they are: settings file")
        assert "did you mean 'log-verbose'?" in server.log
        server.await_logged("SIGHUP: repositories were read again")
        root.rename(tmp_path / "elsewhere")
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: models stay as they are: model repository")
        (tmp_path / "models").mkdir()
        settings.write_text("")
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: models stay as they are: no models in")
        server.await_logged("SIGHUP: settings were read again")
        assert DONE not in server.log
        assert server.log.count("were read again") == 2  # nothing when nothing could be read
        assert await infer(server, "busy", 3) == 3
        assert server.stop() == 0


@pytest.mark.slow
async def test_clients_who_control_models_keep_their_choice(tmp_path: Path) -> None:
    write_busy_model(tmp_path)
    add_model(tmp_path, "other")
    options = ["--model-control-mode=explicit", "--load-model=busy"]
    with ServerProcess(tmp_path, options=options) as server:
        add_model(tmp_path, "new")
        config = tmp_path / "busy" / "config.pbtxt"
        config.write_text(config.read_text() + "\n# changed\n")
        server.send(signal.SIGHUP)
        server.await_logged(DONE)
        names = ("busy", "other", "new")
        assert [await status(server, name) for name in names] == [200, 503, 503]
        assert server.stop() == 0


@pytest.mark.parametrize("options", [
    (), pytest.param(("--frontends=2",), marks=pytest.mark.slow),
    pytest.param(("--grpc-transport=grpcio",), marks=pytest.mark.slow),
    pytest.param(("--frontends=2", "--grpc-transport=grpcio"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_certificate_is_renewed(tmp_path: Path, options: tuple[str, ...]) -> None:
    models, pem, key = tmp_path / "models", tmp_path / "server.pem", tmp_path / "server.key"
    add_model(models, "m")
    given = ["--grpc-use-ssl", f"--grpc-server-cert={pem}", f"--grpc-server-key={key}"]

    def put(name: str) -> str:
        shutil.copy(TLS / f"{name}.pem", pem)
        shutil.copy(TLS / f"{name}.key", key)
        return pem.read_text().strip()

    first = put("server")
    with ServerProcess(models, options=[*given, *options]) as server:
        host, _, port = server.grpc.rpartition(":")

        def shown() -> str:
            return ssl.get_server_certificate((host, int(port))).strip()

        assert shown() == first
        shutil.copy(TLS / "client.key", key)  # does not belong to the certificate
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: TLS files stay as they are")
        assert shown() == first
        second = put("client")
        server.send(signal.SIGHUP)
        server.await_logged(DONE)
        until(lambda: all(shown() == second for _ in range(8)), "the new certificate")
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_whose_terminal_is_gone_ends(tmp_path: Path) -> None:
    """A server in the foreground of a closed window would stay, and keep its ports."""
    add_model(tmp_path, "m")
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    repository = ["--model-repository", str(tmp_path)]
    command = [sys.executable, "-m", "headrace", "serve", *repository, *ports]
    log = tmp_path / "log"
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may be run by nohup
        with log.open("wb") as file:
            os._exit(subprocess.call(command, stderr=file))
    until(lambda: log.exists() and b"ready after" in log.read_bytes(), "a ready server")
    os.close(terminal)
    os.waitpid(pid, 0)
    until(lambda: b"stopped; every admitted request" in log.read_bytes(), "the end of the server")
