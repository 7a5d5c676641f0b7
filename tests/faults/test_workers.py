"""Python models that die, hang, lie and leak: who notices, and who does not."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from headrace.core.datatypes import Datatype
from headrace.core.errors import Unavailable
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import SERVING, check_health
from tests.support.server_process import ServerProcess
from tests.support.watching import until

# What COMMAND says is done; anything else is given back.
OBEDIENT = """
    import ctypes, json, os, signal, socket, struct, subprocess, sys, threading, time
    import numpy as np
    import triton_python_backend_utils as pb_utils


    def link():  # the socket to the server
        for number in range(3, 100):
            try:
                socket.socket(fileno=os.dup(number)).close()
                return number
            except OSError:
                pass


    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            [command] = request.inputs()[0].as_numpy().ravel().tolist()
            word, _, rest = command.decode().partition(" ")
            if word == "exit":
                os._exit(int(rest))
            elif word == "segfault":
                ctypes.string_at(0)
            elif word == "hang":
                while True:
                    pass
            elif word == "sleep":
                open(rest, "w").close()
                time.sleep(600)
            elif word == "nonsense":
                os.write(link(), b"\\xff" * 4096)
                time.sleep(600)
            elif word == "deep":
                depth = b"[" * 100_000
                header = struct.pack("<BBxxIIQ", 21, 0, 0, len(depth), 0)
                os.write(link(), header + depth)
                time.sleep(600)
            elif word == "flood":
                while True:
                    print("y" * 50)
            elif word == "thread":
                threading.Thread(target=time.sleep, args=(600,)).start()
                sys.exit(1)
            elif word == "child":
                child = subprocess.Popen(["sleep", "600"])
                command = str(child.pid).encode()
            elif word == "twins":  # both give an answer
                os.fork()
                command = b"x" * int(rest)
            elif word == "signals":
                if rest == "exec":
                    text = "from signal import *; print(getsignal(2).__name__, int(getsignal(15)))"
                    command = subprocess.check_output([sys.executable, "-c", text])
                else:
                    pid = os.fork()
                    if not pid:
                        time.sleep(600)
                    os.kill(pid, signal.SIGTERM)
                    command = str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode()
            elif word == "surrogate":
                command = "\\ud800"
            elif word == "parameter":
                output = pb_utils.Tensor("OUTPUT", np.array([[command]], object))
                return pb_utils.InferenceResponse([output], parameters={"n": 2**int(rest)})
            elif word == "raise":
                raise ValueError("\\ud800 " + rest)
            elif word == "print":
                print("x" * int(rest))
            elif word == "environment":
                command = json.dumps(dict(os.environ)).encode()
            elif word == "pid":
                command = str(os.getpid()).encode()
            elif word == "files":
                command = str(len(os.listdir("/proc/self/fd"))).encode()
            output = pb_utils.Tensor("OUTPUT", np.array([[command]], object))
            return pb_utils.InferenceResponse([output])
