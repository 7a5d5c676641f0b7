"""Python models that die, hang, lie and leak, and the effects on others."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
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

from headrace.core.errors import Unavailable
from tests.faults.chaos import Chaos, eventually, write_models
from tests.models.python_models import tensors, write_python_model
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import SERVING, check_health
from tests.support.server_process import ServerProcess

_KILLS = 60

# Models that cannot be loaded, and their errors.
BROKEN = {
    "no_class": ("x = 1", "neither a class TritonPythonModel"),
    "syntax": ("def f(:", "SyntaxError"),
    "missing_module": ("import no_such_module", "No module named 'no_such_module'"),
    "raises_at_import": ("raise RuntimeError('at import')", "RuntimeError: at import"),
    "exits_at_import": ("import os; os._exit(7)", "ended with status 7"),
    "raises_at_start": (
        """
        class TritonPythonModel:
            def initialize(self, args):
                raise KeyError("at start")
            def execute(self, requests): ...
        """,
        "KeyError: 'at start'",
    ),
    "no_execute": ("class TritonPythonModel: ...", "has no method execute"),
}
_CONFIG = tensors("input", ("COMMAND", "STRING", "1")) + tensors("output", ("O", "STRING", "1"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An obedient model with one instance and one with two, and a neighbour in ONNX."""
    root = tmp_path_factory.mktemp("workers")
    write_models(root, {"one": ({}, 1), "two": ({}, 2)})
    return root


@contextmanager
def serving(*repositories: Path, options: Sequence[str] = ()) -> Iterator[Chaos]:
    given, environment = ["--exit-timeout-secs=5", *options], {"DATABASE_PASSWORD": "x"}
    with (
        ServerProcess(*repositories, options=given, environment=environment) as server,
        httpx.Client(timeout=30, verify=False) as client,
    ):
        yield Chaos(server, repositories[0], client)
        assert "bug " not in server.log, server.log


@pytest.fixture(scope="module")
def chaos(models: Path) -> Iterator[Chaos]:
    """One server for all tests whose workers are restored at the end."""
    with serving(models) as found:
        yield found


@pytest.fixture
def own(models: Path) -> Iterator[Chaos]:
    """A server for one test."""
    with serving(models) as found:
        yield found


