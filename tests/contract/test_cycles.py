"""Refused requests leave no cycles: all their objects are freed without the garbage collector."""

import gzip
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CLIENTS
from tests.support.grpc_client import GrpcClient
from tests.support.http2_socket import REQUEST, Http2Socket, prefixed
from tests.support.http_socket import HttpSocket, ask, request
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess
from tests.support.uncollected import PROGRAM, SITE, UNCOLLECTED, front_end_socket, garbage

# Their tests, run again as they are, need nothing but the suite's server.
MODULES = ("test_validation", "test_http_infer", "test_http", "test_grpc", "test_statuses")
# The standard library's encoder with indents, which pages use for examples, makes cycles.
_PAGES = {"test_a_404_names_the_nearest_route"}
_LONG = 70_000  # bytes of a request that is decoded on a thread


class Uncollected:
    """A server without cyclic garbage collection."""

    def __init__(self, process: ServerProcess, path: Path) -> None:
        self.process = process
        self._path = path

    def garbage(self) -> dict[str, int]:
        """Objects in cycles since the last call, by type."""
        return garbage(self._path)


@pytest.fixture(scope="module")
def uncollected(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Uncollected]:
    path = tmp_path_factory.mktemp("collected") / "socket"
    with ServerProcess(
        repository, options=["--allow-client-shm"], environment={UNCOLLECTED: str(path)},
        program=PROGRAM,
    ) as process:  # fmt: skip
        found = Uncollected(process, path)
        # The first request for anything but inference imports what answers it.
        assert ask(process.http, "GET", "/v2").status == 200
        found.garbage()
        yield found
        assert process.stop() == 0
        assert "bug " not in process.log, process.log


def _cases(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of a parametrised test."""
    tables: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            rows = [row.values if hasattr(row, "values") else row for row in mark.args[1]]
            rows = rows if len(names) > 1 else [[row] for row in rows]
            tables.append([dict(zip(map(str.strip, names), row, strict=True)) for row in rows])
    for cases in itertools.product(*tables):
        yield {name: value for case in cases for name, value in case.items()}


def _tests(module: ModuleType) -> Iterator[Callable[..., None]]:
    for name, function in vars(module).items():
        if name.startswith("test_") and name not in _PAGES and inspect.isfunction(function):
            yield function


def _run(function: Callable[..., None], server: ServerProcess) -> bool:
    """Run a test with every case; False if it needs more than the server and its clients."""
    given = list(_cases(function))
    needed = inspect.signature(function).parameters.keys() - (given[0] if given else {}).keys()
    with ExitStack() as stack:
        if needed == {"client"}:
            clients = [stack.enter_context(open_(server)) for open_ in CLIENTS.values()]
            own: list[dict[str, Any]] = [{"client": client} for client in clients]
        elif needed == {"server"}:
            own = [{"server": server}]
        elif needed == {"grpc_client"}:
            own = [{"grpc_client": stack.enter_context(GrpcClient(server.grpc))}]
        else:
            return False
        for arguments, case in itertools.product(own, given):
            with suppress(AssertionError, pytest.skip.Exception):  # the test's own concern
                function(**arguments, **case)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_no_test_of_the_contract_leaves_cycles(uncollected: Uncollected, module: str) -> None:
    left = {}
    ran = 0
    for function in _tests(import_module(f"tests.contract.{module}")):
        uncollected.garbage()
        ran += _run(function, uncollected.process)
        if found := uncollected.garbage():
            left[function.__name__] = found
    assert ran > 5 or module in ("test_statuses", "test_validation")
    assert left == {}


# --- decoded on threads


def _documents() -> Iterator[bytes]:
    """Bodies that are refused, by decoding, or by checks afterwards."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    for wrong in (
        {}, {"id": 7}, {"inputs": [tensor, tensor]}, {"inputs": [tensor | {"data": ["x"]}]},
        {"inputs": [tensor | {"shape": [1, 2]}]}, {"inputs": [tensor | {"name": "other"}]},
        {"inputs": [tensor | {"datatype": "INT7"}]}, {"inputs": [tensor], "parameters": {"x": []}},
        {"inputs": [tensor], "outputs": [{"name": "other"}]},
        {"inputs": [tensor], "id": "x" * 9000},
        {"inputs": [tensor | {"shape": [1, 70_000], "data": [1] * 70_000}], "id": 7},
        {"inputs": [tensor | {"shape": [1, 70_000], "data": [1] * 69_999}]},
        {"inputs": [tensor | {"shape": [1, 70_000], "data": ["x"] * 70_000}]},
    ):  # fmt: skip
        yield json.dumps(wrong).encode()
    yield b"{"
    yield b"[NaN, 1e400]"


@pytest.mark.slow
def test_requests_refused_on_a_thread_leave_no_cycles(uncollected: Uncollected) -> None:
    address = uncollected.process.http
    path = "/v2/models/identity_FP32/infer"
    left: list[tuple[bytes, str, dict[str, int]]] = []

    def note(case: bytes, form: str) -> None:
        if found := uncollected.garbage():
            left.append((case[:80], form, found))

    with HttpSocket(address) as connection:
        connection.ask("POST", path, b"{")
        uncollected.garbage()
        for document in _documents():
            body = document + b" " * _LONG
            assert connection.ask("POST", path, body).status == 400
            note(document, "whole")
            packed = gzip.compress(body + np.random.default_rng(0).bytes(9_000).hex().encode())
            assert connection.ask("POST", path, packed, Content_Encoding="gzip").status == 400
            note(document, "gzip")
            connection.send(
                request("POST", path, Transfer_Encoding="chunked", Content_Length="").replace(
                    b"Content-Length: \r\n", b""
                )
                + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            )
            assert connection.receive().status == 400
            note(document, "chunked")
    assert left == []


