"""Shutdown: admitted requests are answered; the exit status reports the outcome."""

import asyncio
import signal
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc
import grpc.aio
import orjson
import psutil
import pytest

from tests.contract.graphs import spin
from tests.faults.conftest import IN_PROCESS
from tests.faults.requests import INFER, busy_message, closed_gate, infer, infer_grpc
from tests.models.onnx_graphs import write_model
from tests.models.python_models import execution, tensors, write_python_model
from tests.support.busy_model import FOREVER, busy_json, write_busy_model
from tests.support.held import Gates, write_held_model
from tests.support.http2_socket import prefixed
from tests.support.raw_clients import (
    SERVICE,
    HttpAnswer,
    HttpConnection,
    call,
    code_of,
    get,
    open_channel,
    open_http2,
    open_stream,
    post,
    post_bytes,
)
from tests.support.server_process import ServerProcess
from tests.support.transports import EACH_TRANSPORT
from tests.support.watching import admitted, incoming, metrics, until

MODEL = "busy_alone"


transports = pytest.mark.parametrize("transport", EACH_TRANSPORT)


def serving(repository: Path, *options: str) -> ServerProcess:
    """A server for one test, to be ended."""
    return ServerProcess(repository, options=[IN_PROCESS, *options])


async def ended(server: ServerProcess, within: float = 60) -> int:
    assert server.process is not None
    return await asyncio.to_thread(server.process.wait, within)


async def refusing(server: ServerProcess) -> bool:
    try:
        await (await HttpConnection.open(server.http)).close()
    except ConnectionRefusedError:
        return True
    return False


@transports
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
async def test_nothing_in_flight_is_lost(
    repository: Path, gates: Gates, transport: str, number: int
) -> None:
    with serving(repository, f"--grpc-transport={transport}") as server:
        async with open_channel(server.grpc) as channel:
            stream = open_stream(channel)
            with closed_gate(gates) as gate:  # the first still runs when all others have arrived
                for value in (gate, 1, 2):
                    await stream.write(busy_message("held_alone", value))
                await until(lambda: admitted(server), lambda found: found[0] == 3)
                waiting = [
                    asyncio.ensure_future(start)
                    for n in range(6)
                    for start in (
                        infer(server, "held_alone", n),
                        infer_grpc(channel, "held_alone", n),
                    )
                ]
                await until(lambda: admitted(server), lambda found: found[0] == 15)
                server.send(number)
                await until(lambda: metrics(server), lambda m: m["headrace_ready"] == 0)
            assert await asyncio.gather(*waiting) == [n for n in range(6) for _ in (0, 1)]
            for _ in range(3):
                assert isinstance(await stream.read(), bytes)
            # Its client has not closed it, so the server does.
            with pytest.raises(grpc.aio.AioRpcError, match="Server exiting"):
                await stream.read()
        assert await ended(server) == 0
        assert "every admitted request was answered" in server.log


async def test_a_half_received_body_is_awaited(repository: Path) -> None:
    with serving(repository) as server:
        whole = post_bytes(INFER[MODEL], busy_json(4))
        async with await HttpConnection.open(server.http) as connection:
            await connection.send(whole[:-10])
            await until(lambda: incoming(server), lambda found: found == 1)
            server.send(signal.SIGTERM)
            await until(lambda: metrics(server), lambda m: m["headrace_ready"] == 0)
            await connection.send(whole[-10:])
            assert (await connection.receive()).status == 200
            assert await connection.ended()
        assert await ended(server) == 0


async def test_readiness_ends_before_requests_are_refused(repository: Path) -> None:
    with serving(repository, "--shutdown-delay-secs=4") as server:
        async with open_channel(server.grpc) as channel:
            assert (await get(server.http, "/v2/health/ready")).status == 200
            server.send(signal.SIGTERM)
            not_ready = await until(
                lambda: get(server.http, "/v2/health/ready"), lambda a: a.status != 200
            )
            assert not_ready.status == 503
            assert orjson.loads(not_ready.body)["ready"] is False
            # Load balancers take their time to notice: until then requests are answered.
            assert (await get(server.http, "/v2/health/live")).status == 200
            assert await infer(server, MODEL, 3) == 3
            assert await infer_grpc(channel, MODEL, 4) == 4
            health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await health(b"") == b"\x08\x02"  # NOT_SERVING
        assert await ended(server) == 0


@transports
async def test_no_request_is_admitted_during_the_drain(
    repository: Path, gates: Gates, transport: str
) -> None:
    with serving(repository, f"--grpc-transport={transport}") as server:
        async with open_channel(server.grpc) as channel, AsyncExitStack() as stack:
            await channel.channel_ready()
            early = [
                await stack.enter_async_context(await HttpConnection.open(server.http))
                for _ in range(100)
            ]
            with closed_gate(gates) as gate:
                held = asyncio.ensure_future(infer(server, "held_alone", gate))
                await until(lambda: admitted(server), lambda found: found[0] == 1)
                server.send(signal.SIGTERM)
                await until(lambda: refusing(server), bool)

                async def turned_away() -> HttpAnswer:
                    # Before a request is refused, this one is checked.
                    answer = await early.pop().post(INFER[MODEL], b"{")
                    assert answer.headers["connection"] == "close"
                    return answer

                answer = await until(turned_away, lambda found: found.status != 400)
                assert answer.status == 503
                assert orjson.loads(answer.body) == {"error": "Server exiting"}
                assert answer.headers["retry-after"]
                code = await code_of(call(channel, "ModelInfer", busy_message(MODEL, 2)))
                assert code is grpc.StatusCode.UNAVAILABLE
            assert await held == gate
        assert await ended(server) == 0