@pytest.mark.parametrize(("command", "how"), [
    ("exit 3", "ended with status 3"), ("quit", "ended with status 1"),
    pytest.param("segfault", "was ended by SIGSEGV", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_worker_that_ends(chaos: Chaos, command: str, how: str) -> None:
    before = chaos.pid("one")
    response = chaos.ask("one", command)
    assert response.status_code == 500
    assert response.json()["error"] == (
        f"the worker process of model 'one' {how} while it executed the request"
    )
    if command == "quit":
        told = re.compile(r"ERROR .* one worker \d+: .*SystemExit: 1$", re.MULTILINE)
        eventually(lambda: told.search(chaos.server.log) is not None)  # written by a thread
    assert chaos.neighbour_is_served()
    assert chaos.pid("one") != before
    assert chaos.ready()
    assert chaos.ready("one")


def test_an_idle_worker_is_killed(chaos: Chaos) -> None:
    pid = chaos.pid("one")
    os.kill(pid, signal.SIGKILL)
    ended = f"worker {pid} of one_0_0 was ended by SIGKILL"
    eventually(lambda: chaos.logged(ended))
    # No request was sent for it.
    eventually(lambda: "one_0_0 runs again" in chaos.server.log.partition(ended)[2])
    assert chaos.pid("one") != pid


def test_unbegun_requests_go_to_the_next_worker(chaos: Chaos, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    for n in range(30):  # its batches are short, so that the worker is given the next one early
        chaos.answer("one", str(n))
    pid = chaos.pid("one")
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(chaos.ask, "one", f"sleep {begun}")
        eventually(begun.exists)
        others = [pool.submit(chaos.ask, "one", f"number {n}") for n in range(6)]
        assert chaos.neighbour_is_served()
        os.kill(pid, signal.SIGKILL)
        assert first.result().status_code == 500
        for n, other in enumerate(others):
            assert other.result().json()["outputs"][0]["data"] == [f"number {n}"]


def test_a_sibling_worker_continues(chaos: Chaos, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chaos.ask, "two", f"sleep {begun}")
        eventually(begun.exists)
        [stopped] = {chaos.pid("two") for _ in range(8)}  # the other one
        os.kill(stopped, signal.SIGKILL)
        eventually(lambda: re.search(rf"worker {stopped} of two\S* was ended by", chaos.server.log))
        assert chaos.answer("two", "a") == "a"
        for process in chaos.workers():
            process.kill()
        assert first.result().status_code == 500


@pytest.mark.parametrize("command", ["stick", pytest.param("sleep", marks=pytest.mark.slow)])
def test_workers_end_with_a_killed_server(own: Chaos, tmp_path: Path, command: str) -> None:
    """Also one whose native code holds the interpreter's lock, and what it has started."""
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(2) as pool:
        child = int(own.answer("one", "child"))
        asked = pool.submit(own.ask, "one", f"{command} {begun}")
        eventually(begun.exists)
        processes = own.workers()
        own.server.stop(signal.SIGKILL)
        assert child in {process.pid for process in processes}
        eventually(lambda: not any(map(_runs, processes)))
        with pytest.raises(httpx.HTTPError):
            asked.result()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_that_dies_repeatedly(own: Chaos) -> None:
    for status in range(5):  # with different inputs: the same one would be quarantined
        assert own.ask("one", f"exit {status}").status_code == 500
    eventually(lambda: not own.ready("one"))
    assert "its worker processes end again and again" in own.reason("one")
    assert own.ready()  # other models are served in any case
    with GrpcClient(own.server.grpc) as client:
        assert client.ready()
        assert not client.model_ready("one")
        assert check_health(client) == SERVING
    response = own.ask("one", "anything")
    assert response.status_code == 503
    assert "end again and again" in response.json()["error"]
    assert 1 <= int(response.headers["retry-after"]) <= 30  # until it is tried again
    with (
        GrpcClient(own.server.grpc) as client,
        pytest.raises(Unavailable, match="end again and again") as refusal,
    ):
        client.infer("one", {"COMMAND": np.array([[b"anything"]], object)})
    assert 1 <= refusal.value.retry_after <= 30
    assert own.neighbour_is_served()
    assert own.ready("neighbour")


@pytest.mark.slow
def test_kills_from_outside_do_not_count_as_crashes(own: Chaos) -> None:
    for number in range(1, 8):
        [worker] = [p for p in own.workers() if p.pid == _pid_of(own, "one")]
        worker.kill()
        for text in ("one_0_0 was ended by SIGKILL", "one_0_0 runs again as worker"):
            eventually(lambda n=number, text=text: own.server.log.count(text) == n)  # type: ignore[misc]
        eventually(partial(own.ready, "one"))
    assert "again and again" not in own.server.log
    assert own.answer("one", "there") == "there"


def _pid_of(chaos: Chaos, model: str) -> int:
    """The process of a model with one instance, from the log."""
    found = re.findall(rf"{model}_0_0 runs again as worker (\d+)", chaos.server.log)
    return int(found[-1]) if found else chaos.pid(model)


@pytest.mark.slow
def test_missing_descriptors_do_not_count_as_crashes(own: Chaos) -> None:
    process = psutil.Process(own.server.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    pid = own.pid("one")
    process.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: own.server.log.count("Too many open files") >= 7)
        assert "again and again" not in own.server.log
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)
    eventually(partial(own.ready, "one"))
    assert own.answer("one", "there") == "there"


SLOW_START = """
    import os, time

    class TritonPythonModel:
        def initialize(self, args):
            print("begun as", os.getpid(), flush=True)
            time.sleep(600)

        def execute(self, requests): ...
"""


@pytest.mark.slow
def test_a_kill_during_the_start_is_reported(tmp_path: Path) -> None:
    write_python_model(tmp_path, "slow", SLOW_START, _CONFIG)
    with ServerProcess(tmp_path, options=["--exit-on-error=false"], wait=False) as server:
        eventually(lambda: "begun as" in server.log)
        [pid] = re.findall(r"begun as (\d+)", server.log)
        os.kill(int(pid), signal.SIGKILL)
        eventually(lambda: "ready after" in server.output)
        [found] = httpx.post(f"{server.url}/v2/repository/index", verify=False).json()
        assert "the worker was ended by SIGKILL" in found["reason"]


def test_workers_end_with_the_server(own: Chaos) -> None:
    found = own.workers()
    assert len(found) == 3
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own.ask, "one", "loop")
        os.kill(own.server.pid, signal.SIGKILL)
        gone, left = psutil.wait_procs(found, timeout=60)
    assert (len(gone), left) == (len(found), [])


def test_a_shutdown_leaves_nothing_behind(own: Chaos) -> None:
    found = own.workers()
    assert own.server.stop() == 0
    assert not any(process.is_running() for process in found)


@pytest.mark.parametrize("command", ["surrogate", "parameter 70", "raise half a pair"])
def test_an_unsendable_answer(chaos: Chaos, command: str) -> None:
    before = chaos.pid("one")
    assert chaos.ask("one", command).status_code == 500
    with InferenceServerClient(chaos.server.grpc) as client:
        tensor = InferInput("COMMAND", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[command.encode()]], object))
        with pytest.raises(InferenceServerException, match="INTERNAL"):
            client.infer("one", [tensor])
    assert chaos.pid("one") == before


