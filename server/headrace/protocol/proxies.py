"""Clients as proxies in front of the server name them: by headers, and by the PROXY protocol.

`Forwarded` (RFC 7239) and `X-Forwarded-For` have the addresses that a request passed, the nearest
last. Whoever sends a request can write any of them but those that a trusted proxy has added: the
client is the last one that is no trusted proxy. Version 2 of the PROXY protocol is a binary header
before the first byte of a connection. Pure: bytes and texts in, values out.
"""

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from struct import Struct
from typing import NamedTuple

UNIX = "unix"  # stands for clients of Unix sockets among the trusted proxies
_MOST_HOPS = 64  # elements of a header that are looked at
_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_HEAD = Struct("!12sBBH")
_LONGEST = 4096  # bytes of addresses and further fields
_LOCAL, _PROXY = 0x20, 0x21
_TCP4, _TCP6, _UNSPEC = 0x11, 0x21, 0x00
_V4, _V6 = Struct("!4s4sHH"), Struct("!16s16sHH")
_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^;\s]*))\s*(?:;|$)', re.IGNORECASE)


class InvalidProxyHeader(ValueError):
    """The bytes are no header of the PROXY protocol, version 2."""


class ProxyHeader(NamedTuple):
    """A header of `size` bytes; no address for a connection of the proxy's own."""

    size: int
    client: tuple[str, int] | None


class TrustedProxies:
    """Proxies whose word about their clients is believed."""

    def __init__(self, networks: Iterable[str], announce: bool = False) -> None:
        """`networks` as in CIDR, or `unix`; raises `ValueError`.

        With `announce`, their connections begin with a header of the PROXY protocol.
        """
        self.announce = announce
        self._unix = False
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in networks:
            if text == UNIX:
                self._unix = True
            else:
                self._networks.append(ip_network(text))

    def trusts(self, address: str) -> bool:
        """True if a peer at this address is a trusted proxy."""
        if address.startswith(UNIX):
            return self._unix
        try:
            found = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None) or found
        return any(mapped in network for network in self._networks)

    def client(self, headers: Mapping[str, str]) -> str:
        """The client that a trusted proxy's headers name, by lower-case name; "" for none.

        A proxy adds to one of the two headers and may pass on the other as its client wrote it. So
        of two that differ, neither is believed.
        """
        standard, usual = headers.get("forwarded"), headers.get("x-forwarded-for")
        found = "" if standard is None else self._last(forwarded_hops(standard))
        if usual is None:
            return found
        other = self._last([hop.strip() for hop in usual.split(",")[-_MOST_HOPS:]])
        return other if standard is None or found == other else ""

    def _last(self, hops: Sequence[str]) -> str:
        """The last address that is no trusted proxy, or the first of all."""
        found = ""
        for hop in reversed(hops):
            address = _address(hop)
            if not address:
                break
            found = address
            if not self.trusts(address):
                break
        return found


def forwarded_hops(value: str) -> list[str]:
    """The `for` of each element of `Forwarded`, "" without one."""
    found = (_FOR.search(element) for element in value.split(",")[-_MOST_HOPS:])
    return ["" if hop is None else hop[1] or hop[2] or "" for hop in found]


def _address(hop: str) -> str:
    """An address without its port, in its usual form; "" for anything else."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return "" if "%" in hop else str(ip_address(hop))  # a zone says nothing elsewhere
    except ValueError:
        return ""


def missing(data: bytes) -> int:
    """The number of bytes that a header lacks which begins with `data`; raises as `read_header`."""
    known = min(len(data), len(_SIGNATURE))
    if data[:known] != _SIGNATURE[:known]:
        raise InvalidProxyHeader("the connection does not begin with a PROXY header, version 2")
    if len(data) < _HEAD.size:
        return _HEAD.size - len(data)
    size: int = _HEAD.unpack_from(data)[3]
    if size > _LONGEST:
        raise InvalidProxyHeader(f"a PROXY header of {size} bytes; expected at most {_LONGEST}")
    return max(_HEAD.size + size - len(data), 0)


def read_header(data: bytes) -> ProxyHeader | None:
    """The header at the start of `data`; None if it is not complete yet.

    Raises `InvalidProxyHeader`.
    """
    if missing(data):
        return None
    _, command, family, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if command == _LOCAL or (command == _PROXY and family == _UNSPEC):
        return ProxyHeader(end, None)
    if command != _PROXY:
        raise InvalidProxyHeader(f"version and command 0x{command:02x}; expected 0x20 or 0x21")
    if family == _TCP4:
        form, kind = _V4, socket.AF_INET
    elif family == _TCP6:
        form, kind = _V6, socket.AF_INET6
    else:
        raise InvalidProxyHeader(f"address family 0x{family:02x}; expected TCP over IPv4 or IPv6")
    if size < form.size:
        raise InvalidProxyHeader(f"{size} bytes of addresses; expected {form.size}")
    source, _, port, _ = form.unpack_from(data, _HEAD.size)
    return ProxyHeader(end, (socket.inet_ntop(kind, source), port))
