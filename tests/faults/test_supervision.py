"""Python models that hang, hog, grow and lie: each is handled without effect on others."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import pack

import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from headrace.ipc.frames import FrameKind, pack_header
from tests.faults.chaos import Chaos, Models, eventually, write_models
from tests.support.server_process import ServerProcess
from tests.support.watching import Resources

_FILES_SPARE = 2
_GROWTH = 64 << 20  # bytes
_LIMITS = {
    "memory_limit": "400MiB", "nice": 5, "max_open_files": 64, "execution_limit_secs": 4,
    "strict_outputs": "true",
}  # fmt: skip
_MODELS: Models = {
    "plain": ({"raises_at_the_end": "yes"}, 1), "bystander": ({}, 1),
    "stopped": ({"heartbeat_secs": 4}, 1), "stuck": ({"heartbeat_secs": 4}, 1),
    "limited": (_LIMITS, 1), "counted": ({"max_requests": 50}, 2),
    "growing": ({"max_rss": "150MiB"}, 1), "outsized": ({"max_rss": "1MiB"}, 1),
    "unlucky": ({"max_requests": 1}, 1),
}  # fmt: skip
WORKERS = sum(count for _, count in _MODELS.values())
_DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """One server for all tests; at the end it has the resources of its beginning."""
    root = tmp_path_factory.mktemp("chaos")
    write_models(root, _MODELS, rows=4)
    with ServerProcess(root) as server, httpx.Client(timeout=60, verify=False) as client:
        found = Chaos(server, root, client)
        assert found.others_are_served()
        before = Resources.of(server.pid)
        yield found
        eventually(found.ready)
        eventually(lambda: len(found.workers()) == WORKERS)
        client.close()  # the server holds its connections
        eventually(lambda: Resources.of(server.pid).files <= before.files + _FILES_SPARE)
        after = Resources.of(server.pid)
        assert after.resident < before.resident + _GROWTH
        assert after.threads <= before.threads + 2
        left = found.workers()
        assert server.stop() == 0
        assert not any(process.is_running() for process in left)
        assert "RuntimeError: at the end" in server.log  # of finalize, without delaying anything
        assert "bug " not in server.log, server.log


def test_a_stopped_worker_and_a_stuck_one(chaos: Chaos, tmp_path: Path) -> None:
    stopped, stuck, begun = chaos.pid("stopped"), chaos.pid("stuck"), tmp_path / "begun"
    with ThreadPoolExecutor(3) as pool:
        os.kill(stopped, signal.SIGSTOP)
        asked = [
            pool.submit(chaos.ask, "stopped", "x"),
            pool.submit(chaos.ask, "stuck", f"stick {begun}"),
        ]
        eventually(begun.exists)
        behind = pool.submit(chaos.answer, "stuck", "behind")  # not begun: it is executed
        assert chaos.others_are_served()
        for future, model in zip(asked, ("stopped", "stuck"), strict=True):
            response = future.result()
            assert response.status_code == 500
            error = response.json()["error"]
            assert error.startswith(
                f"the worker process of model '{model}' has given no sign of life"
            )
            assert error.endswith("and was ended by SIGKILL while it executed the request")
        assert behind.result() == "behind"
    assert chaos.pid("stopped") != stopped
    assert chaos.pid("stuck") != stuck
    assert chaos.ready()
    for model in ("stopped", "stuck"):
        assert chaos.counted("headrace_worker_ends_total", model, reason="hang") == 1


def test_an_infinite_loop(chaos: Chaos) -> None:
    before = chaos.pid("limited")
    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(chaos.ask, "limited", "loop")
        assert chaos.others_are_served()
        response = looping.result()
    assert response.status_code == 500
    assert "has taken longer than 4 s for a batch and was ended by SIGKILL" in response.text
    assert chaos.pid("limited") != before
    assert chaos.counted("headrace_worker_ends_total", "limited", reason="limit") == 1
    eventually(lambda: chaos.logged("has taken longer than 4 s"))


@pytest.mark.slow
def test_a_long_computation_is_no_hang(chaos: Chaos) -> None:
    before = chaos.pid("stopped")
    ended = chaos.counted("headrace_worker_ends_total", "stopped", reason="hang")
    assert (
        chaos.answer("stopped", "compute 8") == "compute 8"
    )  # of 4 permitted without a sign of life
    assert chaos.pid("stopped") == before
    assert chaos.counted("headrace_worker_ends_total", "stopped", reason="hang") == ended


def test_a_model_is_not_ready_while_none_of_its_workers_runs(chaos: Chaos) -> None:
    flag = chaos.flag("plain", "wait")
    flag.touch()
    pid = chaos.pid("plain")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not chaos.ready("plain"))
    assert chaos.reason("plain") == "none of its worker processes runs"
    assert chaos.ready()
    assert chaos.counted("headrace_workers", "plain") == 1
    assert chaos.counted("headrace_workers_running", "plain") == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(chaos.answer, "plain", "patient")
        assert chaos.others_are_served()
        flag.unlink()
        assert waiting.result() == "patient"
    assert chaos.ready("plain")
    assert chaos.ready()
    assert chaos.counted("headrace_worker_ends_total", "plain", reason="signal") >= 1
    assert chaos.counted("headrace_worker_resident_bytes", "plain", instance="plain_0_0") > 1 << 20


@pytest.mark.parametrize("command", ["raise it", "nothing", "rows", "type", "hog 500"])
def test_an_error_is_not_a_crash(chaos: Chaos, command: str) -> None:
    before = chaos.pid("limited")
    response = chaos.ask("limited", command)
    assert response.status_code == 500
    error = response.json()["error"]
    assert "\n" not in error
    assert ("Unable to allocate" in error) == (command == "hog 500")
    assert chaos.pid("limited") == before
    assert chaos.ready("limited")


@pytest.mark.parametrize("frame", [
    b"\xff" * 4096,
    pytest.param(pack_header(FrameKind.RESULT, 3, 0, 0, 1 << 40), marks=pytest.mark.slow),
    pytest.param(pack("<BBxxIIQ", 21, 0, 0, len(_DEEP), 0) + _DEEP, marks=pytest.mark.slow),
], ids=["noise", "no_file", "deep"])  # fmt: skip
def test_a_worker_that_sends_invalid_frames(chaos: Chaos, frame: bytes) -> None:
    before = chaos.counted("headrace_worker_ends_total", "plain", reason="nonsense")
    response = chaos.ask("plain", f"write {frame.hex()}")
    assert response.status_code == 500
    assert "ended by SIGKILL while it executed the request" in response.json()["error"]
    assert chaos.others_are_served()
    assert chaos.answer("plain", "again") == "again"
    assert chaos.counted("headrace_worker_ends_total", "plain", reason="nonsense") == before + 1


def test_a_worker_with_closed_output_threads_and_children(chaos: Chaos) -> None:
    before = chaos.pid("plain")
    children = [psutil.Process(int(chaos.answer("plain", how))) for how in ("fork", "child")]
    for command in ("mute", "thread", "x"):
        assert chaos.answer("plain", command) == command
    assert chaos.pid("plain") == before
    assert chaos.ask("plain", "exit 5").status_code == 500
    assert chaos.answer("plain", "again") == "again"
    for child in children:
        eventually(lambda c=child: not c.is_running() or c.status() == psutil.STATUS_ZOMBIE)  # type: ignore[misc]


def test_limits_of_the_machine(chaos: Chaos) -> None:
    nice, files, score = json.loads(chaos.answer("limited", "limits"))
    own, _, plain_score = json.loads(chaos.answer("plain", "limits"))
    assert nice == min(own + 5, 19)
    assert files == [64, 64]
    # The server's own score is unchanged: the kernel kills a worker first.
    server = int(Path(f"/proc/{chaos.server.pid}/oom_score_adj").read_text())
    assert score == plain_score == min(server + 500, 1000)


def test_an_input_that_kills_is_quarantined(chaos: Chaos) -> None:
    refused = chaos.counted("headrace_quarantined_requests_total", "bystander")
    assert [chaos.ask("bystander", "exit 6").status_code for _ in range(4)] == [500, 500, 422, 422]
    error = chaos.ask("bystander", "exit 6").json()["error"]
    assert error == (
        "the input is quarantined: 2 worker processes of model 'bystander' ended while they"
        " executed it; it is not run again for now"
    )
    with InferenceServerClient(chaos.server.grpc) as client:
        tensor = InferInput("COMMAND", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"exit 6"]], object))
        with pytest.raises(InferenceServerException, match="FAILED_PRECONDITION"):
            client.infer("bystander", [tensor])
    assert chaos.others_are_served()
    assert chaos.counted("headrace_quarantined_requests_total", "bystander") == refused + 4
    assert chaos.counted("headrace_worker_ends_total", "bystander", reason="exit") == 2


def test_workers_are_recycled_without_losing_a_request(chaos: Chaos) -> None:
    before = {chaos.pid("counted") for _ in range(8)}
    done = False

    def load(number: int) -> int:
        count = 0
        while not done:
            assert chaos.answer("counted", f"{number} {count}") == f"{number} {count}"
            count += 1
        return count

    def recycled() -> float:
        return chaos.counted("headrace_worker_recycles_total", "counted", reason="max_requests")

    with ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(load, number) for number in range(6)]
        try:
            eventually(lambda: recycled() >= 1)
            eventually(lambda: not all(map(psutil.pid_exists, before)))
        finally:
            done = True
        assert sum(caller.result() for caller in callers) >= 50
    assert chaos.ready("counted")
    eventually(lambda: len(chaos.workers()) == WORKERS)
    why = r"it has had \d+ requests, max_requests is \d+$"
    replaced = rf"worker (\d+) of (counted\w*) is going to be replaced: {why}"
    found = re.search(replaced, chaos.server.log, re.MULTILINE)
    assert found is not None, chaos.server.log
    chaos.server.await_logged(f" of {found[2]} takes over from worker {found[1]}\n")
    for reason in ("exit", "signal", "hang"):
        assert chaos.counted("headrace_worker_ends_total", "counted", reason=reason) == 0


def test_a_worker_that_has_grown_is_recycled_when_it_has_finished(
    chaos: Chaos, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    before = chaos.pid("growing")
    with ThreadPoolExecutor(1) as pool:
        # In one request: the worker may be replaced as soon as it has grown.
        waiting = pool.submit(chaos.answer, "growing", f"grow {begun}")
        eventually(begun.exists)
        eventually(
            lambda: chaos.counted("headrace_worker_recycles_total", "growing", reason="max_rss")
        )
        after = chaos.pid("growing")  # the successor answers while the old one is busy
        assert after != before
        assert psutil.pid_exists(before)
        begun.unlink()
        assert waiting.result() == f"grow {begun}"
    eventually(lambda: not psutil.pid_exists(before))
    assert chaos.pid("growing") == after


def test_a_worker_too_large_from_its_start_is_not_recycled_for_ever(chaos: Chaos) -> None:
    eventually(lambda: chaos.logged("outsized_0_0 takes"))
    assert chaos.counted("headrace_worker_recycles_total", "outsized", reason="max_rss") == 1
    assert chaos.answer("outsized", "x") == "x"


@pytest.mark.slow
def test_without_a_successor_the_old_worker_goes_on(chaos: Chaos) -> None:
    flag = chaos.flag("unlucky", "fail")
    flag.touch()
    before = chaos.pid("unlucky")
    eventually(lambda: chaos.logged(f"no successor for worker {before} of unlucky_0_0"))
    assert chaos.pid("unlucky") == before
    assert chaos.ready("unlucky")
    flag.unlink()
    eventually(lambda: chaos.pid("unlucky") != before)
    assert chaos.counted("headrace_worker_ends_total", "unlucky", reason="exit") == 0
