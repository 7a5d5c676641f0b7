"""A real S3 server (moto) in a process of its own, and a proxy before it that can misbehave."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any, Self
from urllib.parse import quote

import httpx
import pytest

from headrace.cli.program import main
from headrace.plugins.stores.contents import PART
from tests.models.onnx_graphs import identity, write_model
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.started import AnnouncedServer
from tests.support.stub_server import StubRequest, StubResponse, StubServer

BUCKET = "models"
_SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=somebody/20260101/us-east-1/s3/aws4_request",
    "x-amz-acl": "public-read",
}
SECRET = "a-key-that-nobody-may-see"


class ObjectStore(AnnouncedServer):
    """The server, with one empty bucket. `url` is its address."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        super().__init__(command, "Running on")

    def __enter__(self) -> Self:
        super().__enter__()
        self._ask("PUT", "")  # which makes the bucket
        return self

    def _ask(self, method: str, key: str, content: bytes = b"") -> None:
        url = f"{self.url}/{BUCKET}/{quote(key)}"
        httpx.request(
            method, url, content=content, headers=_SIGNED, timeout=60, trust_env=False, verify=False
        ).raise_for_status()

    def put(self, key: str, content: bytes) -> None:
        """Write an object."""
        self._ask("PUT", key, content)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._ask("DELETE", key)

    def put_directory(self, directory: Path, prefix: str) -> None:
        """Write all files below a directory."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())

    def environment(self, url: str = "") -> dict[str, str]:
        """Variables with which the server, or a proxy before it, is found."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


# What is done with a response: its path with the query, status, headers and body.
Change = Callable[[str, int, Mapping[str, str], bytes], tuple[int, bytes]]


def unchanged(path: str, status: int, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    return status, body


class MisbehavingProxy(StubServer):
    """Passes requests on, and changes responses by `change`.

    `asked` are the paths and ranges of requests so far. While `let_go` is not set, responses wait.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(self._pass_on)
        self.change: Change = unchanged
        self.asked: list[tuple[str, str]] = []
        self.let_go = Event()
        self.let_go.set()
        self._behind = store.url.removeprefix("http://")

    def _pass_on(self, request: StubRequest) -> StubResponse:
        path, given = request.path, request.headers
        self.asked.append((path, given.get("Range", "")))
        connection = HTTPConnection(self._behind, timeout=60)
        connection.request(request.method, path, request.body or None, dict(given))
        answer = connection.getresponse()
        headers = dict(answer.getheaders())
        status, body = self.change(path, answer.status, headers, answer.read())
        connection.close()
        self.let_go.wait(60)
        own = ("content-length", "transfer-encoding", "connection")  # of this connection
        return status, {n: v for n, v in headers.items() if n.lower() not in own}, body

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        super().__exit__()


class HeldDownload:
    """A server that is bringing the model `m` from `address`, half of which is here."""

    def __init__(self, server: ServerProcess, address: str, go: Event, loading: Future[Any]):
        self.server = server
        self.address = address
        self._go = go
        self._loading = loading

    def downloads(self) -> list[dict[str, Any]]:
        """The downloads of the server's status."""
        found = httpx.get(f"{self.server.url}/v2/status", trust_env=False).json()["downloads"]
        return list(found)

    def let_go(self) -> int:
        """Let the rest come; returns the status of the load request."""
        self._go.set()
        return int(self._loading.result().status_code)


@contextmanager
def held_download(site: ObjectStore, folder: Path) -> Iterator[HeldDownload]:
    """A load whose second part is held back by a proxy, until it is let go."""
    model = write_model(folder / "site", "m", identity())
    (model / "1" / "weights").write_bytes(bytes(2 * PART))
    with pytest.raises(SystemExit) as indexed:
        main(["models", "index", str(folder / "site")])
    assert indexed.value.code == 0
    site.put_directory(folder / "site", "held")
    go = Event()

    def hold(path: str, status: int, headers: Any, body: bytes) -> tuple[int, bytes]:
        if any(str(value).startswith(f"bytes {PART}-") for value in headers.values()):
            go.wait(60)
        return status, body

    options = (f"--store-cache={folder / 'cache'}", "--model-control-mode=explicit")
    with MisbehavingProxy(site) as proxy:
        proxy.change = hold
        address = f"{proxy.url}/{BUCKET}/held"
        with clean_server(address, options=options) as server, ThreadPoolExecutor(1) as pool:
            load = f"{server.url}/v2/repository/models/m/load"
            loading = pool.submit(httpx.post, load, timeout=120, trust_env=False)
            held = HeldDownload(server, address, go, loading)
            try:
                until(lambda: any(d["fetched_bytes"] > PART for d in held.downloads()), "a part")
                yield held
            finally:
                go.set()
