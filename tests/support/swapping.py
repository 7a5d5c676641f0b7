"""Models that answer with a number, which identifies their state.

And the resources of a server, which show leaks of swaps.
"""

import os
import threading
from textwrap import dedent
from time import sleep

import numpy as np
import psutil

from headrace.core.errors import ServerError
from tests.models.onnx_graphs import constant
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.server_process import ServerProcess

# The answer combines its own number and that of the file beside it, to expose a mixture of states.
SOURCE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    {more}

    NUMBER = {number}


    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(8)
            config.add_input({{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}})
            config.add_output({{"name": "A", "data_type": "TYPE_FP32", "dims": [1]}})
            config.add_output({{"name": "B", "data_type": "TYPE_FP32", "dims": [1]}})
            return config

        def execute(self, requests):
            return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

        def answer(self, x):
            filled = np.full_like(x, NUMBER)
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("A", filled), pb_utils.Tensor("B", filled)]
            )
"""


def content(name: str, number: int) -> bytes:
    """The file of a model that answers with a number."""
    if name.startswith("graph"):
        return constant(number)
    return dedent(SOURCE).format(number=number, more="").encode()


def ask(client: Client, name: str) -> int:
    """The one number of which a model's whole answer consists."""
    answer = client.infer(name, {"X": np.zeros((3, 1), np.float32)})
    numbers = {float(element) for output in ("A", "B") for element in answer[output].ravel()}
    [number] = numbers
    return int(number)


class Callers:
    """Threads that query models repeatedly, over each transport.

    `serving` is the known number of each model, and `failures` are unexpected outcomes: an error,
    a mixture, or a number from before the one serving when the request was sent.
    """

    def __init__(
        self, server: ServerProcess, serving: dict[str, int], count: int, rate: int = 300
    ) -> None:
        """`count` clients, which query every model at most `rate` times a second in total."""
        self.serving = serving
        self.failures: list[str] = []
        self.answers = 0
        self._server = server
        self._over = threading.Event()
        self._pause = count / rate  # seconds, so that the server gets to something else
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(count)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        makers = (
            lambda: HttpClient(self._server.url, binary=bool(number // 2 % 2)),
            lambda: GrpcClient(self._server.grpc),
        )
        newest = dict.fromkeys(self.serving, 0)
        with makers[number % 2]() as client:
            while not self._over.is_set():
                for name in newest:
                    least = max(self.serving[name], newest[name])
                    try:
                        newest[name] = ask(client, name)
                    except (ServerError, ValueError, OSError) as error:
                        self.failures.append(f"{name}: {error!r}")
                        continue
                    self.answers += 1
                    if newest[name] < least:
                        self.failures.append(f"{name}: {newest[name]} after {least}")
                sleep(self._pause)


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    return int(psutil.Process(pid).memory_info().rss)


class Held(tuple[int, int, int, int]):
    """Numbers of files, unnamed files, threads and processes of a server."""

    @classmethod
    def of(cls, pid: int) -> "Held":
        """Current resources of the process."""
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        links = []
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue  # closed meanwhile
        # Connections vary with the clients.
        lasting = [link for link in links if not link.startswith("socket:")]
        unnamed = sum("memfd:" in link for link in links)
        return cls((len(lasting), unnamed, process.num_threads(), len(children)))
