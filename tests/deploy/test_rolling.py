"""Rolling restarts of two servers behind HAProxy: nothing that clients send is lost.

Servers run with the command line, the variables and the grace period of the chart's pods; HAProxy
with the configuration of `docs/balancing.md`. Each server in turn gets SIGTERM, must end within its
grace period, and is started again, while clients send requests of all kinds.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.deploy.chart import ROOT, Manifest, of_kind, render
from tests.models import onnx_graphs
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.remote import free_ports
from tests.support.scrape import until
from tests.support.started import until_answers

ROW = np.arange(4, dtype=np.float32).reshape(1, 4)
PARTS = 8
# PARTS responses, a twentieth of a second apart: streams are under way whenever a server ends.
PACED = f"""
    import threading
    import time

    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.tell, args=(request,)).start()

        def tell(self, request):
            sender = request.get_response_sender()
            for number in range({PARTS}):
                out = pb_utils.Tensor("OUT", np.array([[number]], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
                time.sleep(0.05)
            sender.send(flags=FINAL)
"""
CONFIG = (
    "max_batch_size: 8\nmodel_transaction_policy { decoupled: true }\n"
    + tensors("input", ("TEXT", "STRING", "1"))
    + tensors("output", ("OUT", "INT32", "1"))
)
PAUSE_SECS = 0.005  # between requests of a client: the load is not to starve the health checks

haproxy = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(haproxy is None, reason="haproxy is not installed"),
]


class Pod:
    """A server that runs as the chart's Deployment says, on ports of its own."""

    def __init__(self, deployment: Manifest, models: Path, cache: Path, log: Path) -> None:
        pod = deployment["spec"]["template"]["spec"]
        [container] = pod["containers"]
        self.http, self.grpc, metrics = free_ports(3)
        self.grace: int = pod["terminationGracePeriodSeconds"]
        places = {"/models": str(models), "/cache": str(cache)}
        self._command = [sys.executable, "-m", "headrace", *container["args"]]
        self._command = [part.replace("/models", str(models)) for part in self._command]
        given = {
            each["name"]: places.get(each["value"], each["value"]) for each in container["env"]
        }
        self._environment = {
            **os.environ, **given,
            "HEADRACE_HTTP_PORT": str(self.http), "HEADRACE_GRPC_PORT": str(self.grpc),
            "HEADRACE_METRICS_PORT": str(metrics),
        }  # fmt: skip
        self._log = log
        self._probe: str = container["readinessProbe"]["httpGet"]["path"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until the readiness probe is answered."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )
        until_answers(f"http://127.0.0.1:{self.http}{self._probe}", self.process, self._log, 60)

    def stop(self) -> None:
        """End it as Kubernetes does; the process must be gone, with status 0, in time."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(self.grace) == 0, self._log.read_text()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Balancer:
    """HAProxy with the configuration of the documentation, in front of two servers."""

    def __init__(self, pods: list[Pod], folder: Path) -> None:
        page = (ROOT / "docs" / "balancing.md").read_text(encoding="utf-8")
        [text] = re.findall(r"^```haproxy\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        self.http, self.grpc = free_ports(2)
        places = {9000: self.http, 9001: self.grpc}
        for pod, base in zip(pods, (8000, 8010), strict=True):
            places |= {base: pod.http, base + 1: pod.grpc}
        text, count = re.subn(r"\b(90|80)\d\d\b", lambda found: str(places[int(found[0])]), text)
        assert count == 8
        self._socket = folder / "haproxy.sock"
        file = folder / "haproxy.cfg"
        file.write_text(f"global\n  stats socket {self._socket} level admin\n\n{text}")
        assert haproxy is not None
        self._process = subprocess.Popen([haproxy, "-f", file, "-db"], stderr=subprocess.DEVNULL)
        until(self._socket.exists, "the socket of HAProxy")

    def up(self) -> bool:
        """True if both servers are up for HTTP and for gRPC."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(self._socket))
            asked.sendall(b"show stat\n")
            lines = asked.makefile().read().splitlines()
        states = [line.split(",")[17] for line in lines if re.match(r"\w+,[ab],", line)]
        assert len(states) == 4, lines
        return all(state.startswith("UP") for state in states)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Load:
    """Clients that send one request after the other until they are told to end."""

    def __init__(self, balancer: Balancer) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self._balancer = balancer
        self._over = threading.Event()
        kinds = (self._http, self._grpc, self._events, self._stream)
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, kind: Callable[[], Iterator[None]]) -> None:
        name = kind.__name__.removeprefix("_")
        requests = kind()
        while not self._over.is_set():
            try:
                next(requests)
                self.counts[name] += 1
                self._over.wait(PAUSE_SECS)
            except Exception as error:
                self.lost.append(f"{name} {self.counts[name]}: {error!r}")
                requests = kind()
        requests.close()  # type: ignore[attr-defined]  # of a generator

    def _http(self) -> Iterator[None]:
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4],
                            "data": ROW.ravel().tolist()}]}  # fmt: skip
        with httpx.Client(base_url=f"http://127.0.0.1:{self._balancer.http}", timeout=60) as client:
            while True:
                answer = client.post("/v2/models/m/infer", json=body)
                assert answer.status_code == 200, (answer.status_code, answer.text)
                assert answer.json()["outputs"][0]["data"] == ROW.ravel().tolist()
                yield

    def _grpc(self) -> Iterator[None]:
        with GrpcClient(f"127.0.0.1:{self._balancer.grpc}") as client:
            while True:
                found = client.infer("m", {"INPUT0": ROW})["OUTPUT0"]
                np.testing.assert_array_equal(found, ROW)
                yield

    def _events(self) -> Iterator[None]:
        with httpx.Client(base_url=f"http://127.0.0.1:{self._balancer.http}", timeout=60) as client:
            while True:
                answer = client.post("/v2/models/paced/generate_stream", json={"TEXT": "a"})
                assert answer.status_code == 200, (answer.status_code, answer.text)
                events = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
                assert [json.loads(event)["OUT"] for event in events] == list(range(PARTS))
                yield

    def _stream(self) -> Iterator[None]:
        with GrpcClient(f"127.0.0.1:{self._balancer.grpc}") as client:
            while True:
                with Stream(client) as stream:
                    text = Input("TEXT", strings([b"a"], [1, 1]))
                    stream.send(infer_message("paced", [text]))
                    stream.half_close()
                    numbers = [
                        int(np.frombuffer(raw, np.int32)[0])
                        for message in stream.rest()
                        for raw in message.infer_response.raw_output_contents
                    ]
                assert numbers == list(range(PARTS)), numbers
                yield


