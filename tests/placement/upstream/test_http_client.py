"""HTTP calls to well-behaved and broken servers, on a thread and on an event loop."""

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import uvloop

from headrace.connections.endpoint import Endpoint
from headrace.connections.http_pool import Done, HttpConnection, HttpPool, NotConnected
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidOption, InvalidRequest
from headrace.core.signature import Signature
from headrace.placement.upstream.connection import (
    CallFailed,
    ProtocolClient,
    RemoteDescription,
    RemoteRequest,
)
from headrace.placement.upstream.http_client import HttpClient, V2Rest
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.protocol.http1 import HttpRequest, HttpResponse
from headrace.protocol.status import Fate
from headrace.protocol.v2_protobuf import RemoteInput
from tests.support.remote_call import infer

TLS = Path(__file__).parents[2] / "support" / "tls"
T = TypeVar("T")
ANSWER = b'{"outputs":[{"name":"Y","datatype":"INT32","shape":[2],"data":[1,2]}]}'
ASKED = RemoteRequest(
    [RemoteInput("X", Datatype.INT32, (2,), [np.arange(2, dtype=np.int32)])], ["Y"], {}
)


class Server:
    """Answers paths by `answers`: a status and body, or raw bytes.

    A connection is closed after raw bytes; without any, it stays open without an answer.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | bytes] = {
            "/v2": (200, b'{"extensions": ["binary_tensor_data"]}'),
            "/v2/models/m/ready": (200, b""),
            "/v2/models/m/infer": (200, ANSWER),
        }
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        self.ended = asyncio.Event()  # a connection
        self.begun = asyncio.Event()  # a request
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        self.writers.append(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers.get("content-length", "0")))
        path = head[0].split(" ")[1]
        self.asked.append((path, headers))
        self.begun.set()
        answer = self.answers.get(path, (404, b""))
        if isinstance(answer, bytes):
            if not answer:
                await reader.read()
            writer.write(answer)
            return False
        status, body = answer
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        return True


def options_of(url: str, root: Path, **parameters: str) -> RemoteOptions:
    return RemoteOptions.of({"endpoints": url, **parameters}, "m", 0, root)


class Thread:
    """Calls on a thread that waits for them."""

    def __init__(self, clients: ProtocolClients, endpoint: Endpoint) -> None:
        self.clients, self.endpoint = clients, endpoint

    async def infer(self, seconds: float = 10) -> list[int]:
        """Output of an inference."""
        answer = await self._visit(lambda client: client.infer(ASKED, seconds))
        return answer.outputs["Y"].tolist()  # type: ignore[no-any-return]

    async def describe(self) -> RemoteDescription:
        return await self._visit(lambda client: client.describe(10))

    async def _visit(self, ask: Callable[[ProtocolClient], Awaitable[T]]) -> T:
        return await asyncio.to_thread(self.clients.visit, self.endpoint, ask)


@asynccontextmanager
async def connected(
    server: Server, tls: ssl.SSLContext | None = None, root: Path = TLS, **parameters: str
) -> AsyncIterator[tuple[HttpClient, Thread]]:
    """A connection to a listening server."""
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as listening:
        port = listening.sockets[0].getsockname()[1]
        url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
        options = options_of(url, root, **parameters)
        endpoint = next(e for e in options.resolve() if e.address == "127.0.0.1")
        clients = ProtocolClients(options, "m")
        connection = clients.connect(endpoint)
        assert isinstance(connection, HttpClient)
        try:
            yield connection, Thread(clients, endpoint)
        finally:
            await connection.close()
            for writer in server.writers:
                writer.close()


async def test_connections_are_reused_one_call_at_a_time() -> None:
    server = Server()
    async with connected(server) as (connection, _):
        assert await connection.ready(10)
        for _ in range(3):
            answer = await infer(connection, ASKED, 10)
        assert answer.outputs["Y"].tolist() == [1, 2]
    assert server.connections == 1
    paths = [path for path, _ in server.asked]
    assert paths == ["/v2/models/m/ready", "/v2", *["/v2/models/m/infer"] * 3]
    assert "inference-header-content-length" in server.asked[-1][1]
    server = Server()
    async with connected(server) as (connection, _):
        await connection.ready(10)
        answers = await asyncio.gather(*(infer(connection, ASKED, 10) for _ in range(4)))
        assert len(answers) == 4
    assert server.connections == 4


async def test_headers_go_with_a_call(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("Bearer abc")
    server = Server()
    token = str(tmp_path / "token")
    async with connected(server, authorization_file=token) as (connection, _):
        await connection.ready(10)
        headers = [("x-tenant", "a"), ("authorization", "Bearer def")]
        await infer(connection, ASKED._replace(headers=headers), 10)
        await infer(connection, ASKED, 10)
        with pytest.raises(CallFailed, match="'x-tenant' cannot be sent") as failed:
            await infer(connection, ASKED._replace(headers=[("x-tenant", "a\r\nb: c")]), 10)
        assert failed.value.failure.fate is Fate.ANSWERED
    first, second = (headers for _, headers in server.asked[-2:])
    assert (first["x-tenant"], first["authorization"]) == ("a", "Bearer def")
    assert second["authorization"] == "Bearer abc"
    assert "x-tenant" not in second


async def test_an_idle_connection_that_the_server_has_closed_is_replaced() -> None:
    server = Server()
    async with connected(server) as (connection, _):
        for _ in range(3):
            assert await connection.ready(10)
            server.writers[-1].close()
            await server.writers[-1].wait_closed()
    assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        ((503, b'{"error": "Exceeds maximum queue size"}'), Fate.REFUSED),
        ((503, b"broken"), Fate.LATE), ((429, b""), Fate.REFUSED),
        ((400, b'{"error": "unexpected shape"}'), Fate.ANSWERED), ((401, b""), Fate.ANSWERED),
        ((302, b""), Fate.ANSWERED), ((200, b"{}"), Fate.ANSWERED),
        ((200, b"<html>"), Fate.ANSWERED), (b"SSH-2.0\r\n\r\n", Fate.ANSWERED),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx", Fate.ANSWERED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", Fate.UNCERTAIN),
        (b"HTTP/1.1 200", Fate.UNCERTAIN),
    ],
)  # fmt: skip
async def test_failures(answer: bytes | tuple[int, bytes], fate: Fate) -> None:
    server = Server()
    server.answers["/v2/models/m/infer"] = answer
    async with connected(server, http_tensors="binary") as (connection, thread):
        with pytest.raises(CallFailed) as failed:
            await infer(connection, ASKED, 10)
        assert failed.value.failure.fate is fate
        with pytest.raises(CallFailed) as failed:
            await thread.infer()
        assert failed.value.failure.fate is fate


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + ANSWER,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (len(ANSWER), ANSWER),
    ],
)
async def test_answers_of_unknown_length(answer: bytes) -> None:
    server = Server()
    server.answers["/v2/models/m/infer"] = answer
    async with connected(server) as (connection, thread):
        for _ in range(2):
            found = await infer(connection, ASKED, 10)
            assert found.outputs["Y"].tolist() == [1, 2]
        assert await thread.infer() == [1, 2]


async def test_a_server_that_does_not_answer() -> None:
    server = Server()
    server.answers["/v2/models/m/infer"] = b""
    async with connected(server, http_tensors="binary") as (connection, thread):
        assert await connection.ready(10)  # it has a connection
        with pytest.raises(CallFailed) as failed:
            await infer(connection, ASKED, 0.1)
        assert failed.value.failure.fate is Fate.LATE
        await server.ended.wait()  # the call is cancelled there
        with pytest.raises(CallFailed) as failed:
            await thread.infer(0.1)
        assert failed.value.failure.fate is Fate.LATE


async def test_a_call_that_is_cancelled_ends_its_connection() -> None:
    server = Server()
    server.answers["/v2/models/m/infer"] = b""
    async with connected(server, http_tensors="binary") as (connection, _):
        call = asyncio.ensure_future(infer(connection, ASKED, 0))
        await server.begun.wait()
        call.cancel()
        await server.ended.wait()
        server.answers["/v2/models/m/infer"] = (200, ANSWER)
        assert (await infer(connection, ASKED, 10)).outputs["Y"].tolist() == [1, 2]


def packed_answer(values: np.ndarray, data: bytes) -> bytes:
    """A compressed answer that also closes the connection."""
    output = {"name": "Y", "datatype": "INT32", "shape": [values.size]}
    head = json.dumps({"outputs": [output | {"parameters": {"binary_data_size": len(data)}}]})
    body = gzip.compress(head.encode() + data, 6)
    return (
        f"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
    ).encode() + body


async def test_a_large_answer_that_is_compressed() -> None:
    """Unrequested compression, first on an existing connection, then on a new one."""
    values = np.random.default_rng(0).integers(0, 99, 100_000, np.int32)
    server = Server()
    async with connected(server, http_tensors="binary") as (connection, _):
        assert (await infer(connection, ASKED, 10)).outputs["Y"].tolist() == [1, 2]
        server.answers["/v2/models/m/infer"] = packed_answer(values, values.tobytes())
        found = await infer(connection, ASKED, 10)
        assert found.outputs["Y"].tolist() == values.tolist()
        assert (await infer(connection, ASKED, 10)).outputs["Y"].size == values.size
        bomb = bytes(70 << 20)
        server.answers["/v2/models/m/infer"] = packed_answer(values, bomb)
        with pytest.raises(CallFailed, match="the answer grows to more than 250 times"):
            await infer(connection, ASKED, 10)


def test_calls_that_are_cancelled_while_they_connect() -> None:
    """On the server's event loop, which does not report the end of every connection."""

    async def scenario() -> None:
        server = Server()
        async with connected(server, http_tensors="binary") as (connection, _):
            for ticks in range(12):
                call = asyncio.ensure_future(infer(connection, ASKED, 0))
                for _ in range(ticks):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            assert (await infer(connection, ASKED, 10)).outputs["Y"].tolist() == [1, 2]

    uvloop.run(asyncio.wait_for(scenario(), 30))


