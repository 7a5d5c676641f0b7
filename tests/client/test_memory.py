"""Large tensors in memory that a client shares with a server on this machine."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.client import StatusError, TimedOut
from headrace.client.blocking import Client
from headrace.client.memory import ClientMemory, SharedTensors
from headrace.client.transport import InferRequest
from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor
from tests.models.python_models import execution, tensors, write_python_model
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, onnx_examples

SCHEMES = ("unix", "grpc+unix")
X = np.arange(1 << 20, dtype=np.float32).reshape(4, -1)
# N numbers of 4 bytes, for any N; a negative one takes its time.
_GROWS = """
    import time

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            found = []
            for request in requests:
                size = int(pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy()[0])
                if size < 0:
                    time.sleep(1)
                values = np.arange(abs(size), dtype=np.int32)
                found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
            return found
"""


_SAME = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                answers.append(pb_utils.InferenceResponse([FOUND]))
            return answers
"""
_ROWS = "\nmax_batch_size: 8\n"


def lent(server: ServerProcess) -> set[int]:
    """Files of memory that are open in the server, by their number; others may close theirs."""
    folder = f"/proc/{server.pid}/fd"
    found = set[int]()
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                found.add(os.stat(f"{folder}/{name}").st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., ServerProcess]:
    """Makes servers with sockets in a folder, which are the same for each."""
    models = tmp_path / "models"
    models.mkdir()
    onnx_examples(models)
    write_python_model(
        models, "grows", _GROWS,
        tensors("input", ("SIZE", "INT64", "1")) + tensors("output", ("OUTPUT0", "INT32", "-1"))
        + execution("thread"),
    )  # fmt: skip

    def make(*options: str) -> ServerProcess:
        return ServerProcess(
            models,
            options=(
                f"--http-unix-socket={tmp_path}/unix", f"--grpc-unix-socket={tmp_path}/grpc+unix",
                "--allow-in-process-python", *options,
            ),
        )  # fmt: skip

    return make


