"""HTTP/1.1 responses read by a client."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.protocol.http1 import (
    LARGEST_HEAD,
    HttpRequest,
    HttpResponse,
    ResponseReader,
    header_lines,
    request_pieces,
)

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Y: z\r\n\r\nhello"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = CHUNKS + b"3\r\nhel\r\n2;a=b\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello"
ANSWERS = {
    "plain": PLAIN,
    "chunked": CHUNKED,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n" + PLAIN,
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "last": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
}


def feed(reader: ResponseReader, pieces: Sequence[bytes]) -> list[HttpResponse]:
    """Events of bytes received piece by piece."""
    found = []
    for piece in pieces:
        rest = piece
        while rest:
            view = reader.buffer()
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            rest = rest[count:]
            response = reader.received(count)
            if response is not None:
                found.append(response)
    return found


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces."""
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("kind", ANSWERS)
@given(data=st.data())
def test_responses_in_any_pieces(kind: str, data: st.DataObject) -> None:
    reader = ResponseReader()
    for _ in range(2):
        (response,) = feed(reader, data.draw(split(ANSWERS[kind])))
        assert response.status == (204 if kind == "nothing" else 200)
        assert bytes(response.body) == (b"" if kind in ("nothing", "empty") else b"hello")
        assert response.reusable is (kind != "last")
        assert b"trailer" not in response.headers
        assert reader.closed() is None
    if kind == "plain":
        assert response.headers[b"x-y"] == b"z"


@given(split(UNTIL_CLOSE))
def test_a_response_ended_by_the_end_of_the_connection(pieces: list[bytes]) -> None:
    reader = ResponseReader()
    assert feed(reader, pieces) == []
    response = reader.closed()
    assert response is not None
    assert (bytes(response.body), response.reusable) == (b"hello", False)


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
def test_end_of_a_response(answer: bytes) -> None:
    for size in range(len(answer)):
        reader = ResponseReader()
        feed(reader, [answer[:size]])
        assert reader.closed() is None
    try:
        (response,) = feed(ResponseReader(), [answer + b"HTTP/1.1 200"])
    except InvalidRequest:
        return
    assert not response.reusable  # further bytes belong to no response


def test_a_large_body_is_not_copied() -> None:
    size = 3 * LARGEST_HEAD
    reader = ResponseReader()
    feed(reader, [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nx" % size])
    assert len(reader.buffer()) == size - 1
    (response,) = feed(reader, [b"x" * (size - 1)])
    assert bytes(response.body) == b"x" * size


@pytest.mark.parametrize(("answer", "text"), [
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * LARGEST_HEAD, "a head of more than"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "a body of more than"),
    (CHUNKS + b"65\r\n" + b"x" * 101, "a body of more than"),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "a body of more than"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "the transfer encoding"),
    (b"HTTP/1.1 101 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", "a switch"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "not HTTP/1.1"),
    (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1.1"),
    (b"HTTP/1.1 102 Processing\r\n\r\n" * 33 + PLAIN, "more than 32 heads"),
    (CHUNKS + b"0\r\nX: " + b"y" * 3 * LARGEST_HEAD, "bytes beside chunks"),
    (CHUNKS + b"1;" + b"y" * 3 * LARGEST_HEAD, "bytes beside chunks"),
])  # fmt: skip
def test_refused_responses(answer: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        feed(ResponseReader(100), [answer])


@given(st.lists(st.binary(min_size=1), max_size=8), st.sampled_from([b"", *ANSWERS.values()]))
def test_any_bytes_are_responses_or_refused(pieces: list[bytes], before: bytes) -> None:
    reader = ResponseReader()
    try:
        feed(reader, [*([before] if before else []), *pieces])
        reader.closed()
    except InvalidRequest:
        pass


def test_requests() -> None:
    common = header_lines([("host", "a"), ("x", "ü\t")])
    sent = request_pieces(HttpRequest("GET", "/p"), common)
    assert sent == [b"GET /p HTTP/1.1\r\nhost: a\r\nx: \xfc\t\r\n\r\n"]
    sent = request_pieces(HttpRequest("POST", "/p", {"x": "y"}, [b"ab", b"c"]), "")
    assert sent == [b"POST /p HTTP/1.1\r\nx: y\r\ncontent-length: 3\r\n\r\nabc"]
    large = memoryview(bytes(1 << 20))
    assert request_pieces(HttpRequest("POST", "/p", {}, [large]), "")[1] is large


def test_header_injection_is_refused() -> None:
    for value in ("a\r\nb: c", "a\nb", "\x00", "€"):
        with pytest.raises(InvalidRequest, match="the header 'x' cannot be sent"):
            header_lines([("x", value)])
