"""Long gRPC requests that workers read where the server has received them."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array
from headrace.protocol.http2.headers import header_block
from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Client
from tests.support.grpc_client import SERVICE, GrpcClient
from tests.support.http2_socket import REQUEST
from tests.support.http_client import HttpClient
from tests.support.http_socket import ask
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

WIDTH = 100_000
_SIZE = -(-(4 * WIDTH + 64) // 65_536) * 65_536  # of the memory of a request

# It answers with a digest of each input, the number of requests of its batch, and the size of the
# mapping that has its first input; and may wait for a file, keep its inputs, or end its process.
DIGEST = """
    import hashlib
    import os
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    KEPT = []


    def mapping(array):
        address = array.ctypes.data
        for line in open("/proc/self/maps"):
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < stop:
                return stop - start if "memfd" in line else 0


    class TritonPythonModel:
        def initialize(self, args):
            self.keeps = args["model_name"] == "keeps"
            self.folder = os.path.dirname(args["model_repository"])

        def execute(self, requests):
            return [self.answer(request, len(requests)) for request in requests]

        def answer(self, request, count):
            arrays = [tensor.as_numpy() for tensor in request.inputs()]
            if self.keeps:
                KEPT.append(arrays)
                arrays = [array for kept in KEPT for array in kept]
            command = request.request_id()
            if command == "die":
                os._exit(3)
            if command.startswith("wait"):
                open(os.path.join(self.folder, command + ".begun"), "w").close()
                while not os.path.exists(os.path.join(self.folder, command)):
                    time.sleep(0.002)
                with open(os.path.join(self.folder, command + ".seen"), "w") as seen:
                    seen.write(hashlib.sha256(arrays[0]).hexdigest())
            rows = len(arrays[0])
            digests = " ".join(hashlib.sha256(a).hexdigest() for a in arrays).encode()
            told = np.array([[count, mapping(arrays[0])]] * rows, np.int64)
            return pb_utils.InferenceResponse([
                pb_utils.Tensor("DIGEST", np.array([[digests]] * rows, object)),
                pb_utils.Tensor("TOLD", told),
            ])
"""
_OUT = tensors("output", ("DIGEST", "STRING", "1"), ("TOLD", "INT64", "2"))
_BATCHING = "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 2000 }\n"

Sent = dict[str, Array]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    one = tensors("input", ("X", "FP32", str(WIDTH)))
    two = tensors("input", ("X", "FP32", str(WIDTH)), ("SCALE", "FP32", "1"))
    odd = tensors("input", ("X", "UINT8", "300001"), ("Y", "FP64", "50000"))
    split = 'parameters { key: "split_requests" value { string_value: "on" } }\n'
    for name, config in {
        "digest": _BATCHING + one, "keeps": _BATCHING + one, "waits": "max_batch_size: 1\n" + one,
        "dies": _BATCHING + one, "two": _BATCHING + two, "odd": _BATCHING + odd,
        "split": "max_batch_size: 2\n" + split + one,
        "several": _BATCHING + one + "instance_group { count: 2 }\n",
    }.items():  # fmt: skip
        write_python_model(root, name, DIGEST, config + _OUT)
    with clean_server(root) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[GrpcClient]:
    with GrpcClient(server.grpc) as found:
        yield found


def random_rows(seed: int, rows: int = 1) -> Array:
    return np.random.default_rng(seed).random((rows, WIDTH), np.float32)


def digests(inputs: Sent, rows: slice = slice(None)) -> bytes:
    return " ".join(sha256(array[rows].tobytes()).hexdigest() for array in inputs.values()).encode()


def check(client: Client, model: str, inputs: Sent, id: str = "") -> tuple[int, int]:
    """Send a request, and compare what the model has seen; its batch, and the mapping's size."""
    answer = client.infer(model, inputs, id=id)
    assert set(answer["DIGEST"].ravel().tolist()) == {digests(inputs)}
    count, mapped = answer["TOLD"][0].tolist()
    return count, mapped


def test_a_request_like_an_earlier_one_is_not_copied(client: GrpcClient) -> None:
    mapped = [check(client, "digest", {"X": random_rows(n)}, f"{n:02}")[1] for n in range(40)]
    assert mapped[0] % (1 << 20) == 0  # the first one was copied to a file of whole MiB
    assert mapped[1:] == [_SIZE] * 39


def test_a_binary_body_is_not_copied(server: ServerProcess) -> None:
    with HttpClient(server.url, binary=True) as http:
        mapped = [check(http, "digest", {"X": random_rows(n)}, f"{n:02}")[1] for n in range(40)]
    assert mapped[1:] == [_SIZE] * 39


