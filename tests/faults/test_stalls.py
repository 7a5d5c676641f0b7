"""Hanging executions: detected, and terminated by a limit or without clients."""

import asyncio
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.core.errors import ServerError
from tests.faults.chaos import eventually
from tests.faults.stuck_models import (
    calm,
    client_of,
    counted,
    hang,
    hanging,
    nap,
    neighbours_serve,
    reason_of,
    told,
    write_neighbours,
    write_spinning,
    write_told,
)
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Answer, Client, Input
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.server_process import ServerProcess, clean_server
from tests.support.watching import admitted, until

LIMIT_SECS = 10
# Sends STEPS responses, one every half second, before `execute` returns.
_STEPS = """
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for number in range(request.inputs()[0].as_numpy().item()):
                    time.sleep(0.5)
                    output = pb_utils.Tensor("STEP", np.array([number], np.int32))
                    sender.send(pb_utils.InferenceResponse([output]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Sends 32 MiB in responses of one.
_FLOOD = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for number in range(32):
                    output = pb_utils.Tensor("STEP", np.zeros(1 << 18, np.int32))
                    sender.send(pb_utils.InferenceResponse([output]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_STEPS_CONFIG = (
    "model_transaction_policy { decoupled: true }\n"
    + tensors("input", ("STEPS", "INT32", "1"))
    + tensors("output", ("STEP", "INT32", "1"))
    + 'parameters { key: "execution_limit_secs" value { string_value: "3" } }\n'
)

pytestmark = pytest.mark.slow
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
each_model = pytest.mark.parametrize(("protocol", "model"), [("grpc", "told"), ("http", "busy")])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that counts a model as stalled after two seconds by default."""
    root = tmp_path_factory.mktemp("stalls")
    write_neighbours(root)
    write_told(root, "told", execution_limit_secs=LIMIT_SECS)
    write_spinning(root, "busy", execution_limit_secs=LIMIT_SECS)
    write_spinning(root, "busy_left")
    write_spinning(root, "busy_auto")
    config = root / "busy_auto" / "config.pbtxt"
    config.write_text(config.read_text().replace('"thread"', '"auto"'))
    write_told(root, "left", execution_limit_secs=0)
    write_told(root, "napping")
    write_told(root, "replaced", max_requests=1, stall_secs=0)
    write_python_model(root, "steps", _STEPS, _STEPS_CONFIG)
    write_python_model(root, "flood", _FLOOD, _STEPS_CONFIG.replace("[ 1 ]", "[ -1 ]"))
    options = ["--stall-secs=2", "--execution-limit-secs=60"]
    with clean_server(root, options=options) as process:
        yield process


