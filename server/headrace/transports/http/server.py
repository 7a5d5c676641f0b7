"""uvicorn on a socket of ours, without its signal handling: one process runs several doors."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.wire.http_infer import error_body

_BACKLOG = 2048
_HEAD_LIMIT = 64 << 10  # bytes of a request line and headers that are still incomplete


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on a request's head: its parser collects one of any size."""

    _in_head = False
    _head_size = 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_size = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer behind a chunked body, of which nobody here wants any
            self._head_size += len(name) + len(value)
            if self._head_size > _HEAD_LIMIT:
                raise ValueError("too many trailers")  # the parser turns it into a refusal
            return
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        continued = self._in_head
        super().data_received(data)
        if continued and self._in_head:
            self._head_size += len(data)
            if self._head_size > _HEAD_LIMIT and not self.transport.is_closing():
                self._refuse_head()

    def _refuse_head(self) -> None:
        text = f"the request line and headers exceed {_HEAD_LIMIT} bytes"
        self._refuse(b"431 Request Header Fields Too Large", text)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, text: str) -> None:
        body = error_body(text)
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the application's, which stops all doors in order


class HttpServer:
    """One listening socket that answers with one ASGI application."""

    def __init__(self, app: ASGIApp, listener: socket.socket, keep_alive_secs: int) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=keep_alive_secs,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Answer from now on."""
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._listener])
        )

    async def stop(self) -> None:
        """Close the socket and idle connections, and wait until the others are answered."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task

    def abort(self) -> None:
        """Let `stop` return without waiting any longer."""
        self._server.force_exit = True


def bind(address: str, port: int) -> socket.socket:
    """A listening socket; raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)  # now, so that a second door on this port is refused
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
