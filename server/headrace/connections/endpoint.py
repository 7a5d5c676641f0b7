"""One address of a server, how a connection to it is made, and why there is none."""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)

_IP = re.compile(r"[0-9.]+|.*:.*")
_SECURE = frozenset({"grpcs", "https"})
PORT = "is this its port for {}, with TLS or without?"
CLOSED = f"the server has closed the connection without an answer; {PORT}"


def connect_error(error: Exception) -> str:
    """The reason why an attempt to connect has failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        what = (getattr(error, "reason", "") or "it was hung up").lower().replace("_", " ")
        return f"TLS fails ({what}); does the server speak TLS at this port?"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # the event loops have texts of their own
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One address of one endpoint; `name` is for people, `host` is what certificates name.

    `authority` is what HTTP calls it, and `path` what stands before the paths there.
    """

    name: str
    scheme: str
    address: str
    port: int
    host: str
    authority: str = ""
    path: str = ""

    @property
    def secure(self) -> bool:
        """True if it is spoken to over TLS."""
        return self.scheme in _SECURE


async def connect(make: Callable[[], P], endpoint: Endpoint, tls: ssl.SSLContext | None) -> P:
    """A connection to an endpoint, whose address may be the path of a Unix socket.

    Raises `OSError` and `ssl.CertificateError`.
    """
    loop = asyncio.get_running_loop()
    host = endpoint.host if tls is not None else None
    if endpoint.address.startswith("/"):
        path = endpoint.address
        return (await loop.create_unix_connection(make, path, ssl=tls, server_hostname=host))[1]
    addresses = [endpoint.address]
    if not _IP.fullmatch(endpoint.address):  # of a name with several, the loop's error is no reason
        found = await loop.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
    for address in addresses:
        try:
            _, made = await loop.create_connection(
                make, address, endpoint.port, ssl=tls, server_hostname=host
            )
            return made
        except OSError:
            if address == addresses[-1]:
                raise
    raise OSError(f"{endpoint.address} has no address")
