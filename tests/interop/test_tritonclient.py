"""tritonclient over HTTP and gRPC, synchronous and asynchronous, used like its examples."""

import uuid
from collections.abc import Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.utils import (
    InferenceServerException,
    serialize_byte_tensor,
    serialized_byte_size,
    shared_memory,
)

from tests.interop.conftest import Served
from tests.interop.triton import FAMILIES, Client
from tests.support.busy_model import POISON
from tests.support.transports import over_both_transports

MODELS = {"busy", "digits", "simple", "simple_identity", "simple_string", "storyteller"}


@pytest.fixture(scope="module", params=FAMILIES)
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[Client]:
    yield from connected(request.param, served)


@pytest.fixture(scope="module", params=["http", "http.aio"])
def http(request: pytest.FixtureRequest, served: Served) -> Iterator[Client]:
    yield from connected(request.param, served)


@pytest.fixture(scope="module", params=["grpc", "grpc.aio"])
def grpc(request: pytest.FixtureRequest, served: Served) -> Iterator[Client]:
    yield from connected(request.param, served)


def connected(family: str, served: Served) -> Iterator[Client]:
    """A client for the length of a fixture."""
    with Client(family, served.http if family.startswith("http") else served.grpc) as client:
        yield client


def counting(rows: int, first: int = 0) -> NDArray[np.int32]:
    """`Client.sum_and_difference`'s INPUT0."""
    return np.arange(first, first + rows * 16, dtype=np.int32).reshape(rows, 16)


# --- health and documents, of which `test_every_method.py` has one of each


def test_ready_and_metadata_of_a_version(client: Client) -> None:
    assert client.call("is_model_ready", "digits", "2") is True
    assert client.call("is_model_ready", "nobody") is False
    assert client.call("is_model_ready", "digits", "77") is False
    assert client.call("get_model_metadata", "digits", **as_json(client))["versions"] == ["1", "2"]
    one = client.call("get_model_metadata", "digits", model_version="1", **as_json(client))
    assert one["versions"] == ["1"]
    found = [(t["name"], list(map(int, t["shape"]))) for t in one["inputs"]]
    assert found == [("image", [-1, 8, 8])]


def test_statistics_count_inferences(client: Client) -> None:
    before = simple_statistics(client)
    client.call("infer", "simple", client.sum_and_difference(rows=3))
    after = simple_statistics(client)
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 3
    assert int(after["inference_stats"]["success"]["ns"]) > 0
    assert any(int(batch["batch_size"]) == 3 for batch in after["batch_stats"])
    answer = client.call("get_inference_statistics", **as_json(client))
    assert {entry["name"] for entry in answer["model_stats"]} == MODELS
    of_version = client.call("get_inference_statistics", "digits", "2", **as_json(client))
    assert [entry["version"] for entry in of_version["model_stats"]] == ["2"]


@over_both_transports("served")
def test_documents_as_messages(grpc: Client) -> None:
    assert grpc.call("get_server_metadata").name == "headrace"
    assert grpc.call("get_model_metadata", "simple").inputs[0].shape == [-1, 16]
    assert grpc.call("get_model_config", "simple").config.max_batch_size == 8
    assert grpc.call("get_inference_statistics", "simple").model_stats[0].name == "simple"
    assert {m.name for m in grpc.call("get_model_repository_index").models} == MODELS


def as_json(client: Client) -> dict[str, bool]:
    """The option with which gRPC clients return dictionaries, as HTTP clients always do."""
    return {} if client.over_http else {"as_json": True}


def simple_statistics(client: Client) -> dict[str, Any]:
    """Statistics of the model `simple`."""
    answer = client.call("get_inference_statistics", "simple", **as_json(client))
    entry: dict[str, Any] = answer["model_stats"][0]
    return entry


# --- inference


def test_infer(client: Client) -> None:
    rows = 8
    outputs = [client.output("OUTPUT0"), client.output("OUTPUT1")]
    answer = client.call("infer", "simple", client.sum_and_difference(rows), outputs=outputs)
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(rows) + 1)
    assert np.array_equal(answer.as_numpy("OUTPUT1"), counting(rows) - 1)
    assert client.document(answer)["model_version"] == "1"


def test_infer_returns_only_the_requested_outputs(client: Client) -> None:
    answer = client.call("infer", "simple", client.sum_and_difference())
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1) + 1)
    outputs = [client.output("OUTPUT1")]
    answer = client.call("infer", "simple", client.sum_and_difference(), outputs=outputs)
    assert np.array_equal(answer.as_numpy("OUTPUT1"), counting(1) - 1)
    assert answer.as_numpy("OUTPUT0") is None
    assert answer.get_output("OUTPUT0") is None


