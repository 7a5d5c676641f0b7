"""A headless Chromium, driven over WebDriver (W3C) by chromedriver; from Debian, or skipped."""

import base64
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.scrape import until

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the specification gives it
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Down": "\ue015", "Up": "\ue013", "Tab": "\ue004"}


class Browser:
    """One window. Elements are found by CSS selectors, the first that matches."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._http = httpx.Client(timeout=120)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        given = None if method == "GET" else json.dumps(body or {})
        answer = self._http.request(method, f"{self._session}{path}", content=given)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def close(self) -> None:
        """Close the window."""
        self._ask("DELETE", "")
        self._http.close()

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *given: object) -> Any:
        """Run a script in the page; `return` gives a value back."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(given)})

    def find(self, selector: str) -> str:
        """The id of an element, which must exist."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def click(self, selector: str) -> None:
        """Click as a user does: the element must be in view and not covered."""
        self._ask("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Type into an element; for a file's, paths."""
        self._ask("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def fill(self, selector: str, text: str) -> None:
        """Replace the value of a field or the choice of a list, as by the user."""
        self.run(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const kind of ['input', 'change'])"
            " field.dispatchEvent(new Event(kind, { bubbles: true }));",
            selector, text,
        )  # fmt: skip

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        steps = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        board = {"type": "key", "id": "keyboard", "actions": steps}
        self._ask("POST", "/actions", {"actions": [board]})

    def text(self, selector: str = "body") -> str:
        """The visible text of an element; "" if there is none."""
        found = self.run(
            "return document.querySelector(arguments[0])?.innerText ?? ''",
            selector,
        )
        return str(found)

    def await_text(self, text: str, selector: str = "body") -> None:
        """Wait until an element has a text."""
        until(lambda: text in self.text(selector), f"{text!r} in {selector}", 60)

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme of the page: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._ask("POST", "/goog/cdp/execute", command)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def screenshot(self, file: Path) -> None:
        """Write what is in view as a PNG."""
        file.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def messages(self) -> list[str]:
        """Errors of scripts and refused resources since the last call."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in found if each["level"] == "SEVERE"]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in `folder`; the test is skipped without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium-driver)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--window-size=1400,900", "--hide-scrollbars", f"--user-data-dir={folder}",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
    ]  # fmt: skip
    options = {"binary": chromium, "args": arguments}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    with subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: _is_up(url), "chromedriver", 60)
            answer = httpx.post(
                f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120
            )
            value = answer.json()["value"]
            assert answer.status_code == 200, value
            window = Browser(f"{url}/session/{value['sessionId']}")
            try:
                yield window
            finally:
                window.close()
        finally:
            process.terminate()


def _is_up(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/status").json()["value"]["ready"])
    except httpx.HTTPError:
        return False
