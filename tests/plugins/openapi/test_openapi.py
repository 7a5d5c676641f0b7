"""The page at `/docs` in a browser: models are run there, also by clients with keys."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.plugins.access.keys import new_key
from tests.support.access_file import known_client
from tests.support.browser import Browser, browser
from tests.support.scrape import until
from tests.support.server_process import clean_server, onnx_examples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_a_model_is_tried(window: Browser, tmp_path: Path) -> None:
    with clean_server(onnx_examples(tmp_path)) as server:
        window.open(f"{server.url}/docs")
        window.await_text("Run digits")
        until(lambda: bool(window.text(".execute")), "the form of the first model")
        window.run("document.querySelector('.execute').click()")
        window.await_text("probabilities", ".live-responses-table")
        assert not window.messages()


def test_a_client_with_a_key(window: Browser, tmp_path: Path) -> None:
    """The models are described once it has given its key."""
    (models := tmp_path / "models").mkdir()
    onnx_examples(models)
    key = new_key()
    (tmp_path / "access.toml").write_text(known_client("all", key))
    with clean_server(models, options=(f"--access={tmp_path}/access.toml",)) as server:
        window.open(f"{server.url}/docs")
        window.await_text("Authorize")
        assert "Run digits" not in window.text()
        window.run("document.querySelector('.btn.authorize').click()")
        until(lambda: bool(window.text(".auth-container")), "the dialog")
        window.type(".auth-container input", key.key)
        window.run("document.querySelector('.auth-btn-wrapper .authorize').click()")
        window.await_text("Run digits")
        window.run("document.querySelector('.close-modal, .btn-done').click()")
        until(lambda: bool(window.text(".execute")), "the form of the first model")
        window.run("document.querySelector('.execute').click()")
        window.await_text("probabilities", ".live-responses-table")
