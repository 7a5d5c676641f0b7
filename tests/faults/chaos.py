"""A repository of Python models that do what they are told, and a server that has to bear it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics, until

# What COMMAND says is done; anything else is given back. Files in the model's folder decide over
# its start: it waits while there is one called `wait`, and fails while there is one called `fail`.
_MODEL = """
    import ctypes, json, os, resource, socket, subprocess, sys, threading, time
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
        def initialize(self, args):
            self.kept = []
            folder = args["model_repository"]
            while os.path.exists(os.path.join(folder, "wait")):
                time.sleep(0.01)
            if os.path.exists(os.path.join(folder, "fail")):
                raise RuntimeError("at the start")

        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def finalize(self):
            raise RuntimeError("at the end")

        def answer(self, request):
            [command] = request.inputs()[0].as_numpy().ravel().tolist()
            word, _, rest = command.decode().partition(" ")
            if word == "exit":
                os._exit(int(rest))
            elif word == "stick":  # in native code that holds the interpreter's lock
                open(rest, "w").close()
                ctypes.PyDLL(None).sleep(600)
            elif word == "loop":
                while True:
                    pass
            elif word == "compute":
                end = time.monotonic() + float(rest)
                while time.monotonic() < end:
                    pass
            elif word == "hog":
                np.ones(int(rest) << 20, np.uint8)
            elif word == "grow":
                self.kept.append(np.ones(200 << 20, np.uint8))
                open(rest, "w").close()
                while os.path.exists(rest):
                    time.sleep(0.01)
            elif word == "write":
                os.write(link(), bytes.fromhex(rest))
                time.sleep(600)
            elif word == "mute":
                os.close(1), os.close(2)
            elif word == "fork":
                command = str(os.fork()).encode()
                if command == b"0":
                    time.sleep(600)
            elif word == "thread":
                threading.Thread(target=time.sleep, args=(600,)).start()
            elif word == "raise":
                raise ValueError(rest)
            elif word == "nothing":
                return None
            elif word == "rows":
                return self.response(np.array([[b"a"], [b"b"]], object))
            elif word == "type":
                return self.response(np.zeros((1, 1), np.float32))
            elif word == "pid":
                command = str(os.getpid()).encode()
            elif word == "limits":
                score = int(open("/proc/self/oom_score_adj").read())
                files = resource.getrlimit(resource.RLIMIT_NOFILE)
                command = json.dumps([os.nice(0), files, score]).encode()
            return self.response(np.array([[command]], object))

        def response(self, array):
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)])
"""
# By model: its parameters, and how many workers it has.
_MODELS: dict[str, tuple[dict[str, str], int]] = {
    "plain": ({}, 1),
    "bystander": ({}, 1),
    "stopped": ({"heartbeat_secs": "2"}, 1),
    "stuck": ({"heartbeat_secs": "2"}, 1),
    "limited": (
        {
            "memory_limit": "400MiB",
            "nice": "5",
            "max_open_files": "64",
            "execution_limit_secs": "2",
            "strict_outputs": "true",
        },
        1,
    ),
    "counted": ({"max_requests": "50"}, 2),
    "growing": ({"max_rss": "150MiB"}, 1),
    "unlucky": ({"max_requests": "1"}, 1),
    "outsized": ({"max_rss": "1MiB"}, 1),
}
WORKERS = sum(count for _, count in _MODELS.values())


def write_models(root: Path) -> None:
    config = "max_batch_size: 4\n" + tensors("input", ("COMMAND", "STRING", "1"))
    config += tensors("output", ("OUTPUT", "STRING", "1"))
    for name, (parameters, count) in _MODELS.items():
        more = f"instance_group {{ count: {count} }}\n" + "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
            for key, value in parameters.items()
        )
        write_python_model(root, name, _MODEL, config + more)
    write_model(root, "neighbour", add_sub(Datatype.INT32, 16), "max_batch_size: 8")


class Chaos:
    """A server with these models, and what its clients see of it. Any thread may ask."""

    def __init__(self, server: ServerProcess, root: Path, client: httpx.Client) -> None:
        self.server = server
        self._root = root
        self._client = client

    def ask(self, model: str, command: str) -> httpx.Response:
        body = {
            "inputs": [{"name": "COMMAND", "shape": [1, 1], "datatype": "BYTES", "data": [command]}]
        }
        return self._client.post(f"{self.server.url}/v2/models/{model}/infer", json=body)

    def answer(self, model: str, command: str) -> str:
        response = self.ask(model, command)
        assert response.status_code == 200, response.text
        return str(response.json()["outputs"][0]["data"][0])

    def pid(self, model: str) -> int:
        return int(self.answer(model, "pid"))

    def ready(self, model: str = "") -> bool:
        """Whether a model, or the server, says that it is."""
        path = f"models/{model}" if model else "health"
        return self._client.get(f"{self.server.url}/v2/{path}/ready").status_code == 200

    def reason(self, model: str) -> str:
        """Why a model says that it is not ready."""
        return str(self._client.get(f"{self.server.url}/v2/models/{model}/ready").json()["reason"])

    def others_are_served(self) -> bool:
        """Whether models that have nothing to do with it answer: in the server, and in a worker."""
        row = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
        body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
        found = self._client.post(f"{self.server.url}/v2/models/neighbour/infer", json=body)
        return found.status_code == 200 and self.answer("bystander", "x") == "x"

    def flag(self, model: str, name: str) -> Path:
        """The file that decides over the start of a model."""
        return self._root / model / name

    def counted(self, name: str, model: str, **labels: str) -> float:
        every = sorted({"model": model, "version": "1", **labels}.items())
        spelled = ",".join(f'{key}="{value}"' for key, value in every)
        return asyncio.run(metrics(self.server))[f"{name}{{{spelled}}}"]

    def logged(self, text: str) -> bool:
        return text in self.server.log

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.server.pid).children(recursive=True)


def eventually(look: Callable[[], object], within: float = 30) -> None:
    async def looked() -> object:
        # On a thread: what it looks at may have an event loop of its own.
        return await asyncio.to_thread(look)

    asyncio.run(until(looked, bool, within))
