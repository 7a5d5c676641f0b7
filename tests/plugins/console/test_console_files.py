"""The files of the console: all from this server, safe, and of a bounded size."""

import asyncio
import re
from pathlib import Path

import pytest

from headrace.api.gate import Gate
from headrace.doors.http.app import create_app
from headrace.plugins import console
from tests.doors.fakes import FakeEngine
from tests.doors.http.asgi import ask
from tests.models.onnx_graphs import identity, write_model
from tests.support.http_socket import ask as ask_server
from tests.support.server_process import clean_server

FILES = sorted(console.FILES.iterdir())


def test_lines_of_the_console() -> None:
    scripts = [path.read_text("utf-8").count("\n") for path in FILES if path.suffix == ".js"]
    assert sum(scripts) <= 1_500
    folder = Path(console.__file__).parent
    assert sum(path.read_text("utf-8").count("\n") for path in folder.rglob("*.py")) <= 500


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    found = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert found <= {"http://www.w3.org/2000/svg"}
    for name in re.findall(r'(?:from|src=|href=)\s*"(?:\./|console/)([\w.]+)"', text):
        assert (console.FILES / name).exists(), name


@pytest.mark.parametrize("path", [each for each in FILES if each.suffix == ".js"], ids=str)
def test_names_never_become_html(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_the_page_has_no_inline_scripts_or_styles() -> None:
    page = (console.FILES / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", page)


def test_only_files_of_the_console_are_served(tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    with clean_server(tmp_path, options=("--frontends=1",)) as server:
        page = ask_server(server.http, "GET", "/console")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        for path in FILES:
            answer = ask_server(server.http, "GET", f"/console/{path.name}")
            if path.name == "index.html":
                assert answer.status == 404
                continue
            assert answer.body == path.read_bytes()
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert ask_server(server.http, "GET", "/console/").headers["location"] == "../console"
        for name in ("__init__.py", "..%2F__init__.py", "nothing.js"):
            assert ask_server(server.http, "GET", f"/console/{name}").status == 404


def test_head_requests() -> None:
    app = create_app(FakeEngine(), 1, Gate())  # type: ignore[arg-type]
    assert asyncio.run(ask(app, "HEAD", "/console")) == 200
