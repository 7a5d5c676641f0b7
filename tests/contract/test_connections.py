"""Lifetime of connections: keep-alive, PING limits, maximum age; shared ports."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from hpack import Encoder

from headrace.protocol.http2.protocol import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    ErrorCode,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.support.client import Input
from tests.support.grpc_client import OPTIONS, SERVICE, GrpcClient, infer_message, procedure
from tests.support.http2_socket import REQUEST, Http2Socket, prefixed
from tests.support.http_socket import HttpSocket, ask
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

# grpcio tests its own keep-alive.
NATIVE = pytest.mark.parametrize(
    "watchful", ["default", pytest.param("frontends", marks=pytest.mark.slow)], indirect=True
)
_MESSAGE = infer_message("identity", [Input("INPUT0", np.zeros((1, 1), np.float32))])
_LARGE = infer_message("identity", [Input("INPUT0", np.zeros((1, 4_000), np.float32))])


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Connection:
    """An HTTP/2 client that sends and answers on request."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 30)
        self._file = self._socket.makefile("rb")
        self._encoder = Encoder()
        self._number = -1
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> None:
        self._socket.sendall(frame(kind, flags, stream, payload))

    def until(self, kind: int, polite: bool = True) -> Frame | None:
        """The next frame of this kind, None at the end; a polite client answers PINGs.

        Only PINGs without ACK count.
        """
        while (came := self._next()) is not None:
            asks = came.kind == PING and not came.flags & ACK
            if asks and polite:
                self.send(PING, ACK, 0, came.payload)
            if came.kind == kind and (kind != PING or asks):
                return came
        return None

    def at_end(self) -> bool:
        """Read to the end of the connection, which must follow."""
        while self._next() is not None:
            pass
        return True

    def call(self, name: str, message: bytes | None = b"") -> int:
        """Start a call, and end it after a message, if any; its stream."""
        self._number += 2
        fields = [(n, f"{SERVICE}/{name}" if n == ":path" else v) for n, v in REQUEST]
        self.send(HEADERS, END_HEADERS, self._number, self._encoder.encode(fields))
        if message is not None:
            self.finish(self._number, message)
        return self._number

    def finish(self, number: int, message: bytes) -> None:
        self.send(DATA, END_STREAM, number, prefixed(message))

    def _next(self) -> Frame | None:
        try:
            head = self._file.read(9)
            if len(head) < 9:
                return None
            payload = self._file.read(int.from_bytes(head[:3]))
        except ConnectionResetError:
            return None
        return Frame(head[3], head[4], int.from_bytes(head[5:]), payload)


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def watchful(request: pytest.FixtureRequest, small_repository: Path) -> Iterator[ServerProcess]:
    """A server with keep-alive and compression."""
    options = (
        *CARRIERS[request.param], "--grpc-keepalive-time=100", "--grpc-keepalive-timeout=3000",
        "--grpc-keepalive-permit-without-calls=1", "--grpc-http2-max-pings-without-data=0",
        "--grpc-http2-min-recv-ping-interval-without-data=100000",
        "--grpc-http2-max-ping-strikes=1",
        "--grpc-infer-response-compression-level=high", "--http-max-connection-age-secs=3",
    )  # fmt: skip
    with clean_server(small_repository, options=options) as process:
        yield process


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def restless(request: pytest.FixtureRequest, small_repository: Path) -> Iterator[ServerProcess]:
    """A server with a short maximum age of gRPC connections."""
    options = (
        *CARRIERS[request.param], "--grpc-max-connection-age=150",
        "--grpc-max-connection-age-grace=4000",
    )  # fmt: skip
    with clean_server(small_repository, options=options) as process:
        yield process


# --- keep-alive


@NATIVE
def test_a_dead_peer_is_found(watchful: ServerProcess) -> None:
    """With and without a running call, the connection ends after the timeout."""
    with Connection(watchful.grpc) as idle, Connection(watchful.grpc) as busy:
        busy.call("ModelStreamInfer", None)
        for client in (idle, busy):
            assert client.until(PING, polite=False)
            assert client.at_end()


def test_too_many_pings_end_the_connection_with_an_error(watchful: ServerProcess) -> None:
    host, _, port = watchful.grpc.rpartition(":")
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    peer.initiate_connection()
    for number in range(3):
        peer.ping(number.to_bytes(8))
    events: list[h2.events.Event] = []
    with socket.create_connection((host, int(port)), 30) as client:
        client.sendall(peer.data_to_send())
        while data := client.recv(65_536):
            events += peer.receive_data(data)
    [end] = [e for e in events if isinstance(e, h2.events.ConnectionTerminated)]
    assert end.error_code == ErrorCode.ENHANCE_YOUR_CALM
    assert end.additional_data == b"too_many_pings"


