"""Azure's emulator (Azurite, by `scripts/store_tools`) on 127.0.0.1, with one empty container."""

import base64
import hashlib
import hmac
import os
from email.utils import formatdate
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.support.started import AnnouncedServer

CONTAINER = "models"
ACCOUNT = "devstoreaccount1"
# The emulator's own, which is in its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PROGRAM = Path("build/stores/node_modules/.bin/azurite-blob")


class Azurite(AnnouncedServer):
    """The emulator, which keeps blobs in memory."""

    def __init__(self) -> None:
        if not _PROGRAM.exists():
            pytest.skip("Azurite is not here; scripts/store_tools fetches it")
        options = ("--inMemoryPersistence", "--disableTelemetry", "--blobPort=0",
                   "--skipApiVersionCheck", "--silent=false")  # fmt: skip
        super().__init__([str(_PROGRAM), *options], "successfully listens on")

    def __enter__(self) -> Self:
        super().__enter__()
        self._make_container()
        return self

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
