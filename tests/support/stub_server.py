"""A stub HTTP server: a function computes the response to each request."""

import ssl
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple, Self

_POLL_SECS = 0.05  # until the end is seen, half a second by default


class StubRequest(NamedTuple):
    """A request; its path is as it came, with the query."""

    method: str
    path: str
    headers: Message
    body: bytes


# Status, headers without the length, and body.
StubResponse = tuple[int, Mapping[str, str], bytes]


class StubServer:
    """Listens on a free port of 127.0.0.1 while entered, with a thread for each connection."""

    def __init__(
        self, respond: Callable[[StubRequest], StubResponse], tls: ssl.SSLContext | None = None
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                request = StubRequest(self.command, self.path, self.headers, body)
                status, headers, content = respond(request)
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"{'http' if tls is None else 'https'}://{self.host}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=(_POLL_SECS,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
