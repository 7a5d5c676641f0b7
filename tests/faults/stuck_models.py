"""Models that hang on request, and clients of theirs over both protocols."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection
from typing import Any

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.chaos import write_obedient
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import in_config
from tests.support.busy_model import FOREVER, busy_json, write_busy_model
from tests.support.client import Client, Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.health_watch import SERVING, HealthWatch
from tests.support.http_client import HttpClient
from tests.support.raw_clients import post_bytes
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics


def write_told(root: Path, name: str, **parameters: object) -> None:
    """A Python model that obeys commands, with parameters in its configuration."""
    write_obedient(root, name, in_config(parameters))


def write_neighbours(root: Path) -> None:
    """Two healthy models: one in process, one in a worker."""
    write_model(root, "neighbour", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    write_told(root, "bystander")


def command(text: str) -> dict[str, Array]:
    """The inputs of a request to such a model."""
    return {"COMMAND": strings([text.encode()], [1, 1])}


def told(client: Client, model: str, text: str) -> str:
    [answer] = client.infer(model, command(text))["OUTPUT"].ravel().tolist()
    return bytes(answer).decode()


def neighbours_serve(client: Client) -> bool:
    """True if the healthy models answer correctly and report themselves ready."""
    row = np.arange(16, dtype=np.int32).reshape(1, 16)
    added = client.infer("neighbour", {"INPUT0": row, "INPUT1": row})["OUTPUT0"]
    return (
        np.array_equal(added, row + row)
        and told(client, "bystander", "there") == "there"
        and client.model_ready("neighbour")
        and client.model_ready("bystander")
    )


@contextmanager
def calm(server: ServerProcess) -> Iterator[Callable[[], bool]]:
    """A check, over both protocols, that the healthy models serve and the server is ready.

    Both hold before and after, and the server's readiness never changes between.
    """
    with (
        client_of(server, "http") as http,
        GrpcClient(server.grpc) as grpc,
        ThreadPoolExecutor(1) as pool,
        HealthWatch(grpc) as watch,
    ):

        def others_serve() -> bool:
            return all(client.ready() and neighbours_serve(client) for client in (http, grpc))

        assert watch.next() == SERVING
        change = pool.submit(watch.changed)
        assert others_serve()
        yield others_serve
        assert others_serve()
        assert not change.done(), "the server's readiness has changed"
        watch.cancel()


def reason_of(client: Client, model: str) -> str:
    [found] = [one.reason for one in client.index().models if one.name == model]
    return str(found)


async def counted(server: ServerProcess, name: str, model: str, **labels: str) -> float:
    every = sorted({"model": model, "version": "1", **labels}.items())
    spelled = ",".join(f'{key}="{value}"' for key, value in every)
    return (await metrics(server))[f"{name}{{{spelled}}}"]


class Impatient(ABC):
    """A request whose client disconnects before the answer."""

    @abstractmethod
    def go(self) -> None:
        """Disconnect the client."""


class _ImpatientHttp(Impatient):
    def __init__(self, server: ServerProcess, model: str, body: bytes) -> None:
        host, port = server.http.split(":")
        self._socket = create_connection((host, int(port)))
        self._socket.sendall(post_bytes(f"/v2/models/{model}/infer", body))

    def go(self) -> None:
        self._socket.close()


class _ImpatientGrpc(Impatient):
    def __init__(self, server: ServerProcess, message: pb.ModelInferRequest) -> None:
        self._client = GrpcClient(server.grpc)
        procedure = self._client.procedure("ModelInfer", pb.ModelInferResponse)
        self._call: Any = procedure.future(message)

    def go(self) -> None:
        self._call.cancel()
        self._client.close()


def nap(server: ServerProcess, model: str) -> Impatient:
    """Keep a model busy longer than its client waits, but not for ever."""
    row = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": ["nap"]}
    return _ImpatientHttp(server, model, json.dumps({"inputs": [row]}).encode())


def hang(server: ServerProcess, protocol: str, model: str) -> Impatient:
    """Hang a model: by a deadlock, or in ONNX by an endless loop."""
    if protocol == "grpc":
        inputs = [Input(name, array) for name, array in hanging(model).items()]
        return _ImpatientGrpc(server, infer_message(model, inputs))
    row = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": ["lock"]}
    body = json.dumps({"inputs": [row]}).encode()
    return _ImpatientHttp(server, model, busy_json(1, FOREVER) if "busy" in model else body)


def hanging(model: str) -> dict[str, Array]:
    if "busy" in model:
        return {"VALUE": np.array([[1]]), "COST": np.array([[FOREVER]])}
    return command("lock")


@contextmanager
def client_of(server: ServerProcess, protocol: str) -> Iterator[Client]:
    """A client over `http` or `grpc`."""
    with HttpClient(server.url, False) if protocol == "http" else GrpcClient(server.grpc) as found:
        yield found


def write_spinning(root: Path, name: str, **parameters: object) -> None:
    """An ONNX model on a thread that a request can run for ever; its name has `busy`."""
    write_busy_model(root, name, max_batch_size=1, more=in_config(parameters))
