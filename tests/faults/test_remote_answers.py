"""Upstreams with endless answers: the cost to this server stays bounded."""

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from headrace.core.datatypes import Datatype
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.onnx_graphs import add_sub, write_model
from tests.support.remote import write_remote
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

_LIMIT = 1 << 20
_GROWTH = 48 << 20  # bytes of permitted growth
_METADATA = {
    "name": "m", "versions": ["1"], "platform": "x",
    "inputs": [{"name": "X", "datatype": "INT32", "shape": [-1]}],
    "outputs": [{"name": "Y", "datatype": "INT32", "shape": [-1]}],
}  # fmt: skip
_BODY = {"inputs": [{"name": "X", "shape": [2], "datatype": "INT32", "data": [1, 2]}]}
_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"


def _bomb(size: int) -> bytes:
    body = gzip.compress(bytes(size))
    head = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    return _OK + head + body


# The beginning, and the repeated part behind it.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "chunks": (_CHUNKED, b"10000\r\n" + bytes(1 << 16) + b"\r\n"),
    "trailers": (_CHUNKED + b"0\r\n", b"X-Y: z\r\n" * 1000),
    "head": (_OK, b"X-Y: z\r\n" * 1000),
    "interim heads": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "until the end": (b"HTTP/1.0 200 OK\r\n\r\n", bytes(1 << 16)),
    "a known length": (_OK + b"Content-Length: 1099511627776\r\n\r\n", bytes(1 << 16)),
    "a bomb": (b"", b""),  # made by its test, since packing takes long
}


class Upstream:
    """Describes a model, and answers inference with `before` and repetitions of `again`.

    With an empty `again` it sends nothing more and keeps the connection.
    """

    def __init__(self) -> None:
        self.port = 0
        self.before, self.again = b"", b""
        self.pause = 0.0  # before each of them
        self.hung_up = threading.Event()  # on an answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
                await reader.readexactly(int(length or 0))
                path = head.split(" ")[1]
                if path.endswith("/infer"):
                    await self._answer(writer)
                else:
                    self._describe(writer, path)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _describe(self, writer: asyncio.StreamWriter, path: str) -> None:
        found = {"/v2": {"extensions": []}, "/v2/models/m": _METADATA, "/v2/models/m/ready": {}}
        status = 200 if path in found else 404
        body = json.dumps(found.get(path, {})).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        writer.write(head + body)

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self.before)
            while self.again:
                await asyncio.sleep(self.pause)
                writer.write(self.again)
                await writer.drain()
        except ConnectionError:
            self.hung_up.set()
            raise


@contextmanager
def running(upstream: Upstream) -> Iterator[None]:
    """An event loop on a thread, on which the upstream listens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(upstream.serve, "127.0.0.1", 0), loop
        ).result(60)
        upstream.port = listening.sockets[0].getsockname()[1]
        yield
        loop.call_soon_threadsafe(listening.close)
    finally:
        asyncio.run_coroutine_threadsafe(_end_all(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Messages(grpc.GenericRpcHandler):
    """A gRPC server that answers with a message of `size` bytes."""

    def __init__(self) -> None:
        self.size = 0

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        procedure = handler_call_details.method.rpartition("/")[2]
        answer: Callable[[bytes, grpc.ServicerContext], bytes] | None = {
            "ModelMetadata": lambda *_: _grpc_metadata(),
            "ModelReady": lambda *_: pb.ModelReadyResponse(ready=True).SerializeToString(),
            "ModelInfer": lambda *_: _grpc_answer(self.size),
        }.get(procedure)
        return None if answer is None else grpc.unary_unary_rpc_method_handler(answer)


def _grpc_metadata() -> bytes:
    tensors = [
        pb.ModelMetadataResponse.TensorMetadata(name=name, datatype="INT32", shape=shape)
        for name, shape in (("X", [-1]), ("Y", [-1, -1]))
    ]
    found = pb.ModelMetadataResponse(name="m", inputs=tensors[:1], outputs=tensors[1:])
    return found.SerializeToString()


def _grpc_answer(size: int) -> bytes:
    answer = pb.ModelInferResponse(model_name="m", raw_output_contents=[bytes(size)])
    answer.outputs.add(name="Y", datatype="INT32", shape=[2, size // 8])
    return answer.SerializeToString()


@contextmanager
def grpc_upstream(
    messages: Messages, compression: grpc.Compression = grpc.Compression.NoCompression
) -> Iterator[int]:
    server = grpc.server(
        ThreadPoolExecutor(4), handlers=[messages], compression=compression,
        options=[("grpc.max_send_message_length", -1)],
    )  # fmt: skip
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    with running(made):
        yield made


@pytest.fixture(scope="module")
def messages() -> Messages:
    return Messages()


@pytest.fixture(scope="module", params=["alone", "frontends"])
def front(
    upstream: Upstream,
    messages: Messages,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[ServerProcess]:
    """A server of models on these upstreams, and of one of its own."""
    root = tmp_path_factory.mktemp("models")
    url, more = f"http://127.0.0.1:{upstream.port}", {"max_response_bytes": str(_LIMIT)}
    write_remote(root, "batched", url, remote_model="m", **more)
    write_remote(root, "hasty", url, remote_model="m", timeout_secs="1")
    write_remote(root, "usual", url, remote_model="m")
    write_model(root, "neighbour", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    with grpc_upstream(messages) as port, grpc_upstream(messages, grpc.Compression.Gzip) as packing:
        write_remote(root, "message", f"127.0.0.1:{port}", remote_model="m", **more)
        write_remote(root, "packed", f"127.0.0.1:{packing}", remote_model="m", **more)
        count = "1" if request.param == "frontends" else "0"
        options = [f"--frontends={count}", "--max-request-bytes=8388608"]
        with ServerProcess(root, options=options) as process:
            yield process
            assert process.stop() == 0
            assert "bug " not in process.log, process.log
            assert "Traceback" not in process.log, process.log


def ask(front: ServerProcess, model: str) -> httpx.Response:
    return httpx.post(f"{front.url}/v2/models/{model}/infer", json=_BODY, timeout=60, verify=False)


def resident(front: ServerProcess) -> int:
    """Resident memory of a server's processes, in bytes."""
    process = psutil.Process(front.pid)
    return sum(p.memory_info().rss for p in (process, *process.children()))