def test_a_model_that_prints_without_end(chaos: Chaos) -> None:
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(chaos.ask, "one", "flood")
        eventually(lambda: "lines were left out" in chaos.server.log)
        assert chaos.neighbour_is_served()
        for process in chaos.workers():
            process.kill()
        assert flooding.result().status_code == 500


def test_output_of_a_model_is_logged(chaos: Chaos) -> None:
    chaos.answer("one", "print 100000")
    eventually(lambda: chaos.server.log.count("x" * 1000) >= 1)
    chaos.server.await_logged(f"{'x' * 100}")


def test_descriptors_and_variables_of_a_worker(chaos: Chaos) -> None:
    assert "DATABASE_PASSWORD" not in chaos.answer("one", "environment")
    assert int(chaos.answer("one", "files")) < 12


def test_a_returning_forked_process_is_ignored(chaos: Chaos) -> None:
    pid = chaos.pid("one")
    for size in (10, 1 << 20):
        assert chaos.answer("one", f"twins {size}") == "x" * size
        for number in range(20):
            assert chaos.answer("one", f"after {number}") == f"after {number}"
    assert chaos.pid("one") == pid
    eventually(lambda: not psutil.Process(pid).children(recursive=True) or _zombies(pid))
    chaos.server.await_logged("a process that the model has forked came back from it, and is ended")


def _zombies(pid: int) -> bool:
    """True if a process has only unreaped children."""
    children = psutil.Process(pid).children(recursive=True)
    return all(child.status() == psutil.STATUS_ZOMBIE for child in children)


def test_processes_that_a_model_starts_can_be_ended(chaos: Chaos) -> None:
    assert chaos.answer("one", "signals exec").split() == ["default_int_handler", "0"]
    assert chaos.answer("one", "signals fork") == str(-signal.SIGTERM)


@pytest.mark.slow
def test_models_that_cannot_be_loaded(models: Path, tmp_path: Path) -> None:
    for name, (source, _) in BROKEN.items():
        write_python_model(tmp_path, name, source, _CONFIG)
    with serving(models, tmp_path, options=["--exit-on-error=false"]) as chaos:
        index = httpx.post(f"{chaos.server.url}/v2/repository/index", verify=False).json()
        found = {entry["name"]: entry for entry in index}
        for name, (_, says) in BROKEN.items():
            assert found[name]["state"] == "UNAVAILABLE"
            assert says in found[name]["reason"]
        assert chaos.neighbour_is_served()
        assert len(chaos.workers()) == 3


@pytest.mark.slow
def test_many_kills_lose_only_begun_requests(own: Chaos) -> None:
    """Each kill costs at most the request that the worker had; everything else is answered."""
    done = False

    def load(number: int) -> tuple[int, int]:
        good = bad = 0
        while not done:  # with new inputs each time: one present at two deaths is refused
            command = f"number {number} {good + bad}"
            response = own.ask("two", command)
            if response.status_code == 200:
                assert response.json()["outputs"][0]["data"] == [command]
                good += 1
            else:
                assert "was ended by SIGKILL while it executed" in response.text, response.text
                bad += 1
        return good, bad

    def killed(times: int) -> bool:
        return own.server.log.count("was ended by SIGKILL\n") >= times

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(load, number) for number in range(8)]
        try:
            for kills in range(1, _KILLS + 1):
                os.kill(own.pid("two"), signal.SIGKILL)
                eventually(partial(killed, kills))
                eventually(partial(own.ready, "two"))
        finally:
            done = True
        results = [caller.result() for caller in callers]
    assert sum(good for good, _ in results) > _KILLS
    assert sum(bad for _, bad in results) <= _KILLS