@pytest.mark.parametrize("model", ["digest", "several"])
def test_concurrent_requests_over_both_doors(
    server: ServerProcess, client: GrpcClient, model: str
) -> None:
    with ThreadPoolExecutor(8) as pool, HttpClient(server.url, binary=True) as http:
        seen = list(
            pool.map(
                lambda n: check(http if n % 4 == 3 else client, model, {"X": random_rows(n)}),
                range(80),
            )
        )
    assert max(count for count, _ in seen) > 1
    assert _SIZE in {mapped for _, mapped in seen}


def test_small_inputs_are_beside(client: GrpcClient) -> None:
    def send(n: int) -> tuple[int, int]:
        return check(client, "two", {"X": random_rows(n), "SCALE": np.array([[n]], np.float32)})

    send(0)
    with ThreadPoolExecutor(6) as pool:
        seen = list(pool.map(send, range(30)))
    assert _SIZE in {mapped for _, mapped in seen}


def test_inputs_that_cannot_be_aligned(client: GrpcClient) -> None:
    for n in range(6):
        x = np.random.default_rng(n).integers(0, 255, (1, 300_001), np.uint8)
        y = np.random.default_rng(n).random((1, 50_000))
        check(client, "odd", {"X": x, "Y": y})


def test_a_model_that_keeps_its_inputs(client: GrpcClient) -> None:
    sent: list[Array] = []
    for n in range(12):
        sent.append(random_rows(n))
        answer = client.infer("keeps", {"X": sent[-1]})
        told = answer["DIGEST"].ravel()[0].decode().split()
        assert told == [sha256(array.tobytes()).hexdigest() for array in sent]


def test_parts_of_a_divided_request(client: GrpcClient) -> None:
    for n in range(4):
        x = random_rows(n, rows=7)
        answer = client.infer("split", {"X": x})
        parts = [digests({"X": x}, slice(at, at + 2)) for at in range(0, 7, 2)]
        assert answer["DIGEST"].ravel().tolist() == [parts[at // 2] for at in range(7)]


def test_a_worker_that_ends(client: GrpcClient) -> None:
    for n in range(3):
        check(client, "dies", {"X": random_rows(n)})
    with pytest.raises(ServerError, match="worker process"):
        client.infer("dies", {"X": random_rows(3)}, id="die")
    until(lambda: client.model_ready("dies"), "the next worker")
    for n in range(4, 8):
        check(client, "dies", {"X": random_rows(n)})


def test_a_cancelled_request_is_not_overwritten(
    root: Path, server: ServerProcess, client: GrpcClient
) -> None:
    for n in range(2):
        check(client, "waits", {"X": random_rows(n)})
    x = random_rows(5)
    message = pb.ModelInferRequest(model_name="waits", id="wait")
    message.inputs.add(name="X", datatype=Datatype.FP32, shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    send: Any = client.channel.unary_unary(
        f"{SERVICE}/ModelInfer", pb.ModelInferRequest.SerializeToString
    )
    sent = send.future(message)
    until(lambda: (root / "wait.begun").exists(), "the model's begin")
    sent.cancel()
    with ThreadPoolExecutor(6) as pool, Scraper(server.metrics) as scraper:
        others = [pool.submit(check, client, "waits", {"X": random_rows(n)}) for n in range(20)]
        waiting = "nv_inference_pending_request_count"
        until(lambda: scraper.now().value(waiting, model="waits") >= 3, "further requests")
        (root / "wait").touch()
        for other in others:
            other.result()
    assert (root / "wait.seen").read_text() == sha256(x.tobytes()).hexdigest()


def test_small_frames_behind_a_part_of_a_long_message(server: ServerProcess) -> None:
    """Bytes of a fast client gather in the socket, but not when it pauses."""
    host, _, port = server.grpc.rpartition(":")
    fields = [(name.encode(), value.encode()) for name, value in REQUEST]
    begun = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, header_block(fields))
    begun += frame(DATA, 0, 1, b"\0" + (30 << 20).to_bytes(4))
    part = frame(DATA, 0, 1, bytes(16_384)) * 64
    for turn in range(10):
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(begun + part * (4 + turn % 3))
            client.sendall(frame(PING, 0, 0, b"answered"))
            received = b""
            while b"answered" not in received:
                received += client.recv(65_536)


def test_a_long_header_length(server: ServerProcess) -> None:
    head = {"Inference-Header-Content-Length": "9" * 5000}
    answer = ask(server.http, "POST", "/v2/models/digest/infer", bytes(1 << 20), **head)
    assert answer.status == 400
    assert "Traceback" not in server.log