def ask_until_refused(address: str, keep: bool, seconds: float, met: Counter[str]) -> None:
    """Send requests on new connections until none can be made; retries nothing."""
    host, _, port = address.rpartition(":")
    connection: HTTPConnection | None = None
    while True:
        if connection is None:
            connection = HTTPConnection(host, int(port), timeout=30)
            try:
                connection.connect()
            except ConnectionRefusedError:
                return
        try:
            connection.request("POST", INFER[MODEL], busy_json(1))
            answer = connection.getresponse()
            answer.read()
        except (OSError, HTTPException) as error:
            met[f"lost: {error!r}"] += 1
            return
        met[f"{answer.status}{' and closed' if keep and answer.will_close else ''}"] += 1
        if not keep or answer.will_close:
            connection.close()
            connection = None
        time.sleep(seconds)


def call_until_refused(address: str, met: Counter[str]) -> None:
    """Call on one channel until it cannot connect any more."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        while True:
            try:
                infer(busy_message(MODEL, 1), timeout=30)
            except grpc.RpcError as error:
                if "failed to connect" not in str(error):
                    met[f"lost: {error}"] += 1
                return
            met["ok"] += 1


@pytest.mark.parametrize("front_ends", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_no_request_of_a_client_that_retries_nothing_is_lost(
    repository: Path, front_ends: str
) -> None:
    http, rpc = Counter[str](), Counter[str]()
    with serving(repository, f"--frontends={front_ends}") as server:
        clients = [
            *(partial(ask_until_refused, server.http, True, n / 100, http) for n in range(8)),
            *(partial(ask_until_refused, server.http, False, 0, http) for _ in range(2)),
            *(partial(call_until_refused, server.grpc, rpc) for _ in range(4)),
        ]
        threads = [threading.Thread(target=client) for client in clients]
        for thread in threads:
            thread.start()
        while http["200"] < 50 or rpc["ok"] < 50:
            assert any(thread.is_alive() for thread in threads)
            time.sleep(0.01)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert not [what for what in (*http, *rpc) if what.startswith("lost")], (http, rpc)
    assert http["200 and closed"]  # answered, and told to go


@transports
async def test_idle_connections_and_streams_do_not_delay_shutdown(
    repository: Path, transport: str
) -> None:
    with serving(repository, f"--grpc-transport={transport}", "--exit-timeout-secs=200") as server:
        async with open_channel(server.grpc) as channel:
            kept = await HttpConnection.open(server.http)
            assert (await kept.post(INFER[MODEL], busy_json(1))).status == 200
            fresh = await HttpConnection.open(server.http)
            half = await HttpConnection.open(server.http)
            await half.send(b"POST /v2/mod")
            stream = open_stream(channel)
            await stream.write(busy_message(MODEL, 1))
            assert await stream.read()
            server.send(signal.SIGTERM)
            assert await ended(server) == 0
            with pytest.raises(grpc.aio.AioRpcError, match="Server exiting"):
                await stream.read()
            for connection in (kept, fresh, half):
                assert await connection.ended()
                await connection.close()


@pytest.mark.parametrize("left", [None, 2], ids=["head", "part"])
async def test_unfinished_calls_do_not_delay_shutdown(repository: Path, left: int | None) -> None:
    message = prefixed(busy_message(MODEL, 1))
    with serving(repository, "--exit-timeout-secs=30") as server:
        async with open_http2(server.grpc) as caller:
            caller.begin(1, *([] if left is None else [message[:-left]]))
            caller.begin(3, message, end=True)  # so that the server has seen the first one
            assert await caller.statuses(1) == [("0", "")]
            server.send(signal.SIGTERM)
            assert await caller.statuses(1) == [("14", "Server exiting")]
            assert await ended(server, 10) == 0


async def test_a_second_signal_ends_the_server_at_once(repository: Path) -> None:
    with serving(repository) as server:
        async with await HttpConnection.open(server.http) as connection:
            await connection.send(post_bytes(INFER[MODEL], busy_json(1, FOREVER)))
            await until(lambda: admitted(server), lambda found: found[0] == 1)
            server.send(signal.SIGTERM)
            await until(lambda: metrics(server), lambda m: m["headrace_ready"] == 0)
            assert psutil.pid_exists(server.pid)
            server.send(signal.SIGTERM)
            assert await ended(server, 20) == 1
        assert "exiting at once" in server.log


async def status_of(server: ServerProcess, body: bytes) -> int:
    return (await post(server.http, INFER[MODEL], body)).status


@pytest.mark.parametrize("over", ["http", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_an_endless_request_is_abandoned_at_shutdown(repository: Path, over: str) -> None:
    with serving(repository, "--exit-timeout-secs=1") as server:
        async with open_channel(server.grpc) as channel:
            waiting: asyncio.Future[int | grpc.StatusCode]
            if over == "http":
                body = busy_json(1, FOREVER)
                waiting = asyncio.ensure_future(status_of(server, body))
            else:
                message = busy_message(MODEL, 1, FOREVER)
                waiting = asyncio.ensure_future(code_of(call(channel, "ModelInfer", message)))
            await until(lambda: admitted(server), lambda found: found[0] == 1)
            server.send(signal.SIGTERM)
            assert await ended(server, 15) == 1
            answer = await waiting
            assert answer in (503, grpc.StatusCode.UNAVAILABLE)
        assert "waiting for 1 request under way, at most 1 s; another signal" in server.log
        assert "1 requests were still under way after 1 s" in server.log
        assert "Traceback" not in server.log, server.log


async def test_a_run_without_a_client_is_terminated(repository: Path) -> None:
    with serving(repository, "--exit-timeout-secs=4") as server:
        async with await HttpConnection.open(server.http) as connection:
            await connection.send(post_bytes(INFER[MODEL], busy_json(1, FOREVER)))
            await until(lambda: admitted(server), lambda found: found[0] == 1)
        await until(lambda: admitted(server), lambda found: found[0] == 0)
        server.send(signal.SIGTERM)
        assert await ended(server, 15) == 0
        assert f"the run of {MODEL}_0_0 is ended" in server.log
        assert "Traceback" not in server.log, server.log


SLEEPING = """
    import time

    class TritonPythonModel:
        def execute(self, requests):
            time.sleep(600)
