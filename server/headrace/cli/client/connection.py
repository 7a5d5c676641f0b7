"""One connection to a server: it is opened when it is needed and kept while it is good."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.cli.client.address import Address, BadAnswer, ClientError, NotReached, Refused

if TYPE_CHECKING:
    from headrace.core.tensors import Buffer


_PIECE = 1 << 16  # bytes
_SHOWN = 200  # characters of an error that is no JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer with status 200; header names are in lower case."""

    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; raises `BadAnswer`."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise BadAnswer(f"the answer is no JSON: {_shown(self.body)}") from None


class Connection:
    """Asks one server, one request after the other."""

    def __init__(
        self, address: Address, headers: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> None:
        """`headers` go with every request; `timeout` in seconds is for each wait on the server."""
        self.address = address
        self._headers = dict(headers or {})
        kind = (
            http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        )
        self._timeout = timeout
        self._connection = kind(address.host, address.port, timeout=timeout)
        self._kept = False  # whether an answer has come over it

    def ask(
        self,
        method: str,
        path: str,
        pieces: Sequence["Buffer"] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request with a body of `pieces`, if any; raises `ClientError`."""
        kept = self._kept
        try:
            return self._whole(method, path, pieces, headers)
        except NotReached as error:
            # The server may have closed what was idle for long; what changes is not sent twice.
            if method != "GET" or not kept or isinstance(error.__cause__, TimeoutError):
                raise
        return self._whole(method, path, pieces, headers)

    def events(self, path: str, body: bytes) -> Iterator[str]:
        """Send `body` and yield the data of each server-sent event as it comes.

        Raises `ClientError`, also between events.
        """
        response = self._send("POST", path, [body], {"content-type": "application/json"})
        if response.status != 200:
            raise _refusal(response.status, self._read(response))
        with self._speaking():
            for line in _lines(response):
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode("utf-8", "replace")
        self._kept = True

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()
        self._kept = False

    def _whole(
        self,
        method: str,
        path: str,
        pieces: Sequence["Buffer"] | None,
        headers: Mapping[str, str] | None,
    ) -> Answer:
        response = self._send(method, path, pieces, headers)
        body = self._read(response)
        self._kept = True
        if response.status != 200:
            raise _refusal(response.status, body)
        return Answer({name.lower(): value for name, value in response.getheaders()}, body)

    def _send(
        self,
        method: str,
        path: str,
        pieces: Sequence["Buffer"] | None,
        headers: Mapping[str, str] | None,
    ) -> http.client.HTTPResponse:
        all_headers = {**self._headers, **(headers or {})}
        if pieces is not None:
            all_headers["content-length"] = str(sum(map(len, pieces)))
        with self._speaking():
            # A server may refuse a body before it has it as a whole, and say why.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._connection.request(method, self.address.prefix + path, pieces, all_headers)
            return self._connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        with self._speaking():
            return response.read()

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Close the connection if anything happens to it, and raise that as a `ClientError`."""
        try:
            yield
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> ClientError:
        address = self.address
        match error:
            case TimeoutError():
                return NotReached(f"no answer from {address} within {self._timeout:g} s")
            case ConnectionRefusedError():
                return NotReached(f"no server at {address}: connection refused")
            case ConnectionError() | http.client.IncompleteRead():
                return NotReached(f"{address} has closed the connection before it had answered")
            case OSError():
                return NotReached(f"no server at {address}: {error.strerror or error}")
        return BadAnswer(f"what answers at {address} does not speak HTTP")


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines as they come; not by `readline`, which takes a connection that breaks for the end."""
    rest = b""
    while piece := response.read1(_PIECE):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if response.length:
        raise http.client.IncompleteRead(rest, response.length)
    yield rest


def _refusal(status: int, body: bytes) -> Refused:
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"HTTP status {status} {http.client.responses.get(status, '')}".rstrip()
        text += f": {_shown(body)}" if body.strip() else ""
    return Refused(status, text)


def _shown(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
