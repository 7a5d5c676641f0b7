"""The PROXY protocol at every door, with TLS and without: the client that a proxy names counts."""

import json
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.plugins.access.keys import new_key
from tests.contract.conftest import CARRIERS
from tests.support.access_file import known_client
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.tls_files import tls_options

pytestmark = pytest.mark.slow

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_CLIENT = "192.0.2.77"
_HTTP = b"GET /v2/models/m HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def _proxied(client: str) -> bytes:
    """The header of a connection from a client, over TCP and IPv4."""
    ends = socket.inet_aton(client) + socket.inet_aton("127.0.0.1") + struct.pack("!HH", 4711, 80)
    return _SIGNATURE + b"\x21\x11" + struct.pack("!H", len(ends)) + ends


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _call(path: bytes) -> bytes:
    """The preface and the head of a call, as in RFC 7541 without tables."""
    head = b"".join(
        _literal(*field)
        for field in (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        )
    )  # fmt: skip
    return _PREFACE + struct.pack("!I", len(head))[1:] + b"\1\5\0\0\0\1" + head


def _ask(address: str, alpn: str, asked: bytes, header: bytes, secure: bool) -> bytes:
    """The first bytes of the answer to what a client sends behind a proxy's header."""
    host, _, port = address.rpartition(":")
    with ExitStack() as kept:
        sock = kept.enter_context(socket.create_connection((host, int(port)), timeout=30))
        sock.sendall(header)
        if secure:
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            trusting.set_alpn_protocols([alpn])
            sock = kept.enter_context(trusting.wrap_socket(sock))
        sock.sendall(asked)
        try:
            return sock.recv(1 << 10)
        except ConnectionResetError:
            return b""


def _doors(process: ServerProcess) -> dict[str, str]:
    flight = process.door("flight").partition("//")[2]
    return {"http": process.http, "grpc": process.grpc, "flight": flight}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("carrier", ["default", "frontends"])
def test_the_client_is_recorded(
    small_repository: Path, tmp_path: Path, carrier: str, secure: bool
) -> None:
    pytest.importorskip("pyarrow")
    log, rules = tmp_path / "audit.log", tmp_path / "access.toml"
    rules.write_text(known_client("web", new_key()))
    options = [
        "--door=flight=0", "--trusted-proxies=127.0.0.0/8", "--proxy-protocol",
        f"--access={rules}", f"--audit-log={log}", *CARRIERS[carrier],
    ]  # fmt: skip
    for door in ("http", "grpc", "flight") if secure else ():
        options += tls_options(door)
    calls = {
        "http": _HTTP,
        "grpc": _call(b"/inference.GRPCInferenceService/ModelMetadata"),
        "flight": _call(b"/arrow.flight.protocol.FlightService/GetSchema"),
    }

    def recorded() -> Sequence[tuple[str, str]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return sorted((entry["door"], entry["address"]) for entry in map(json.loads, lines))

    with clean_server(small_repository, options=options) as process:
        for door, address in _doors(process).items():
            alpn = "http/1.1" if door == "http" else "h2"
            assert _ask(address, alpn, calls[door], _proxied(_CLIENT), secure)
        until(lambda: len(recorded()) == 3, "three refusals")
        assert recorded() == [(door, _CLIENT) for door in ("flight", "grpc", "http")]
        if not secure:  # a connection without the header is closed
            for door, address in _doors(process).items():
                assert _ask(address, "", calls[door], b"", secure) == b""
