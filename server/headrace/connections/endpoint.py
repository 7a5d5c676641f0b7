"""Address of a server, connecting to it, and the reasons of failures."""

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
# OpenSSL's reasons for an answer that is no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
_SEND_BYTES = 1 << 20  # at most what the system permits
PORT = "is this its port for {}, with TLS or without?"
CLOSED = f"the server has closed the connection without an answer; {PORT}"


def connect_error(error: Exception) -> str:
    """The reason of a failed attempt to connect, for messages."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", "")  # of OpenSSL's errors only
        if reason in _NO_TLS:
            return "it does not speak TLS at this port: is this an http:// or grpc:// address?"
        what = (reason or "it was hung up").lower().replace("_", " ")
        return f"TLS fails ({what}); does the server speak TLS at this port?"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # event loops use texts of their own
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """An address of an endpoint; `name` is for messages, `host` is the name in certificates.

    `authority` is the HTTP authority, and `path` the prefix of HTTP paths.
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
        """True if the connection uses TLS."""
        return self.scheme in _SECURE


def send_more(sock: socket.socket) -> None:
    """Enlarge the send buffer of a Unix socket, which does not grow by itself as TCP's does.

    With the usual 208 KiB, a MiB through it takes twice as long as over TCP.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)


async def connect(make: Callable[[], P], endpoint: Endpoint, tls: ssl.SSLContext | None) -> P:
    """Connect to an endpoint, whose address may be the path of a Unix socket.

    Raises `OSError` and `ssl.CertificateError`.
    """
    loop = asyncio.get_running_loop()
    host = endpoint.host if tls is not None else None
    if endpoint.address.startswith("/"):
        path = endpoint.address
        transport, made = await loop.create_unix_connection(
            make, path, ssl=tls, server_hostname=host
        )
        send_more(transport.get_extra_info("socket"))
        return made
    addresses = [endpoint.address]
    if not _IP.fullmatch(endpoint.address):  # a name may have several, with a useless common error
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
