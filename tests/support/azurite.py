"""Azure's emulator (Azurite, by `scripts/store_tools`) on 127.0.0.1, with one empty container."""

import base64
import hashlib
import hmac
import os
import re
import subprocess
from email.utils import formatdate
from pathlib import Path
from threading import Thread
from typing import Self

import httpx
import pytest

CONTAINER = "models"
ACCOUNT = "devstoreaccount1"
# The emulator's own, which is in its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PROGRAM = Path("build/stores/node_modules/.bin/azurite-blob")
_READY = re.compile(r"successfully listens on (http://127\.0\.0\.1:\d+)")


class Azurite:
    """The emulator, which keeps blobs in memory."""

    def __init__(self) -> None:
        if not _PROGRAM.exists():
            pytest.skip("Azurite is not here; scripts/store_tools fetches it")
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [str(_PROGRAM), "--inMemoryPersistence", "--disableTelemetry", "--blobPort=0",
             "--skipApiVersionCheck", "--silent=false"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := _READY.search(line):
                self.url = match[1]
                break
        # Its log is read, so that it never waits for a reader.
        self._reader = Thread(target=self._process.stdout.read, daemon=True)
        self._reader.start()
        self._make_container()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def environment(self) -> dict[str, str]:
        """Variables with which the emulator is found."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT": ACCOUNT,
            "AZURE_STORAGE_KEY": KEY,
        }

    def _make_container(self) -> None:
        """Make the container by a request with a shared key, for which the library has none."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        signed = hmac.new(
            base64.b64decode(KEY), f"PUT{chr(10) * 12}{named}{resource}".encode(), hashlib.sha256
        )
        signature = base64.b64encode(signed.digest()).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        url = f"{self.url}/{ACCOUNT}/{CONTAINER}?restype=container"
        httpx.put(url, headers=headers, trust_env=False, timeout=60).raise_for_status()


def use(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulator's address and key into the environment of this process."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
