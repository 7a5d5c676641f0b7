"""HTTP responses of unusual servers: error messages, and connections that break."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from headrace import Client
from headrace.client import AnswerError, ClientError, ConnectionFailed, StatusError, TimedOut

Scripted = Callable[..., Client]


def response(body: bytes, head: str = "", status: str = "200 OK") -> bytes:
    """A response over HTTP/1.1."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A client of a server that gives `answers` in turn, one per request.

    After an empty answer it closes the connection and accepts another.
    """
    with ExitStack() as stack:

        def start(*answers: bytes, timeout: float = 10.0) -> Client:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=_serve, args=(listener, list(answers)))
            thread.start()
            stack.callback(thread.join, 10)
            # This wakes a thread that waits for another connection; closing would not.
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return stack.enter_context(Client(url, timeout=timeout))

        yield start


def _serve(listener: socket.socket, answers: list[bytes]) -> None:
    while answers:
        try:
            connection, _ = listener.accept()
        except OSError:  # the test has ended
            return
        with connection:
            while answers and (answers[0] == b"" or connection.recv(65536)):
                answer = answers.pop(0)
                if not answer:
                    # Later: a client's unread data would reset the connection.
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                    break
                connection.sendall(answer)


def test_a_kept_connection_closed_by_the_server(scripted: Scripted) -> None:
    client = scripted(response(b"1"), b"", response(b"2"), response(b"3"))
    assert [client.fetch("/a") for _ in range(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("answer", "kind", "text"), [
    (b"SSH-2.0-OpenSSH\r\n\r\n", AnswerError, "does not speak HTTP"),
    (
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        ConnectionFailed,
        "before it had answered",
    ),
    (response(b'{"error": "as it says"}', "", "400 x"), StatusError, "^as it says$"),
    (response(b"", "", "502 x"), StatusError, "^HTTP status 502 Bad Gateway$"),
    (
        response(b"<h1>no\n</h1>", "", "404 x"), StatusError, "^HTTP status 404 Not Found: <h1>",
    ),
    (response(b"[" * 10**5, "", "499 x"), StatusError, r"^HTTP status 499: \[{200}\.\.\.$"),
    (response(b"hello"), AnswerError, "no JSON: hello"),
    (response(b"[]"), AnswerError, "the answer to SetModelTraffic is no JSON object"),
])  # fmt: skip
def test_error_messages(
    scripted: Scripted, answer: bytes, kind: type[ClientError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        scripted(answer, b"").document("SetModelTraffic", {}, name="m")


@pytest.mark.parametrize("answer", [
    response(b"{}"),
    response(b"{}", "Inference-Header-Content-Length: x\r\n"),
    response(b"{}", "Inference-Header-Content-Length: 99\r\n"),
    response(b"[" * 10**5),
    response(b'{"outputs": [{"name": "a", "datatype": "FP32", "shape": [2], "data": [1]}]}'),
])  # fmt: skip
def test_invalid_inference_responses(scripted: Scripted, answer: bytes) -> None:
    with pytest.raises(AnswerError, match="the answer is no inference response"):
        scripted(answer).infer("m", {"a": 1})


def test_outputs_that_are_not_binary(scripted: Scripted) -> None:
    output = b'{"name": "a", "datatype": "BYTES", "shape": [1], "data": ["\xc3\xbc"]}'
    text = b'{"model_name": "m", "outputs": [%s]}' % output
    assert scripted(response(text)).infer("m", {"a": 1}).texts() == ["\u00fc"]


def test_a_refusal_keeps_the_connection(scripted: Scripted) -> None:
    client = scripted(response(b"", "", "503 x"), response(b"[1]"))
    with pytest.raises(StatusError) as refused:
        client.fetch("/x")
    assert (refused.value.status, refused.value.grpc_status) == (503, None)
    assert client.fetch("/x") == b"[1]"


def test_a_server_that_closes_without_an_answer(scripted: Scripted) -> None:
    client = scripted(b"", response(b"1"))
    with pytest.raises(ConnectionFailed, match="before it had answered"):
        client.fetch("/x")
    assert client.fetch("/x") == b"1"  # the next request has a connection of its own


def test_a_server_that_does_not_answer(scripted: Scripted) -> None:
    client = scripted(b"HTTP/1.1 ", b"never", timeout=0.05)
    with pytest.raises(TimedOut, match=r"no answer from http://.* within 0\.05 s"):
        client.fetch("/x")


@pytest.mark.parametrize("head", ["", "Transfer-Encoding: chunked\r\n"])
def test_events(scripted: Scripted, head: str) -> None:
    body = b': remark\n\ndata: {"a": 1}\n\nevent: x\ndata:{"a": 2}\r\n\r\n'
    answer = response(body)
    if head:
        pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))
        answer = f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + chunks
    client = scripted(answer, response(b"kept"))
    assert list(client.generate_stream("m", {})) == [{"a": 1}, {"a": 2}]
    assert client.fetch("/x") == b"kept"


@pytest.mark.parametrize(("answer", "kind", "text"), [
    (response(b'{"error": "no"}', "", "400 x"), StatusError, "^no$"),
    (response(b'data: {"error": "no"}\n\n'), StatusError, "^no$"),
    (response(b"data: x\n\n"), AnswerError, "an event is no JSON: x"),
    (response(b"data: 1\n\n"), AnswerError, "an event is no JSON object: 1"),
])  # fmt: skip
def test_events_that_are_errors(
    scripted: Scripted, answer: bytes, kind: type[ClientError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        list(scripted(answer).generate_stream("m", {}))


def test_a_broken_stream(scripted: Scripted) -> None:
    event = b'data: {"a": 1}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = scripted(head + b"%x\r\n%s\r\n" % (len(event), event), b"").generate_stream("m", {})
    assert next(events) == {"a": 1}
    with pytest.raises(ConnectionFailed, match="before it had answered"):
        next(events)


def test_a_stream_closed_early(scripted: Scripted) -> None:
    event = b'data: {"a": 1}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    client = scripted(head + b"%x\r\n%s\r\n" % (len(event), event), response(b"other"))
    events = client.generate_stream("m", {})
    assert next(events) == {"a": 1}
    events.close()  # which closes the connection: the server takes another one
    assert client.fetch("/x") == b"other"