def _messages() -> Iterator[pb.ModelInferRequest]:
    """Messages of long text that are refused."""
    for model, shape, element in (
        ("identity_BYTES", [1, 2], 70_000), ("other", [1, 1], 70_000), ("simple", [1, 1], 70_000),
        ("identity_BYTES", [1, 1], 69_999), ("identity_BYTES", [9, 1], 70_000),
    ):  # fmt: skip
        text = element.to_bytes(4, "little") + b"x" * 70_000
        message = pb.ModelInferRequest(model_name=model, raw_input_contents=[text])
        message.inputs.add(name="INPUT0", datatype="BYTES", shape=shape)
        yield message
        typed = pb.ModelInferRequest(model_name=model)
        item = typed.inputs.add(name="INPUT0", datatype="BYTES", shape=shape)
        item.contents.bytes_contents.extend([b"x" * 70_000] * 3)
        yield typed


def test_messages_refused_on_a_thread_leave_no_cycles(uncollected: Uncollected) -> None:
    left: list[tuple[str, dict[str, int]]] = []
    with Http2Socket(uncollected.process.grpc) as connection:
        connection.call(REQUEST, prefixed(b"\xff"))
        uncollected.garbage()
        for message in _messages():
            data = prefixed(message.SerializeToString())
            pieces = [data[start : start + 16_384] for start in range(0, len(data), 16_384)]
            answer = connection.call(REQUEST, *pieces)
            assert (answer.headers | answer.trailers)["grpc-status"] != "0"
            if found := uncollected.garbage():
                left.append((str(message)[:60], found))
    assert left == []


# --- connections whose clients are gone

_SIZE = 4 << 20


def _large_body() -> bytes:
    """A request with `_SIZE` bytes in binary, and for as many; the JSON has 200 bytes."""
    binary = {"binary_data_size": _SIZE}
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [1, _SIZE], "parameters": binary}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return json.dumps(document).encode().ljust(200) + bytes(_SIZE)


def _large_message() -> bytes:
    message = pb.ModelInferRequest(model_name="identity_UINT8", raw_input_contents=[bytes(_SIZE)])
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, _SIZE])
    return prefixed(message.SerializeToString())


@pytest.mark.slow
def test_abandoned_connections_leave_no_cycles(uncollected: Uncollected) -> None:
    """Clients that do not read their answers, or end within a message."""
    path, body = "/v2/models/identity_UINT8/infer", _large_body()
    whole = request("POST", path, body, Inference_Header_Content_Length="200")
    piece = _large_message()[:16_384]
    uncollected.garbage()
    with Scraper(uncollected.process.metrics) as metrics:

        def of(name: str) -> float:
            return metrics.now().value(name)

        with HttpSocket(uncollected.process.http, receive_buffer=4096) as connection:
            connection.send(whole)
            until(lambda: of("headrace_unread_answer_bytes") > 0, "an unread answer")
        with HttpSocket(uncollected.process.http) as connection:
            connection.send(whole[: _SIZE // 2])
            until(lambda: of("headrace_admitted_bytes") > 0, "a part of a body")
        with Http2Socket(uncollected.process.grpc) as calls:
            calls.begin(REQUEST, piece, end=False)
            until(lambda: of("headrace_admitted_bytes") > 0, "a part of a message")
        until(lambda: of("headrace_connections") == 0, "the end of all connections")
        assert of("headrace_admitted_bytes") == 0
    assert uncollected.garbage() == {}


# --- in front ends


@pytest.fixture(scope="module")
def front_end(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uncollected]:
    path = tmp_path_factory.mktemp("collected") / "socket"
    with ServerProcess(
        repository, options=["--frontends=1", "--model-control-mode=explicit", "--load-model=*"],
        environment={UNCOLLECTED: str(path), "PYTHONPATH": SITE}, program=PROGRAM,
    ) as process:  # fmt: skip
        found = Uncollected(process, front_end_socket(path))
        assert ask(process.http, "GET", "/v2").status == 200
        found.garbage()
        yield found
        assert process.stop() == 0


@pytest.mark.slow
def test_requests_refused_behind_a_front_end_leave_no_cycles(front_end: Uncollected) -> None:
    """Their bodies stayed in it until the collector ran: 62 load requests held 130 MB."""
    infer, load = "/v2/models/identity_FP32/infer", "/v2/repository/models/other/load"
    with HttpSocket(front_end.process.http) as connection:
        for path, bodies in {
            infer: list(_documents()),
            infer.replace("FP32", "other"): [b"{}"],
            load: [b"{}", b"{", b'{"parameters": {"config": "[["}}'],
            "/v2/other": [b"{}"],
        }.items():
            for body in bodies:
                connection.ask("POST", path, body)
                assert connection.ask("POST", path, body).status >= 400
                assert front_end.garbage() == {}, (path, body[:80])


@pytest.mark.slow
def test_messages_refused_behind_a_front_end_leave_no_cycles(front_end: Uncollected) -> None:
    load = pb.RepositoryModelLoadRequest(model_name="identity_FP32")
    load.parameters["config"].string_param = "[" * 5_000
    asked = {
        "RepositoryModelLoad": (load, pb.RepositoryModelLoadResponse),
        "ModelMetadata": (pb.ModelMetadataRequest(name="other"), pb.ModelMetadataResponse),
        "ModelInfer": (pb.ModelInferRequest(model_name="other"), pb.ModelInferResponse),
    }
    with GrpcClient(front_end.process.grpc) as client:
        for name, (message, kind) in asked.items():
            ask_ = client.procedure(name, kind)
            for _ in range(2):
                with pytest.raises(grpc.RpcError):
                    ask_(message, timeout=60)
            assert front_end.garbage() == {}, name
