"""Servers on Unix sockets: real clients, limits by user, front ends, start and end."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import headrace
from headrace.client import ConnectionFailed, StatusError
from headrace.client.blocking import Client
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.held import Gates, write_held_model
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, onnx_examples

X = np.arange(16, dtype=np.int32).reshape(1, 16)
PLAIN = "--http-address=none", "--grpc-address=none"
FRONT_END = "headrace.plugins.frontends"
HELD = ("--allow-in-process-python",)
HELD_INPUT = {"VALUE": np.array([[1]])}


@dataclass
class Sockets:
    """A folder with the sockets of a server."""

    folder: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The server's options."""
        return f"--http-unix-socket={self.http}", f"--grpc-unix-socket={self.grpc}"

    @property
    def http(self) -> str:
        """The path for HTTP."""
        return f"{self.folder}/http.sock"

    @property
    def grpc(self) -> str:
        """The path for gRPC."""
        return f"{self.folder}/grpc.sock"

    @property
    def urls(self) -> tuple[str, str]:
        """Both, for headrace's client."""
        return f"unix:{self.http}", f"grpc+unix:{self.grpc}"


@pytest.fixture
def sockets(tmp_path: Path) -> Sockets:
    return Sockets(tmp_path)


@pytest.fixture
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_examples(tmp_path_factory.mktemp("models"))


@pytest.fixture(
    scope="module",
    params=[
        (), pytest.param(("--frontends=2",), marks=pytest.mark.slow),
        pytest.param(("--grpc-transport=grpcio",), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sockets, ServerProcess]]:
    """A server with sockets besides its ports."""
    sockets = Sockets(tmp_path_factory.mktemp("sockets"))
    models = onnx_examples(tmp_path_factory.mktemp("models"))
    options = *sockets.options, "--access-log", *request.param
    with ServerProcess(models, options=options) as server:
        yield sockets, server
        assert server.stop() == 0
        assert "bug " not in server.log
        assert list(sockets.folder.iterdir()) == []


def test_clients_of_every_kind(running: tuple[Sockets, ServerProcess]) -> None:
    sockets, server = running
    ports = f"http://{server.http}", f"grpc://{server.grpc}"
    for url in (*sockets.urls, *ports):
        with Client(url) as client:
            result = client.infer("simple", {"INPUT0": X, "INPUT1": X})
            np.testing.assert_array_equal(result["OUTPUT0"], X + X)

    curl = ["curl", "-sS", "--fail", "--unix-socket", sockets.http]
    found = subprocess.check_output([*curl, "http://any.name/v2/models/simple"], timeout=60)
    assert json.loads(found)["name"] == "simple"
    page = subprocess.check_output([*curl, "http://localhost/docs"], timeout=60)
    assert b"swagger-ui" in page

    with grpc.insecure_channel(f"unix:{sockets.grpc}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        request = pb.ModelInferRequest(
            model_name="simple",
            inputs=[
                pb.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1, 16])
                for name in ("INPUT0", "INPUT1")
            ],
            raw_input_contents=[X.tobytes(), X.tobytes()],
        )
        assert infer(request).raw_output_contents[0] == (X + X).tobytes()

    command = [sys.executable, "-m", "headrace", "models", "list", f"--url={sockets.urls[0]}"]
    assert b"simple" in subprocess.check_output(command, timeout=60)
    server.await_logged(f"unix:{os.geteuid()} gRPC /inference.GRPCInferenceService/ModelInfer OK")
    server.await_logged(f"unix:{os.geteuid()} GET /v2/models/simple 200")


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    """Gates of the model `held` in `models`."""
    folder = tmp_path / "gates"
    folder.mkdir()
    write_held_model(tmp_path / "models", "held", folder)
    return Gates(folder)