async def test_connection_refused(tmp_path: Path) -> None:
    async with connected(Server()) as (_, thread):
        pass
    connection = thread.clients.connect(thread.endpoint)
    with pytest.raises(CallFailed) as failed:
        await infer(connection, ASKED, 10)
    assert failed.value.failure.fate is Fate.UNSENT
    await connection.close()
    with pytest.raises(CallFailed, match="Connection refused") as failed:
        await thread.describe()
    assert failed.value.failure.fate is Fate.UNSENT


async def test_a_port_of_another_protocol() -> None:
    class HangsUp(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

    async with connected(HangsUp()) as (_, thread):
        with pytest.raises(CallFailed, match="is this its port for HTTP") as failed:
            await thread.describe()
        assert failed.value.failure.fate is Fate.UNCERTAIN


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        ((200, b""), True), ((200, b'{"name": "m", "ready": true}'), True),
        ((200, b'{"ready": false}'), False), ((200, b"ok"), True), ((400, b""), False),
        ((503, b""), False),
    ],
)  # fmt: skip
async def test_readiness(answer: tuple[int, bytes], ready: bool) -> None:
    server = Server()
    server.answers["/v2/models/m/ready"] = answer
    async with connected(server) as (connection, _):
        assert await connection.ready(10) is ready


async def test_unsupported_extensions_are_not_requested() -> None:
    server = Server()
    server.answers["/v2"] = (200, b'{"extensions": []}')
    tensor = b'[{"name": "Y", "datatype": "FP16", "shape": [2]}]'
    metadata = b'{"name": "m", "inputs": %s, "outputs": %s}' % (tensor, tensor)
    server.answers["/v2/models/m"] = (200, metadata)
    async with connected(server) as (connection, thread):
        said = await thread.describe()
        assert said.config is None
        assert said.metadata.inputs[0].datatype == "FP16"
        await infer(connection, ASKED, 10)
    assert "inference-header-content-length" not in server.asked[-1][1]