def neighbour(front: ServerProcess) -> int:
    """The status of a request to a local model."""
    row = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
    body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
    url = f"{front.url}/v2/models/neighbour/infer"
    return httpx.post(url, json=body, timeout=60, verify=False).status_code


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_answer(front: ServerProcess, upstream: Upstream, kind: str) -> None:
    upstream.before, upstream.again = ENDLESS[kind]
    if kind == "a bomb":
        upstream.before = _bomb(200 << 20)
    upstream.pause = 0.0
    upstream.hung_up.clear()
    assert neighbour(front) == 200
    before = resident(front)
    response = ask(front, "batched")
    assert response.status_code == 502, response.text
    assert "the server of model 'batched'" in response.json()["error"]
    front.await_logged(f"127.0.0.1:{upstream.port}")
    if upstream.again:
        assert upstream.hung_up.wait(30)
    assert resident(front) - before < _GROWTH
    assert neighbour(front) == 200


def test_the_limit_is_named(front: ServerProcess, upstream: Upstream) -> None:
    upstream.before, upstream.again = ENDLESS["chunks"]
    upstream.pause = 0.0
    text = "has given an answer of more than {} bytes (max_response_bytes)"
    assert text.format(_LIMIT) in ask(front, "batched").json()["error"]
    with InferenceServerClient(front.grpc) as client:
        tensor = InferInput("X", [2], "INT32")
        tensor.set_data_from_numpy(np.arange(2, dtype=np.int32))
        with pytest.raises(InferenceServerException, match="max_response_bytes") as raised:
            client.infer("batched", [tensor])
    assert raised.value.status() == "StatusCode.INTERNAL"
    # By default the limit is that of requests.
    assert text.format(8388608) in ask(front, "usual").json()["error"]


def test_a_trickling_answer(front: ServerProcess, upstream: Upstream) -> None:
    upstream.before, upstream.again, upstream.pause = _CHUNKED, b"1\r\n \r\n", 0.05
    upstream.hung_up.clear()
    response = ask(front, "hasty")
    assert response.status_code == 504, response.text
    assert upstream.hung_up.wait(30)


@pytest.mark.parametrize("model", ["message", "packed"])
def test_a_message_that_is_too_long(front: ServerProcess, messages: Messages, model: str) -> None:
    messages.size = 4096
    response = ask(front, model)
    assert response.status_code == 200, response.text
    assert response.json()["outputs"][0]["shape"] == [2, 512]
    for size in (_LIMIT, 100 << 20):
        before = resident(front)
        messages.size = size
        response = ask(front, model)
        assert response.status_code == 502, response.text
        assert f"more than {_LIMIT} bytes (max_response_bytes)" in response.json()["error"]
        assert resident(front) - before < _GROWTH
    messages.size = 4096
    assert ask(front, model).status_code == 200
