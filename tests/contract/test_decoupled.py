"""Decoupled Python models over every door that streams."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.workers import triton_api
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.models.python_models import write_python_model
from tests.models.streaming_models import FLOOD, FLOOD_CONFIG, TELLER, TELLER_CONFIG
from tests.support.client import Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.http_socket import RawAnswer, ask, events, request
from tests.support.remote import write_remote
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess
from tests.support.teller import tell, told

pytestmark = pytest.mark.skipif(
    not hasattr(triton_api, "InferenceResponseSender"), reason="there are no response senders yet"
)

# Numbers of Triton's own test.
BUCKETS = """
model_metrics { metric_control: [ {
  metric_identifier: { family: "nv_inference_first_response_histogram_ms" }
  histogram_options: { buckets: [ -1, 0.0, 1, 2.5 ] }
} ] }
"""
_SIZE = 64 << 10  # bytes of a response of `flood`
_READ = 8 << 20  # bytes of them that a slow client reads
_WAITING = 96 << 20  # bytes queued for it: buffers of the system and the client
_GROWN = 160 << 20  # bytes of further memory in all processes of the server


REMOTE_CARRIERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("remote", "remote frontends")
]


@pytest.fixture(scope="module", params=[*FIRST_CARRIER, *REMOTE_CARRIERS])
def streaming(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of these models, for each carrier; also with an upstream."""
    root = tmp_path_factory.mktemp("decoupled")
    write_python_model(root, "teller", TELLER, TELLER_CONFIG)
    write_python_model(root, "flood", FLOOD, FLOOD_CONFIG + BUCKETS)
    carrier = request.param.removeprefix("remote").strip() or "default"
    latencies = ("--metrics-config=histogram_latencies=true",)
    with ExitStack() as stack:
        if "remote" in request.param:
            there = stack.enter_context(ServerProcess(root))
            root = tmp_path_factory.mktemp("front")
            for name in ("teller", "flood"):
                write_remote(root, name, there.grpc)
        options = CARRIERS[carrier] + latencies
        process = stack.enter_context(ServerProcess(root, options=options))
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log, process.log
        # grpcio reports a disconnected client with a line of its own.
        assert "Traceback" not in process.log or "ExecuteBatchError" in process.log, process.log


@pytest.fixture(scope="module")
def streaming_grpc(streaming: ServerProcess) -> Iterator[GrpcClient]:
    # Without the probe, which lets the client read ahead by more the busier the machine is.
    with GrpcClient(streaming.grpc, ("grpc.http2.bdp_probe", 0)) as client:
        yield client


class Refusal(NamedTuple):
    """Statuses of the model's own error."""

    http: int
    grpc: grpc.StatusCode


@pytest.fixture
def refusal(request: pytest.FixtureRequest) -> Refusal:
    """The error of a failed request: the stream of an upstream carries the text alone."""
    if "remote" in request.node.callspec.params["streaming"]:
        return Refusal(500, grpc.StatusCode.INTERNAL)
    return Refusal(404, grpc.StatusCode.NOT_FOUND)


@pytest.fixture
def idle(streaming: ServerProcess) -> Iterator[Scraper]:
    """The server's metrics; after the test nothing may be in flight."""
    with Scraper(streaming.metrics) as scraper:
        yield scraper
        scraper.until_idle()


def generate(server: ServerProcess, verb: str, document: object) -> RawAnswer:
    """A generate request to `teller`."""
    path = f"/v2/models/teller/{verb}"
    return ask(server.http, "POST", path, json.dumps(document).encode())


# --- over gRPC


def test_many_responses_and_a_final_one(streaming_grpc: GrpcClient, idle: Scraper) -> None:
    with Stream(streaming_grpc) as stream:
        for count in (0, 1, 3):
            stream.send(tell("a", count, id=str(count)))
        stream.half_close()
        messages = stream.rest()
    for count in (1, 3):
        found = [told(message) for message in messages if message.infer_response.id == str(count)]
        assert found == [(str(count), f"a{n}", False) for n in range(count)]
    assert len(messages) == 4
    with Stream(streaming_grpc) as stream:
        stream.send(tell("a", 3, final=True))
        stream.half_close()
        assert [told(message)[1:] for message in stream.rest()] == [
            ("a0", False), ("a1", False), ("a2", True),
        ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 2])
def test_an_empty_final_response_is_sent_on_request(
    streaming_grpc: GrpcClient, idle: Scraper, count: int
) -> None:
    with Stream(streaming_grpc) as stream:
        stream.send(tell("a", count, id="x", triton_enable_empty_final_response=True))
        stream.half_close()
        *_, last = messages = stream.rest()
    assert len(messages) == count + 1
    assert told(last) == ("x", "", True)
    assert (last.infer_response.model_name, last.infer_response.model_version) == ("teller", "")


