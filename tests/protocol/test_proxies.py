"""Clients as proxies name them."""

import socket
from random import Random
from struct import pack

import pytest

from headrace.protocol.proxies import (
    InvalidProxyHeader,
    ProxyHeader,
    TrustedProxies,
    missing,
    read_header,
)

PROXIES = TrustedProxies(["10.0.0.0/8", "2001:db8:1::/48", "unix"])
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def header(command: int = 0x21, family: int = 0x11, body: bytes | None = None) -> bytes:
    """A header of a connection from 192.0.2.1:4711."""
    if body is None:
        body = socket.inet_aton("192.0.2.1") + socket.inet_aton("10.0.0.1") + pack("!HH", 4711, 80)
    return SIGNATURE + pack("!BBH", command, family, len(body)) + body


@pytest.mark.parametrize(("address", "trusted"), [
    ("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("11.0.0.1", False), ("2001:db8:1::5", True),
    ("2001:db8:2::5", False), ("unix:1000", True), ("", False), ("nonsense", False),
])  # fmt: skip
def test_trusted_proxies(address: str, trusted: bool) -> None:
    assert PROXIES.trusts(address) is trusted


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "example.com", ""])
def test_networks_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        TrustedProxies([text])


@pytest.mark.parametrize(("value", "client"), [
    ("192.0.2.1", "192.0.2.1"), ("6.6.6.6, 192.0.2.1, 10.0.0.2", "192.0.2.1"),
    ("10.0.0.3,10.0.0.2", "10.0.0.3"), ("192.0.2.1:4711", "192.0.2.1"),
    ("[2001:db8:9::1]:4711", "2001:db8:9::1"), ("2001:db8:9:0::1", "2001:db8:9::1"),
    ("192.0.2.1, unknown", ""), ("unknown, 10.0.0.2", "10.0.0.2"), ("", ""), (",", ""),
    (",".join(["6.6.6.6"] * 1000 + ["10.0.0.1"] * 64), "10.0.0.1"),
])  # fmt: skip
def test_x_forwarded_for(value: str, client: str) -> None:
    assert PROXIES.client({"x-forwarded-for": value}) == client


@pytest.mark.parametrize(("value", "client"), [
    ("for=192.0.2.1", "192.0.2.1"), ('For="[2001:db8:9::1]:4711";proto=https', "2001:db8:9::1"),
    ("for=6.6.6.6, proto=http;for=192.0.2.1;by=10.0.0.1 , for=10.0.0.2", "192.0.2.1"),
    ("for=_hidden", ""), ("proto=https", ""), ("before=192.0.2.1", ""), ('for="192.0.2.1', ""),
])  # fmt: skip
def test_forwarded(value: str, client: str) -> None:
    assert PROXIES.client({"forwarded": value}) == client


def test_two_headers_that_differ_are_not_believed() -> None:
    assert PROXIES.client({"forwarded": "for=192.0.2.1", "x-forwarded-for": "192.0.2.1"})
    assert not PROXIES.client({"forwarded": "for=6.6.6.6", "x-forwarded-for": "192.0.2.1"})
    assert not PROXIES.client({"forwarded": "for=_x", "x-forwarded-for": "192.0.2.1"})
    assert not PROXIES.client({})


def test_proxy_headers() -> None:
    assert read_header(header() + b"GET /") == ProxyHeader(28, ("192.0.2.1", 4711))
    body = socket.inet_pton(socket.AF_INET6, "2001:db8::1") + bytes(16) + pack("!HH", 1, 2)
    fields = b"\x04\x00\x01x"  # a further field, which is skipped
    assert read_header(header(family=0x21, body=body + fields)) == ProxyHeader(
        56, ("2001:db8::1", 1)
    )
    assert read_header(header(0x20, 0)) == ProxyHeader(28, None)
    assert read_header(header(0x21, 0, b"")) == ProxyHeader(16, None)
    for size in range(28):
        assert read_header(header()[:size]) is None
    assert (missing(b""), missing(header()[:16]), missing(header())) == (16, 12, 0)


@pytest.mark.parametrize(("data", "text"), [
    (b"GET / HTTP/1.1\r\n", "does not begin"), (b"PROXY TCP4", "does not begin"),
    (header(0x31), "version and command 0x31"), (header(0x22), "command 0x22"),
    (header(0x21, 0x12), "family 0x12"), (header(body=b"short"), "5 bytes of addresses"),
    (SIGNATURE + b"\x21\x11\xff\xff", "65535 bytes; expected at most 4096"),
])  # fmt: skip
def test_headers_that_are_none(data: bytes, text: str) -> None:
    with pytest.raises(InvalidProxyHeader, match=text):
        read_header(data)


@pytest.mark.slow
def test_any_bytes_are_read_or_refused() -> None:
    random = Random(27)
    outcomes = {"read": 0, "more": 0, "refused": 0}
    for _ in range(100_000):
        data = bytearray(header(random.choice([0x20, 0x21]), random.choice([0, 0x11, 0x21])))
        data += random.randbytes(random.randint(0, 40))
        for _ in range(random.randint(0, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        del data[random.randint(0, len(data)) :]
        try:
            found = read_header(bytes(data))
        except InvalidProxyHeader:
            outcomes["refused"] += 1
            continue
        outcomes["more" if found is None else "read"] += 1
        if found is None:
            assert 0 < missing(bytes(data)) <= 4096 + 16
        else:
            assert 16 <= found.size <= len(data)
            assert found.client is None or socket.getaddrinfo(*found.client)
    assert min(outcomes.values()) > 1_000


@pytest.mark.slow
def test_any_text_names_an_address_or_nobody() -> None:
    random = Random(27)
    parts = ["for=", "10.0.0.1", "192.0.2.1", ",", ";", '"', "[", "]", ":", "2001:db8::1", " ", "%"]
    for _ in range(100_000):
        text = "".join(random.choices(parts, k=random.randint(0, 20)))
        name = random.choice(["forwarded", "x-forwarded-for"])
        found = PROXIES.client({name: text})
        assert not found or socket.getaddrinfo(found, 0, flags=socket.AI_NUMERICHOST)
