"""Managed Tritons are killed, hang, and must not outlive their server.

Once with headrace in Triton's place, and once with the real Triton where available (see
`tests.support.triton_server`).
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from headrace.core.errors import ServerError
from tests.support.grpc_client import GrpcClient
from tests.support.managed import CPU, descendants, servers, write_managed, write_program
from tests.support.scrape import until
from tests.support.server_process import ServerProcess
from tests.support.triton_server import real_program

pytestmark = pytest.mark.slow

ROW = np.array([[1, 2]], np.float32)
PATIENT = 'parameters { key: "wait_secs" value { string_value: "50" } }'


@pytest.fixture(scope="module", params=["stand-in", "triton"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "triton":
        return real_program()
    return write_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("stand-in"))


@contextmanager
def serving(
    program: Path, folder: Path, *more: str, config: str = CPU
) -> Iterator[tuple[ServerProcess, GrpcClient]]:
    """A server with a model in Tritons, whose files are checked at the end."""
    write_managed(folder / "models", config)
    (folder / "tmp").mkdir()
    options = (f"--triton-server={program}", *more)
    environment = {"TMPDIR": str(folder / "tmp")}
    with ServerProcess(folder / "models", options=options, environment=environment) as server:
        [directory] = (folder / "tmp").glob("headrace-triton-*")
        (folder / "name").write_text(directory.name)
        with GrpcClient(server.grpc) as client:
            yield server, client
        assert "bug " not in server.log
        assert "Exception in callback" not in server.log


def left_behind(folder: Path) -> list[str]:
    own = {path.name for path in (folder / "tmp").glob("headrace-triton-*")}
    name = (folder / "name").read_text()  # the prefix of their shared memory's names
    return sorted(own) + [n for n in os.listdir("/dev/shm") if n.startswith(name)]


def ask(client: GrpcClient) -> float:
    return float(client.infer("times", {"INPUT0": ROW})["OUTPUT0"][0, 1])


def test_one_of_two_tritons_is_killed_under_load(program: Path, tmp_path: Path) -> None:
    """Its running requests are lost, and no others; it is restarted, loaded, and serves again."""
    failures: Counter[str] = Counter()
    answered = 0
    ended = Event()

    with serving(program, tmp_path, "--triton-processes=2") as (server, client):
        first, second = servers(server.pid)

        def caller() -> None:
            nonlocal answered
            while not ended.is_set():
                try:
                    assert ask(client) == 6
                    answered += 1
                except ServerError as error:
                    failures[str(error)] += 1

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(caller) for _ in range(4)]
            try:
                until(lambda: answered > 50, "answers")
                serves = server.log.count(" serves\n")
                os.kill(first, signal.SIGKILL)
                lost = "triton-0 was ended by SIGKILL"
                until(lambda: lost in server.log or "triton-1 was ended" in server.log, "the end")
                until(lambda: len(servers(server.pid)) == 2, "another process")
                until(lambda: server.log.count(" serves\n") > serves, "the other one to serve")
                before = answered
                until(lambda: answered > before + 50, "more answers")
            finally:
                ended.set()
            for one in running:
                one.result()
        assert second in servers(server.pid)
        assert all("was lost during the request" in text for text in failures), failures
        assert sum(failures.values()) <= 8
        assert server.stop() == 0
    assert left_behind(tmp_path) == []


def test_the_only_triton_is_killed(program: Path, tmp_path: Path) -> None:
    """Requests wait for its restart."""
    with serving(program, tmp_path, config=CPU + PATIENT) as (server, client):
        for _ in range(2):
            [pid] = servers(server.pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda gone=pid: gone not in servers(server.pid), "its end")  # type: ignore[misc]
            until(lambda: not client.model_ready("times") or answers(client), "the truth")
            assert ask(client) == 6
        assert server.stop() == 0
    assert left_behind(tmp_path) == []


def answers(client: GrpcClient) -> bool:
    try:
        return ask(client) == 6
    except ServerError:
        return False


def test_a_hanging_triton_is_killed(stand_in: Path, tmp_path: Path) -> None:
    with serving(stand_in, tmp_path, "--triton-hang-secs=5") as (server, client):
        [pid] = servers(server.pid)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "triton-0 has given no sign of life for" in server.log, "its end")
        until(lambda: answers(client), "an answer")
        assert pid not in servers(server.pid)


def test_no_triton_outlives_the_server(program: Path, tmp_path: Path) -> None:
    with serving(program, tmp_path, "--triton-processes=2") as (server, _):
        below = [pid for pid, _ in descendants(server.pid)]
        assert len(servers(server.pid)) == 2
        server.stop(signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in below), "their ends")
        until(lambda: left_behind(tmp_path) == [], "their files to go")


def test_a_triton_that_ignores_sigterm_is_killed(stand_in: Path, tmp_path: Path) -> None:
    with serving(stand_in, tmp_path, "--triton-exit-timeout-secs=1") as (server, _):
        below = [pid for pid, _ in descendants(server.pid)]
        for pid in servers(server.pid):
            os.kill(pid, signal.SIGSTOP)
        assert server.stop() == 0
        assert "has not ended within 3 s, and is killed" in server.log
        assert not any(alive(pid) for pid in below)
    assert left_behind(tmp_path) == []


def test_a_triton_that_crashes_repeatedly(stand_in: Path, tmp_path: Path) -> None:
    """After a while restarts end, and the model is not ready."""
    with serving(stand_in, tmp_path) as (server, client):
        ended = 0
        while "it is tried again in 30 s" not in server.log:
            for pid in servers(server.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended += 1
            assert ended < 500
        with pytest.raises(ServerError, match="is not ready: none of its servers"):
            client.infer("times", {"INPUT0": ROW})
        assert not client.model_ready("times")
        assert server.stop() == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
