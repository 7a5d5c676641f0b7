"""Servers that answer with what a test has written."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from headrace.cli.client.address import Address
from headrace.cli.client.connection import Connection

Scripted = Callable[..., Connection]


def response(body: bytes, head: str = "", status: str = "200 OK") -> bytes:
    """A response over HTTP/1.1."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A connection to a server that gives `answers` in turn, each to whatever it has read.

    After an empty answer it closes the connection and takes another.
    """
    with ExitStack() as stack:

        def start(*answers: bytes, timeout: float = 10.0) -> Connection:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=_serve, args=(listener, list(answers)))
            thread.start()
            connection = Connection(
                Address("http", "127.0.0.1", listener.getsockname()[1]), timeout=timeout
            )
            stack.callback(thread.join, 10)
            stack.callback(connection.close)
            return connection

        yield start


def _serve(listener: socket.socket, answers: list[bytes]) -> None:
    while answers:
        connection, _ = listener.accept()
        with connection:
            while answers and (answers[0] == b"" or connection.recv(65536)):
                answer = answers.pop(0)
                if not answer:
                    # Not at once: what the client has still under way would reset it.
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                    break
                connection.sendall(answer)
