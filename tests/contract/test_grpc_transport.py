"""gRPC transports: framing, limits, deadlines, compression, encryption."""

import ssl
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import Rounds
from tests.support.client import Input
from tests.support.command import run
from tests.support.grpc_client import (
    OPTIONS,
    SERVICE,
    GrpcClient,
    infer_message,
    procedure,
    read_answer,
)
from tests.support.held import Gates
from tests.support.http2_socket import REQUEST, Http2Socket, prefixed
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess
from tests.support.transports import EACH_TRANSPORT, over_both_transports

# Tests of the transport itself; those of every transport are elsewhere.
NATIVE = pytest.mark.parametrize("server", ["default"], indirect=True)

TLS = Path(__file__).parents[1] / "support" / "tls"
_LARGE = 33 << 20


def _identity(nbytes: int, model: str = "identity_FP32") -> pb.ModelInferRequest:
    values = np.arange(nbytes // 4, dtype=np.float32).reshape(1, -1)
    return infer_message(model, [Input("INPUT0", values)], id="large")


# --- headers of a call


def _with(**changes: str) -> list[tuple[str, str]]:
    fields = dict(REQUEST) | {name.replace("_", "-"): value for name, value in changes.items()}
    return [(name, value) for name, value in fields.items() if value]


@NATIVE
def test_requests_that_are_not_grpc(server: ServerProcess) -> None:
    with Http2Socket(server.grpc) as client:
        for kind in ("application/json", "application/grpcx", ""):
            answer = client.call(_with(content_type=kind), b"x")
            assert answer.headers[":status"] == "415"
        assert client.call(REQUEST, prefixed(b"")).headers["grpc-status"] == "5"  # as usual
    with Http2Socket(server.grpc) as client:
        answer = client.call([(":method", "GET"), *REQUEST[1:]], b"")
    assert (answer.headers[":status"], answer.headers["allow"]) == ("405", "POST")


@pytest.mark.parametrize(("changes", "code", "text"), [
    ({":path": "/inference.GRPCInferenceService/Nothing"}, 12, "unknown method /inference"),
    ({"grpc_encoding": "snappy"}, 12, "compression 'snappy' is not supported"),
    ({"grpc_timeout": "soon"}, 13, "bad grpc-timeout"),
    ({"grpc_timeout": "123456789S"}, 13, "bad grpc-timeout"),
])  # fmt: skip
@NATIVE
def test_refused_headers(
    server: ServerProcess, changes: dict[str, str], code: int, text: str
) -> None:
    with Http2Socket(server.grpc) as client:
        fields = {**dict(REQUEST), **{k.replace("_", "-"): v for k, v in changes.items()}}
        answer = client.call(list(fields.items()), prefixed(b""))
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"] == "application/grpc"
    assert answer.headers["grpc-status"] == str(code)
    assert text in answer.headers["grpc-message"]
    assert "identity" in answer.headers["grpc-accept-encoding"]


@pytest.mark.parametrize(("body", "text"), [
    (b"", "one message, got none"), (b"\0\0", "ends within a message"),
    (prefixed(b"abc")[:-1], "ends within a message"),
    (prefixed(b"") * 2, "one message, got another"),
    (b"\x01" + prefixed(b"abc")[1:], "grpc-encoding does not say how"),
    (b"\x02" + prefixed(b"abc")[1:], "grpc-encoding does not say how"),
])  # fmt: skip
@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
@NATIVE
def test_bodies_that_are_not_one_message(
    server: ServerProcess, method: str, body: bytes, text: str
) -> None:
    with Http2Socket(server.grpc) as client:
        fields = [(n, f"{SERVICE}/{method}" if n == ":path" else v) for n, v in REQUEST]
        answer = client.call(fields, body)
    assert answer.headers["grpc-status"] == "3"
    assert text in answer.headers["grpc-message"]


# --- sizes


@pytest.fixture(params=EACH_TRANSPORT)
def wide(request: pytest.FixtureRequest, small_repository: Path) -> Iterator[ServerProcess]:
    options = ("--max-request-bytes=50000000", f"--grpc-transport={request.param}")
    with ServerProcess(small_repository, options=options) as process:
        yield process
        assert process.stop() == 0


def test_large_messages_both_ways(wide: ServerProcess) -> None:
    with GrpcClient(wide.grpc) as client, ThreadPoolExecutor(3) as pool:
        message = _identity(_LARGE, "identity")
        call = client.procedure("ModelInfer", pb.ModelInferResponse)
        answers = list(pool.map(lambda _: call(message, timeout=60), range(3)))
    for answer in answers:
        assert answer.id == "large"
        assert answer.raw_output_contents[0] == message.raw_input_contents[0]


@NATIVE
def test_a_message_over_the_limit_is_refused_by_its_length_prefix(server: ServerProcess) -> None:
    """The rest is not awaited, and the text names the setting."""
    with Http2Socket(server.grpc) as client:
        answer = client.call(REQUEST, struct.pack(">BI", 0, (64 << 20) + 1), end=False)
    assert answer.headers["grpc-status"] == "8"
    assert "--max-request-bytes" in answer.headers["grpc-message"]


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_message_that_decompresses_beyond_the_limit(
    narrow: ServerProcess, algorithm: grpc.Compression
) -> None:
    with grpc.insecure_channel(narrow.grpc, OPTIONS, compression=algorithm) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        call = infer.future(bytes(1 << 20), timeout=60)
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-request-bytes" in call.details()


@NATIVE
def test_answers_are_compressed_for_clients_that_compress(server: ServerProcess) -> None:
    message = _identity(12_000).SerializeToString()
    with Http2Socket(server.grpc) as client:
        plain = client.call(_with(grpc_accept_encoding="gzip"), prefixed(message))
        packed = client.call(
            _with(grpc_encoding="gzip", grpc_accept_encoding="identity,gzip"), prefixed(message)
        )
    assert "grpc-encoding" not in plain.headers
    assert packed.headers["grpc-encoding"] == "gzip"
    assert packed.data[0] == 1


# --- time


@over_both_transports("busy_server")
def test_a_deadline(
    busy_server: ServerProcess, number: int, gates: Gates, busy_metrics: Scraper
) -> None:
    """The call ends, and its request is not executed."""
    with GrpcClient(busy_server.grpc) as client:
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        held, waiting = (
            infer_message("held", [Input("VALUE", np.array([[n]]))]) for n in (number, 1)
        )
        running = infer.future(held, timeout=60)
        busy_metrics.until_running("held")
        with pytest.raises(grpc.RpcError) as caught:
            infer(waiting, timeout=0.1)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        busy_metrics.until_queued("held", 0)
        gates.open()
        assert running.result().model_name == "held"
    busy_metrics.until_idle()


def test_the_server_enforces_the_deadline(
    busy_server: ServerProcess, rounds: Rounds, busy_metrics: Scraper
) -> None:
    message = infer_message("spin", [Input("ROUNDS", rounds(0.5))]).SerializeToString()
    with Http2Socket(busy_server.grpc) as client:
        answer = client.call(_with(grpc_timeout="50m"), prefixed(message))
        assert answer.headers["grpc-status"] == "4"
        answer = client.call(_with(grpc_timeout="1n"), prefixed(message)[:9], end=False)
        assert answer.headers["grpc-status"] == "4"
    busy_metrics.until_idle()


# --- encryption


@pytest.mark.parametrize("transport", EACH_TRANSPORT)
def test_tls(small_repository: Path, transport: str) -> None:
    files = [f"--grpc-server-cert={TLS / 'server.pem'}", f"--grpc-server-key={TLS / 'server.key'}"]
    options = ("--grpc-use-ssl", *files, f"--grpc-transport={transport}")
    root = (TLS / "root.pem").read_bytes()
    with ServerProcess(small_repository, options=options) as process:
        with grpc.secure_channel(process.grpc, grpc.ssl_channel_credentials(root)) as channel:
            _infer_securely(channel)
        context = ssl.create_default_context(cafile=str(TLS / "root.pem"))
        context.set_alpn_protocols(["h2"])
        with Http2Socket(process.grpc, context) as client:
            assert client.call(REQUEST, prefixed(b"")).headers["grpc-status"] == "5"
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(process.grpc) as channel:
            _infer_securely(channel)
        assert process.stop() == 0


@pytest.mark.parametrize("transport", EACH_TRANSPORT)
def test_tls_for_clients_with_a_certificate(small_repository: Path, transport: str) -> None:
    options = (
        "--grpc-use-ssl", "--grpc-use-ssl-mutual", f"--grpc-transport={transport}",
        f"--grpc-server-cert={TLS / 'server.pem'}", f"--grpc-server-key={TLS / 'server.key'}",
        f"--grpc-root-cert={TLS / 'root.pem'}",
    )  # fmt: skip
    root = (TLS / "root.pem").read_bytes()
    pair = (TLS / "client.key").read_bytes(), (TLS / "client.pem").read_bytes()
    with ServerProcess(small_repository, options=options) as process:
        known = grpc.ssl_channel_credentials(root, *pair)
        with grpc.secure_channel(process.grpc, known) as channel:
            _infer_securely(channel)
        stranger = grpc.ssl_channel_credentials(root)
        with pytest.raises(grpc.RpcError), grpc.secure_channel(process.grpc, stranger) as channel:
            _infer_securely(channel)


@pytest.mark.parametrize(("options", "text"), [
    pytest.param((), "needs --grpc-server-cert", marks=pytest.mark.slow),
    pytest.param((f"--grpc-server-cert={TLS / 'server.pem'}",), "needs --grpc-server-key",
     marks=pytest.mark.slow),
    pytest.param((f"--grpc-server-cert={TLS / 'nothing'}",
     f"--grpc-server-key={TLS / 'server.key'}"), "--grpc-server-cert: there is no file",
     marks=pytest.mark.slow),
    ((f"--grpc-server-cert={TLS / 'server.pem'}", f"--grpc-server-key={TLS / 'client.key'}"),
     "cannot be used"),
])  # fmt: skip
@pytest.mark.parametrize("transport", EACH_TRANSPORT)
def test_tls_without_its_files(
    small_repository: Path, transport: str, options: tuple[str, ...], text: str
) -> None:
    done = run(
        "serve", "--model-repository", str(small_repository), "--http-port=0", "--metrics-port=0",
        "--grpc-port=0", "--grpc-use-ssl", f"--grpc-transport={transport}", *options,
    )  # fmt: skip
    assert done.returncode == 1
    assert text in done.stderr


def _infer_securely(channel: grpc.Channel) -> None:
    infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
    row = np.ones((1, 1), np.float32)
    answer = infer(infer_message("identity", [Input("INPUT0", row)]), timeout=60)
    assert read_answer(answer)["OUTPUT0"].tolist() == [[1]]