# --- age


def test_an_old_connection_sends_goaway(restless: ServerProcess) -> None:
    with Connection(restless.grpc) as client:
        end = client.until(GOAWAY)
        assert end is not None
        assert end.payload == (2**31 - 1).to_bytes(4) + bytes(4) + b"max_age"
        assert client.until(GOAWAY)  # with the last accepted stream
        assert client.at_end()


def test_running_calls_have_the_grace_period(restless: ServerProcess) -> None:
    with Connection(restless.grpc) as client, Connection(restless.grpc) as late:
        number = client.call("ModelStreamInfer", None)
        late.call("ModelStreamInfer", None)
        assert client.until(GOAWAY)
        client.finish(number, _MESSAGE.SerializeToString())
        answer = client.until(DATA)
        assert answer is not None
        assert b"identity" in answer.payload
        assert client.at_end()
        assert late.at_end()


def test_no_call_is_lost_by_age(restless: ServerProcess) -> None:
    """Clients call over many generations of connections without noticing."""
    done, counts = threading.Event(), [0] * 3

    def call(number: int) -> None:
        with GrpcClient(restless.grpc) as client:
            while not done.is_set():
                zeros = np.zeros((1, 1), np.float32)
                assert client.infer("identity", {"INPUT0": zeros})["OUTPUT0"].tolist() == [[0]]
                counts[number] += 1
                done.wait(0.005)  # else the clients take the cores from one another

    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(call, number) for number in range(3)]
        try:
            for _ in range(5):
                with Connection(restless.grpc) as client:
                    assert client.until(GOAWAY)
            until(lambda: min(counts) > 5 or any(map(Future.done, callers)), "calls of each client")
        finally:
            done.set()
        for caller in callers:
            caller.result()
    assert min(counts) > 5


@pytest.mark.parametrize("path", ["/v2/models/identity/infer", "/v2/health/live"])
def test_an_old_http_connection_closes_after_an_answer(watchful: ServerProcess, path: str) -> None:
    body = (
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'
        if path.endswith("infer")
        else b""
    )
    with HttpSocket(watchful.http) as client:
        answers = 0
        while True:
            answer = client.ask("POST" if body else "GET", path, body)
            assert answer.status == 200
            answers += 1
            if answer.headers["connection"] == "close":
                break
            time.sleep(0.01)  # of the seconds that the connection may grow old
        assert answers > 5
        assert client.at_end()


# --- compression


def test_answers_are_compressed_for_clients_that_accept_it(watchful: ServerProcess) -> None:
    message = prefixed(_LARGE.SerializeToString())
    for procedure_name in ("ModelInfer", "ModelStreamInfer"):
        path = f"{SERVICE}/{procedure_name}"
        fields = [(n, path if n == ":path" else v) for n, v in REQUEST]
        with Http2Socket(watchful.grpc) as client:
            plain = client.call(fields, message)
            packed = client.call([*fields, ("grpc-accept-encoding", "identity,gzip")], message)
            odd = client.call([*fields, ("grpc-accept-encoding", "identity,snappy")], message)
        for answer in (plain, odd):
            assert answer.headers.get("grpc-encoding", "identity") == "identity"
            assert answer.data[0] == 0
        assert packed.headers["grpc-encoding"] == "gzip"
        assert packed.data[0] == 1
        assert len(packed.data) < len(plain.data) / 10
    # Real clients decode them.
    with grpc.insecure_channel(watchful.grpc, OPTIONS) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        assert infer(_LARGE, timeout=30).raw_output_contents == _LARGE.raw_input_contents


# --- ports


@pytest.mark.parametrize(
    "carrier", ["default", *[pytest.param(c, marks=pytest.mark.slow) for c in list(CARRIERS)[1:]]]
)
def test_servers_that_share_their_ports(small_repository: Path, carrier: str) -> None:
    shared = (*CARRIERS[carrier], "--reuse-http-port=true", "--reuse-grpc-port=true")
    with ServerProcess(small_repository, options=shared) as first:
        ports = [f"--{d}-port={a.rpartition(':')[2]}" for d, a in _doors(first)]
        with ServerProcess(small_repository, options=(*shared, *ports)) as second:
            assert (second.http, second.grpc) == (first.http, first.grpc)
            first.stop()
            assert ask(second.http, "GET", "/v2/health/ready").status == 200
            with GrpcClient(second.grpc) as client:
                assert client.ready()


def _doors(server: ServerProcess) -> list[tuple[str, str]]:
    return [("http", server.http), ("grpc", server.grpc)]
