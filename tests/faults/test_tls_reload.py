"""TLS files that change while the server runs: new connections get them, and nothing fails."""

import os
import shutil
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models import onnx_graphs
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.tls_files import Authority, tls_options

DOORS = ("http", "grpc", "metrics")
FRONT_ENDS = pytest.param(("--frontends=2",), marks=pytest.mark.slow)
GRPCIO = pytest.param(("--grpc-transport=grpcio",), marks=pytest.mark.slow)
_RELOADS = 1000
_CLIENTS = 4
_BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    onnx_graphs.write_model(root, "m", onnx_graphs.identity())
    return root


def write(folder: Path, authority: Authority) -> str:
    """Write a new certificate and its key; returns the former."""
    folder.mkdir(exist_ok=True)
    certificate, key = authority.sign("server", ["localhost"])
    (folder / "server.pem").write_bytes(certificate)
    (folder / "server.key").write_bytes(key)
    return certificate.decode().strip()


def shown(server: ServerProcess, door: str) -> str:
    """The certificate that a door shows to a new client."""
    host, _, port = getattr(server, door).rpartition(":")
    return ssl.get_server_certificate((host, int(port))).strip()


def all_show(server: ServerProcess, certificate: str) -> bool:
    """True if every door shows that, each of several times: to any front end."""
    return all(shown(server, door) == certificate for door in DOORS * 6)


@pytest.mark.parametrize("options", [(), FRONT_ENDS, GRPCIO])
def test_files_are_swapped_by_links(tmp_path: Path, models: Path, options: tuple[str, ...]) -> None:
    """A mounted secret of Kubernetes: the files themselves are links that stay."""
    authority, mounted = Authority("swapped"), tmp_path / "mounted"
    mounted.mkdir()
    for name in ("server.pem", "server.key"):
        (mounted / name).symlink_to(f"..data/{name}")

    def swap(version: str) -> str:
        certificate = write(mounted / version, authority)
        (mounted / "..new").symlink_to(version)
        os.rename(mounted / "..new", mounted / "..data")
        return certificate

    first = swap("..1")
    given = [option for door in DOORS for option in tls_options(door, mounted)]
    with clean_server(models, options=[*given, *options]) as server:
        assert all_show(server, first)
        second = swap("..2")
        until(lambda: all_show(server, second), "the second certificate")
        shutil.rmtree(mounted / "..1")
        assert "stay as they are" not in server.log


def test_half_a_pair_is_reported_once(tmp_path: Path, models: Path) -> None:
    authority, folder = Authority("half"), tmp_path / "tls"
    first = write(folder, authority)
    given = [option for door in DOORS for option in tls_options(door, folder)]
    with clean_server(models, options=given) as server:
        certificate, key = authority.sign("next", ["localhost"])
        (folder / "server.pem").write_bytes(certificate)
        server.await_logged("TLS files stay as they are: --")
        assert all_show(server, first)
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: TLS files stay as they are: --")
        (folder / "server.key").write_bytes(key)
        until(lambda: all_show(server, certificate.decode().strip()), "the second certificate")
        lines = [line for line in server.log.splitlines() if "doors.server" in line]
        assert sum("stay as they are" in line for line in lines) == 1


def test_roots_are_replaced(tmp_path: Path, models: Path) -> None:
    """Connections of before go on; a new one needs a certificate of the new root."""
    folder = tmp_path / "tls"
    old, new = Authority("old"), Authority("new")
    write(folder, old)
    (folder / "root.pem").write_bytes(old.root)
    clients = {}
    for name, authority in (("old", old), ("new", new)):
        (tmp_path / name).write_bytes(b"".join(authority.sign("client")))
        clients[name] = ssl.create_default_context(cadata=old.root.decode())
        clients[name].load_cert_chain(tmp_path / name)

    with clean_server(models, options=tls_options("http", folder, mutual=True)) as server:
        url = f"https://localhost:{server.http.rpartition(':')[2]}/v2"

        def served(name: str) -> bool:
            try:
                return httpx.get(url, verify=clients[name]).status_code == 200
            except httpx.TransportError:
                return False

        with httpx.Client(verify=clients["old"]) as kept:
            assert kept.get(url).status_code == 200
            assert (served("old"), served("new")) == (True, False)
            (folder / "root.pem").write_bytes(new.root)
            until(lambda: served("new"), "the new root")
            assert not served("old")
            assert kept.get(url).status_code == 200


@pytest.fixture(params=[(), FRONT_ENDS])
def loaded(request: pytest.FixtureRequest, tmp_path: Path, models: Path) -> Iterator[ServerProcess]:
    """A server with TLS files in `tls`."""
    folder = tmp_path / "tls"
    authority = Authority("loaded")
    (tmp_path / "trusted.pem").write_bytes(authority.root)
    for number in range(2):
        write(tmp_path / str(number), authority)
    shutil.copytree(tmp_path / "0", folder)
    given = [option for door in ("http", "grpc") for option in tls_options(door, folder)]
    with clean_server(models, options=[*given, *request.param]) as server:
        yield server


@pytest.mark.slow
def test_a_thousand_reloads_under_load(loaded: ServerProcess, tmp_path: Path) -> None:
    """Clients that connect anew for each request, and such that do not: no request fails."""
    trusted = ssl.create_default_context(cafile=str(tmp_path / "trusted.pem"))
    base, over = f"https://localhost:{loaded.http.rpartition(':')[2]}", threading.Event()
    path, failures, counts = "/v2/models/m/infer", list[object](), [0] * _CLIENTS

    def ask(number: int) -> None:
        kept = httpx.Client(verify=trusted, base_url=base, timeout=60)
        try:
            while not over.is_set():
                answer = kept.post(path, content=_BODY)
                if answer.status_code != 200:
                    failures.append(answer.text)
                counts[number] += 1
                if number % 2:
                    kept.close()
                    kept = httpx.Client(verify=trusted, base_url=base, timeout=60)
        except httpx.HTTPError as error:
            failures.append(error)
        finally:
            kept.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    done = "changed TLS files are in effect"
    for number in range(1, _RELOADS + 1):
        for file in ("server.pem", "server.key"):
            new = tmp_path / "tls" / f"{file}.new"
            shutil.copy(tmp_path / str(number % 2) / file, new)
            new.replace(tmp_path / "tls" / file)
        loaded.send(signal.SIGHUP)
        until(lambda: loaded.log.count(done) >= number, f"reload {number}")  # noqa: B023
    over.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(counts) > 10
