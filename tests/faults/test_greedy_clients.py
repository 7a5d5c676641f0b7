"""Clients that do not read or send: limited in share and time, without effect on others."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import onnx
import pytest
from hpack import Encoder
from onnx import TensorProto, helper

from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.http2_socket import REQUEST
from tests.support.raw_clients import (
    HttpConnection,
    call,
    get,
    open_channel,
    open_http2,
    post,
    post_bytes,
)
from tests.support.server_process import ServerProcess
from tests.support.watching import admitted, incoming, metrics, until

pytestmark = pytest.mark.slow  # while they wait for clients

INFER = "/v2/models/echo/infer"
SMALL = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
MANY = 4 << 20  # bytes of an answer too large for a socket
PLACES = 20  # concurrent requests of the server
# Of the server with clients without progress: a busy machine takes part of it to send them all.
PATIENCE_SECS = 3
_FEW_BYTES = 4096  # bytes that a client's socket buffers


def write_echo(repository: Path) -> None:
    """A model that returns its FP32 input."""
    (repository / "echo" / "1").mkdir(parents=True)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "n"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "echo", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, repository / "echo" / "1" / "model.onnx")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("echo")
    write_echo(path)
    return path


@pytest.fixture(scope="module", params=[[], ["--frontends=1"]], ids=["alone", "frontends"])
def hasty(request: pytest.FixtureRequest, echo: Path) -> Iterator[ServerProcess]:
    """A server with low limits and a patience of some seconds."""
    options = [
        f"--max-admitted-requests={PLACES}", f"--progress-timeout-secs={PATIENCE_SECS}",
        f"--http-body-timeout-secs={PATIENCE_SECS}", *request.param,
    ]  # fmt: skip
    with ServerProcess(echo, options=options) as server:
        yield server
        asyncio.run(until(lambda: admitted(server), lambda found: found == (0, 0)))
        assert server.stop() == 0
        assert "bug" not in server.log, server.log


def message(count: int) -> bytes:
    """A request of `count` elements, with gRPC's prefix."""
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(4 * count)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, count])
    data = request.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def binary(count: int) -> tuple[bytes, dict[str, str]]:
    """A binary HTTP request of `count` elements, and its headers."""
    tensor = b'"name":"x","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}'
    head = b'{"inputs":[{%b}],"parameters":{"binary_data_output":true}}' % (
        tensor % (count, 4 * count)
    )
    return head + bytes(4 * count), {"Inference-Header-Content-Length": str(len(head))}


async def given_up(server: ServerProcess, reason: str) -> float:
    """Number of clients aborted for this reason."""
    return (await metrics(server))[f'headrace_given_up_total{{reason="{reason}"}}']


async def test_messages_being_received_do_not_count_as_requests(hasty: ServerProcess) -> None:
    before = await given_up(hasty, "unsent")
    async with contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(open_http2(hasty.grpc)) for _ in range(3)]
        for caller in callers:
            for number in range(1, 2 * PLACES, 2):
                caller.begin(number, struct.pack(">BI", 0, 100))
        await until(lambda: incoming(hasty), lambda found: found == 3 * PLACES)
        assert (await post(hasty.http, INFER, SMALL)).status == 200
        for caller in callers:
            for status, text in await caller.statuses(PLACES):
                assert status == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
                assert text == f"no more of the request came for {PATIENCE_SECS} s"
    assert await incoming(hasty) == 0
    assert await given_up(hasty, "unsent") == before + 3 * PLACES


@pytest.mark.parametrize("elements", [10, 1_000_000])
async def test_complete_messages_of_open_calls_count(hasty: ServerProcess, elements: int) -> None:
    whole = message(elements)
    pieces = [whole[start : start + 16384] for start in range(0, len(whole), 16384)]
    async with open_http2(hasty.grpc) as caller:
        for number in (1, 3, 5):
            caller.begin(number, *pieces)
        count = 3 * (len(whole) - 5)
        await until(lambda: admitted(hasty), lambda found: found == (0, count))
        assert len(await caller.statuses(3)) == 3
        await until(lambda: admitted(hasty), lambda found: found == (0, 0))


async def test_early_bytes_buy_no_time(hasty: ServerProcess) -> None:
    """A megabyte, and a byte now and then."""
    body, headers = binary(1 << 20)
    whole = post_bytes(INFER, body, headers)
    async with await HttpConnection.open(hasty.http) as connection:
        await connection.send(whole[:-1000])
        answer = asyncio.ensure_future(connection.receive())
        for sent in range(100):
            done, _ = await asyncio.wait([answer], timeout=0.3)
            if done:
                break
            await connection.send(whole[sent - 1000 : sent - 999])
        assert answer.done()
        assert answer.result().status == 408
        assert b"more slowly than 1024 bytes/s" in answer.result().body
    await until(lambda: admitted(hasty), lambda found: found == (0, 0))


