"""Front ends that die, share work, and end: clients and counts."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from headrace.core.datatypes import Datatype
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.conftest import IN_PROCESS, Busy
from tests.faults.requests import INFER, busy_message, closed_gate, holding, infer, infer_grpc
from tests.models.onnx_graphs import identity, write_model
from tests.support.busy_model import busy_json
from tests.support.held import Gates
from tests.support.raw_clients import (
    HttpConnection,
    call,
    code_of,
    open_channel,
    open_stream,
    post_bytes,
)
from tests.support.server_process import ServerProcess
from tests.support.watching import admitted, metrics, pending, statistics, until

MODEL = "held_alone"
CLIENTS = 16
_FLOATS = 200_000  # a tensor that lies in a file


@pytest.fixture(scope="module")
def wide_repository(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model that returns tensors of any size."""
    path = tmp_path_factory.mktemp("wide")
    write_model(path, "wide", identity(Datatype.FP32, ["rows", "columns"]), "max_batch_size: 8")
    return path


@contextmanager
def serving(gates: Gates, *repositories: Path) -> Iterator[Busy]:
    with ServerProcess(*repositories, options=[IN_PROCESS, "--frontends=2"]) as server:
        yield Busy(server, gates)
        assert "bug " not in server.log, server.log


@pytest.fixture(scope="module")
def fronted(repository: Path, wide_repository: Path, gates: Gates) -> Iterator[Busy]:
    with serving(gates, repository, wide_repository) as busy:
        yield busy
        assert busy.server.stop() == 0


@pytest.fixture
def own(repository: Path, gates: Gates) -> Iterator[Busy]:
    """A server for a test that ends it."""
    with serving(gates, repository) as busy:
        yield busy


def front_ends(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def owners(server: ServerProcess) -> dict[int, psutil.Process]:
    """The front end of each connection, by the client's port."""
    return {
        c.raddr.port: process
        for process in front_ends(server)
        for c in process.connections("tcp")
        if c.status == psutil.CONN_ESTABLISHED
    }


def files(pid: int) -> int:
    """Number of unnamed files that a process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += "memfd:headrace" in os.readlink(entry)
    return count


async def until_freed(*pids: int) -> None:
    """Wait until processes have no unnamed file open: an answer's is closed behind the answer."""

    async def found() -> list[int]:
        return [files(pid) for pid in pids]

    await until(found, lambda counts: not any(counts))


async def both_serve(server: ServerProcess, number: int = 2) -> list[psutil.Process]:
    async def listening() -> list[psutil.Process]:
        found = []
        for process in front_ends(server):
            with suppress(psutil.NoSuchProcess):
                if any(c.status == psutil.CONN_LISTEN for c in process.connections("tcp")):
                    found.append(process)
        return found

    found: list[psutil.Process] = await until(listening, lambda some: len(some) == number)
    return found


async def connect(
    stack: AsyncExitStack, server: ServerProcess
) -> dict[HttpConnection, psutil.Process]:
    """Connections with their front ends, some for each."""
    await both_serve(server)
    connections = [
        await stack.enter_async_context(await HttpConnection.open(server.http))
        for _ in range(CLIENTS)
    ]

    async def accepted() -> dict[int, psutil.Process]:
        return owners(server)

    ports = {connection.port for connection in connections}
    found = await until(accepted, lambda had: ports <= had.keys())
    return {connection: found[connection.port] for connection in connections}


async def status_of(connection: HttpConnection) -> int:
    """The status of the next answer, 0 if the connection ends instead."""
    try:
        return (await connection.receive()).status
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


def wide_message(rows: int = 1) -> bytes:
    message = pb.ModelInferRequest(model_name="wide")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[rows, _FLOATS])
    message.raw_input_contents.append(np.ones(rows * _FLOATS, np.float32).tobytes())
    return message.SerializeToString()


async def test_only_requests_of_a_killed_front_end_fail(fronted: Busy) -> None:
    server = fronted.server
    before = (await statistics(server, MODEL))["inference_stats"]["success"]["count"]
    async with AsyncExitStack() as stack:
        connections = await connect(stack, server)
        first, *_ = had = list(connections.values())
        victim = next(process for process in had if process != first)
        lost = had.count(victim)
        with closed_gate(fronted.gates) as number:  # the first runs, the others wait
            for value, connection in enumerate(connections):
                await connection.send(post_bytes(INFER[MODEL], busy_json(value or number)))
                if not value:
                    await until(lambda: admitted(server), lambda found: found[0] == 1)
            await until(lambda: pending(server, MODEL), lambda count: count == CLIENTS - 1)
            victim.kill()
            await until(lambda: admitted(server), lambda found: found[0] == CLIENTS - lost)
        statuses = await asyncio.gather(*map(status_of, connections))
        assert statuses == [0 if process == victim else 200 for process in had]
    await until(lambda: admitted(server), lambda found: found == (0, 0))
    stats = (await statistics(server, MODEL))["inference_stats"]
    assert stats["success"]["count"] - before == CLIENTS - lost
    # A new one takes its place, and both answer.
    renewed = await both_serve(server)
    assert victim.pid not in {process.pid for process in renewed}
    async with AsyncExitStack() as stack:
        for connection in await connect(stack, server):
            assert (await connection.post(INFER[MODEL], busy_json(1))).status == 200
    told = "its requests are cancelled, and it is started again"
    server.await_logged(told)
    assert server.log.count(told) == 1


