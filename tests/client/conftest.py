"""A server with all its doors, and relays before it that speak TLS."""

import asyncio
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

TLS = Path(__file__).parents[1] / "support" / "tls"
SCHEMES = ("http", "https", "unix", "grpc", "grpcs", "grpc+unix")


# Of servers and engines alike.
OPTIONS: dict[str, Any] = {
    "model_control_mode": "explicit",
    "load_model": "*",
    "load_overrides": "config",
}


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each datatype, one that streams, and the small examples."""
    root = onnx_examples(tmp_path_factory.mktemp("client"))
    for datatype in Datatype:
        write_model(root, f"identity_{datatype}", identity(datatype, ["rows", "length"]))
    write_model(root, "narrow", identity(), "max_batch_size: 4")
    write_python_model(root, "teller", TELLER, TELLER_CONFIG)
    return root


@pytest.fixture(scope="session")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Unix sockets."""
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="session")
def server(repository: Path, sockets: Path) -> Iterator[ServerProcess]:
    unix = {"http_unix_socket": sockets / "http", "grpc_unix_socket": sockets / "grpc"}
    given = (OPTIONS | unix).items()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given]
    with clean_server(repository, options=options) as process:
        yield process


@pytest.fixture(scope="session")
def urls(server: ServerProcess, sockets: Path) -> Iterator[Mapping[str, str]]:
    """URLs of the server by scheme."""
    servers: list[asyncio.Server] = []
    found = {"http": server.url, "grpc": f"grpc://{server.grpc}"}
    found |= {"unix": f"unix:{sockets}/http", "grpc+unix": f"grpc+unix:{sockets}/grpc"}

    async def open_relays() -> None:
        for name, target in (("http", server.http), ("grpc", server.grpc)):
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
            tls.set_alpn_protocols(["h2" if name == "grpc" else "http/1.1"])
            relay = partial(_relay, target)
            servers.append(await asyncio.start_server(relay, "127.0.0.1", 0, ssl=tls))
            port = servers[-1].sockets[0].getsockname()[1]
            found[f"{name}s"] = f"{name}s://localhost:{port}"

    with running_loop() as loop:
        asyncio.run_coroutine_threadsafe(open_relays(), loop).result()
        yield found
        for one in servers:
            loop.call_soon_threadsafe(one.close)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread, which cancels its tasks at its end."""
    with asyncio.Runner() as runner:
        loop, stop = runner.get_loop(), asyncio.Event()
        thread = threading.Thread(target=runner.run, args=(stop.wait(),))
        thread.start()
        yield loop
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def client_tls() -> ssl.SSLContext:
    """The TLS context of clients that trust the relays."""
    return ssl.create_default_context(cafile=TLS / "root.pem")


async def _relay(target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = target.rpartition(":")
    far_reader, far_writer = await asyncio.open_connection(host, int(port))
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
    finally:
        sink.close()
