"""System and CUDA shared memory, over both protocols and every carrier."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    ServerError,
    Unsupported,
)
from headrace.core.tensors import Array
from tests.support.client import strings, to_raw
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.memory_client import (
    GrpcMemory,
    HttpMemory,
    Inputs,
    MemoryClient,
    Place,
    StreamMemory,
    memory_message,
)
from tests.support.server_process import ServerProcess
from tests.support.shared_memory import SharedFile

SIZE = 4 << 20
LONG = 2 << 20  # bytes that are copied on another thread
OFF = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."

CLIENTS: dict[str, Callable[[ServerProcess, GrpcClient], MemoryClient]] = {
    "http": lambda server, _: HttpMemory(server.http),
    "grpc": lambda _, client: GrpcMemory(client),
    "stream": lambda _, client: StreamMemory(client),
}
CONTROL = ("http", "grpc")  # a stream is for inference alone


@pytest.fixture(params=CLIENTS)
def memory(
    request: pytest.FixtureRequest, server: ServerProcess, grpc_client: GrpcClient
) -> Iterator[MemoryClient]:
    """Clients of every transport; at the end no region is left."""
    client = CLIENTS[request.param](server, grpc_client)
    yield client
    client.unregister()
    assert client.status() == []


@pytest.fixture(params=CONTROL)
def control(
    request: pytest.FixtureRequest, server: ServerProcess, grpc_client: GrpcClient
) -> Iterator[MemoryClient]:
    client = CLIENTS[request.param](server, grpc_client)
    yield client
    client.unregister()


@pytest.fixture
def streaming(grpc_client: GrpcClient) -> Iterator[StreamMemory]:
    client = StreamMemory(grpc_client)
    yield client
    client.unregister()


@pytest.fixture
def shared() -> Iterator[SharedFile]:
    with SharedFile(SIZE) as file:
        yield file


@pytest.fixture
def file(memory: MemoryClient, shared: SharedFile) -> SharedFile:
    """Shared memory registered as `r`."""
    memory.register("r", shared.key, 0, SIZE)
    return shared


# --- control


def test_register_status_unregister(control: MemoryClient, shared: SharedFile) -> None:
    assert control.status() == control.status(kind="cuda") == []
    control.register("b", shared.key, 8, 100)
    control.register("a", shared.key[1:], 0, SIZE)
    a = {"name": "a", "key": shared.key[1:], "offset": 0, "byte_size": SIZE}
    b = {"name": "b", "key": shared.key, "offset": 8, "byte_size": 100}
    assert control.status() == [a, b]
    assert control.status("b") == [b]
    control.unregister("b")
    control.unregister("b")  # unknown regions need not be unregistered
    assert control.status() == [a]
    control.unregister("a", kind="cuda")
    assert control.status() == [a]
    control.unregister()
    assert control.status() == []


def test_one_set_of_regions_for_both_protocols(
    server: ServerProcess, grpc_client: GrpcClient, shared: SharedFile
) -> None:
    http, grpc = HttpMemory(server.http), GrpcMemory(grpc_client)
    http.register("r", shared.key, 0, SIZE)
    for _ in range(4):  # for any front end
        assert [region["name"] for region in grpc.status()] == ["r"]
    grpc.unregister("r")
    for _ in range(4):
        assert http.status() == []


def test_registrations_that_are_refused(control: MemoryClient, shared: SharedFile) -> None:
    control.register("r", shared.key, 0, SIZE)
    with pytest.raises(
        AlreadyExists if isinstance(control, GrpcMemory) else InvalidRequest,
        match="shared memory region 'r' already in manager",
    ):
        control.register("r", shared.key, 0, SIZE)
    text = r"^Unable to open shared memory region: '/nothing'$"
    with pytest.raises(ExecutionFailed, match=text):  # INTERNAL
        control.register("other", "/nothing", 0, 8)
    with pytest.raises(InvalidRequest, match=r"region 'other' - invalid shm key '/'$"):
        control.register("other", "/", 0, 8)
    with pytest.raises(InvalidRequest, match="as the key contains the reserved prefix 'triton_py"):
        control.register("other", "/triton_python_backend_shm_region_1", 0, 8)
    with pytest.raises(InvalidRequest, match="memory region 'other': invalid args"):
        control.register("other", shared.key, 2**64 - 1, 2)
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'other'"):
        control.status("other")


@pytest.mark.parametrize(("kind", "body", "part"), [
    ("system", {"byte_size": 8}, "'key' of a region must be a string, got null"),
    ("system", {"key": "k"}, "'byte_size' of a region must be an integer, got null"),
    ("system", {"key": "k", "byte_size": 2**70}, "'byte_size' of a region must be an integer"),
    ("system", {"key": "k", "byte_size": 8, "offset": "0"}, "'offset' of a region must be an"),
    ("system", [], "the request must be a JSON object"),
    ("cuda", {"raw_handle": "x", "device_id": 0, "byte_size": 8}, "'raw_handle'"),
    ("cuda", {"raw_handle": {"b64": "!"}, "device_id": 0, "byte_size": 8}, "'raw_handle'"),
    ("cuda", {"raw_handle": {"b64": ""}, "device_id": None, "byte_size": 8}, "'device_id'"),
])  # fmt: skip
def test_invalid_registrations(server: ServerProcess, kind: str, body: object, part: str) -> None:
    path = f"/v2/{kind}sharedmemory/region/r/register"
    answer = ask(server.http, "POST", path, json.dumps(body).encode())
    assert answer.status == 400
    assert part in answer.error


def test_cuda_without_a_gpu(control: MemoryClient) -> None:
    assert control.status(kind="cuda") == []
    control.unregister(kind="cuda")
    control.unregister("c", kind="cuda")
    with pytest.raises(InvalidRequest) as raised:
        control.register_cuda("c", bytes(64), 0, 8)
    assert str(raised.value) == (
        "failed to register CUDA shared memory region: 'c', GPUs not supported"
    )
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'c'"):
        control.status("c", kind="cuda")


def attempts(client: MemoryClient, key: str) -> list[Callable[[], object]]:
    return [
        lambda: client.register("r", key, 0, SIZE),
        lambda: client.register_cuda("r", bytes(64), 0, 8),
        lambda: client.unregister(),
        lambda: client.unregister("r", kind="cuda"),
    ]


def test_shared_memory_is_off_by_default(narrow: ServerProcess, shared: SharedFile) -> None:
    with GrpcClient(narrow.grpc) as client:
        for off in (HttpMemory(narrow.http), GrpcMemory(client)):
            assert off.status() == off.status(kind="cuda") == []
            for attempt in attempts(off, shared.key):
                with pytest.raises(Unsupported) as raised:
                    attempt()
                assert str(raised.value) == OFF
            for outputs, inputs in (({}, {"INPUT0": Place("r")}), ({"OUTPUT0": Place("r")}, None)):
                with pytest.raises(NotFound) as missing:  # an unknown region
                    off.infer("identity", inputs or ones(16), outputs)
                assert str(missing.value) == f"Unable to find shared memory region: 'r'. {OFF}"


# --- inference


def ones(length: int) -> dict[str, Array | Place]:
    return {"INPUT0": np.ones((1, length), np.float32)}


def test_elements_of_any_length(memory: MemoryClient, file: SharedFile) -> None:
    array = strings([b"", b"abc", bytes(300), "\u00fc".encode()], (2, 2))
    raw = to_raw(array, "BYTES")
    file.put(raw, 64)
    source = {"INPUT0": Place("r", 64, len(raw), Datatype.BYTES, (2, 2))}
    [found] = memory.infer("identity_BYTES", source).values()
    assert found is not None
    assert found.tolist() == array.tolist()
    file.put(b"\xff" * 1000, 8000)
    target = {"OUTPUT0": Place("r", 8000, 1000)}  # more room than is filled
    assert memory.infer("identity_BYTES", source, target) == {"OUTPUT0": None}
    assert file.get(1000, 8000) == raw + b"\xff" * (1000 - len(raw))
    empty = Place("r", 0, 0, shape=(1, 0))
    assert memory.infer("identity_FP32", {"INPUT0": empty}, {"OUTPUT0": empty}) == {"OUTPUT0": None}


@pytest.mark.parametrize("nbytes", [64, LONG])
def test_short_and_long(memory: MemoryClient, file: SharedFile, nbytes: int) -> None:
    array = np.arange(nbytes // 4, dtype=np.float32).reshape(1, -1)
    file.put(array.tobytes())
    source = Place("r", 0, nbytes, shape=array.shape)
    [found] = memory.infer("identity_FP32", {"INPUT0": source}, {"OUTPUT0": None}).values()
    assert found is not None
    assert np.array_equal(found, array)
    for tensor in (source, array):
        file.put(bytes(nbytes), SIZE - nbytes)
        target = {"OUTPUT0": Place("r", SIZE - nbytes, nbytes)}
        assert memory.infer("identity_FP32", {"INPUT0": tensor}, target) == {"OUTPUT0": None}
        assert file.get(nbytes, SIZE - nbytes) == array.tobytes()


def test_tensors_in_and_outside_of_regions(memory: MemoryClient, file: SharedFile) -> None:
    first, second = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 3, np.int32)
    file.put(first.tobytes(), 100)
    place = Place("r", 100, 64, Datatype.INT32)
    target = Place("r", 1000, 64)
    here: Inputs = {"INPUT0": first, "INPUT1": second}
    there: Inputs = {"INPUT0": place, "INPUT1": second}
    for inputs in (here, there):
        for names in (("OUTPUT0", "OUTPUT1"), ("OUTPUT1", "OUTPUT0")):
            file.put(bytes(64), 1000)
            result = memory.infer("simple", inputs, {names[0]: target, names[1]: None})
            sums = {"OUTPUT0": first + second, "OUTPUT1": first - second}
            assert result[names[0]] is None
            found = result[names[1]]
            assert found is not None
            assert np.array_equal(found, sums[names[1]])
            assert file.get(64, 1000) == sums[names[0]].tobytes()


@pytest.mark.parametrize(("place", "error", "part"), [
    (Place("no"), NotFound, "Unable to find shared memory region: 'no'"),
    (Place("r", SIZE), InvalidRequest, "Invalid offset for shared memory region: 'r'"),
    (Place("r", SIZE - 63), InvalidRequest, "Invalid offset + byte size for shared memory re"),
])  # fmt: skip
def test_invalid_places(
    memory: MemoryClient, file: SharedFile, place: Place, error: type[ServerError], part: str
) -> None:
    kind = ServerError if isinstance(memory, StreamMemory) else error  # a string there
    for inputs, outputs in (({"INPUT0": place}, None), (ones(16), {"OUTPUT0": place})):
        with pytest.raises(kind) as raised:
            memory.infer("identity_FP32", inputs, outputs)
        assert part in str(raised.value)


def test_a_place_beyond_what_can_be_counted(server: ServerProcess, shared: SharedFile) -> None:
    """Over HTTP alone: numbers of gRPC are shorter."""
    client = HttpMemory(server.http)
    client.register("r", shared.key, 0, SIZE)
    place = Place("r", 32, 2**64 - 32)
    for inputs, outputs in (({"INPUT0": place}, None), (ones(16), {"OUTPUT0": place})):
        with pytest.raises(InvalidRequest, match=r"^Integer overflow detected: byte_size \(184467"):
            client.infer("identity_FP32", inputs, outputs)
    client.unregister()


def test_inputs_that_do_not_match_the_model(memory: MemoryClient, file: SharedFile) -> None:
    """Requests that the model refuses are refused before reading."""
    file.put(b"\xff" * 64)
    for model, inputs, outputs, text in (
        ("FP32", Place("r", 0, 128), None, "input byte size mismatch for input 'INPUT0'"),
        (
            "BYTES",
            Place("r", 0, 64, Datatype.BYTES, (1, 1)),
            None,
            "incomplete string data for inf",
        ),
        ("FP32", Place("r", 0, SIZE, shape=(SIZE // 4, 1)), None, "batch-size must be <= 8"),
        ("FP32", Place("r", 0, 64, Datatype.INT32), None, "data-type is 'INT32', but model"),
        ("FP32", Place("r"), {"no": Place("r")}, "unexpected inference output 'no'"),
    ):
        with pytest.raises(ServerError, match=text):
            memory.infer(f"identity_{model}", {"INPUT0": inputs}, outputs)


def test_an_output_larger_than_its_place(memory: MemoryClient, file: SharedFile) -> None:
    kind = ServerError if isinstance(memory, StreamMemory) else ExecutionFailed
    with pytest.raises(kind) as raised:
        memory.infer("identity_FP32", ones(16), {"OUTPUT0": Place("r", 0, 63)})
    assert str(raised.value) == (
        "shared memory size specified with the request for output 'OUTPUT0' (63 bytes)"
        " should be at least 64 bytes to hold the results"
    )


def test_a_truncated_file(memory: MemoryClient, file: SharedFile) -> None:
    """With a mapping the server would crash."""
    file.resize(10)
    for nbytes in (64, LONG):
        place = Place("r", 0, nbytes, shape=(1, nbytes // 4))
        with pytest.raises(ServerError, match="'r' does not have the bytes any more"):
            memory.infer("identity_FP32", {"INPUT0": place})
        with pytest.raises(ServerError, match="'r' did not take an output"):
            memory.infer("identity_FP32", ones(nbytes // 4), {"OUTPUT0": place})
    file.resize(SIZE)
    assert memory.infer("identity_FP32", ones(16), {"OUTPUT0": Place("r")}) == {"OUTPUT0": None}


def test_files_that_change_all_the_time(
    memory: MemoryClient, file: SharedFile, pool: ThreadPoolExecutor
) -> None:
    """Truncated, extended, and with changing lengths: each request has an answer or an error."""
    array = strings([b"abc"] * 4, (1, 4))
    raw = to_raw(array, "BYTES")
    source = Place("r", 0, len(raw), Datatype.BYTES, (1, 4))
    long = Place("r", 0, LONG, shape=(1, LONG // 4))

    def change(number: int) -> None:
        for turn in range(60):
            file.resize((0, 10, len(raw), SIZE)[(turn + number) % 4])
            file.put(raw if turn % 2 else b"\xff\xff\xff\xff" * 4)

    def ask_some(number: int) -> int:
        errors = 0
        for _ in range(10):
            try:
                if number % 2:
                    memory.infer("identity_FP32", {"INPUT0": long}, {"OUTPUT0": long})
                else:
                    memory.infer("identity_BYTES", {"INPUT0": source})
            except ServerError:
                errors += 1
        return errors

    changes = [pool.submit(change, number) for number in range(2)]
    errors = sum(pool.map(ask_some, range(8)))
    for done in changes:
        done.result()
    assert 0 <= errors <= 80
    file.resize(SIZE)
    file.put(raw)
    [found] = memory.infer("identity_BYTES", {"INPUT0": source}).values()
    assert found is not None
    assert found.tolist() == array.tolist()


def test_classes_beside_shared_memory(server: ServerProcess, shared: SharedFile) -> None:
    memory = HttpMemory(server.http)
    memory.register("r", shared.key, 0, SIZE)
    document = {
        "inputs": [
            {"name": f"INPUT{n}", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
            for n in range(2)
        ],
        "outputs": [
            {"name": "OUTPUT0", "parameters": {"classification": 1}},
            {"name": "OUTPUT1", "parameters": Place("r").parameters},
        ],
    }
    answer = ask(server.http, "POST", "/v2/models/simple/infer", json.dumps(document).encode())
    assert answer.document["outputs"] == [
        {"name": "OUTPUT0", "datatype": "BYTES", "shape": [1, 1], "data": ["30:15"]},
        {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16]},
    ]
    assert shared.get(64) == bytes(64)
    memory.unregister()


def test_a_decoupled_model(streaming: StreamMemory, shared: SharedFile) -> None:
    streaming.register("r", shared.key, 0, SIZE)
    shared.put(np.full(8, 4, np.float32).tobytes())
    source, target = Place("r", 0, 32, shape=(8, 1)), Place("r", 64, 32)
    message = memory_message("decoupled", {"INPUT0": source}, {"OUTPUT0": target})
    answers = list(streaming.client.stream([message, message]))
    assert [a.error_message for a in answers] == ["", ""]
    for answer in answers:
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert list(answer.infer_response.raw_output_contents) == [b""]
    assert np.frombuffer(shared.get(32, 64), np.float32).tolist() == [5] * 8


def test_errors_of_a_stream_are_messages(streaming: StreamMemory, shared: SharedFile) -> None:
    """Also late errors; the stream goes on."""
    streaming.register("r", shared.key, 0, SIZE)
    shared.resize(0)
    long = Place("r", 0, LONG, shape=(1, LONG // 4))
    late = memory_message("identity_FP32", {"INPUT0": long})
    early = memory_message("identity_FP32", {"INPUT0": Place("no")})
    good = memory_message("identity_FP32", ones(4))
    first, second, third = streaming.client.stream([late, early, good])
    assert "does not have the bytes any more" in first.error_message
    assert not first.infer_response.parameters  # it was refused, not executed
    assert "Unable to find shared memory region" in second.error_message
    assert list(third.infer_response.raw_output_contents) == [np.ones(4, np.float32).tobytes()]
