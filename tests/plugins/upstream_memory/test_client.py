"""Calls with tensors in shared memory, to a server with controlled answers."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.connections.grpc_channel import receive_buffer
from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.placement.upstream.connection import CallFailed, RemoteRequest
from headrace.placement.upstream.grpc_client import GrpcMessages
from headrace.placement.upstream.options import RemoteOptions
from headrace.plugins.upstream_memory.client import SharedMemoryClient
from headrace.plugins.upstream_memory.regions import THRESHOLD, exists
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import Fate
from headrace.protocol.v2_protobuf import RemoteInput
from tests.support import watching
from tests.support.remote_call import infer

COUNT = THRESHOLD // 4
REGION, SIZE = "shared_memory_region", "shared_memory_byte_size"


class Echo(grpc.GenericRpcHandler):
    """Returns inputs by registered regions, or in the message.

    Requests with the id `hold` wait before they write; with `end` they are then refused.
    """

    def __init__(self) -> None:
        self.regions: dict[str, str] = {}
        self.refuses = False
        self.released, self.held, self.written = Event(), Event(), Event()
        self.shared: list[tuple[str, str]] = []  # the regions of input and output of each run
        self.asked: list[str] = []
        self._lock = Lock()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                self.asked.append(name)
            response: bytes = getattr(self, name)(message, context).SerializeToString()
            return response

        return grpc.unary_unary_rpc_method_handler(answer)

    def SystemSharedMemoryRegister(self, message: bytes, context: grpc.ServicerContext) -> Any:
        if self.refuses:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "shared memory is disabled")
        asked = pb.SystemSharedMemoryRegisterRequest.FromString(message)
        assert os.stat(f"/dev/shm{asked.key}").st_size == asked.byte_size
        self.regions[asked.name] = asked.key
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, message: bytes, context: grpc.ServicerContext) -> Any:
        del context
        self.regions.pop(pb.SystemSharedMemoryUnregisterRequest.FromString(message).name, None)
        return pb.SystemSharedMemoryUnregisterResponse()

    def SystemSharedMemoryStatus(self, message: bytes, context: grpc.ServicerContext) -> Any:
        del message, context
        response = pb.SystemSharedMemoryStatusResponse()
        for name, key in self.regions.items():
            response.regions[name].name, response.regions[name].key = name, key
        return response

    def ModelInfer(self, message: bytes, context: grpc.ServicerContext) -> Any:
        asked = pb.ModelInferRequest.FromString(message)
        tensor, room = asked.inputs[0], asked.outputs[0]
        named = [item.parameters[REGION].string_param for item in (tensor, room)]
        for region in named:
            if region and region not in self.regions:
                text = f"Unable to find shared memory region: '{region}'"
                context.abort(grpc.StatusCode.NOT_FOUND, text)
        self.shared.append((named[0], named[1]))
        if named[0]:
            size = tensor.parameters[SIZE].int64_param
            data = Path(f"/dev/shm{self.regions[named[0]]}").read_bytes()[:size]
        else:
            data = asked.raw_input_contents[0]
        if asked.id == "hold":
            key = self.regions[named[1]]
            self.held.set()
            self.released.wait(30)
            Path(f"/dev/shm{key}").write_bytes(b"\xff" * len(data))
            self.written.set()
            context.abort(grpc.StatusCode.INTERNAL, "nobody wants to know")
        if asked.id == "end":
            text = "shared memory size specified with the request for output 'Y' (1 bytes)"
            context.abort(grpc.StatusCode.INTERNAL, text)
        response = pb.ModelInferResponse(id=asked.id)
        response.outputs.add(name="Y", datatype="FP32", shape=tensor.shape)
        if named[1]:
            with Path(f"/dev/shm{self.regions[named[1]]}").open("r+b") as file:
                file.write(data)
            data = b""
        response.raw_output_contents.append(data)
        return response


@pytest.fixture
def echo() -> Echo:
    """The server's behaviour."""
    return Echo()


@pytest.fixture
def endpoint(echo: Echo) -> Iterator[str]:
    """The server's endpoint."""
    limit = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, [echo], options=limit)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}"
        echo.released.set()
        server.stop(None).wait()


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[SharedMemoryClient]:
    """A connection for a model with one output, of as many bytes as go through shared memory."""
    parameters = {"endpoints": endpoint, "shared_memory": "true"}
    options = RemoteOptions.of(parameters, "m", 0, Path())
    found, messages = options.resolve()[0], GrpcMessages(options, "m")
    connection = SharedMemoryClient(
        found,
        messages,
        None,
        receive_buffer(),
        Signature("m", 4, (), (TensorSpec("Y", Datatype.FP32, (COUNT,)),)),
    )
    try:
        yield connection
    finally:
        await connection.close()


def row(value: float) -> Array:
    return np.full((1, COUNT), value, np.float32)


def request(array: Array, id: str = "") -> RemoteRequest:
    return RemoteRequest([RemoteInput("X", Datatype.FP32, array.shape, [array])], ["Y"], {}, id)


