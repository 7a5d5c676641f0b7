"""`headrace status`."""

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Headrace
from tests.models.onnx_graphs import identity, write_model
from tests.support.server_process import ServerProcess, clean_server


def test_a_healthy_server(
    command: Headrace, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_URL", server.url)
    ended = command("status", "--check")
    assert (ended.status, ended.err) == (0, "")
    assert "nothing is degraded" in ended.out
    assert "--max-admitted-requests" in ended.out
    assert f"http {server.url}" in ended.out
    assert any(line.startswith("storyteller 1 ready") for line in _squeezed(ended.out))
    assert any(line.startswith(f"server {server.pid}") for line in _squeezed(ended.out))
    assert command("status", "--json").document["server"]["ready"] is True


def test_tables_have_styles_on_a_terminal(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    ended = headrace("status")
    assert "\x1b[1m" in ended.out
    assert "\\x1b" not in ended.out


def test_a_model_that_cannot_be_loaded(command: Headrace, tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    write_model(tmp_path, "broken", b"no model")
    with clean_server(tmp_path, options=("--exit-on-error=false",)) as process:
        ended = command("status", f"--url={process.url}")
        assert ended.status == 0
        assert "models: 1 unavailable, 1 ready" in ended.out
        assert "  model broken" in ended.out
        assert command("status", "--check", f"--url={process.url}").status == 1


def _squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["status", "top"])
def test_an_address_of_grpc_is_refused_with_what_is_expected(command: Headrace, name: str) -> None:
    ended = command(name, "--url=grpc://127.0.0.1:8001")
    assert ended.status == 2
    text = "'grpc://127.0.0.1:8001' is of gRPC; commands ask over HTTP: expected the address of"
    assert f"{text} that door, such as http://127.0.0.1:8000" in ended.err
