"""The load generator's HTTP/1.1: every split of the bytes gives the same answers."""

import pytest

from benchmarks.http1 import HttpWire, build_request, header
from benchmarks.wire import Answer, ProtocolError

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Other: 7\r\n\r\nhello"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\n\r\n"
)
TRAILERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n"
)
CASES = [
    (PLAIN, "", b"hello"), (EMPTY, "", b""), (REFUSED, "HTTP 503: busy", b"busy"),
    (CHUNKED, "", b"hello"), (TRAILERS, "", b"hello"),
]  # fmt: skip


def answers(data: bytes, size: int, requests: int) -> list[Answer]:
    """Feed `data` in pieces of `size`."""
    wire = HttpWire()
    for _ in range(requests):
        wire.send(b"")
    found: list[Answer] = []
    for begin in range(0, len(data), size):
        complete, reply = wire.receive(data[begin : begin + size])
        assert reply == b""
        found += complete
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_answers(size: int) -> None:
    for data, error, body in CASES:
        (answer,) = answers(data, size, 1)
        assert (answer.token, answer.error, answer.body) == (1, error, body)
        assert answers(data[:-1], size, 1) == []
    found = answers(b"".join(data for data, _, _ in CASES), size, len(CASES))
    assert [answer.token for answer in found] == [1, 2, 3, 4, 5]
    assert [(answer.error, answer.body) for answer in found] == [case[1:] for case in CASES]


@pytest.mark.parametrize("data", [
    b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"x" * 70_000,
])  # fmt: skip
def test_refused_frames(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        answers(data, 100_000, 1)


def test_refuses_an_answer_to_no_request() -> None:
    with pytest.raises(ProtocolError, match="nobody asked"):
        answers(PLAIN * 2, 1, 1)


def test_header_is_found_by_its_whole_name() -> None:
    head = b"http/1.1 200 ok\r\nx-content-length: 9\r\ncontent-length:  4 \r\n"
    assert header(head, b"content-length") == b"4"
    assert header(head, b"length") is None


def test_request() -> None:
    assert build_request("localhost:1", "/a", {"X": "y"}, b"body") == (
        b"POST /a HTTP/1.1\r\nHost: localhost:1\r\nX: y\r\nContent-Length: 4\r\n\r\nbody"
    )
