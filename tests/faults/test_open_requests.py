"""Workers that die with open requests, partly answered or waiting."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.python_models import in_config, write_python_model
from tests.models.triton_models import CONFIG, COROUTINE, DECOUPLED, MANY, ORDINARY
from tests.support.client import Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

_WORKERS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("open")
    write_python_model(root, "many", MANY, DECOUPLED)
    write_python_model(root, "replaced", MANY, DECOUPLED + in_config({"max_requests": 1}))
    write_python_model(root, "coroutine", COROUTINE, CONFIG)
    write_python_model(root, "ordinary", ORDINARY, CONFIG)
    with clean_server(root, options=["--exit-timeout-secs=5"]) as process:
        yield process


def ask(server: ServerProcess, model: str, **command: object) -> httpx.Response:
    text = json.dumps(command)
    tensor = {"name": "COMMAND", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    url = f"{server.url}/v2/models/{model}/infer"
    with httpx.Client(timeout=30, trust_env=False, verify=False) as client:
        return client.post(url, json={"inputs": [tensor]})


def endless(model: str, file: Path, id: str = "") -> pb.ModelInferRequest:
    """A request that is answered until its client disconnects, which a file reports."""
    command = {"do": "until cancelled", "file": str(file), "thread": True}
    array = strings([json.dumps(command).encode()], [1, 1])
    return infer_message(model, [Input("COMMAND", array)], id=id)


def kill_workers(server: ServerProcess) -> None:
    """Kill all workers; on return the server has noticed, and no child is one of them."""
    killed = psutil.Process(server.pid).children()
    for process in killed:
        process.kill()
    _, left = psutil.wait_procs(killed, timeout=60)
    assert not left


def test_open_requests_fail_with_their_worker(server: ServerProcess, tmp_path: Path) -> None:
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        for number in range(3):
            stream.send(endless("many", tmp_path / str(number), id=str(number)))
        seen: set[str] = set()
        while len(seen) < 3:
            seen.add(stream.receive().infer_response.id)
        kill_workers(server)
        ended: dict[str, str] = {}
        while len(ended) < 3:
            message = stream.receive()
            if message.error_message:
                ended[message.infer_response.id] = message.error_message
    assert all("was ended by SIGKILL while it executed the request" in e for e in ended.values())
    assert ask(server, "ordinary", do="give", value=1).status_code == 200


def test_a_worker_that_is_replaced_finishes_its_open_requests(
    server: ServerProcess, tmp_path: Path
) -> None:
    def recycled() -> bool:
        found = scraper.now().value("headrace_worker_recycles_total", model="replaced")
        return found >= 1

    def ends() -> float:
        return scraper.now().value("headrace_worker_ends_total", model="replaced")

    until(lambda: len(psutil.Process(server.pid).children()) == _WORKERS, "all workers")
    before = psutil.Process(server.pid).children()
    with GrpcClient(server.grpc) as client, Scraper(server.metrics) as scraper:
        ended = ends()
        with Stream(client) as stream:
            stream.send(endless("replaced", tmp_path / "old", id="old"))
            stream.receive()
            until(recycled, "a successor")
            assert all(process.is_running() for process in before)
            stream.send(endless("replaced", tmp_path / "new", id="new"))
            seen = {stream.receive().infer_response.id for _ in range(50)}
            while seen != {"old", "new"}:  # no error ends the old one's
                received = stream.receive()
                assert not received.error_message
                seen.add(received.infer_response.id)
        until(lambda: (tmp_path / "old").exists(), "the model to hear of the end")
        until(lambda: not all(process.is_running() for process in before), "the old worker's end")
        assert ends() == ended


@pytest.mark.slow
def test_a_replaced_worker_that_dies_is_not_restarted(
    server: ServerProcess, tmp_path: Path
) -> None:
    def started_again() -> int:
        return server.log.count("replaced_0 runs again")

    with GrpcClient(server.grpc) as client, Scraper(server.metrics) as scraper:
        times = scraper.now().value("headrace_worker_recycles_total", model="replaced")
        before = started_again()
        with Stream(client) as stream:
            stream.send(endless("replaced", tmp_path / "old"))
            until(
                lambda: (
                    scraper.now().value("headrace_worker_recycles_total", model="replaced") > times
                ),
                "a successor",
            )
            kill_workers(server)
            while not stream.receive().error_message:
                pass
        until(
            lambda: (
                scraper.now().value("headrace_workers_running", model="replaced") == 1
                and started_again() > before
            ),
            "the successor's return",
        )
        until(lambda: len(psutil.Process(server.pid).children()) == _WORKERS, "all workers")
        assert started_again() == before + 1


@pytest.mark.parametrize(
    ("model", "command"),
    [("coroutine", {"do": "meet", "where": "nowhere"}), ("ordinary", {"do": "after the next"})],
)
def test_waiting_requests_fail_with_their_worker(
    server: ServerProcess, model: str, command: dict[str, str]
) -> None:
    with ThreadPoolExecutor(1) as pool, Scraper(server.metrics) as scraper:
        waiting = pool.submit(ask, server, model, **command)
        scraper.until_running(model)
        kill_workers(server)
        response = waiting.result()
    assert response.status_code == 500
    assert "was ended by SIGKILL while it executed the request" in response.text
    assert ask(server, model, do="give").status_code == 200


def test_a_model_sees_cancellations_before_its_worker_ends(tmp_path: Path) -> None:
    write_python_model(tmp_path, "many", MANY, DECOUPLED)
    with (
        clean_server(tmp_path, options=["--exit-timeout-secs=20"]) as server,
        GrpcClient(server.grpc) as client,
        Stream(client) as stream,
    ):
        stream.send(endless("many", tmp_path / "told"))
        stream.receive()
    assert (tmp_path / "told").exists()


@pytest.mark.slow
def test_a_shutdown_ends_streams_in_time(tmp_path: Path) -> None:
    write_python_model(tmp_path, "many", MANY, DECOUPLED)
    with ServerProcess(tmp_path, options=["--exit-timeout-secs=2"]) as server:
        with GrpcClient(server.grpc) as client, Stream(client) as stream:
            stream.send(endless("many", tmp_path / "ended"))
            stream.receive()
            found = psutil.Process(server.pid).children()
            server.send(15)
            until(lambda: server.process is not None and server.process.poll() is not None, "end")
        _, left = psutil.wait_procs(found, timeout=10)
        assert not left
