"""Connections in a queue, those without a descriptor, and TLS clients that say nothing."""

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import pytest
import uvloop

from headrace.doors.acceptor import Acceptor
from headrace.doors.listeners import bind

# A handshake record with the beginning of a hello, after which OpenSSL waits for more.
_RECORD = b"\x16\x03\x01\0\x04\x01\0\x02\0"


class Greeting(asyncio.Protocol):
    """Greets and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        greeted = cast(asyncio.Transport, transport)
        greeted.write(b"hello")
        greeted.close()


class Counted(Greeting):
    """Notes the address of its client."""

    def __init__(self, made: list[str]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport.get_extra_info("peername")[0])
        super().connection_made(transport)


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Use up the process's descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 20, before[1]))
    opened: list[int] = []
    try:
        for _ in range(1000):
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def received(client: socket.socket) -> bytes:
    """Read until the other side closes."""
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    client.setblocking(False)
    while part := await loop.sock_recv(client, 100):
        parts.append(part)
    return b"".join(parts)


def test_waiting_connections_are_accepted_at_close() -> None:
    async def scenario(stack: ExitStack) -> None:
        listener = bind("127.0.0.1", 0)
        address = listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        acceptor = Acceptor(listener, Greeting, list)
        acceptor.start()
        acceptor.close()  # before an iteration of the loop
        acceptor.close()
        for client in clients:
            assert await received(client) == b"hello"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    with ExitStack() as stack:
        uvloop.run(scenario(stack))


def test_clients_without_a_descriptor_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(stack: ExitStack) -> None:
        failures = list[int]()
        listener = bind("127.0.0.1", 0)
        address = listener.getsockname()
        clients = [stack.enter_context(socket.socket()) for _ in range(6)]
        acceptor = Acceptor(listener, Greeting, lambda: failures.append(1))
        acceptor.start()
        with no_free_descriptors():
            for client in clients[:5]:
                client.connect(address)
                assert await received(client) == b""  # at once, not when there is a descriptor
        assert len(failures) == 5
        clients[5].connect(address)
        assert await received(clients[5]) == b"hello"
        assert len(failures) == 5
        acceptor.close()

    with ExitStack() as stack, caplog.at_level(logging.ERROR):
        uvloop.run(scenario(stack))
    # One line for the first, and none for those soon after it.
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept 1 connection: Too many open files; they are closed or queued"
    ]


def test_a_newcomer_overtakes_the_connections_of_one_client() -> None:
    async def scenario(stack: ExitStack) -> None:
        listener = bind("127.0.0.1", 0)
        address = listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(1000)]
        newcomer = stack.enter_context(
            socket.create_connection(address, source_address=("127.0.0.2", 0))
        )
        acceptor = Acceptor(listener, lambda: Counted(made), list)
        acceptor.start()
        for client in (newcomer, *clients):
            assert await received(client) == b"hello"
        acceptor.close()

    made = list[str]()
    with ExitStack() as stack:
        uvloop.run(scenario(stack))
    assert made.index("127.0.0.2") < 500


@contextmanager
def tls_acceptor(
    seconds: float = 60, verify: ssl.VerifyMode = ssl.CERT_NONE
) -> Iterator[tuple[tuple[str, int], list[int]]]:
    """Accept TLS clients; gives the address, and a list with an item for each handshake begun."""
    begun = list[int]()

    def make() -> Greeting:
        begun.append(1)
        return Greeting()

    listener = bind("127.0.0.1", 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = verify
    address = listener.getsockname()
    acceptor = Acceptor(listener, make, list, lambda: context, seconds)
    acceptor.start()
    yield address, begun
    acceptor.close()


async def greet(address: tuple[str, int], source: str = "127.0.0.1") -> None:
    """Connect without TLS, and wait until the handshake has failed."""
    with socket.create_connection(address, source_address=(source, 0)) as client:
        client.sendall(b"not a hello")
        await received(client)


def test_tls_clients_that_leave_cost_no_handshake() -> None:
    async def scenario() -> None:
        with tls_acceptor() as (address, begun):
            for _ in range(100):
                socket.create_connection(address).close()
            await greet(address)
            assert len(begun) == 1

    uvloop.run(scenario())


def test_silent_tls_clients_are_closed_in_time() -> None:
    async def scenario() -> None:
        with ExitStack() as stack, tls_acceptor(seconds=0.01) as (address, _):
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
            for client in clients:
                assert await received(client) == b""

    uvloop.run(scenario())


def test_a_handshake_begins_with_the_whole_hello() -> None:
    async def scenario() -> None:
        with ExitStack() as stack, tls_acceptor() as (address, begun):
            slow, leaving = [stack.enter_context(socket.create_connection(address)) for _ in "ab"]
            for at in range(len(_RECORD)):
                slow.sendall(_RECORD[at : at + 1])
                leaving.sendall(_RECORD[at : at + 1])
                await greet(address)  # answered after the bytes were seen
                assert len(begun) == at + 1 + (at == len(_RECORD) - 1) * 2
                if at == 6:
                    leaving.close()
                    leaving = stack.enter_context(socket.create_connection(address))
                    leaving.sendall(_RECORD[:7])

    uvloop.run(scenario())


@pytest.mark.parametrize(("verify", "least", "most"), [
    (ssl.CERT_NONE, 400, 600), (ssl.CERT_OPTIONAL, 32, 128),
])  # fmt: skip
def test_one_client_has_a_limited_number_of_handshakes_under_way(
    verify: ssl.VerifyMode, least: int, most: int
) -> None:
    async def scenario() -> None:
        with ExitStack() as stack, tls_acceptor(verify=verify) as (address, begun):
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(900)]
            for client in clients:
                client.sendall(_RECORD)
            for _ in clients:
                await greet(address, source="127.0.0.2")
            assert least < len(begun) - len(clients) < most
            for client in clients[:-1]:
                client.close()
            clients[-1].sendall(b"not a hello" * 100)
            await received(clients[-1])

    uvloop.run(scenario())
