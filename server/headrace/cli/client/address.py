"""Where a server is, and why an answer of it is not there.

ClientError ─┬─ NotReached   nobody answers there, or not in time
             ├─ Refused      the server answered with an error
             └─ BadAnswer    what came is not what the protocol says

Apart from connections, which import much: the command line needs these to explain its options.
"""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `prefix` comes before every path, empty or beginning with a slash."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `http://host:port/prefix`, also without scheme; raises `ValueError` for others."""
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.scheme not in _PORTS:
            raise ValueError(f"{text!r} begins with neither http:// nor https://")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"{text!r} has no number from 0 to 65535 for a port") from None
        if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"{text!r} is no address such as http://127.0.0.1:8000")
        default = _PORTS[parts.scheme]
        return cls(
            parts.scheme, parts.hostname, default if port is None else port, parts.path.rstrip("/")
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


class ClientError(Exception):
    """The reason why a server's answer is missing; its text is for people."""


class NotReached(ClientError):
    """No connection, or no answer within the timeout."""


class Refused(ClientError):
    """The server's error, in its own words; `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class BadAnswer(ClientError):
    """An answer that makes no sense in the protocol: perhaps there is another server."""
