"""The address of a server, and the transport that its URL selects.

Separate from connections, whose imports are slow: the command line needs it for its help.
"""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_SOCKETS = {"unix": "http", "http+unix": "http", "grpc+unix": "grpc"}


def is_address(text: str) -> bool:
    """True for a URL with a scheme of servers, or of their sockets."""
    scheme, colon, rest = text.partition(":")
    if scheme in _SOCKETS:
        return bool(colon)
    return scheme in _PORTS and rest.startswith("//")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: a host and port, or the path of a Unix `socket`.

    `prefix` precedes every HTTP path; it is empty or begins with a slash.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    socket: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `http://host:port/prefix`, also without a scheme, or `unix:/path`.

        Raises `ValueError` for any other form.
        """
        parts = urlsplit(text if "://" in text or text.startswith("unix:") or "+unix:" in text
                         else f"http://{text}")  # fmt: skip
        if parts.scheme in _SOCKETS:
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError(f"{text!r} is no path of a socket such as {parts.scheme}:/run/it")
            return cls(_SOCKETS[parts.scheme], "localhost", 0, socket=parts.path)
        if parts.scheme not in _PORTS:
            others = "grpc://, grpcs://, unix: or grpc+unix:"
            raise ValueError(f"{text!r} begins with neither http:// nor https://, {others}")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"{text!r} has no number from 0 to 65535 for a port") from None
        path = parts.path.rstrip("/")
        if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"{text!r} is no address such as {DEFAULT_URL}")
        if path and parts.scheme.startswith("grpc"):
            raise ValueError(f"{text!r} has a path, which gRPC has not")
        return cls(
            parts.scheme, parts.hostname, _PORTS[parts.scheme] if port is None else port, path
        )

    @property
    def grpc(self) -> bool:
        """True if the address is for gRPC, False for HTTP."""
        return self.scheme.startswith("grpc")

    @property
    def secure(self) -> bool:
        """True if the connection uses TLS."""
        return self.scheme.endswith("s")

    @property
    def authority(self) -> str:
        """The host, bracketed if needed, and the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host

    def __str__(self) -> str:
        if self.socket:
            return f"{'grpc+' if self.grpc else ''}unix:{self.socket}"
        return f"{self.scheme}://{self.authority}{self.prefix}"
