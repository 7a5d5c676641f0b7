"""gRPC calls over TLS and with credentials, on a thread and on an event loop."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.connections.endpoint import Endpoint
from headrace.connections.grpc_channel import GrpcChannel, receive_buffer
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.placement.upstream.connection import CallFailed, RemoteRequest
from headrace.placement.upstream.grpc_client import GrpcClient, GrpcMessages, GrpcStream
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients, tls_context
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import Failure, Fate
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput
from tests.protocol.http2.server_peer import HEAD
from tests.support.remote_call import infer

TLS = Path(__file__).parents[2] / "support" / "tls"


class Guarded(grpc.GenericRpcHandler):
    """Has a ready model for clients with the token."""

    goes_on = Event()  # for a stream that is silent until then

    def service(self, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            if given != "Bearer abc":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is there")
            if details.method.endswith("ModelReady"):
                return pb.ModelReadyResponse(ready=True).SerializeToString()
            if details.method.endswith("ModelInfer"):
                asked = pb.ModelInferRequest.FromString(message)
                if not asked.inputs:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is nothing")
                response = pb.ModelInferResponse(raw_output_contents=asked.raw_input_contents)
                response.outputs.add(name="OUT", datatype="FP32", shape=asked.inputs[0].shape)
                left = context.time_remaining() or 1e9
                for name, text in {
                    "left": f"{left:.0f}",
                    "tenant": str(dict(context.invocation_metadata()).get("x-tenant", "")),
                }.items():
                    response.parameters[name].string_param = text
                context.set_compression(grpc.Compression.Gzip)
                return response.SerializeToString()
            if details.method.endswith("ModelMetadata"):
                return pb.ModelMetadataResponse(name="m").SerializeToString()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is nothing")

        def answers(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for message in messages:
                asked = pb.ModelInferRequest.FromString(message)
                if asked.id == "silent":
                    self.goes_on.wait(30)
                    continue
                response = pb.ModelInferResponse(id=asked.id)
                wrong = "there is nothing" if asked.id == "bad" else ""
                said = pb.ModelStreamInferResponse(error_message=wrong, infer_response=response)
                yield said.SerializeToString()
                if asked.id == "last":
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Server not ready")

        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(answers)
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of a server with a certificate for `localhost`."""
    pair = (TLS / "server.key").read_bytes(), (TLS / "server.pem").read_bytes()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [Guarded()])
        found = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        yield found
        server.stop(None).wait()


@pytest.fixture
def options(port: int, tmp_path: Path) -> RemoteOptions:
    """Connection options: the server's name, and a token in a file."""
    (tmp_path / "token").write_text("Bearer abc\n")
    parameters = {
        "endpoints": f"grpcs://localhost:{port}",
        "tls_root_cert": str(TLS / "root.pem"),
        "authorization_file": "token",
    }
    return RemoteOptions.of(parameters, "m", 0, tmp_path)


def client_of(options: RemoteOptions) -> tuple[ProtocolClients, Endpoint]:
    endpoint = next(e for e in options.resolve() if e.address == "127.0.0.1")
    return ProtocolClients(options, "m"), endpoint


def test_on_a_thread(options: RemoteOptions) -> None:
    client, endpoint = client_of(options)
    with pytest.raises(CallFailed, match="there is nothing") as failed:
        client.visit(endpoint, lambda it: it.describe(10))
    with pytest.raises(CallFailed, match="there is nothing"):
        client.visit(endpoint, lambda it: it.infer(RemoteRequest([], [], {}), 10))
    assert failed.value.failure.fate is Fate.ANSWERED
    assert isinstance(failed.value.failure.error, InvalidRequest)


async def test_on_a_loop(options: RemoteOptions) -> None:
    client, endpoint = client_of(options)
    connection = client.connect(endpoint)
    assert await connection.ready(10)
    with pytest.raises(CallFailed, match="there is nothing"):
        await infer(connection, RemoteRequest([], [], {}), 10)
    await connection.close()


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
@pytest.mark.parametrize("seconds", [0, 50])
async def test_metadata_of_a_call(options: RemoteOptions, compression: str, seconds: float) -> None:
    packed = replace(options, compression="" if compression == "none" else compression)
    client, endpoint = client_of(packed)
    array = np.zeros((3, 50_000), np.float32)
    inputs = [RemoteInput("IN", Datatype.FP32, (6, 50_000), [array, array])]
    connection = client.connect(endpoint)
    for headers in ([("x-tenant", "t")], []):
        request = RemoteRequest(inputs, ["OUT"], {}, headers=headers)
        answer = await infer(connection, request, seconds)
        assert answer.outputs["OUT"].shape == (6, 50_000)
        assert answer.parameters["tenant"] == ("t" if headers else "")
        assert (float(str(answer.parameters["left"])) <= 50) is bool(seconds)
    request = RemoteRequest(inputs, ["OUT"], {}, headers=[("authorization", "other")])
    with pytest.raises(CallFailed, match="who is there"):
        await infer(connection, request, seconds)
    await connection.close()


