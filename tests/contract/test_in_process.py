"""In-process Python models: differences from workers, over both doors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, NotFound
from tests.contract.conftest import CLIENTS
from tests.models.python_models import execution, tensors, write_python_model
from tests.support.client import Client
from tests.support.server_process import ServerProcess

# Its answer is the number in the file beside it, and its input; negative inputs fail.
MODEL = """
    import os
    import sys
    import threading

    import numpy as np
    import triton_python_backend_utils as pb_utils

    from beside import NUMBER


    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_instance_name"]

        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = request.inputs()[0].as_numpy()
            if x[0, 0] == -1:
                raise ValueError("as asked")
            if x[0, 0] == -2:
                sys.exit(3)
            if x[0, 0] == -3:
                error = pb_utils.TritonError("not this", pb_utils.TritonError.NOT_FOUND)
                return pb_utils.InferenceResponse(error=error)
            pb_utils.Logger.log_info(f"{NUMBER} sees a request")
            here = threading.current_thread() is threading.main_thread()
            told = [[NUMBER, os.getpid(), here, *x[0]]]
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(told, np.int64))])

        def finalize(self):
            pb_utils.Logger.log_info(f"{self.name} has ended")
"""


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with such models, which must have ended them."""
    root = tmp_path_factory.mktemp("in_process")
    config = "max_batch_size: 8\n" + tensors("input", ("X", "INT64", "1"))
    config += tensors("output", ("Y", "INT64", "4"))
    for number, kind in enumerate(("inline", "thread"), start=1):
        where = execution(kind) + "instance_group { count: 2 }\n"
        write_python_model(root, f"py_{kind}", MODEL, where + config)
        (root / f"py_{kind}" / "1" / "beside.py").write_text(f"NUMBER = {number}\n")
    with ServerProcess(root, options=["--allow-in-process-python"]) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log
        for name in ("py_inline_0_0", "py_inline_0_1", "py_thread_0_0", "py_thread_0_1"):
            assert f"{name} has ended" in process.log


@pytest.fixture(scope="module", params=["http", "grpc"])
def asked(request: pytest.FixtureRequest, in_process: ServerProcess) -> Iterator[Client]:
    with CLIENTS[request.param](in_process) as client:
        yield client


def ask(client: Client, kind: str, value: int) -> list[int]:
    answer = client.infer(f"py_{kind}", {"X": np.array([[value]])})
    told: list[int] = answer["Y"][0].tolist()
    return told


@pytest.mark.parametrize(("kind", "number"), [("inline", 1), ("thread", 2)])
def test_instances_run_in_the_servers_process(
    asked: Client, in_process: ServerProcess, kind: str, number: int
) -> None:
    properties = asked.model_metadata(f"py_{kind}").properties
    assert (properties["instance_kind"], properties["instances"]) == (kind, "2")
    on_loop = int(kind == "inline")
    assert ask(asked, kind, 5) == [number, in_process.pid, on_loop, 5]
    in_process.await_logged(f"triton: {number} sees a request")


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_an_error_affects_its_request_alone(asked: Client, kind: str) -> None:
    def answer(number: int) -> int | str:
        try:
            return ask(asked, kind, -(number % 4) or number)[-1]
        except NotFound as error:
            return str(error)
        except ExecutionFailed as error:
            return str(error).rpartition("message: ")[2]

    errors = {1: "ValueError: as asked", 2: "SystemExit: 3"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, range(80)))
    for number, found in enumerate(answers):
        if number % 4 == 3:
            assert "not this" in str(found)
        else:
            assert found == errors.get(number % 4, number)