@pytest.mark.parametrize("share", ["connection", "address"])
def test_limits_of_a_client(share: str, sockets: Sockets, gates: Gates) -> None:
    """Connections have accounts of their own; those of one user have one address."""
    options = *HELD, *sockets.options, *PLAIN, f"--max-{share}-share=1", "--max-model-share=100"
    gates.close(1)
    with (
        ServerProcess(sockets.folder / "models", options=options) as server,
        Scraper(server.metrics) as metrics,
        Client(sockets.urls[1]) as one,
        Client(sockets.urls[1]) as other,
        ThreadPoolExecutor(101) as pool,
    ):
        share_of_all = 100  # of --max-admitted-requests
        calls = [pool.submit(one.infer, "held", HELD_INPUT) for _ in range(share_of_all)]
        admitted = "headrace_admitted_requests"
        until(lambda: metrics.now().value(admitted) == share_of_all, "all of them")
        with pytest.raises(StatusError, match=f"this client's {share} is at its limit of 100"):
            one.infer("held", HELD_INPUT)
        if share == "address":
            with pytest.raises(StatusError, match="this client's address is at its limit of 100"):
                other.infer("held", HELD_INPUT)
        else:
            calls.append(pool.submit(other.infer, "held", HELD_INPUT))
            until(lambda: metrics.now().value(admitted) == len(calls), "another one")
        gates.open()
        for call in calls:
            call.result()
        assert server.stop() == 0


def test_permissions_and_paths(sockets: Sockets, examples: Path) -> None:
    options = *sockets.options, *PLAIN, "--unix-socket-mode=600"
    with ServerProcess(examples, options=options) as server:
        assert f"HTTP     unix:{sockets.http}\n" in server.output
        assert f"gRPC     grpc+unix:{sockets.grpc}\n" in server.output
        assert stat.S_IMODE(os.stat(sockets.http).st_mode) == 0o600
        again = subprocess.run(
            [sys.executable, "-m", "headrace", "serve", f"--model-repository={examples}", *options],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert again.returncode == 1
        assert again.stderr.splitlines()[-1] == (
            f"headrace serve: cannot listen on {sockets.http} for HTTP: Address already in use"
        )
        with Client(sockets.urls[0]) as client:
            assert client.ready()
        server.stop(signal.SIGKILL)
    assert os.path.exists(sockets.http)
    with ServerProcess(examples, options=options) as server, Client(sockets.urls[1]) as client:
        assert client.ready()
        assert server.stop() == 0
    assert not os.path.exists(sockets.http)


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--frontends=2",), marks=pytest.mark.slow)],
    ids=["one process", "front ends"],
)  # fmt: skip
def test_requests_end_and_newcomers_are_refused(
    options: tuple[str, ...], sockets: Sockets, gates: Gates
) -> None:
    gates.close(1)
    models = sockets.folder / "models"
    with (
        ServerProcess(models, options=(*HELD, *sockets.options, *PLAIN, *options)) as server,
        Scraper(server.metrics) as metrics,
        Client(sockets.urls[0]) as http,
        Client(sockets.urls[1]) as over_grpc,
        ThreadPoolExecutor(2) as pool,
    ):
        calls = [pool.submit(client.infer, "held", HELD_INPUT) for client in (http, over_grpc)]
        until(lambda: metrics.now().value("headrace_admitted_requests") == 2, "two requests")
        server.send(signal.SIGTERM)
        until(lambda: not os.path.exists(sockets.http), "the end of the socket")
        with pytest.raises(ConnectionFailed, match="no such file"):
            Client(sockets.urls[0], connect_retries=0).ready()
        gates.open()
        for call in calls:
            call.result()
        assert server.process is not None
        assert server.process.wait(60) == 0


def test_a_front_end_that_is_killed(sockets: Sockets, examples: Path) -> None:
    """Clients that connect meanwhile wait, and its successor has the same socket."""
    options = *sockets.options, *PLAIN, "--frontends=1"
    with ServerProcess(examples, options=options) as server:
        children = psutil.Process(server.pid).children()
        (front_end,) = [child for child in children if FRONT_END in child.cmdline()]
        front_end.kill()
        with Client(sockets.urls[0]) as client:
            assert client.wait_ready(seconds=60) is None
            result = client.infer("simple", {"INPUT0": X, "INPUT1": X})
            np.testing.assert_array_equal(result["OUTPUT0"], X + X)
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--http-address=none"], "--http-address=none needs --http-unix-socket"),
        (["--allow-grpc=false", "--grpc-unix-socket=/tmp/x"], "is of a closed door: --allow-grpc"),
        (["--unix-socket-mode=rw"], "--unix-socket-mode must be an octal mode such as 660"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(options: list[str], problem: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "serve", f"--model-repository={tmp_path}"]
    found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert problem in found.stderr


def test_a_server_of_a_script(sockets: Sockets, examples: Path) -> None:
    with headrace.serve(
        examples, http_address="none", http_unix_socket=sockets.http, allow_grpc=False
    ) as server:
        assert server.url == sockets.urls[0]
        assert server.client.ready()