class Busy(ThreadPoolExecutor):
    """Threads that are busy until released; `asked` is set by the first task."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked = asyncio.Event()
        self.go_on = threading.Event()
        super().submit(self.go_on.wait)

    def submit(self, *arguments: Any, **named: Any) -> "Future[Any]":
        self.asked.set()
        return super().submit(*arguments, **named)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_large_answer_that_is_compressed(options: RemoteOptions, cancelled: bool) -> None:
    """The answer is decompressed on a thread, while other calls go on."""
    client, endpoint = client_of(options)
    array = np.random.default_rng(0).random((1, 100_000), np.float32)
    large = RemoteRequest([RemoteInput("IN", Datatype.FP32, array.shape, [array])], ["OUT"], {})
    small = RemoteRequest([RemoteInput("IN", Datatype.FP32, (1, 1), [array[:, :1]])], ["OUT"], {})
    threads = Busy()
    connection = client.connect(endpoint)
    assert await connection.ready(10)
    asyncio.get_running_loop().set_default_executor(threads)
    call = asyncio.ensure_future(infer(connection, large, 50))
    await threads.asked.wait()
    assert (await infer(connection, small, 50)).outputs["OUT"].tolist() == [[array[0, 0]]]
    if cancelled:
        call.cancel()
        await asyncio.wait([call])
    threads.go_on.set()
    if not cancelled:
        np.testing.assert_array_equal((await call).outputs["OUT"], array)
    await asyncio.get_running_loop().run_in_executor(None, len, "")  # behind the other work
    assert (await infer(connection, small, 50)).outputs["OUT"].size == 1
    await connection.close()


class Heard:
    """Recorded messages of a stream; its end is awaited."""

    def __init__(self) -> None:
        self.answers: list[RemoteAnswer | Failure] = []
        self.end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def received(self, answer: RemoteAnswer | Failure) -> None:
        self.answers.append(answer)

    def ended(self) -> None:
        self.end.set_result(None)

    def failed(self, error: Exception) -> None:
        self.end.set_result(error)


@pytest.mark.parametrize("id", ["a", "bad", "last"])
async def test_a_stream(options: RemoteOptions, id: str) -> None:
    client, endpoint = client_of(options)
    connection = client.connect(endpoint)
    heard = Heard()
    connection.stream(RemoteRequest([], [], {}, id), 10, heard)
    failed = await heard.end
    [answer] = heard.answers
    if id == "bad":
        assert isinstance(answer, Failure)
        assert str(answer.error) == "there is nothing"
    else:
        assert isinstance(answer, RemoteAnswer)
        assert answer.id == id
    if id == "last":
        assert isinstance(failed, CallFailed)
        assert failed.failure.fate is Fate.REFUSED
    else:
        assert failed is None
    await connection.close()


class Buggy(GrpcMessages):
    """Raises on an unexpected answer."""

    def answer(self, data: Buffer) -> RemoteAnswer:
        raise ZeroDivisionError

    def stream_answer(self, data: Buffer) -> RemoteAnswer | Failure:
        raise ZeroDivisionError


async def test_an_exception_in_reading_an_answer_fails_only_its_call(
    options: RemoteOptions,
) -> None:
    messages, endpoint = Buggy(options, "m"), client_of(options)[1]
    context = tls_context(options.credentials)
    context.set_alpn_protocols(["h2"])
    array = np.zeros((1, 1), np.float32)
    request = RemoteRequest([RemoteInput("IN", Datatype.FP32, (1, 1), [array])], ["OUT"], {})
    connection = GrpcClient(endpoint, messages, context, receive_buffer())
    assert await connection.ready(10)
    other = Heard()
    connection.stream(RemoteRequest([], [], {}, "silent"), 20, other)
    with pytest.raises(ZeroDivisionError):
        await infer(connection, request, 10)
    heard = Heard()
    connection.stream(RemoteRequest([], [], {}, "a"), 10, heard)
    failed = await heard.end
    assert isinstance(failed, CallFailed)
    assert failed.failure.fate is Fate.ANSWERED
    Guarded.goes_on.set()
    assert await other.end is None  # it has the same connection
    await connection.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_server_that_requires_a_client_certificate(own: bool, tmp_path: Path) -> None:
    root, key, certificate = [
        (TLS / name).read_bytes() for name in ("root.pem", "server.key", "server.pem")
    ]
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [Guarded()])
        wanted = grpc.ssl_server_credentials([(key, certificate)], root, True)
        port = server.add_secure_port("127.0.0.1:0", wanted)
        server.start()
        parameters = {
            "endpoints": f"grpcs://localhost:{port}", "tls_root_cert": str(TLS / "root.pem"),
        }  # fmt: skip
        if own:
            parameters["tls_cert"] = str(TLS / "client.pem")
            parameters["tls_key"] = str(TLS / "client.key")
        client, endpoint = client_of(RemoteOptions.of(parameters, "m", 0, tmp_path))
        with pytest.raises(CallFailed) as failed:
            client.visit(endpoint, lambda it: it.describe(10))
        server.stop(None).wait()
    assert failed.value.failure.fate is (Fate.ANSWERED if own else Fate.UNSENT)


def test_a_server_that_is_not_trusted(port: int, tmp_path: Path) -> None:
    parameters = {"endpoints": f"grpcs://localhost:{port}"}
    client, endpoint = client_of(RemoteOptions.of(parameters, "m", 0, tmp_path))
    with pytest.raises(CallFailed) as failed:
        client.visit(endpoint, lambda it: it.describe(10))
    assert failed.value.failure.fate is Fate.UNSENT


async def test_a_stream_that_is_held_keeps_its_window() -> None:
    """The server has to buffer the rest."""
    channel = GrpcChannel(Endpoint("s", "grpc", "127.0.0.1", 1, "s"), None, receive_buffer())
    stream = GrpcStream(channel, HEAD, [])
    seen = [stream.keeps_window]
    for held in (True, False):
        stream.hold(held)
        seen.append(stream.keeps_window)
    assert seen == [False, True, False]