"""

_KILLS = 60

BROKEN = {
    "no_class": "x = 1",
    "syntax": "def f(:",
    "missing_module": "import no_such_module",
    "raises_at_import": "raise RuntimeError('at import')",
    "exits_at_import": "import os; os._exit(7)",
    "raises_at_start": """
        class TritonPythonModel:
            def initialize(self, args):
                raise KeyError("at start")
            def execute(self, requests): ...
    """,
    "no_execute": "class TritonPythonModel: ...",
}
_SAYS = {
    "no_class": "neither a class TritonPythonModel", "syntax": "SyntaxError",
    "missing_module": "No module named 'no_such_module'",
    "raises_at_import": "RuntimeError: at import", "exits_at_import": "ended with status 7",
    "raises_at_start": "KeyError: 'at start'", "no_execute": "has no method execute",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An obedient model with one instance and one with two, and a neighbour in ONNX."""
    root = tmp_path_factory.mktemp("workers")
    config = "max_batch_size: 1\n" + tensors("input", ("COMMAND", "STRING", "1"))
    config += tensors("output", ("OUTPUT", "STRING", "1"))
    write_python_model(root, "one", OBEDIENT, config)
    write_python_model(root, "two", OBEDIENT, config + "instance_group { count: 2 }\n")
    limit = 'parameters { key: "execution_limit_secs" value { string_value: "1.5" } }\n'
    write_python_model(root, "limited", OBEDIENT, config + limit)
    write_model(root, "neighbour", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    return root


@contextmanager
def serving(models: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        models, options=["--exit-timeout-secs=5"], environment={"DATABASE_PASSWORD": "x"}
    ) as process:
        yield process
        assert "bug " not in process.log, process.log


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    """One for all tests whose workers serve again in the end."""
    with serving(models) as process:
        yield process


@pytest.fixture
def own_server(models: Path) -> Iterator[ServerProcess]:
    """A server of its own for a test."""
    with serving(models) as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    with httpx.Client(verify=False, timeout=30) as _asked.client:
        yield


class _Asked:
    client: httpx.Client


_asked = _Asked()


def ask(server: ServerProcess, command: str, model: str = "one") -> httpx.Response:
    body = {
        "inputs": [{"name": "COMMAND", "shape": [1, 1], "datatype": "BYTES", "data": [command]}]
    }
    return _asked.client.post(f"{server.url}/v2/models/{model}/infer", json=body)


def answer(server: ServerProcess, command: str, model: str = "one") -> str:
    response = ask(server, command, model)
    assert response.status_code == 200, response.text
    return str(response.json()["outputs"][0]["data"][0])


def neighbour(server: ServerProcess) -> int:
    """The status of a request to another model."""
    row = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
    body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
    return _asked.client.post(f"{server.url}/v2/models/neighbour/infer", json=body).status_code


def ready(server: ServerProcess, path: str = "health") -> bool:
    """Whether the server, or a model, says that it is."""
    return _asked.client.get(f"{server.url}/v2/{path}/ready").status_code == 200


def eventually(look: Callable[[], object]) -> None:
    async def looked() -> object:
        return look()

    asyncio.run(until(looked, bool))


def workers(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


@pytest.mark.parametrize(("command", "how"), [
    ("exit 3", "ended with status 3"), ("nonsense", "was ended by SIGKILL"),
    ("thread", "ended with status 1"),
    pytest.param("segfault", "was ended by SIGSEGV", marks=pytest.mark.slow),
    pytest.param("deep", "was ended by SIGKILL", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_worker_that_ends(server: ServerProcess, command: str, how: str) -> None:
    before = answer(server, "pid")
    response = ask(server, command)
    assert response.status_code == 500
    assert response.json()["error"] == (
        f"the worker process of model 'one' {how} while it executed the request"
    )
    if command == "thread":
        told = re.compile(r"ERROR .* one worker \d+: .*SystemExit: 1$", re.MULTILINE)
        eventually(lambda: told.search(server.log) is not None)  # written by a thread
    assert neighbour(server) == 200
    assert answer(server, "pid") != before
    assert ready(server)
    assert ready(server, "models/one")


def test_an_idle_worker_is_killed(server: ServerProcess) -> None:
    pid = int(answer(server, "pid"))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: f"worker {pid} of one_0 was ended by SIGKILL" in server.log)
    # Nobody has asked for it.
    eventually(lambda: "one_0 runs again" in server.log.partition(f"worker {pid} of one_0 was")[2])
    assert answer(server, "pid") != str(pid)


def test_what_was_not_begun_goes_to_the_next_worker(server: ServerProcess, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    for n in range(30):  # its batches are short, so that the worker is given the next one early
        answer(server, str(n))
    pid = int(answer(server, "pid"))
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server, f"sleep {begun}")
        eventually(begun.exists)
        others = [pool.submit(ask, server, f"number {n}") for n in range(6)]
        assert neighbour(server) == 200
        os.kill(pid, signal.SIGKILL)
        assert first.result().status_code == 500
        for n, other in enumerate(others):
            assert other.result().json()["outputs"][0]["data"] == [f"number {n}"]


def test_a_sibling_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server, f"sleep {begun}", "two")
        eventually(begun.exists)
        [stopped] = {int(answer(server, "pid", "two")) for _ in range(8)}  # the other one
        os.kill(stopped, signal.SIGKILL)
        eventually(lambda: re.search(rf"worker {stopped} of two\S* was ended by", server.log))
        assert answer(server, "a", "two") == "a"
        for process in workers(server):
            process.kill()
        assert first.result().status_code == 500


def test_a_batch_that_takes_too_long(server: ServerProcess) -> None:
    response = ask(server, "hang", "limited")
    assert response.status_code == 500
    assert "was ended by SIGKILL" in response.text
    eventually(lambda: "has taken longer than 1.5 s" in server.log)
    assert answer(server, "again", "limited") == "again"


def test_a_worker_that_dies_again_and_again(own_server: ServerProcess) -> None:
    for status in range(5):  # with different inputs: the same one would be quarantined
        assert ask(own_server, f"exit {status}").status_code == 500
    eventually(lambda: not ready(own_server, "models/one"))
    said = _asked.client.get(f"{own_server.url}/v2/models/one/ready").json()
    assert not said["ready"]
    assert "its worker processes end again and again" in said["reason"]
    assert ready(own_server)  # whatever becomes of a model, the others are served
    with GrpcClient(own_server.grpc) as client:
        assert client.ready()
        assert not client.model_ready("one")
        assert check_health(client) == SERVING
    response = ask(own_server, "anything")
    assert response.status_code == 503
    assert "end again and again" in response.json()["error"]
    assert 1 <= int(response.headers["retry-after"]) <= 30  # until it is tried again
    with (
        GrpcClient(own_server.grpc) as client,
        pytest.raises(Unavailable, match="end again and again") as refusal,
    ):
        client.infer("one", {"COMMAND": np.array([[b"anything"]], object)})
    assert 1 <= refusal.value.retry_after <= 30
    assert neighbour(own_server) == 200
    assert ready(own_server, "models/neighbour")


@pytest.mark.slow
def test_kills_from_outside_are_no_crashes_of_the_model(own_server: ServerProcess) -> None:
    for number in range(1, 8):
        [worker] = [p for p in workers(own_server) if p.pid == int(_pid_of(own_server, "one"))]
        worker.kill()
        for text in ("one_0 was ended by SIGKILL", "one_0 runs again as worker"):
            eventually(lambda n=number, text=text: own_server.log.count(text) == n)  # type: ignore[misc]
        eventually(partial(ready, own_server, "models/one"))
    assert "again and again" not in own_server.log
    assert answer(own_server, "there") == "there"


def _pid_of(server: ServerProcess, model: str) -> str:
    """The process that serves a model of one instance, as the log has it."""
    found = re.findall(rf"{model}_0 runs again as worker (\d+)", server.log)
    return str(found[-1]) if found else answer(server, "pid", model)


@pytest.mark.slow
def test_no_descriptors_are_no_crashes_of_the_model(own_server: ServerProcess) -> None:
    process = psutil.Process(own_server.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    pid = int(answer(own_server, "pid"))
    process.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: own_server.log.count("Too many open files") >= 7)
        assert "again and again" not in own_server.log
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)
    eventually(partial(ready, own_server, "models/one"))
    assert answer(own_server, "there") == "there"


SLOW_START = """
    import os, time

    class TritonPythonModel:
        def initialize(self, args):
            print("begun as", os.getpid(), flush=True)
            time.sleep(600)

        def execute(self, requests): ...
"""


@pytest.mark.slow
def test_a_kill_while_it_starts_says_so(models: Path, tmp_path: Path) -> None:
    config = tensors("input", ("COMMAND", "STRING", "1")) + tensors("output", ("O", "STRING", "1"))
    write_python_model(tmp_path, "slow", SLOW_START, config)
    with ServerProcess(tmp_path, options=["--exit-on-error=false"], wait=False) as server:
        eventually(lambda: "begun as" in server.log)
        [pid] = re.findall(r"begun as (\d+)", server.log)
        os.kill(int(pid), signal.SIGKILL)
        eventually(lambda: "ready after" in server.output)
        [found] = _asked.client.post(f"{server.url}/v2/repository/index").json()
        assert "the worker was ended by SIGKILL" in found["reason"]


def test_workers_end_with_the_server(own_server: ServerProcess) -> None:
    found = workers(own_server)
    assert len(found) == 4
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask, own_server, "hang")
        os.kill(own_server.pid, signal.SIGKILL)
        psutil.wait_procs(found, timeout=10)
    assert not any(process.is_running() for process in found)


def test_a_shutdown_leaves_nothing(own_server: ServerProcess) -> None:
    found = workers(own_server)
    assert own_server.stop() == 0
    assert not any(process.is_running() for process in found)


@pytest.mark.parametrize("command", ["surrogate", "parameter 70", "raise it"])
def test_an_answer_that_cannot_be_sent(server: ServerProcess, command: str) -> None:
    before = answer(server, "pid")
    assert ask(server, command).status_code == 500
    with InferenceServerClient(server.grpc) as client:
        tensor = InferInput("COMMAND", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[command.encode()]], object))
        with pytest.raises(InferenceServerException, match="INTERNAL"):
            client.infer("one", [tensor])
    assert answer(server, "pid") == before