async def ask(connection: SharedMemoryClient, value: float = 1.0) -> Array:
    """The answer to a row, which is checked."""
    answer = await infer(connection, request(row(value)), 60)
    found: Array = np.asarray(answer.outputs["Y"])
    np.testing.assert_array_equal(found, row(value))
    return found


async def warm(connection: SharedMemoryClient, echo: Echo) -> None:
    """Wait until both tensors go through shared memory."""
    async with asyncio.timeout(60):
        while not (echo.shared and all(echo.shared[-1])):
            await ask(connection)


async def until(found: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""

    async def look() -> bool:
        return found()

    await watching.until(look, bool)


async def test_successive_calls_reuse_regions(echo: Echo, endpoint: str) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        for value in range(30):
            await ask(connection, float(value))
        assert all(echo.shared[-1])
        assert len(echo.regions) <= 4  # an answer may be freed a moment later
        names = list(echo.regions)
        assert all(exists(name) for name in names)
    assert not echo.regions
    assert not any(exists(name) for name in names)


async def test_a_referenced_answer_stays_unchanged(echo: Echo, endpoint: str) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        kept = [await ask(connection, float(value)) for value in range(12)]
        assert sum(bool(output) for _, output in echo.shared[-12:]) > 1
        for value, array in enumerate(kept):
            np.testing.assert_array_equal(array, row(float(value)))
    np.testing.assert_array_equal(kept[3], row(3.0))  # also without the connection


async def test_concurrent_calls_have_their_own_regions(echo: Echo, endpoint: str) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        for _ in range(10):
            await asyncio.gather(*(ask(connection, float(value)) for value in range(6)))


@pytest.mark.parametrize("way", ["cancelled", pytest.param("late", marks=pytest.mark.slow)])
async def test_a_region_that_may_still_be_written_is_not_reused(
    echo: Echo, endpoint: str, way: str
) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        held = asyncio.create_task(
            infer(connection, request(row(9.0), "hold"), 2 if way == "late" else 30)
        )
        await until(echo.held.is_set)
        lost = set(echo.shared[-1])
        if way == "cancelled":
            held.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held
        else:
            with pytest.raises(CallFailed) as failed:
                await held
            assert failed.value.failure.fate is Fate.LATE
        kept = []
        for value in range(5):
            kept.append(await ask(connection, float(value)))
            assert not lost & set(echo.shared[-1])
        echo.released.set()
        await until(echo.written.is_set)
        for value, array in enumerate(kept):
            np.testing.assert_array_equal(array, row(float(value)))
        await warm(connection, echo)
        assert lost <= set(echo.regions)  # the server may be reading it
        assert all(exists(name) for name in lost)
    assert not any(exists(name) for name in lost)


async def test_a_request_that_cannot_be_encoded_takes_no_region(echo: Echo, endpoint: str) -> None:
    wrong: Any = {"x": None}
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        for _ in range(8):
            with pytest.raises(TypeError):
                await infer(connection, request(row(1.0))._replace(parameters=wrong), 60)
        lease = connection.regions.take(THRESHOLD)
        assert lease is not None
        connection.regions.give_back(lease)


async def test_forgotten_regions_are_registered_again(echo: Echo, endpoint: str) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        before = set(echo.regions)
        echo.regions.clear()
        await ask(connection, 3.0)
        assert echo.shared[-1] == ("", "")
        await warm(connection, echo)
        assert not before & set(echo.regions)
        await until(lambda: not any(exists(name) for name in before))


async def test_a_server_without_regions_gets_messages(
    echo: Echo, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    echo.refuses = True
    async with connected(endpoint) as connection:
        for value in range(20):
            await ask(connection, float(value))
        await until(lambda: "go over the wire" in caplog.text)
        await ask(connection)
    assert set(echo.shared) == {("", "")}
    assert echo.asked.count("SystemSharedMemoryRegister") == 1
    assert caplog.text.count("go over the wire") == 1
    assert "shared memory is disabled" in caplog.text


async def test_a_model_that_gives_more_than_declared(
    echo: Echo, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        with pytest.raises(CallFailed, match="shared memory size specified"):
            await infer(connection, request(row(1.0), "end"), 60)
        await ask(connection)
        assert not echo.shared[-1][1]
    assert "one was larger than declared" in caplog.text


async def test_small_tensors_stay_in_the_message(echo: Echo, endpoint: str) -> None:
    async with connected(endpoint) as connection:
        for _ in range(5):
            await infer(connection, request(np.zeros((1, 4), np.float32)), 60)
            assert not echo.shared[-1][0]


async def test_regions_left_by_others_are_unregistered(echo: Echo, endpoint: str) -> None:
    gone, theirs = "headrace-1-" + "0" * 24, "headrace-frames"
    echo.regions = {gone: f"/{gone}", theirs: f"/{theirs}"}
    async with connected(endpoint) as connection:
        await warm(connection, echo)
        await until(lambda: gone not in echo.regions)
    assert echo.regions == {theirs: f"/{theirs}"}