@contextmanager
def two_pods(folder: Path) -> Iterator[tuple[list[Pod], Balancer]]:
    (models := folder / "models").mkdir()
    onnx_graphs.write_model(
        models, "m", onnx_graphs.identity(dims=("rows", "length")), "max_batch_size: 8"
    )
    write_python_model(models, "paced", PACED, CONFIG)
    deployment = of_kind(render({}), "Deployment")
    pods = [Pod(deployment, models, folder / "cache", folder / f"{name}.log") for name in "ab"]
    balancer: Balancer | None = None
    try:
        for pod in pods:
            pod.start()
        balancer = Balancer(pods, folder)
        until(balancer.up, "servers that HAProxy knows as ready")
        yield pods, balancer
    finally:
        if balancer is not None:
            balancer.end()
        for pod in pods:
            pod.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("restarts", [3, pytest.param(50, marks=pytest.mark.whole)])
def test_nothing_is_lost_in_rolling_restarts(restarts: int, tmp_path: Path) -> None:
    with two_pods(tmp_path) as (pods, balancer):
        with Load(balancer) as load:
            until(lambda: len(load.counts) == 4, "answers of each kind")
            for number in range(restarts):
                pod = pods[number % 2]
                pod.stop()
                pod.start()
                until(balancer.up, "a server that HAProxy knows as ready again")
        assert load.lost == [], dict(load.counts)
        print(dict(load.counts))
