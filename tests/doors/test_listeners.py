"""Unix sockets of servers: permissions, files of other servers, and removal."""

import asyncio
import errno
import os
import select
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.identity import PeerFacts
from headrace.doors.listeners import (
    UnixSocket,
    bind,
    peer_of,
    port_of,
    refuse_connections,
    user_of,
)
from headrace.doors.tls import DoorTls, TlsFiles
from tests.support.tls_files import FOLDER


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_that_closes_resets_no_connection(address: str) -> None:
    try:
        listener = bind(address, 0)
    except OSError:
        pytest.skip(f"there is no address {address}")
    port = listener.getsockname()[:2]
    with socket.create_connection(port, 30) as queued:
        refuse_connections(listener)
        with socket.socket(listener.family) as late:
            late.setblocking(False)
            with pytest.raises(BlockingIOError):
                late.connect(port)
            accepted, _ = listener.accept()
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.close()
            assert select.select([], [late], [], 60)[1]
            problem = late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            assert problem == errno.ECONNREFUSED  # not: connected, and reset
        queued.sendall(b"a")
        assert accepted.recv(1) == b"a"
        accepted.close()


@pytest.mark.usefixtures("strict_umask")
def test_permissions_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o666)
    with made.listener:
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666
        assert port_of([made.listener]) == 0


def test_the_user_of_a_client(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o600)
    with made.listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(made.path)
        with made.listener.accept()[0] as accepted:
            assert user_of(accepted) == f"unix:{os.geteuid()}"


def test_a_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o600)
    with made.listener:
        with pytest.raises(OSError, match="in use"):
            UnixSocket(made.path, 0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(made.path)  # the first one still listens


def test_a_socket_whose_queue_is_full_is_in_use(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(f"{tmp_path}/a")
        listener.listen(0)
        client.connect(f"{tmp_path}/a")
        with pytest.raises(OSError, match="in use"):
            UnixSocket(f"{tmp_path}/a", 0o600)


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    left = UnixSocket(f"{tmp_path}/a", 0o600)
    left.listener.close()
    made = UnixSocket(left.path, 0o600)
    with made.listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(made.path)
        made.remove()
        assert not os.path.lexists(made.path)


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    first = UnixSocket(f"{tmp_path}/a", 0o600)
    with first.listener:
        os.unlink(first.path)
        second = UnixSocket(first.path, 0o600)
        first.remove()
        assert os.path.lexists(second.path)
    second.remove()
    second.listener.close()
    third = UnixSocket(first.path, 0o600)  # its number may be that of the second
    second.remove()
    assert os.path.lexists(third.path)
    third.listener.close()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_other_files_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(FileExistsError, match="not a socket"):
        UnixSocket(str(path), 0o600)
    assert os.path.lexists(path)


def test_paths_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        UnixSocket(f"{tmp_path}/missing/a", 0o600)
    with pytest.raises(OSError, match="too long"):
        UnixSocket(f"{tmp_path}/{'a' * 200}", 0o600)
    assert list(tmp_path.iterdir()) == []


class _Peers(asyncio.Protocol):
    """Notes what is known of clients."""

    def __init__(self, found: asyncio.Queue[PeerFacts]) -> None:
        self._found = found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._found.put_nowait(peer_of(transport))


async def test_facts_of_clients(tmp_path: Path) -> None:
    found = asyncio.Queue[PeerFacts]()
    made, loop = UnixSocket(f"{tmp_path}/a", 0o600), asyncio.get_running_loop()
    files = TlsFiles(
        "http", [f"{FOLDER}/server.pem"], [f"{FOLDER}/server.key"], f"{FOLDER}/root.pem"
    )
    tls = DoorTls(files).current()
    servers = list[asyncio.Server]()
    plain, secure = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    for listener, context in ((made.listener, None), (plain, None), (secure, tls)):
        servers.append(await loop.create_server(lambda: _Peers(found), sock=listener, ssl=context))

    async def facts(**options: object) -> PeerFacts:
        _, writer = await asyncio.open_connection(**options)  # type: ignore[arg-type]
        try:
            return await found.get()
        finally:
            writer.transport.abort()

    _, writer = await asyncio.open_unix_connection(made.path)
    assert await found.get() == PeerFacts(
        f"unix:{os.geteuid()}", None, os.getpid(), os.geteuid(), os.getegid()
    )
    writer.transport.abort()
    host, port = plain.getsockname()
    assert await facts(host=host, port=port) == PeerFacts("127.0.0.1")
    trusting = ssl.create_default_context(cafile=f"{FOLDER}/root.pem")
    host, port = secure.getsockname()
    asked = {"host": host, "port": port, "ssl": trusting, "server_hostname": "localhost"}
    assert await facts(**asked) == PeerFacts("127.0.0.1")
    trusting.load_cert_chain(f"{FOLDER}/client.pem", f"{FOLDER}/client.key")
    known = await facts(**asked)
    assert known.address == "127.0.0.1"
    assert known.certificate is not None
    assert known.certificate["subject"] == ((("commonName", "localhost"),),)
    for server in servers:
        server.close()
