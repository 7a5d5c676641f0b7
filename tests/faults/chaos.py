"""Repositories of Python models that obey commands, and a server of them."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import in_config, tensors, write_python_model
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics, until

# COMMAND is executed; anything else is returned. Files in the model's folder control
# its start: it waits while there is one called `wait`, and fails while there is one called `fail`.
_MODEL = """
    import ctypes, json, os, resource, signal, socket, subprocess, sys, threading, time
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
            self.kept, self.parting = [], "raises_at_the_end" in args["model_config"]
            folder = args["model_repository"]
            while os.path.exists(os.path.join(folder, "wait")):
                time.sleep(0.01)
            if os.path.exists(os.path.join(folder, "fail")):
                raise RuntimeError("at the start")

        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def finalize(self):
            if self.parting:
                raise RuntimeError("at the end")

        def answer(self, request):
            [command] = request.inputs()[0].as_numpy().ravel().tolist()
            word, _, rest = command.decode().partition(" ")
            if word == "exit":
                os._exit(int(rest))
            elif word == "quit":  # while one of its threads continues
                threading.Thread(target=time.sleep, args=(600,)).start()
                sys.exit(1)
            elif word == "segfault":
                ctypes.string_at(0)
            elif word == "sleep":
                open(rest, "w").close()
                time.sleep(600)
            elif word == "stick":  # in native code that holds the interpreter's lock
                open(rest, "w").close()
                ctypes.PyDLL(None).sleep(600)
            elif word == "lock":  # for ever
                print("holds its lock", flush=True)
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            elif word == "nap":
                print("naps", flush=True)
                time.sleep(0.7)
            elif word == "fill":  # the disk of temporary files
                try:
                    with open(os.path.join(os.environ["TMPDIR"], "filling"), "wb") as file:
                        while True:
                            file.write(bytes(1 << 16))
                            file.flush()
                except OSError as error:
                    command = os.strerror(error.errno).encode()
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
            elif word == "child":
                command = str(subprocess.Popen(["sleep", "600"]).pid).encode()
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
            elif word == "thread":
                threading.Thread(target=time.sleep, args=(600,)).start()
            elif word == "flood":
                while True:
                    print("y" * 50)
            elif word == "print":
                print("x" * int(rest))
            elif word == "raise":
                raise ValueError(rest.replace("half a pair", "\\ud800"))
            elif word == "nothing":
                return None
            elif word == "rows":
                return self.response(np.array([[b"a"], [b"b"]], object))
            elif word == "type":
                return self.response(np.zeros((1, 1), np.float32))
            elif word == "surrogate":
                return self.response(np.array([["\\ud800"]], object))
            elif word == "parameter":
                return self.response(np.array([[command]], object), {"n": 2**int(rest)})
            elif word == "environment":
                command = json.dumps(dict(os.environ)).encode()
            elif word == "files":
                command = str(len(os.listdir("/proc/self/fd"))).encode()
            elif word == "pid":
                command = str(os.getpid()).encode()
            elif word == "limits":
                score = int(open("/proc/self/oom_score_adj").read())
                files = resource.getrlimit(resource.RLIMIT_NOFILE)
                command = json.dumps([os.nice(0), files, score]).encode()
            return self.response(np.array([[command]], object))

        def response(self, array, parameters=None):
            output = pb_utils.Tensor("OUTPUT", array)
            return pb_utils.InferenceResponse([output], parameters=parameters)
"""
# Parameters and number of workers, by model.
Models = Mapping[str, tuple[Mapping[str, object], int]]


def write_obedient(root: Path, name: str, config: str = "", rows: int = 1) -> None:
    """A Python model that obeys commands, with a batch size."""
    config += f"max_batch_size: {rows}\n" + tensors("input", ("COMMAND", "STRING", "1"))
    config += tensors("output", ("OUTPUT", "STRING", "1"))
    write_python_model(root, name, _MODEL, config)


def write_models(root: Path, models: Models, rows: int = 1) -> None:
    """Such models, and one in ONNX."""
    for name, (parameters, count) in models.items():
        config = f"instance_group {{ count: {count} }}\n" + in_config(parameters)
        write_obedient(root, name, config, rows)
    write_model(root, "neighbour", add_sub(Datatype.INT32, 16), "max_batch_size: 8")


class Chaos:
    """A server with these models as its clients see it. Safe for any thread."""

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
        """Readiness of a model, or of the server."""
        path = f"models/{model}" if model else "health"
        return self._client.get(f"{self.server.url}/v2/{path}/ready").status_code == 200

    def reason(self, model: str) -> str:
        """Reason of a model that is not ready."""
        return str(self._client.get(f"{self.server.url}/v2/models/{model}/ready").json()["reason"])

    def others_are_served(self) -> bool:
        """True if other models answer: in process, and in a worker."""
        return self.neighbour_is_served() and self.answer("bystander", "x") == "x"

    def neighbour_is_served(self) -> bool:
        row = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
        body = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
        url = f"{self.server.url}/v2/models/neighbour/infer"
        return self._client.post(url, json=body).status_code == 200

    def flag(self, model: str, name: str) -> Path:
        """The file that controls the start of a model."""
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
        # On a thread: the check may have an event loop of its own.
        return await asyncio.to_thread(look)

    asyncio.run(until(looked, bool, within))