def test_an_error_after_responses(streaming_grpc: GrpcClient, idle: Scraper) -> None:
    with Stream(streaming_grpc) as stream:
        stream.send(tell("a", 2, id="x", fail=True))
        assert [told(stream.receive()) for _ in range(3)] == [
            ("x", "a0", False), ("x", "a1", False), ("x", "as asked", True),
        ]  # fmt: skip
        stream.send(tell("b", 1))
        assert told(stream.receive())[1] == "b0"


def test_a_real_status_after_responses(
    streaming_grpc: GrpcClient, refusal: Refusal, idle: Scraper
) -> None:
    with Stream(streaming_grpc, ("triton_grpc_error", "true")) as stream:
        stream.send(tell("a", 1, fail=True))
        assert told(stream.receive())[1] == "a0"
        with pytest.raises(grpc.RpcError):
            stream.receive()
        assert stream.call.code() is refusal.grpc


def test_tritonclient(streaming: ServerProcess, idle: Scraper) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    got: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    text = triton.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["hi"]], object))
    count = triton.InferInput("COUNT", [1, 1], "INT32")
    count.set_data_from_numpy(np.array([[3]], np.int32))
    with triton.InferenceServerClient(streaming.grpc) as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        client.async_stream_infer(
            "teller", [text, count], request_id="7", enable_empty_final_response=True
        )
        found = []
        for _ in range(4):
            result, error = got.get(timeout=30)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
            out = result.as_numpy("OUT")
            found.append((None if out is None else out.item(), final))
        client.async_stream_infer("teller", [text, count], parameters={"fail": True})
        answers = [got.get(timeout=30) for _ in range(4)]
        client.stop_stream()
    assert found == [(b"hi0", False), (b"hi1", False), (b"hi2", False), (None, True)]
    assert "as asked" in str(answers[3][1])


# --- over HTTP


