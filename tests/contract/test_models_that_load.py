"""Models that load and unload others in `initialize`."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ServerError
from tests.contract.conftest import CLIENTS, FRONT_ENDS
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Client
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

CONFIG = tensors("output", ("PID", "INT32", "1"))
# It runs the calls in the file `steps`: lists of concurrent calls.
LOADER = """
    import json, os, pathlib
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            steps = pathlib.Path(__file__).parents[1] / "steps"
            for step in json.loads(steps.read_text()):
                with ThreadPoolExecutor() as pool:
                    done = [pool.submit(getattr(pb_utils, call), name) for call, name in step]
                assert all(each.result() in (None, True) for each in done), step

        def execute(self, requests):
            output = pb_utils.Tensor("PID", np.array([os.getpid()], np.int32))
            return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
LOAD, UNLOAD, READY = "load_model", "unload_model", "is_model_ready"
STEPS: dict[str, list[list[tuple[str, str]]]] = {
    "leaf": [], "other": [],
    "middle": [[(LOAD, "leaf")]],
    "top": [[(LOAD, "middle"), (LOAD, "other")], [(READY, "middle"), (READY, "leaf")]],
    "one": [[(LOAD, "two")]], "two": [[(LOAD, "one")]],
    "self": [[(LOAD, "self")]],
    "shy": [[(UNLOAD, "shy")]],
    "cleaner": [[(LOAD, "leaf")], [(UNLOAD, "leaf"), (UNLOAD, "nobody")]],
    "lost": [[(LOAD, "nobody")]],
}  # fmt: skip

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loading")
    for name, steps in STEPS.items():
        write_python_model(root, name, LOADER, CONFIG)
        write_steps(root, name, steps)
    return root


@pytest.fixture(scope="module", params=["http", pytest.param("grpc", marks=pytest.mark.slow)])
def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Over gRPC in slow tests alone: each load starts workers, and is the same operation."""
    with CLIENTS[request.param](server) as client:
        yield client


def write_steps(root: Path, name: str, steps: Sequence[object]) -> None:
    """Set the calls of a model's next load."""
    (root / name / "steps").write_text(json.dumps(steps))


@pytest.fixture(scope="module", params=["default", FRONT_ENDS])
def server(request: pytest.FixtureRequest, root: Path) -> Iterator[ServerProcess]:
    """A server that loads one model at a time, at start too."""
    options = ["--model-control-mode=explicit", "--load-model=top", "--model-load-thread-count=1"]
    if request.param != "default":
        options.append("--frontends=2")
    with clean_server(root, options=options) as process:
        yield process


def test_models_load_others_at_start_and_later(caller: Client) -> None:
    for name in ("top", "middle", "other", "leaf"):
        assert caller.model_ready(name), name
        caller.unload(name)
    caller.load("top")
    for name in ("top", "middle", "other", "leaf"):
        assert caller.infer(name, {})["PID"].shape == (1,)


def test_models_unload_others(caller: Client) -> None:
    caller.unload("cleaner")
    caller.load("cleaner")
    assert caller.model_ready("cleaner")
    assert not caller.model_ready("leaf")
    caller.load("leaf")


@pytest.mark.parametrize(("name", "says"), [
    ("one", "each has the next one loaded: two -> one -> two"),
    ("self", "each has the next one loaded: self -> self"),
    ("lost", "TritonModelException: failed to load 'nobody'"),
    ("shy", "failed to load 'shy', no version is available"),
])  # fmt: skip
def test_impossible_loads_fail(root: Path, caller: Client, name: str, says: str) -> None:
    with pytest.raises(ServerError, match=says):
        caller.load(name)
    assert not caller.model_ready(name)
    write_steps(root, name, [])
    caller.load(name)
    assert caller.model_ready(name)
    caller.unload(name)
    write_steps(root, name, STEPS[name])


def test_a_restarted_worker_loads_again(caller: Client) -> None:
    caller.load("middle")
    caller.unload("leaf")
    pid = int(caller.infer("middle", {})["PID"][0])
    os.kill(pid, signal.SIGKILL)
    until(lambda: caller.model_ready("leaf"), "the next worker to have the model loaded")
    until(lambda: caller.infer("middle", {})["PID"] != np.int32(pid), "the next worker")