def test_a_model_that_prints_without_end(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(ask, server, "flood", "one")
        eventually(lambda: "lines were left out" in server.log)
        assert neighbour(server) == 200
        for process in workers(server):
            process.kill()
        assert flooding.result().status_code == 500


def test_what_a_worker_has_started_ends_with_it(server: ServerProcess) -> None:
    child = psutil.Process(int(answer(server, "child")))
    ask(server, "exit 1")
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_what_a_model_prints_is_in_the_log(server: ServerProcess) -> None:
    answer(server, "print 100000")
    eventually(lambda: server.log.count("x" * 1000) >= 1)
    server.await_logged(f"{'x' * 100}")


def test_what_a_worker_has_of_its_server(server: ServerProcess) -> None:
    assert "DATABASE_PASSWORD" not in answer(server, "environment")
    assert int(answer(server, "files")) < 12


def test_a_forked_process_that_comes_back_is_none_of_the_servers(server: ServerProcess) -> None:
    pid = answer(server, "pid")
    for size in (10, 1 << 20):
        assert answer(server, f"twins {size}") == "x" * size
        for number in range(20):
            assert answer(server, f"after {number}") == f"after {number}"
    assert answer(server, "pid") == pid
    eventually(lambda: not psutil.Process(int(pid)).children(recursive=True) or _zombies(int(pid)))
    server.await_logged("a process that the model has forked came back from it, and is ended")


def _zombies(pid: int) -> bool:
    """Whether a process has no children but those that it has not waited for."""
    children = psutil.Process(pid).children(recursive=True)
    return all(child.status() == psutil.STATUS_ZOMBIE for child in children)


def test_processes_that_a_model_starts_can_be_ended(server: ServerProcess) -> None:
    assert answer(server, "signals exec").split() == ["default_int_handler", "0"]
    assert answer(server, "signals fork") == str(-signal.SIGTERM)


def test_models_that_cannot_be_loaded(models: Path, tmp_path: Path) -> None:
    config = tensors("input", ("COMMAND", "STRING", "1")) + tensors("output", ("O", "STRING", "1"))
    for name, source in BROKEN.items():
        write_python_model(tmp_path, name, source, config)
    with ServerProcess(models, tmp_path, options=["--exit-on-error=false"]) as server:
        index = _asked.client.post(f"{server.url}/v2/repository/index").json()
        found = {entry["name"]: entry for entry in index}
        for name, says in _SAYS.items():
            assert found[name]["state"] == "UNAVAILABLE"
            assert says in found[name]["reason"]
        assert neighbour(server) == 200
        assert len(workers(server)) == 4


@pytest.mark.slow
def test_many_kills_lose_only_what_was_begun(own_server: ServerProcess) -> None:
    """Each kill costs at most the request that the worker had; everything else is answered."""
    done = False

    def load(number: int) -> tuple[int, int]:
        good = bad = 0
        while not done:  # with ever new inputs: one that was there at two deaths is refused
            command = f"number {number} {good + bad}"
            response = ask(own_server, command, "two")
            if response.status_code == 200:
                assert response.json()["outputs"][0]["data"] == [command]
                good += 1
            else:
                assert "was ended by SIGKILL while it executed" in response.text, response.text
                bad += 1
        return good, bad

    def killed(times: int) -> bool:
        return own_server.log.count("was ended by SIGKILL\n") >= times

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(load, number) for number in range(8)]
        try:
            for kills in range(1, _KILLS + 1):
                os.kill(int(answer(own_server, "pid", "two")), signal.SIGKILL)
                eventually(partial(killed, kills))
                eventually(partial(ready, own_server, "models/two"))
        finally:
            done = True
        results = [caller.result() for caller in callers]
    assert sum(good for good, _ in results) > _KILLS
    assert sum(bad for _, bad in results) <= _KILLS