@pytest.mark.parametrize("inputs", [True, False], ids=["binary in", "JSON in"])
@pytest.mark.parametrize("outputs", [True, False], ids=["binary out", "JSON out"])
def test_json_and_binary(http: Client, inputs: bool, outputs: bool) -> None:
    wanted = [http.output("OUTPUT0", outputs), http.output("OUTPUT1", not outputs)]
    answer = http.call("infer", "simple", http.sum_and_difference(2, binary=inputs), outputs=wanted)
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(2) + 1)
    assert np.array_equal(answer.as_numpy("OUTPUT1"), counting(2) - 1)
    assert ("data" in answer.get_output("OUTPUT0")) is not outputs


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
def test_strings_of_digits(client: Client, binary: bool) -> None:
    numbers = np.arange(16).reshape(1, 16)
    texts = np.array([[str(n).encode() for n in numbers[0]]], object)
    inputs = [client.input("INPUT0", texts, binary), client.input("INPUT1", texts, binary)]
    outputs = [client.output("OUTPUT0", binary), client.output("OUTPUT1", binary)]
    answer = client.call("infer", "simple_string", inputs, outputs=outputs)
    assert np.array_equal(answer.as_numpy("OUTPUT0").astype(int), 2 * numbers)
    assert np.array_equal(answer.as_numpy("OUTPUT1").astype(int), 0 * numbers)


def test_strings_round_trip(client: Client) -> None:
    for texts in ([b"", b"\x01", "Grüße".encode(), b"x" * 70_000], [b"\0\0", b"a\0b"], [b""] * 3):
        sent = np.array([texts], object)
        answer = client.call("infer", "simple_identity", [client.input("INPUT0", sent)])
        assert answer.as_numpy("OUTPUT0").tolist() == [texts]


def test_strings_as_json(http: Client) -> None:
    sent = np.array([["plain", 'quoted " \\', "Grüße", ""]], object)
    inputs, outputs = [http.input("INPUT0", sent, False)], [http.output("OUTPUT0", False)]
    answer = http.call("infer", "simple_identity", inputs, outputs=outputs)
    # Read from JSON, elements are text; read from bytes, they are bytes.
    assert answer.as_numpy("OUTPUT0").tolist() == sent.tolist()


def test_a_digit(client: Client) -> None:
    image = np.zeros((1, 8, 8), np.float32)
    image[0, 1:7, 3:5] = 16  # a stroke from top to bottom
    for version in ("1", "2", ""):
        tensor = client.input("image", image)
        answer = client.call("infer", "digits", [tensor], model_version=version)
        assert answer.as_numpy("label").tolist() == [[1]]
        assert answer.as_numpy("probabilities").shape == (1, 10)
        assert client.document(answer)["model_version"] == (version or "2")


def test_the_most_likely_digits_with_their_labels(client: Client) -> None:
    image = client.input("image", np.zeros((2, 8, 8), np.float32))
    outputs = [client.output("probabilities", class_count=3)]
    answer = client.call("infer", "digits", [image], outputs=outputs).as_numpy("probabilities")
    assert answer.shape == (2, 3)
    first = [element.decode().split(":") for element in answer[0]]
    assert len({index for _, index, _ in first}) == 3
    assert [float(value) for value, _, _ in first] == sorted(
        (float(value) for value, _, _ in first), reverse=True
    )


def test_options_of_a_request_are_accepted(client: Client) -> None:
    answer = client.call(
        "infer", "simple", client.sum_and_difference(), headers={"x-tenant": "a"}, priority=1,
        timeout=5_000_000, parameters={"text": "x", "whole": 3, "flag": True},
        request_id="a-request",
    )  # fmt: skip
    assert client.document(answer)["id"] == "a-request"
    for sequence_id in (7, "a-sequence"):
        answer = client.call(
            "infer", "simple", client.sum_and_difference(), sequence_id=sequence_id,
            sequence_start=True, sequence_end=True,
        )  # fmt: skip
        assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1) + 1)
        assert client.document(answer).get("id", "") == ""


def test_timings_are_parameters_on_request(client: Client) -> None:
    inputs = client.sum_and_difference()
    answer = client.call("infer", "simple", inputs, parameters={"headrace_timing": True})
    found = client.document(answer)["parameters"]
    assert {"queue_us", "compute_us", "batch_rows"} <= set(found)


@pytest.mark.parametrize(("there", "back"), [("gzip", "deflate"), ("deflate", "gzip")])
def test_compression_over_http(http: Client, there: str, back: str) -> None:
    answer = http.call(
        "infer", "simple", http.sum_and_difference(8), request_compression_algorithm=there,
        response_compression_algorithm=back,
    )  # fmt: skip
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(8) + 1)