def open_deaf(address: str) -> socket.socket:
    """A connection with a small receive buffer."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _FEW_BYTES)
    host, _, port = address.rpartition(":")
    deaf.connect((host, int(port)))
    return deaf


async def unread(server: ServerProcess) -> float:
    return (await metrics(server))["headrace_unread_answer_bytes"]


@pytest.mark.parametrize("closing", [False, True])
async def test_unread_http_answers(hasty: ServerProcess, closing: bool) -> None:
    before = await given_up(hasty, "unread")
    body, headers = binary(MANY)
    if closing:
        headers["Connection"] = "close"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            deaf = stack.enter_context(open_deaf(hasty.http))
            await asyncio.to_thread(deaf.sendall, post_bytes(INFER, body, headers))
        await until(lambda: unread(hasty), lambda found: found > MANY)
        assert (await admitted(hasty))[1] > MANY
        assert (await post(hasty.http, INFER, SMALL)).status == 200
        await until(lambda: given_up(hasty, "unread"), lambda found: found == before + 2)
        await until(lambda: unread(hasty), lambda found: found == 0)
    await until(lambda: admitted(hasty), lambda found: found == (0, 0))


async def test_slowly_read_http_answers_arrive(hasty: ServerProcess) -> None:
    """Over more time than a client without progress has."""
    body, headers = binary(MANY)
    with open_deaf(hasty.http) as slow:
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(slow, post_bytes(INFER, body, headers))
        await until(lambda: unread(hasty), lambda found: found > 0)
        got = 0
        for _ in range(20 * PATIENCE_SECS):  # a few kilobytes at a time
            got += len(await loop.sock_recv(slow, 10_000))
            await asyncio.sleep(0.1)
        while got < 4 * MANY:
            piece = await loop.sock_recv(slow, 1 << 20)
            assert piece, f"the connection ended after {got} bytes"
            got += len(piece)


@pytest.mark.parametrize("window", [0, 1 << 30])
async def test_unread_grpc_answers(hasty: ServerProcess, window: int) -> None:
    """With a window of 0, and with a large window on an unread socket."""
    before = await given_up(hasty, "unread")
    whole = message(MANY)
    frames = [
        frame(DATA, 0, 1, whole[start : start + 16384]) for start in range(0, len(whole), 16384)
    ]
    head = frame(HEADERS, END_HEADERS, 1, Encoder().encode(REQUEST))
    settings = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))
    more = frame(8, 0, 0, struct.pack(">I", (1 << 30))) if window else b""
    with open_deaf(hasty.grpc) as deaf:
        data = b"".join([PREFACE, settings, more, head, *frames, frame(DATA, END_STREAM, 1)])
        await asyncio.to_thread(deaf.sendall, data)
        await until(lambda: unread(hasty), lambda found: found > MANY)
        assert (await post(hasty.http, INFER, SMALL)).status == 200
        await until(lambda: given_up(hasty, "unread"), lambda found: found == before + 1)
        await until(lambda: unread(hasty), lambda found: found == 0)
    await until(lambda: admitted(hasty), lambda found: found == (0, 0))


async def test_connections_beyond_the_limit(echo: Path) -> None:
    with ServerProcess(echo, options=["--max-connections=3"]) as server:
        async with contextlib.AsyncExitStack() as stack:
            kept = [
                await stack.enter_async_context(await HttpConnection.open(server.http))
                for _ in range(2)
            ]
            caller = await stack.enter_async_context(open_http2(server.grpc))
            await until(
                lambda: metrics(server),
                lambda m: (
                    m['headrace_connections{door="http"}'] == 2
                    and m['headrace_connections{door="grpc"}'] == 1
                ),
            )
            async with await HttpConnection.open(server.http) as connection:
                answer = await connection.receive()
                assert answer.status == 503
                assert b"as many connections as it may (--max-connections)" in answer.body
                assert await connection.ended()
            async with open_http2(server.grpc) as refused:
                await refused.ended()
            assert (await metrics(server))["headrace_refused_connections_total"] == 2
            assert (await kept[0].post(INFER, SMALL)).status == 200
            caller.begin(1, message(3), end=True)
            assert await caller.statuses(1) == [("0", "")]
            await kept[0].close()
            await until(
                lambda: metrics(server), lambda m: m['headrace_connections{door="http"}'] == 1
            )
            assert (await post(server.http, INFER, SMALL)).status == 200


async def test_silent_tls_clients_count_as_connections(echo: Path) -> None:
    files = Path(__file__).parents[1] / "support" / "tls"
    options = [
        "--max-connections=3", "--grpc-use-ssl", f"--grpc-server-cert={files}/server.pem",
        f"--grpc-server-key={files}/server.key",
    ]  # fmt: skip
    with ServerProcess(echo, options=options) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(await HttpConnection.open(server.grpc))
            async with await HttpConnection.open(server.grpc) as refused:
                assert await refused.ended()
            assert (await metrics(server))["headrace_refused_connections_total"] == 1
        await until(lambda: metrics(server), lambda m: m['headrace_connections{door="grpc"}'] == 0)
        root = (files / "root.pem").read_bytes()
        credentials = grpc.ssl_channel_credentials(root)
        async with grpc.aio.secure_channel(server.grpc, credentials) as channel:
            assert await call(channel, "ModelInfer", message(3)[5:])


async def test_connections_of_the_metrics_door_are_limited(echo: Path) -> None:
    with ServerProcess(echo) as server:
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(await HttpConnection.open(server.metrics))
                for _ in range(129)
            ]
            assert (await opened[-1].receive()).status == 503
            await opened[0].send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await opened[0].receive()).status == 200

        async def status() -> int:
            try:
                return (await get(server.metrics, "/metrics")).status
            except (ConnectionError, EOFError):  # closed before the request was read
                return 0

        # Until the server has noticed that the others are closed, it refuses this one, too.
        await until(status, lambda found: found == 200)
        assert (await metrics(server))["headrace_ready"] == 1


@pytest.mark.parametrize("front_ends", ["0", "1"])
@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_connections_beyond_the_descriptors(echo: Path, door: str, front_ends: str) -> None:
    """Excess connections are closed at once, counted and logged; existing ones go on."""
    # Fewer than the three quarters that connections may have, and the server's open files.
    prefix = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    options = [f"--frontends={front_ends}"]
    with ServerProcess(echo, options=options, prefix=prefix) as server:
        address = server.http if door == "http" else server.grpc
        async with contextlib.AsyncExitStack() as stack:
            early = await stack.enter_async_context(await HttpConnection.open(server.http))
            assert (await early.post(INFER, SMALL)).status == 200
            for _ in range(64):
                await stack.enter_async_context(await HttpConnection.open(address))
            async with await HttpConnection.open(address) as refused:
                assert await refused.ended()
            assert (await early.post(INFER, SMALL)).status == 200
        open_ones = f'headrace_connections{{door="{door}"}}'

        async def scrape() -> dict[str, float]:
            try:
                return await metrics(server)
            except (ConnectionError, EOFError):  # still no descriptor for this one
                return {}

        found = await until(
            scrape,
            lambda m: m.get("headrace_failed_accepts_total", 0) > 0 and m[open_ones] == 0,
        )
        assert found["headrace_refused_connections_total"] == 0
        assert (await post(server.http, INFER, SMALL)).status == 200
        server.await_logged("cannot accept 1 connection: Too many open files")


async def test_idle_connections_over_grpc_end(echo: Path) -> None:
    with ServerProcess(echo, options=["--grpc-max-connection-idle-secs=1"]) as server:
        async with open_http2(server.grpc) as caller:
            assert await caller.ended() is not None  # after a GOAWAY
        # A client that behaves like gRPC's libraries notices nothing.
        async with open_channel(server.grpc) as channel:
            data = message(3)[5:]
            assert await call(channel, "ModelInfer", data)
            await until(
                lambda: metrics(server), lambda m: m['headrace_connections{door="grpc"}'] == 0
            )
            assert await call(channel, "ModelInfer", data)


async def test_front_ends_share_one_limit(echo: Path) -> None:
    """Bodies being received by all of them count together: with separate limits, half would do."""
    size = 100_000
    options = ["--frontends=2", f"--max-admitted-bytes={10 * size}"]
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    with ServerProcess(echo, options=options) as server:
        async with contextlib.AsyncExitStack() as stack:
            for count in range(1, 11):
                one = await stack.enter_async_context(await HttpConnection.open(server.http))
                await one.send(head + bytes(size - 1))
                held = count * (size - 1)
                await until(lambda: admitted(server), lambda found: found == (0, held))  # noqa: B023
            for _ in range(8):
                answer = await post(server.http, INFER, bytes(size))
                assert answer.status == 503
                assert b"limit of 1000000 bytes" in answer.body
        await until(lambda: admitted(server), lambda found: found == (0, 0))
        assert (await post(server.http, INFER, SMALL)).status == 200
