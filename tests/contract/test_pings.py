"""PINGs of ordinary gRPC clients, which are never hung up on, and those of too eager ones.

Clients measure the bandwidth by a PING after received data, at most one at a time; each library by
a rule of its own. A serial model answers calls that were all sent before.
"""

from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import numpy as np
import pytest

from headrace.protocol.http2.protocol import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.python_models import execution, tensors, write_python_model
from tests.support.client import Input
from tests.support.grpc_client import OPTIONS, SERVICE, infer_message, procedure
from tests.support.held import Gates, write_held_model
from tests.support.http2_socket import prefixed
from tests.support.raw_clients import Http2Caller, open_http2
from tests.support.server_process import ServerProcess, clean_server
from tests.support.transports import EACH_TRANSPORT

_CALLS = 8
_NUMBERS = range(1, 2 * _CALLS, 2)
_PROBE = frame(PING, 0, 0, b"\2\4\x10\x10\t\x0e\7\7")
_UPDATE = frame(WINDOW_UPDATE, 0, 0, (1 << 16).to_bytes(4))
_SLOW = """
    import time

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            time.sleep(0.15)
            value = pb_utils.get_input_tensor_by_name(requests[0], "VALUE")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value.as_numpy())])]
"""


class Prober:
    """Probes by one rule: `asks` is given the kind of a received frame, and the PINGs so far."""

    def __init__(self, asks: Callable[[int, int], bool], updates: bool) -> None:
        self._asks = asks
        self._updates = updates  # sends WINDOW_UPDATE with each PING
        self._waits = False
        self._sent = 0

    def received(self, kind: int) -> bytes:
        """Frames to send after a received one."""
        if kind == PING:
            self._waits = False
        if self._waits or not self._asks(kind, self._sent):
            return b""
        self._waits = True
        self._sent += 1
        return _UPDATE * self._updates + _PROBE


PROBERS: dict[str, Callable[[], Prober]] = {
    "grpcio": lambda: Prober(lambda kind, _: kind == DATA, False),
    "grpc-go": lambda: Prober(lambda kind, _: kind == DATA, True),
    "h2 of Rust": lambda: Prober(lambda kind, _: kind in (DATA, HEADERS), False),
    ".NET": lambda: Prober(lambda kind, sent: kind in (DATA, HEADERS) and sent < 4, True),
    "none": lambda: Prober(lambda _, __: False, False),
}


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="module", params=EACH_TRANSPORT)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gates: Gates
) -> Iterator[ServerProcess]:
    """A server with default limits on PINGs."""
    root = tmp_path_factory.mktemp("serial")
    write_held_model(root, "serial", gates.folder, rows=1)
    config = execution("thread") + tensors("input", ("VALUE", "INT64", "1"))
    config += tensors("output", ("OUTPUT0", "INT64", "1"))
    write_python_model(root, "slow", _SLOW, f"max_batch_size: 1\n{config}")
    options = ("--allow-in-process-python", f"--grpc-transport={request.param}")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture
async def client(server: ServerProcess, gates: Gates) -> AsyncIterator[Http2Caller]:
    async with open_http2(server.grpc) as caller:
        yield caller
    gates.open()


def _message(model: str, number: int) -> pb.ModelInferRequest:
    return infer_message(model, [Input("VALUE", np.full((1, 1), number, np.int64))])


@pytest.mark.parametrize("library", PROBERS)
async def test_probes_after_answers(client: Http2Caller, gates: Gates, library: str) -> None:
    """All calls are sent at once, and answered one after the other."""
    prober = PROBERS[library]()
    for number in _NUMBERS:
        gates.close(number)
    for number in _NUMBERS:
        message = prefixed(_message("serial", number).SerializeToString())
        client.begin(number, message, end=True)
    for number in _NUMBERS:
        gates.open(number)
        ended = False
        while not ended:
            kind, flags, stream, _ = await client.next_whole_frame()
            assert kind != GOAWAY
            if kind != PING or flags & ACK:
                client.writer.write(prober.received(kind))
            ended = stream == number and kind == HEADERS and bool(flags & END_STREAM)
    client.writer.write(_PROBE)
    assert await _acknowledged(client)


@pytest.mark.slow
def test_concurrent_calls_of_grpcio(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
        futures = [infer.future(_message("slow", n), timeout=60) for n in _NUMBERS]
        assert [future.code() for future in futures] == [grpc.StatusCode.OK] * _CALLS


async def test_an_idle_client_may_ping_at_times(client: Http2Caller) -> None:
    """The first PING is no strike, and two strikes are forgiven."""
    for _ in range(3):
        client.writer.write(_PROBE)
        assert await _acknowledged(client)


@pytest.mark.parametrize("calls", [0, 1])
async def test_keep_alive_that_is_too_frequent(
    client: Http2Caller, gates: Gates, calls: int
) -> None:
    """Neither without calls, nor while one runs: opening it is no answer."""
    gates.close(1)
    for number in _NUMBERS[:calls]:
        client.begin(number, prefixed(_message("serial", 1).SerializeToString()), end=True)
    client.writer.write(_PROBE * 4)
    assert await client.ended() == ErrorCode.ENHANCE_YOUR_CALM


async def _acknowledged(client: Http2Caller) -> bool:
    """Wait for the answer to a PING; false if the connection ends before."""
    while (received := await client.next_whole_frame())[0] != PING or not received[1] & ACK:
        if received[0] == GOAWAY:
            return False
    return True