@over_both_transports("served")
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_over_grpc(grpc: Client, algorithm: str) -> None:
    inputs = grpc.sum_and_difference(8)
    answer = grpc.call("infer", "simple", inputs, compression_algorithm=algorithm)
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(8) + 1)


def test_generated_and_parsed_bodies(http: Client, served: Served) -> None:
    from http.client import HTTPConnection

    kind = http.types.InferenceServerClient
    body, json_size = kind.generate_request_body(http.sum_and_difference(2))
    connection = HTTPConnection(served.http)
    headers = {"Inference-Header-Content-Length": str(json_size)} if json_size else {}
    connection.request("POST", "/v2/models/simple/infer", body, headers)
    answer = connection.getresponse()
    size = int(answer.headers["Inference-Header-Content-Length"])
    result = kind.parse_response_body(answer.read(), header_length=size)
    connection.close()
    assert np.array_equal(result.as_numpy("OUTPUT0"), counting(2) + 1)


# --- concurrent requests


def test_async_infer_over_http(served: Served) -> None:
    with Client("http", served.http, concurrency=8) as client:
        started = [
            client.call("async_infer", "simple", client.sum_and_difference(1, n), request_id=str(n))
            for n in range(50)
        ]
        for n, request in enumerate(started):
            answer = request.get_result(timeout=30)
            assert answer.get_response()["id"] == str(n)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1, n) + 1)


@over_both_transports("served")
def test_async_infer_over_grpc(served: Served) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    with Client("grpc", served.grpc) as client:
        for n in range(50):
            client.call(
                "async_infer", "simple", client.sum_and_difference(1, n),
                lambda result, error: answers.put((result, error)), request_id=str(n),
            )  # fmt: skip
        seen = set()
        for _ in range(50):
            answer, error = answers.get(timeout=30)
            assert error is None
            n = int(answer.get_response().id)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1, n) + 1)
            seen.add(n)
    assert seen == set(range(50))


@pytest.mark.parametrize("family", ["http.aio", "grpc.aio"])
def test_many_asynchronous_requests(served: Served, family: str) -> None:
    with Client(family, served.http if family == "http.aio" else served.grpc) as client:
        calls = [("simple", client.sum_and_difference(1 + n % 8, n)) for n in range(50)]
        answers = client.together("infer", calls)
    for n, answer in enumerate(answers):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1 + n % 8, n) + 1)


# --- streams


@over_both_transports("served")
def test_a_stream(served: Served) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    with Client("grpc", served.grpc) as client:
        client.call("start_stream", lambda result, error: answers.put((result, error)))
        for n in range(20):
            inputs = client.sum_and_difference(1 + n % 8, n)
            client.call("async_stream_infer", "simple", inputs, request_id=str(n))
        for n in range(20):  # in the order of the requests
            answer, error = answers.get(timeout=30)
            assert error is None
            assert answer.get_response().id == str(n)
            assert answer.get_response().parameters["triton_final_response"].bool_param is True
            assert np.array_equal(answer.as_numpy("OUTPUT1"), counting(1 + n % 8, n) - 1)
        client.call("stop_stream")
    assert answers.empty()


@over_both_transports("served")
def test_a_stream_with_statuses_on_request(served: Served) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    with Client("grpc", served.grpc) as client:
        client.call(
            "start_stream", lambda result, error: answers.put((result, error)),
            headers={"triton_grpc_error": "true"},
        )  # fmt: skip
        client.call("async_stream_infer", "busy", client.work(POISON, 0))
        _, error = answers.get(timeout=30)
        client.call("stop_stream")
    assert error.status() == "StatusCode.INTERNAL"


@over_both_transports("served")
def test_a_stream_stopped_with_its_requests(served: Served) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    with Client("grpc", served.grpc) as client:
        client.call("start_stream", lambda result, error: answers.put((result, error)))
        client.call("async_stream_infer", "busy", client.work(1, served.second))
        client.call("stop_stream", cancel_requests=True)
    _, error = answers.get(timeout=30)
    assert error.status() == "StatusCode.CANCELLED"


@over_both_transports("served")
def test_a_stream_asynchronously(served: Served) -> None:
    with Client("grpc.aio", served.grpc) as client:
        requests = [
            {"model_name": m, "inputs": client.sum_and_difference(1, n), "request_id": str(n)}
            for n, m in enumerate(["simple", "nobody", "simple"])
        ]
        outcomes = client.stream(requests)
    assert [error is None for _, error in outcomes] == [True, False, True]
    assert outcomes[2][0].get_response().id == "2"
    assert np.array_equal(outcomes[2][0].as_numpy("OUTPUT0"), counting(1, 2) + 1)


