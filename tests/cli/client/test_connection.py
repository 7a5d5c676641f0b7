"""One connection: addresses, errors in words, and what becomes of it when it breaks."""

import pytest

from headrace.cli.client.address import Address, BadAnswer, ClientError, NotReached, Refused
from tests.cli.client.conftest import Scripted, response


@pytest.mark.parametrize(("text", "address"), [
    ("localhost", Address("http", "localhost", 80)),
    ("localhost:8000", Address("http", "localhost", 8000)),
    ("http://127.0.0.1:8000/", Address("http", "127.0.0.1", 8000)),
    ("https://h/behind/a/proxy/", Address("https", "h", 443, "/behind/a/proxy")),
    ("http://[::1]:9/", Address("http", "::1", 9)),
])  # fmt: skip
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "ftp://h", "http://", "http://h:x", "http://h:70000", "http://u:p@h", "http://h?a"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|begins with neither"):
        Address.parse(text)


def test_a_kept_connection_that_was_closed_meanwhile(scripted: Scripted) -> None:
    connection = scripted(response(b"1"), b"", response(b"2"), response(b"3"))
    assert [connection.ask("GET", "/a").body for _ in range(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("answer", "kind", "text"), [
    (b"SSH-2.0-OpenSSH\r\n", BadAnswer, "does not speak HTTP"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", NotReached, "before it had answered"),
    (response(b'{"error": "as it says"}', "", "400 x"), Refused, "^as it says$"),
    (response(b"", "", "502 x"), Refused, "^HTTP status 502 Bad Gateway$"),
    (response(b"<h1>no\n</h1>", "", "404 x"), Refused, "^HTTP status 404 Not Found: <h1>no </"),
    (response(b"[" * 10**5, "", "499 x"), Refused, r"^HTTP status 499: \[{200}\.\.\.$"),
])  # fmt: skip
def test_errors_in_words(
    scripted: Scripted, answer: bytes, kind: type[ClientError], text: str
) -> None:
    connection = scripted(answer, b"")
    with pytest.raises(kind, match=text):
        connection.ask("POST", "/x", [b"body"])


def test_a_refusal_keeps_the_connection(scripted: Scripted) -> None:
    connection = scripted(response(b"", "", "503 x"), response(b"[1]"))
    with pytest.raises(Refused) as refused:
        connection.ask("GET", "/x")
    assert refused.value.status == 503
    assert connection.ask("GET", "/x").json() == [1]


def test_a_server_that_goes_without_an_answer(scripted: Scripted) -> None:
    connection = scripted(b"", response(b"1"))
    with pytest.raises(NotReached, match="before it had answered"):
        connection.ask("GET", "/x")
    assert connection.ask("GET", "/x").body == b"1"  # the next request has a connection of its own


def test_no_json(scripted: Scripted) -> None:
    with pytest.raises(BadAnswer, match="no JSON: hello"):
        scripted(response(b"hello")).ask("GET", "/x").json()


def test_events(scripted: Scripted) -> None:
    body = b": remark\n\ndata: 1\n\nevent: x\ndata:2\r\n\r\n"
    assert list(scripted(response(body)).events("/x", b"{}")) == ["1", "2"]
    with pytest.raises(Refused, match="no"):
        list(scripted(response(b'{"error": "no"}', "", "400 x")).events("/x", b"{}"))


@pytest.mark.parametrize(
    "head", ["Transfer-Encoding: chunked\r\n\r\n9\r\n", "Content-Length: 10\r\n\r\n"]
)
def test_a_stream_that_breaks_off(scripted: Scripted, head: str) -> None:
    piece = f"HTTP/1.1 200 OK\r\n{head}data: 1\n\n".encode()
    events = scripted(piece, b"").events("/x", b"{}")
    assert next(events) == "1"
    with pytest.raises(NotReached, match="before it had answered"):
        next(events)
