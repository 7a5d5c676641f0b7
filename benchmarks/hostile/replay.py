"""Sends a case to a server: `python -m benchmarks.hostile.replay HTTP GRPC CASE`, as JSON.

It is a process of its own, so that ending it ends all of its connections. A case ends with its
answers, with the connections that the server has closed, or after some seconds: those of an attack
that only holds on to what it has.
"""

import gzip
import os
import selectors
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from benchmarks.hostile.case import ABORT, CUT, GRPC, HALF, WHOLE, Case, from_json
from benchmarks.hostile.grammar import (
    grpc_message,
    grpc_metadata,
    http_body,
    http_headers,
    http_target,
    named,
)
from benchmarks.hostile.wire import Http2, allow_connections

HOLD_SECS = 3.0
LONGEST_SECS = 12.0
_PIECE = 1 << 18


def replay(case: Case, http: str, grpc: str) -> None:
    """Send the case to the doors at these addresses (host:port), and wait for its end."""
    if case.door == GRPC:
        _over_grpc(case, grpc)
    else:
        _over_http(case, http)


def _compressed(case: Case, data: bytes) -> bytes:
    if case.compression == "gzip":
        return gzip.compress(data, 6)
    return zlib.compress(data, 6) if case.compression == "deflate" else data


# --- HTTP


class _Client:
    """A connection that writes the requests of a case, and reads what comes."""

    def __init__(
        self, made: socket.socket, pieces: Iterator[bytes | memoryview], case: Case
    ) -> None:
        self.socket = made
        self.over = False
        self._pieces = pieces
        self._case = case
        self._rest = memoryview(b"")
        self._sent_all = False
        self._at = 0.0  # when the next write is due

    def events(self) -> int:
        """Events to wait for: at least reading, unless answers are left unread."""
        reading = 0 if self._case.unread else selectors.EVENT_READ
        due = not self._sent_all and time.monotonic() >= self._at
        return reading | (selectors.EVENT_WRITE if due else 0)

    @property
    def sending(self) -> bool:
        """True as long as there is more to send."""
        return not self._sent_all and not self.over

    def on_events(self, events: int) -> None:
        """Read, and write one piece."""
        try:
            if events & selectors.EVENT_READ and not self.socket.recv(1 << 20):
                self.over = True
            if events & selectors.EVENT_WRITE and not self.over:
                self._write()
        except BlockingIOError:
            pass
        except OSError:
            self.over = True

    def _write(self) -> None:
        if not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                self._end()
                return
            self._rest = memoryview(piece)
        self._rest = self._rest[self.socket.send(self._rest) :]
        if self._case.pause and not self._rest:
            self._at = time.monotonic() + self._case.pause

    def _end(self) -> None:
        self._sent_all = True
        if self._case.ending == HALF:
            self.socket.shutdown(socket.SHUT_WR)
        elif self._case.ending == ABORT:
            self.over = True


def _over_http(case: Case, address: str) -> None:
    request = http_request(case)
    host, _, port = address.rpartition(":")
    selector = selectors.DefaultSelector()
    clients = []
    with ExitStack() as stack:
        stack.enter_context(selector)
        for _ in range(case.connections):
            with suppress(OSError):
                made = stack.enter_context(socket.create_connection((host, int(port)), 10))
                made.setblocking(False)
                clients.append(_Client(made, _pieces(case, request), case))
        deadline = time.monotonic() + LONGEST_SECS
        quiet = deadline  # until when it holds on once all is sent
        known: dict[_Client, int] = {}
        while time.monotonic() < min(deadline, quiet):
            alive = [each for each in clients if not each.over]
            if not alive:
                break
            if quiet == deadline and not any(each.sending for each in alive):
                quiet = time.monotonic() + HOLD_SECS
            for each in clients:
                wanted = 0 if each.over else each.events()
                before = known.get(each, 0)
                if wanted == before:
                    continue
                if not wanted:
                    selector.unregister(each.socket)
                elif before:
                    selector.modify(each.socket, wanted, each)
                else:
                    selector.register(each.socket, wanted, each)
                known[each] = wanted
            for key, events in selector.select(0.01):
                client: _Client = key.data
                client.on_events(events)


def http_request(case: Case) -> bytes:
    """One request of the case, as it is sent."""
    method, path = http_target(case)
    body = _compressed(case, http_body(case))
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if case.compression:
        lines.append(f"Content-Encoding: {case.compression}")
    lines += [f"{name}: {value}" for name, value in http_headers(case)]
    if case.frame and body:
        size = case.frame
        lines.append("Transfer-Encoding: chunked")
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    elif body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def _pieces(case: Case, request: bytes) -> Iterator[bytes | memoryview]:
    together = max(min(_PIECE // len(request), case.requests), 1)
    block = request * together
    for number in range(0, case.requests, together):
        last = number + together >= case.requests
        data = memoryview(block)[: len(request) * min(together, case.requests - number)]
        if last and case.ending == CUT:
            data = data[: max(len(data) - 10, 1)]
        size = case.write or (len(data) if len(data) < 4 * _PIECE else _PIECE)
        for start in range(0, len(data), size):
            yield data[start : start + size]


# --- gRPC


def _over_grpc(case: Case, address: str) -> None:
    message = grpc_message(case)
    data = _compressed(case, message)
    prefixed = (b"\1" if case.compression else b"\0") + len(data).to_bytes(4, "big") + data
    deadline = time.monotonic() + LONGEST_SECS
    threads = [
        threading.Thread(target=_connection, args=(case, address, prefixed, deadline), daemon=True)
        for _ in range(case.connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.1))


def _connection(case: Case, address: str, message: bytes, deadline: float) -> None:
    headers = grpc_metadata(case)
    encoding = case.compression or "identity"
    procedure = named(case.operation).procedure
    window = 0 if case.unread else (1 << 31) - 1
    with (
        suppress(OSError),
        Http2(
            address, procedure, window, headers=headers, encoding=encoding, most_frame=case.frame
        ) as connection,
    ):
        streams = []
        together = max(min(_PIECE // len(message), case.messages), 1)
        for _ in range(case.requests):
            stream = connection.open()
            streams.append(stream)
            left = case.messages
            while left and time.monotonic() < deadline:
                count = min(left, together)
                left -= count
                block = message * count
                if case.ending == CUT and not left:
                    connection.send(stream, block[:-1], end=False)
                else:
                    connection.send(stream, block, end=not left and case.ending == WHOLE)
                if case.pause:
                    time.sleep(case.pause)
            if time.monotonic() > deadline or connection.over:
                break
        if case.ending == ABORT:
            return
        quiet = min(time.monotonic() + HOLD_SECS, deadline)
        for stream in streams:
            if case.ending == CUT or case.unread:
                time.sleep(max(quiet - time.monotonic(), 0))
                break
            connection.wait(stream, max(quiet - time.monotonic(), 0.01))


def main() -> None:
    """Read the case from the command line, and send it."""
    allow_connections()
    os.nice(19)  # a hostile client's own machine would not take the server's time
    http, grpc, written = sys.argv[1:4]
    replay(from_json(written), http, grpc)


if __name__ == "__main__":
    main()
