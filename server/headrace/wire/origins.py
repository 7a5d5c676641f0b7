"""Which web pages may have a browser change this server: the origins that are allowed to.

A page cannot read the answers of another site, but it can have a browser send requests there; and
one whose name is made to mean another address (DNS rebinding) reads the answers, too, since its
`Origin` and `Host` agree. So what counts is the origin alone, held against names that nobody else
can have. Clients that are no browsers send none.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TypeAlias

from headrace.core.errors import Restricted

ALL = "*"
_FORM = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}  # those that an origin does not name
_WEB = frozenset(_PORTS)
_SHOWN = 80  # characters of an origin in an error
_OWN_SITE = frozenset({b"same-origin", b"none"})  # a page of this server, or no page at all
_Origin: TypeAlias = tuple[str, str, int | None]  # scheme, host, port
Server: TypeAlias = Sequence[object] | None  # ASGI's: the address and port that a request came to


class AllowedOrigins:
    """Loopback names, the address that the server listens on, and what the operator names."""

    def __init__(self, named: Sequence[str] = (), address: str = "") -> None:
        """`named` are `SCHEME://HOST[:PORT]`, or `*` for all; `address` is where the server
        listens, as it was given. Raises `ValueError`.
        """
        self._all = ALL in named
        self._named = {_named(text) for text in named if text != ALL}
        self._address = address.lower()

    def check(self, headers: Sequence[tuple[bytes, bytes]], server: Server) -> None:
        """Raise `Restricted` if a browser sends a request for a page that is not allowed to.

        The names of `headers` are in lower case.
        """
        if self._all:
            return
        origins = [value for name, value in headers if name == b"origin"]
        if origins:
            refused = [one for one in origins if not self._allows(one.decode("latin-1"), server)]
        else:
            refused = [
                value
                for name, value in headers
                if name == b"sec-fetch-site" and value not in _OWN_SITE
            ]
        if refused:
            shown = refused[0][:_SHOWN].decode("latin-1")
            raise Restricted(
                f"models and settings are not changed by pages of other sites: '{shown}'"
                " (--http-allowed-origin allows one)"
            )

    def _allows(self, text: str, server: Server) -> bool:
        origin = _parsed(text)
        if origin is None:
            return False
        scheme, host, port = origin
        if scheme in _WEB and (host == "localhost" or _is_loopback(host)):
            return True
        if origin in self._named:
            return True
        if scheme != "http" or server is None or port != server[1]:
            return False
        return host in (self._address, _unmapped(str(server[0])))


def _parsed(text: str) -> _Origin | None:
    """An origin in parts, its host without brackets; None for what is none, such as `null`."""
    found = _FORM.fullmatch(text.lower())
    if found is None:
        return None
    scheme, host, port = found.groups()
    return scheme, host.strip("[]"), int(port) if port else _PORTS.get(scheme)


def _named(text: str) -> _Origin:
    origin = _parsed(text)
    if origin is None:
        raise ValueError(f"expected SCHEME://HOST[:PORT] or {ALL}, got {text!r}")
    return origin


def _unmapped(address: str) -> str:
    """An address as an origin has it, also if IPv4 comes to a socket of IPv6."""
    return address.removeprefix("::ffff:") if "." in address else address


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