async def test_an_invalid_configuration() -> None:
    server = Server()
    server.answers["/v2/models/m"] = (200, b'{"name": "m"}')
    server.answers["/v2/models/m/config"] = (200, b"7")
    async with connected(server) as (_, thread):
        with pytest.raises(CallFailed, match="invalid response"):
            await thread.describe()


async def test_a_connection_that_is_lost_before_anything_is_sent() -> None:
    connection = HttpConnection(HttpPool(Endpoint("s", "http", "127.0.0.1", 1, "localhost"), None))
    outcome: asyncio.Future[HttpResponse | Exception]
    outcome = asyncio.get_running_loop().create_future()
    connection.send([b"x"], 10, outcome.set_result)
    assert isinstance(await outcome, NotConnected)  # so that another server may be asked


class KeptConnection(HttpConnection):
    """A connection whose answers arrive on request."""

    def __init__(self, pool: HttpPool) -> None:
        super().__init__(pool)
        self.sent = asyncio.Event()
        self.tell: Callable[[HttpResponse | Exception], None] = lambda _: None
        self.aborted = 0

    def send(self, pieces: object, seconds: float, done: Done, sink: object = None) -> None:
        self.tell = done
        self.sent.set()

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize("answered", [True, False])
async def test_an_answer_that_comes_as_its_call_is_cancelled(answered: bool) -> None:
    """The connection belongs to another call before the task learns of the cancellation."""
    pool = HttpPool(Endpoint("s", "http", "127.0.0.1", 1, "localhost"), None)
    connection = KeptConnection(pool)

    async def given(seconds: float) -> HttpConnection:
        return connection

    pool.connection = given  # type: ignore[method-assign]
    task = asyncio.ensure_future(pool.ask([b"x"], 10))
    await connection.sent.wait()
    task.cancel()
    if answered:
        connection.tell(HttpResponse(200, {}, b"", True))
    await asyncio.wait([task])
    assert connection.aborted == (0 if answered else 1)