def grown(client: Client, size: int, timeout: float | None = None) -> Array:
    result = client.infer("grows", {"SIZE": np.array([size])}, timeout=timeout)
    return result["OUTPUT0"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_in_memory(scheme: str, urls: Mapping[str, str], server: ServerProcess) -> None:
    before = lent(server)
    with Client(urls[scheme]) as client:
        kept = []
        for number in range(6):
            result = client.infer("identity_FP32", {"INPUT0": X + number})
            kept.append(result["OUTPUT0"])
            del result
            if number == 3:
                del kept[1]
        # One for the inputs; the first output came in the message, a released one was used again.
        until(lambda: len(lent(server) - before) == 5, "regions")
        for number, array in zip((0, 2, 3, 4, 5), kept, strict=True):
            np.testing.assert_array_equal(array, X + number)
            assert number == 0 or not array.flags.writeable
        model = client.model("identity_FP32")
        np.testing.assert_array_equal(model(INPUT0=X.astype(np.float64))["OUTPUT0"], X)
        texts = np.full((1, 20_000), b"a text of bytes", object)
        assert client.infer("identity_BYTES", {"INPUT0": texts})["OUTPUT0"].shape == (1, 20_000)
    until(lambda: not lent(server) - before, "no region")
    np.testing.assert_array_equal(kept[-1], X + 5)  # also when the client is closed


def test_outputs_of_other_sizes(own: Callable[..., ServerProcess], tmp_path: Path) -> None:
    with own() as server:
        for scheme in SCHEMES:
            with Client(f"{scheme}:{tmp_path}/{scheme}") as client:
                for size in (1 << 20, 1 << 20, 1 << 22, 1 << 22, 1 << 16, 3, 1 << 20):
                    np.testing.assert_array_equal(grown(client, size), np.arange(size))
        assert server.stop() == 0


def test_outputs_of_a_model_that_is_loaded_anew(
    own: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Also those that it did not have, without those that it has no more."""
    values = np.arange(1 << 18, dtype=np.float32).reshape(1, -1)

    def load(client: Client, *names: str) -> None:
        config = tensors("input", ("INPUT0", "FP32", "-1"))
        config += "".join(tensors("output", (name, "FP32", "-1")) for name in names)
        found = ", ".join(f'pb_utils.Tensor("{name}", x)' for name in names)
        source = _SAME.replace("FOUND", found)
        shutil.rmtree(tmp_path / "models" / "changes", ignore_errors=True)
        write_python_model(
            tmp_path / "models", "changes", source, config + execution("thread") + _ROWS
        )
        client.load("changes")

    with own("--model-control-mode=explicit", "--load-model=simple") as server:
        for scheme in SCHEMES:
            with Client(f"{scheme}:{tmp_path}/{scheme}") as client:
                for names in (("A",), ("A", "B"), ("B",), ("C", "B")):
                    load(client, *names)
                    for _ in range(3):
                        found = client.infer("changes", {"INPUT0": values})
                        assert set(found) == set(names)
                        for name in names:
                            np.testing.assert_array_equal(found[name], values)
        assert server.stop() == 0


def test_a_request_that_times_out(own: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """The region that the late output is written to is not used again."""
    with own() as server:
        for scheme in SCHEMES:
            with Client(f"{scheme}:{tmp_path}/{scheme}") as client:
                for _ in range(2):
                    grown(client, 1 << 20)
                with pytest.raises(TimedOut):
                    grown(client, -(1 << 20), timeout=0.1)
                found = [grown(client, 1 << 20) for _ in range(3)]
                for array in found:
                    np.testing.assert_array_equal(array, np.arange(1 << 20))
        assert server.stop() == 0


def test_a_server_that_is_restarted(own: Callable[..., ServerProcess], tmp_path: Path) -> None:
    with (
        Client(f"unix:{tmp_path}/unix") as http,
        Client(f"grpc+unix:{tmp_path}/grpc+unix") as over_grpc,
    ):
        for options in ((), ("--unix-socket-memory=false",), ("--frontends=1",)):
            with own(*options) as server:
                for client in (http, over_grpc):
                    client.wait_ready()
                    for _ in range(3):
                        np.testing.assert_array_equal(grown(client, 1 << 20), np.arange(1 << 20))
                assert server.stop() == 0


def test_a_server_that_takes_none(
    own: Callable[..., ServerProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        own("--unix-socket-memory=false"),
        caplog.at_level(logging.INFO, "headrace.client.memory"),
        Client(f"unix:{tmp_path}/unix") as client,
    ):
        for _ in range(3):
            np.testing.assert_array_equal(grown(client, 1 << 20), np.arange(1 << 20))
    [record] = caplog.records
    assert "large tensors go through the socket: [Errno 2] No such file" in record.getMessage()


def test_a_client_that_is_killed(urls: Mapping[str, str], server: ServerProcess) -> None:
    before = lent(server)
    program = (
        "import os, signal, sys, numpy as np, headrace\n"
        "client = headrace.Client(sys.argv[1])\n"
        "for _ in range(3):\n"
        "    client.infer('identity_FP32', {'INPUT0': np.ones((1, 1 << 20), np.float32)})\n"
        "own = f'headrace-{os.getpid()}-'\n"
        "print(len([n for n in os.listdir('/dev/shm') if n.startswith(own)]), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, urls["unix"]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as client:  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == b"0\n"
        assert lent(server) - before
        client.kill()
    until(lambda: not lent(server) - before, "no region")


def test_memory_of_a_response_that_a_child_has_is_not_written(urls: Mapping[str, str]) -> None:
    with Client(urls["unix"]) as client:
        client.infer("identity_FP32", {"INPUT0": X})
        response = client.infer("identity_FP32", {"INPUT0": X})
        begin = os.pipe()
        child = os.fork()
        if not child:
            os.read(begin[0], 1)
            os._exit(int(not (response["OUTPUT0"] == X).all()))
        del response
        for _ in range(3):
            client.infer("identity_FP32", {"INPUT0": X + 7})
        os.write(begin[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end in begin:
            os.close(end)


LARGE = InferRequest("m", [Tensor("X", Datatype.FP32, X)])


def answered() -> InferResponse:
    return InferResponse("m", "1", "", [Tensor("Y", Datatype.FP32, X)], Timing(0, 0, 0))


class Lenders:
    """The doors of a server for memory, which name regions; for "" they do not answer."""

    def __init__(self, *names: str) -> None:
        self._names = iter(names)
        self._tasks = set[asyncio.Task[None]]()
        self.silent = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await reader.read(1)
        if name := next(self._names):
            writer.write(f"ok {name}".encode())
        else:
            self.silent.set()
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async def ended(self) -> None:
        """Wait until clients have closed all their connections."""
        await asyncio.gather(*self._tasks)


def test_a_request_cancelled_before_it_is_sent(tmp_path: Path) -> None:
    """Its inputs' region is used by the next one."""
    sent: list[set[str]] = []

    async def send(_request: InferRequest, shared: SharedTensors) -> InferResponse:
        sent.append({place.region for place in shared.places.values()})
        return answered()

    async def ask() -> None:
        lenders = Lenders("first", "", "third")
        async with await asyncio.start_unix_server(lenders.take, f"{tmp_path}/unix.memory"):
            memory = ClientMemory(f"{tmp_path}/unix")
            await memory.infer(LARGE, send)
            cancelled = asyncio.ensure_future(memory.infer(LARGE, send))  # waits for the outputs'
            await lenders.silent.wait()
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await memory.infer(replace(LARGE, model="other"), send)
            memory.close()
            await lenders.ended()

    asyncio.run(ask())
    assert sent == [{"first"}, {"first"}]


@pytest.mark.parametrize(("text", "times"), [
    ("the model takes no such rows", 1),
    ("unexpected inference output 'Y' for model 'm'", 2),
    ("Unable to find shared memory region: 'first'", 2),
])  # fmt: skip
def test_refusals_of_the_model_are_not_sent_again(text: str, times: int, tmp_path: Path) -> None:
    sent: list[bool] = []

    async def send(_request: InferRequest, shared: SharedTensors) -> InferResponse:
        sent.append(bool(shared.places))
        if sent == [True]:
            return answered()
        raise StatusError(400, text)

    async def ask() -> None:
        lenders = Lenders("first", "second")
        async with await asyncio.start_unix_server(lenders.take, f"{tmp_path}/unix.memory"):
            memory = ClientMemory(f"{tmp_path}/unix")
            await memory.infer(LARGE, send)
            with pytest.raises(StatusError, match=text):
                await memory.infer(LARGE, send)
            memory.close()
            await lenders.ended()

    asyncio.run(ask())
    assert sent == [True, True, False][: 1 + times]