# --- errors


def test_errors_are_the_clients_own_exceptions(client: Client) -> None:
    simple = client.sum_and_difference()
    for text, status, call in (
        ("unknown model: 'nobody'", (404, "NOT_FOUND"), ("infer", "nobody", simple)),
        ("unknown model: 'nobody'", (404, "NOT_FOUND"), ("get_model_metadata", "nobody")),
        ("version 77 is not found", (404, "NOT_FOUND"), ("infer", "simple", simple, "77")),
        ("missing required input", (400, "INVALID_ARGUMENT"), ("infer", "simple", simple[:1])),
        ("model 'busy' failed", (500, "INTERNAL"), ("infer", "busy", client.work(POISON, 0))),
        ("'nobody' is not available", (400, "INVALID_ARGUMENT"),
         ("get_inference_statistics", "nobody")),
        ("requested model version is not available for model 'simple'",
         (400, "INVALID_ARGUMENT"), ("get_inference_statistics", "simple", "7")),
        ("explicit model load / unload is not allowed if polling is enabled",
         (503, "UNAVAILABLE"), ("load_model", "simple")),
        ("Unable to open shared memory region: '/nothing'", (500, "INTERNAL"),
         ("register_system_shared_memory", "s", "/nothing", 8)),
        ("invalid shm key '/'", (400, "INVALID_ARGUMENT"),
         ("register_system_shared_memory", "s", "/", 8)),
        ("cannot register shared memory region 's' with key 'triton_python_backend_shm_region_k' as"
         " the key contains the reserved prefix 'triton_python_backend_shm_region_'",
         (400, "INVALID_ARGUMENT"),
         ("register_system_shared_memory", "s", "triton_python_backend_shm_region_k", 8)),
    ):  # fmt: skip
        with pytest.raises(InferenceServerException, match=text) as caught:
            client.call(*call)
        found = caught.value.status()
        assert found == (str(status[0]) if client.over_http else f"StatusCode.{status[1]}")


@over_both_transports("served")
def test_a_deadline_of_a_call(grpc: Client, served: Served) -> None:
    with pytest.raises(InferenceServerException, match="Deadline Exceeded") as caught:
        grpc.call("infer", "busy", grpc.work(1, served.second), client_timeout=0.05)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    answer = grpc.call("infer", "simple", grpc.sum_and_difference(), client_timeout=30)
    assert np.array_equal(answer.as_numpy("OUTPUT0"), counting(1) + 1)


# --- shared memory, by the client's own tools


@pytest.fixture
def shared(client: Client) -> Iterator[Any]:
    """A region `r` of 4 KiB; registrations of a test are removed after it."""
    handle = shared_memory.create_shared_memory_region("r", f"/headrace-{uuid.uuid4().hex}", 4096)
    yield handle
    client.call("unregister_system_shared_memory")
    shared_memory.destroy_shared_memory_region(handle)


def test_shared_memory_for_strings(client: Client, shared: Any) -> None:
    words = np.array([b"one", b"", "z\u00fcrich".encode()], object)
    packed = serialize_byte_tensor(words)
    shared_memory.set_shared_memory_region(shared, [packed])
    size = serialized_byte_size(packed)
    client.call("register_system_shared_memory", "r", shared._shm_key, 4096)
    tensor = client.types.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_shared_memory("r", size)
    wanted = client.types.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory("r", size, offset=1000)
    client.call("infer", "simple_identity", [tensor], outputs=[wanted])
    found = shared_memory.get_contents_as_numpy(shared, np.object_, [1, 3], offset=1000)
    assert found.ravel().tolist() == words.tolist()


def test_shared_memory_over_a_stream(served: Served) -> None:
    with Client("grpc.aio", served.grpc) as client:
        handle = shared_memory.create_shared_memory_region("r", f"/headrace-{uuid.uuid4().hex}", 64)
        shared_memory.set_shared_memory_region(handle, [counting(1)])
        client.call("register_system_shared_memory", "s", handle._shm_key, 64)
        inputs = [client.types.InferInput(f"INPUT{n}", [1, 16], "INT32") for n in range(2)]
        for tensor in inputs:
            tensor.set_shared_memory("s", 64)
        [(answer, error)] = client.stream([{"model_name": "simple", "inputs": inputs}])
        assert error is None
        assert np.array_equal(answer.as_numpy("OUTPUT0"), 2 * counting(1))
        client.call("unregister_system_shared_memory", "s")
        shared_memory.destroy_shared_memory_region(handle)