async def test_batches_form_across_front_ends(fronted: Busy) -> None:
    server = fronted.server
    async with AsyncExitStack() as stack:
        connections = await connect(stack, server)
        assert len({process.pid for process in connections.values()}) == 2
        before = await statistics(server, "held")
        async with holding(fronted, "held"):
            for value, connection in enumerate(connections):
                await connection.send(post_bytes(INFER["held"], busy_json(value)))
            await until(lambda: pending(server, "held"), lambda count: count == CLIENTS)
        assert [await status_of(connection) for connection in connections] == [200] * CLIENTS
    after = await statistics(server, "held")
    assert after["inference_count"] - before["inference_count"] == CLIENTS + 1
    # One for the busy model, and two for full queues.
    assert after["execution_count"] - before["execution_count"] == 3


async def test_statistics_cover_all_front_ends(fronted: Busy) -> None:
    server = fronted.server
    before = await statistics(server, "busy")
    async with open_channel(server.grpc) as channel:
        answers = await asyncio.gather(
            *[infer(server, "busy", n) for n in range(40)],
            *[infer_grpc(channel, "busy", n) for n in range(40)],
        )
    assert answers == [*range(40), *range(40)]
    after = await statistics(server, "busy")
    assert after["inference_count"] - before["inference_count"] == 80
    stats = [document["inference_stats"]["success"]["count"] for document in (before, after)]
    assert stats[1] - stats[0] == 80


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
async def test_nothing_in_flight_is_lost(own: Busy, number: int) -> None:
    server = own.server
    async with AsyncExitStack() as stack:
        connections = await connect(stack, server)
        channel = await stack.enter_async_context(open_channel(server.grpc))
        stream = open_stream(channel)
        with closed_gate(own.gates) as gate:  # the first still runs when all others have arrived
            for value in (gate, 1, 2):
                await stream.write(busy_message(MODEL, value))
            await until(lambda: admitted(server), lambda found: found[0] == 3)
            for value, connection in enumerate(connections):
                await connection.send(post_bytes(INFER[MODEL], busy_json(value)))
            await until(lambda: admitted(server), lambda found: found[0] == CLIENTS + 3)
            server.send(number)
            await until(lambda: metrics(server), lambda m: m["headrace_ready"] == 0)
        assert [await status_of(c) for c in connections] == [200] * CLIENTS
        for _ in range(3):
            assert isinstance(await stream.read(), bytes)
        with pytest.raises(grpc.aio.AioRpcError, match="Server exiting"):
            await stream.read()
    assert server.process is not None
    assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert "every admitted request was answered" in server.log


async def test_a_front_end_ignores_signals_for_the_server(fronted: Busy) -> None:
    server = fronted.server
    ends = await both_serve(server)
    for process in ends:
        assert os.getpgid(process.pid) != os.getpgid(server.pid)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    assert await infer(server, MODEL, 3) == 3
    assert await both_serve(server) == ends


async def test_long_tensors_leave_nothing_behind(fronted: Busy) -> None:
    server = fronted.server
    processes = [server.pid, *[process.pid for process in await both_serve(server)]]
    async with open_channel(server.grpc) as channel:
        for rows in (1, 3):
            answers = await asyncio.gather(
                *[call(channel, "ModelInfer", wide_message(rows)) for _ in range(20)]
            )
            for answer in answers:
                [raw] = pb.ModelInferResponse.FromString(answer).raw_output_contents
                assert raw == np.ones(rows * _FLOATS, np.float32).tobytes()
    await until(lambda: admitted(server), lambda found: found == (0, 0))
    await until_freed(*processes)


async def test_long_tensors_of_killed_front_ends_are_freed(fronted: Busy) -> None:
    server = fronted.server
    ends = await both_serve(server)
    async with open_channel(server.grpc) as one, open_channel(server.grpc) as other:
        calls = [
            asyncio.ensure_future(code_of(call(channel, "ModelInfer", wide_message())))
            for channel in (one, other) * 20
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for process in ends:
            process.kill()
        codes = set(await asyncio.gather(*calls))
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    await both_serve(server)
    await until(lambda: admitted(server), lambda found: found == (0, 0))
    await until_freed(server.pid)


async def test_front_ends_end_with_the_server(own: Busy) -> None:
    server = own.server
    ends = await both_serve(server)
    server.send(signal.SIGKILL)

    async def alive() -> bool:
        return any(process.is_running() for process in ends)

    await until(alive, lambda some: not some)


@pytest.mark.slow
async def test_a_crash_loop_makes_the_server_not_ready(own: Busy) -> None:
    server = own.server

    async def kill_all() -> float:
        for process in front_ends(server):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return (await metrics(server))["headrace_ready"]

    await until(kill_all, lambda ready: ready == 0)
    await until(kill_all, lambda _: "ends again and again" in server.log)
    await both_serve(server)
    await until(lambda: metrics(server), lambda samples: samples["headrace_ready"] == 1)
