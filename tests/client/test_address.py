"""Addresses of servers, and their transports."""

import pytest

from headrace.client.address import Address


@pytest.mark.parametrize(("text", "address"), [
    ("localhost", Address("http", "localhost", 80)),
    ("localhost:8000", Address("http", "localhost", 8000)),
    ("http://127.0.0.1:8000/", Address("http", "127.0.0.1", 8000)),
    ("https://h/behind/a/proxy/", Address("https", "h", 443, "/behind/a/proxy")),
    ("http://[::1]:9/", Address("http", "::1", 9)), ("grpc://h", Address("grpc", "h", 8001)),
    ("grpcs://h:9", Address("grpcs", "h", 9)),
    ("unix:/run/a b", Address("http", "localhost", 0, socket="/run/a b")),
    ("http+unix:///run/it", Address("http", "localhost", 0, socket="/run/it")),
    ("grpc+unix:/run/it", Address("grpc", "localhost", 0, socket="/run/it")),
])  # fmt: skip
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address
    assert address.grpc is text.startswith("grpc")


@pytest.mark.parametrize("text", [
    "", "ftp://h", "http://", "http://h:x", "http://h:70000", "http://u:p@h", "http://h?a",
    "grpc://h/path", "unix:relative", "unix://host/path",
])  # fmt: skip
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|begins with neither|has a path|no path"):
        Address.parse(text)