def secure() -> ssl.SSLContext:
    """A server with a certificate for `localhost` that requires one of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    context.load_verify_locations(TLS / "root.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def test_tls_and_credentials(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("Bearer abc\n")
    parameters = {
        "tls_root_cert": str(TLS / "root.pem"), "tls_cert": str(TLS / "client.pem"),
        "tls_key": str(TLS / "client.key"), "authorization_file": "token",
    }  # fmt: skip
    server = Server()
    async with connected(server, secure(), tmp_path, **parameters) as (connection, thread):
        assert await connection.ready(10)
        assert await thread.infer() == [1, 2]
    for _, headers in server.asked:
        assert headers["authorization"] == "Bearer abc"
        assert headers["host"] == thread.endpoint.authority


@pytest.mark.parametrize("parameters", [{}, {"tls_root_cert": "root.pem", "host": "elsewhere"}])
async def test_a_server_that_is_not_trusted(parameters: dict[str, str]) -> None:
    async with connected(Server(), secure(), TLS, **parameters) as (connection, thread):
        with pytest.raises(CallFailed, match="its certificate is not accepted") as failed:
            await connection.ready(10)
        assert failed.value.failure.fate is Fate.UNSENT
        with pytest.raises(CallFailed, match="its certificate is not accepted"):
            await thread.describe()


@pytest.mark.parametrize("name", ["tls_root_cert", "tls_cert"])
def test_files_without_certificates(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("nothing")
    given = {name: "file"} if name == "tls_root_cert" else {name: "file", "tls_key": "file"}
    with pytest.raises(InvalidOption, match=f"{name}.*in the form of PEM"):
        ProtocolClients(options_of("https://127.0.0.1", tmp_path, **given), "m")


async def test_a_tensor_that_cannot_be_sent() -> None:
    array = np.array([b"\xff"], object)
    request = RemoteRequest([RemoteInput("X", Datatype.BYTES, (1,), [array])], ["Y"], {})
    server = Server()
    server.answers["/v2/models/m"] = (200, b"{}")
    async with connected(server, http_tensors="json") as (connection, _):
        with pytest.raises(CallFailed) as failed:
            await infer(connection, request, 10)
    assert isinstance(failed.value.failure.error, InvalidRequest)


@pytest.mark.parametrize("inputs", [1, 500])
async def test_a_long_description_is_read_on_a_thread(inputs: int) -> None:
    tensors = [{"name": f"x{n}", "data_type": "TYPE_FP32", "dims": [1]} for n in range(inputs)]
    answers = {
        "/v2/models/m": {"name": "m", "inputs": [], "outputs": []},
        "/v2/models/m/config": {"name": "m", "input": tensors},
    }

    async def ask(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, {}, json.dumps(answers[request.path]).encode(), True)

    rest = V2Rest(options_of("http://h", Path()), "m", Signature("m", 0, (), ()))
    described = asyncio.ensure_future(rest.describe(ask))
    await asyncio.sleep(0)
    assert described.done() is (inputs == 1)
    config = (await described).config
    assert config is not None
    assert len(config.input) == inputs