"""


def test_a_thread_that_cannot_be_terminated_is_abandoned(tmp_path: Path) -> None:
    config = tensors("input", ("IN", "FP32", "1")) + tensors("output", ("OUT", "FP32", "1"))
    write_python_model(tmp_path, "sleeping", SLEEPING, config + execution("thread"))
    options = ["--allow-in-process-python", "--exit-timeout-secs=1"]

    async def scenario() -> None:
        with ServerProcess(tmp_path, options=options) as server:
            async with await HttpConnection.open(server.http) as connection:
                row = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
                body = orjson.dumps({"inputs": [row]})
                await connection.send(post_bytes("/v2/models/sleeping/infer", body))
                await until(lambda: admitted(server), lambda found: found[0] == 1)
            await until(lambda: admitted(server), lambda found: found[0] == 0)
            server.send(signal.SIGTERM)
            assert await ended(server, 15) == 1
            assert "still running after 1 s: sleeping version 1\n" in server.log
            assert "Traceback" not in server.log, server.log

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model that loads fast, and one that never does: it is measured."""
    path = tmp_path_factory.mktemp("endless")
    write_busy_model(path)
    write_model(path, "endless", spin(rounds=FOREVER), "max_batch_size: 8")
    return path


def test_a_loading_server_can_be_stopped(endless: Path) -> None:
    with ServerProcess(endless, options=["--shutdown-delay-secs=60"], wait=False) as server:
        assert server.stop(timeout=30) == 0
        assert "stopped while models were loading" in server.log
        assert "ready after" not in server.output
        assert "Traceback" not in server.log, server.log


@pytest.mark.slow
async def test_admitted_requests_are_answered_at_shutdown_during_a_load(
    endless: Path, gates: Gates, tmp_path: Path
) -> None:
    write_held_model(tmp_path, "held", gates.folder, tensors("input", ("COST", "INT64", "1")))
    with ServerProcess(endless, tmp_path, options=[IN_PROCESS], wait=False) as server:
        await until(lambda: get(server.http, "/v2/models/held/ready"), lambda a: a.status == 200)
        with closed_gate(gates) as gate:
            waiting = asyncio.ensure_future(infer(server, "held", gate))
            await until(lambda: admitted(server), lambda found: found[0] == 1)
            server.send(signal.SIGTERM)
            await until(lambda: refusing(server), bool)
        assert await waiting == gate
        assert await ended(server, 30) == 0
        assert "ready after" not in server.output


@pytest.mark.slow
async def test_a_second_signal_during_a_load(endless: Path) -> None:
    with ServerProcess(endless, wait=False) as server:
        await until(lambda: get(server.http, "/v2/models/busy/ready"), lambda a: a.status == 200)
        async with await HttpConnection.open(server.http) as connection:
            await connection.send(post_bytes(INFER["busy"], busy_json(1, FOREVER)))
            await until(lambda: admitted(server), lambda found: found[0] == 1)
            server.send(signal.SIGTERM)
            await until(lambda: refusing(server), bool)
            server.send(signal.SIGTERM)
            assert await ended(server, 20) == 1
        assert "exiting at once" in server.log