@pytest.mark.parametrize(("protocol", "model", "counter"), [
    ("http", "told", "headrace_worker_ends_total"), ("grpc", "busy", "headrace_ended_runs_total"),
])  # fmt: skip
def test_a_hang_is_reported_and_terminated(
    server: ServerProcess, protocol: str, model: str, counter: str
) -> None:
    with (
        calm(server) as others_serve,
        client_of(server, protocol) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        hung: Future[Answer] = pool.submit(client.infer, model, hanging(model))
        eventually(lambda: not client.model_ready(model))
        assert reason_of(client, model).startswith(f"stalled: {model}_0")
        assert "has made no progress for" in reason_of(client, model)
        assert asyncio.run(counted(server, "headrace_stalled_instances", model)) == 1
        assert others_serve()
        with pytest.raises(ServerError, match=f"has taken longer than {LIMIT_SECS} s for a batch"):
            hung.result()
        assert others_serve()
        assert answers(client, model)
        eventually(lambda: client.model_ready(model))
        assert reason_of(client, model) == ""
        assert asyncio.run(counted(server, "headrace_stalled_instances", model)) == 0
        assert asyncio.run(counted(server, counter, model, reason="limit")) >= 1


def answers(client: Client, model: str) -> bool:
    """True if a model that can hang answers correctly."""
    if "busy" in model:
        given = {"VALUE": np.array([[7]]), "COST": np.array([[0]])}
        return int(client.infer(model, given)["RESULT"].item()) == 7
    return told(client, model, "there") == "there"


def test_a_stream_may_take_as_long_as_it_likes(server: ServerProcess) -> None:
    with GrpcClient(server.grpc) as client:
        request = infer_message("steps", [Input("STEPS", np.array([12], np.int32))])
        found = [message.infer_response for message in client.stream([request])]
        assert len([one for one in found if one.outputs]) == 12
    assert asyncio.run(counted(server, "headrace_worker_ends_total", "steps", reason="limit")) == 0


def test_a_slow_reader_is_no_hang_of_the_model(server: ServerProcess) -> None:
    """Its limit is below that of the hanging model, which is terminated."""
    with client_of(server, "http") as other, GrpcClient(server.grpc) as client:
        request = infer_message("flood", [Input("STEPS", np.array([1], np.int32))])
        streamed = client.stream([request])
        assert next(streamed).infer_response.outputs
        with pytest.raises(ServerError, match="has taken longer than"):
            told(other, "told", "lock while a client reads slowly")
        assert client.model_ready("flood")
        found = [message.infer_response for message in streamed]
        assert len([one for one in found if one.outputs]) == 31
    assert asyncio.run(counted(server, "headrace_worker_ends_total", "flood", reason="limit")) == 0


def test_a_terminated_worker_without_clients_is_no_crash(server: ServerProcess) -> None:
    """More often than crashes would open the breaker, and each time with the same input."""
    for number in range(1, 7):
        protocol = ("http", "grpc")[number % 2]
        leave(server, protocol, "left", lambda n=number: server.log.count("holds its lock") >= n)  # type: ignore[misc]
        with client_of(server, protocol) as client:
            assert told(client, "left", "behind") == "behind"
        ends = counted(server, "headrace_worker_ends_total", "left", reason="abandoned")
        assert asyncio.run(ends) == number
    assert "ends again and again" not in server.log
    refused = counted(server, "headrace_quarantined_requests_total", "left")
    assert asyncio.run(refused) == 0


def test_successive_batches_without_clients_are_no_hang(server: ServerProcess) -> None:
    with client_of(server, "http") as client:
        pid = told(client, "napping", "pid")
        for number in range(1, 9):  # longer than the limit of one of them
            impatient = nap(server, "napping")
            eventually(lambda n=number: server.log.count("naps") >= n)  # type: ignore[misc]
            impatient.go()
        assert told(client, "napping", "pid") == pid


def leave(server: ServerProcess, protocol: str, model: str, begun: Callable[[], object]) -> None:
    """Hang a model for a client that then disconnects."""
    client = hang(server, protocol, model)
    eventually(lambda: asyncio.run(admitted(server))[0] > 0)
    eventually(begun)
    client.go()
    asyncio.run(until(lambda: admitted(server), lambda found: found[0] == 0))


def test_a_replaced_hanging_worker_ends(server: ServerProcess) -> None:
    client = hang(server, "http", "replaced")
    taken = r"takes over from worker (\d+)$"
    eventually(lambda: re.search(rf"of replaced_0 {taken}", server.log, re.MULTILINE))
    [old] = re.findall(rf"of replaced_0 {taken}", server.log, re.MULTILINE)
    assert psutil.pid_exists(int(old))
    client.go()
    eventually(lambda: not psutil.pid_exists(int(old)))
    ends = counted(server, "headrace_worker_ends_total", "replaced", reason="abandoned")
    assert asyncio.run(ends) == 1


def test_a_graph_with_a_loop_is_not_run_on_the_event_loop(server: ServerProcess) -> None:
    """Light when measured, it may run for as long as a request says."""
    client = hang(server, "http", "busy_auto")
    eventually(lambda: asyncio.run(admitted(server))[0] > 0)
    with client_of(server, "http") as other:
        assert neighbours_serve(other)
        client.go()
        assert answers(other, "busy_auto")


@protocols
def test_a_run_without_clients_is_terminated(server: ServerProcess, protocol: str) -> None:
    before = server.log.count("the run of busy_left_0_0 is ended")
    leave(server, protocol, "busy_left", lambda: True)
    with client_of(server, protocol) as client:
        assert answers(client, "busy_left")
    eventually(lambda: server.log.count("the run of busy_left_0_0 is ended") == before + 1)
    ended = counted(server, "headrace_ended_runs_total", "busy_left", reason="abandoned")
    assert asyncio.run(ended) == before + 1


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a worker and one on a thread, both hanging."""
    root = tmp_path_factory.mktemp("stuck")
    write_told(root, "told")
    write_spinning(root, "busy")
    return root


@each_model
def test_a_hung_request_ends_with_the_unload(stuck: Path, protocol: str, model: str) -> None:
    options = ["--model-control-mode=explicit", "--load-model=*"]
    with clean_server(stuck, options=options) as server, client_of(server, protocol) as client:
        leave(server, protocol, model, lambda: begun(server, model))
        client.unload(model)
        eventually(lambda: reason_of(client, model) == "unloaded")
        if model == "told":
            assert not psutil.Process(server.pid).children()
        client.load(model)
        assert answers(client, model)


def begun(server: ServerProcess, model: str) -> bool:
    """True if a model has begun to hang, where it reports that."""
    return model == "busy" or "holds its lock" in server.log


@each_model
def test_a_hung_request_without_a_client_does_not_delay_shutdown(
    stuck: Path, protocol: str, model: str
) -> None:
    with ServerProcess(stuck, options=["--exit-timeout-secs=20"]) as server:
        leave(server, protocol, model, lambda: begun(server, model))
        children = psutil.Process(server.pid).children()
        assert server.stop(signal.SIGTERM) == 0
        assert not any(child.is_running() for child in children)
        assert "stopped; every admitted request was answered" in server.log
        assert "Traceback" not in server.log, server.log