@pytest.mark.parametrize(("count", "final"), [(0, False), (1, True), (5, False)])
def test_a_stream_of_events(
    streaming: ServerProcess, idle: Scraper, count: int, final: bool
) -> None:
    document = {"TEXT": "a", "COUNT": count, "final": final, "id": "x"}
    answer = generate(streaming, "generate_stream", document)
    assert answer.status == 200
    assert events(answer) == [
        {"INDEX": n, "OUT": f"a{n}", "id": "x", "model_name": "teller", "model_version": "1"}
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_among_the_events(
    streaming: ServerProcess, refusal: Refusal, idle: Scraper, count: int
) -> None:
    """The first response decides on the status."""
    document = {"TEXT": "a", "COUNT": count, "fail": True}
    answer = generate(streaming, "generate_stream", document)
    assert answer.status == (200 if count else refusal.http)
    found = events(answer)
    assert [event.get("OUT", event.get("error")) for event in found] == [
        *(f"a{n}" for n in range(count)), "as asked",
    ]  # fmt: skip


def test_generate_takes_exactly_one_response(
    streaming: ServerProcess, refusal: Refusal, idle: Scraper
) -> None:
    text = "generate expects model to produce exactly 1 response, use generate stream"
    for final in (True, False):
        document = {"TEXT": "a", "COUNT": 1, "final": final}
        assert generate(streaming, "generate", document).document["OUT"] == "a0"
    several = generate(streaming, "generate", {"TEXT": "a", "COUNT": 4})
    assert several.status == 200  # as the first response has it
    assert several.error.startswith(text)
    none = generate(streaming, "generate", {"TEXT": "a", "COUNT": 0})
    assert none.status == 500
    assert none.error.startswith(text)
    failed = generate(streaming, "generate", {"TEXT": "a", "COUNT": 0, "fail": True})
    assert (failed.status, failed.error) == (refusal.http, "as asked")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_responses_are_counted_by_their_ordinals(
    streaming: ServerProcess, streaming_grpc: GrpcClient, idle: Scraper, protocol: str
) -> None:
    with CLIENTS[protocol](streaming) as client:
        [before] = client.statistics("teller")
        with Stream(streaming_grpc) as stream:
            for request in (tell("a", 3), tell("a", 2, final=True), tell("a", 1, fail=True)):
                stream.send(request)
            stream.half_close()
            assert len(stream.rest()) == 7
        document = {"TEXT": "a", "COUNT": 1}
        assert generate(streaming, "generate_stream", document).status == 200
        idle.until_idle()
        [after] = client.statistics("teller")

    def grown(ordinal: int, name: str) -> tuple[int, bool]:
        old = getattr(before.response_stats[str(ordinal)], name)
        new = getattr(after.response_stats[str(ordinal)], name)
        return new.count - old.count, new.ns > old.ns

    for name in ("success", "compute_infer", "compute_output"):
        assert [grown(n, name)[0] for n in range(4)] == [4, 2, 1, 0]
        assert grown(0, name)[1]
    assert [grown(n, "fail") for n in range(3)] == [(0, False), (1, True), (0, False)]
    assert [grown(n, "empty_response")[0] for n in range(4)] == [0, 1, 0, 1]
    assert after.inference_stats.success.count - before.inference_stats.success.count == 3
    first = idle.now().value("nv_inference_first_response_histogram_ms_count", model="teller")
    assert first == after.response_stats["0"].success.count


def test_the_histogram_of_first_responses_in_tritons_form(
    request: pytest.FixtureRequest, idle: Scraper
) -> None:
    """Its clients look for whole lines, and read integers; the buckets are the configuration's."""
    if "remote" in request.node.callspec.params["streaming"]:
        pytest.skip("the buckets are configured on the other server")
    lines = re.findall("^nv_inference_first_response_histogram_ms.*$", idle.now().text, re.M)
    found = {name: int(value) for name, value in (line.rsplit(" ") for line in lines)}
    name = 'nv_inference_first_response_histogram_ms_{}{{model="{}",version="1"{}}}'
    for model, bounds in (("teller", (100, 500, 2000, 5000)), ("flood", (-1, 0, 1, 2.5))):
        assert {name.format("count", model, ""), name.format("sum", model, "")} <= found.keys()
        buckets = {name.format("bucket", model, f',le="{le}"') for le in (*bounds, "+Inf")}
        assert buckets == {key for key in found if "_bucket" in key and model in key}
    assert not [key for key in found if "teller" not in key and "flood" not in key]


def test_doors_of_a_single_answer_refuse(
    streaming: ServerProcess, streaming_grpc: GrpcClient
) -> None:
    body = b'{"inputs":[]}'
    answer = ask(streaming.http, "POST", "/v2/models/teller/infer", body)
    assert answer.status == 501
    assert answer.error == (
        "HTTP end point doesn't support models with decoupled transaction policy"
    )
    with pytest.raises(grpc.RpcError) as raised:
        streaming_grpc.procedure("ModelInfer", pb.ModelInferResponse)(tell("a", 1))
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


# --- slow and disconnected clients


class Flood:
    """A request to `flood`, and its model's progress."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.file = folder / "sent"
        self._process = psutil.Process(server.pid)
        self._before = self._memory()

    def check(self, received: int) -> None:
        """Assert a bound on unread data after `received` bytes of responses."""
        sent = int(self.file.read_text() or 0) * _SIZE
        assert sent - received < _WAITING
        assert self._memory() - self._before < _GROWN

    def until_cancelled(self) -> None:
        """Wait until the model has seen the cancellation."""
        until(self.file.with_name("sent.cancelled").exists, "the model to see that nobody waits")

    def _memory(self) -> int:
        processes = [self._process, *self._process.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)


@pytest.fixture
def flood(streaming: ServerProcess, tmp_path: Path, idle: Scraper) -> Flood:
    return Flood(streaming, tmp_path)


def test_a_slow_reader_of_events(streaming: ServerProcess, flood: Flood) -> None:
    document = {"FILE": str(flood.file), "SIZE": _SIZE}
    host, _, port = streaming.http.rpartition(":")
    received = 0
    with socket.create_connection((host, int(port)), 30) as connection:
        body = json.dumps(document).encode()
        connection.sendall(request("POST", "/v2/models/flood/generate_stream", body))
        while received < _READ:
            data = connection.recv(_SIZE)
            assert data
            received += len(data)
            flood.check(received)
    flood.until_cancelled()


def test_a_slow_reader_of_a_stream(streaming_grpc: GrpcClient, flood: Flood) -> None:
    inputs = [
        Input("FILE", strings([str(flood.file).encode()], [1, 1])),
        Input("SIZE", np.array([[_SIZE]], np.int32)),
    ]
    with Stream(streaming_grpc) as stream, Stream(streaming_grpc) as other:
        stream.send(infer_message("flood", inputs))
        for count in range(_READ // _SIZE):
            message = stream.receive()
            assert len(message.infer_response.raw_output_contents[0]) == _SIZE + 4
            flood.check(count * _SIZE)
            if count % 64 == 0:  # others are answered meanwhile, on the same connection
                other.send(tell("b", 1))
                assert told(other.receive())[1] == "b0"
        stream.call.cancel()
    flood.until_cancelled()
