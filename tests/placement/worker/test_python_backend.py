"""A worker from start to end, on a thread as during a load."""

import logging
import os
import resource
from pathlib import Path

import psutil
import pytest

from headrace.core.daemon_thread import NoResources
from headrace.core.errors import InvalidConfig, InvalidOption, LoadFailed
from headrace.ipc.frames import FrameKind
from headrace.placement.loaded import ModelTraits
from headrace.placement.worker.loaded_worker import LoadedWorker, ask_worker
from headrace.placement.worker.python_backend import PythonBackend
from headrace.placement.worker.python_options import CODE_ROWS
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from tests.placement.worker.specs import spec

GOOD = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(8)
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1, 2]})
            config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [1]})
            return config

        def initialize(self, args):
            print("started", args["model_name"])

        def execute(self, requests): ...
"""


def alive(worker: LoadedWorker) -> bool:
    return psutil.pid_exists(worker.process.pid)


def test_a_model_is_completed_and_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = PythonBackend().load_apart(spec(tmp_path, GOOD, quarantine_deaths="3"))
    assert worker.traits == ModelTraits(
        declared_by_code=True, reads_parameters=True, row_limit=CODE_ROWS, quarantine_deaths=3
    )
    assert worker.memory(growth=1) > 1 << 20  # its own, not this process's
    config = worker.completed(ModelConfig(name="m"))
    assert config.max_batch_size == 8
    assert [(t.name, list(t.dims)) for t in config.input] == [("X", [-1, 2])]
    assert [t.name for t in config.output] == ["Y"]
    worker.begin(config, reading.signature(config), False)
    another = worker.again()
    assert another.pid != worker.process.pid
    another.kill()
    worker.close()
    assert not alive(worker)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"m worker {pid}: started m" for pid in (worker.process.pid, another.pid)]


def test_a_contradicting_configuration(tmp_path: Path) -> None:
    config: dict[str, object] = {"max_batch_size": 16}
    with pytest.raises(LoadFailed, match="specified max_batch_size 16, but in the model"):
        PythonBackend().load_apart(spec(tmp_path, GOOD, config))


def test_a_completion_that_is_not_a_configuration(tmp_path: Path) -> None:
    worker = PythonBackend().load_apart(spec(tmp_path, GOOD.replace("TYPE_FP32", "TYPE_FLOAT")))
    with pytest.raises(InvalidConfig, match=r"auto_complete_config: .*TYPE_FLOAT"):
        worker.completed(ModelConfig(name="m"))
    worker.close()


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "1e9"])
def test_an_invalid_limit(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidOption, match="expected a number of seconds"):
        PythonBackend().load_apart(spec(tmp_path, GOOD, execution_limit_secs=text))


def test_a_missing_interpreter(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="cannot start /no/python: No such file"):
        PythonBackend().load_apart(spec(tmp_path, GOOD, python="/no/python"))


def test_all_names_of_the_package_are_there_in_a_worker(tmp_path: Path) -> None:
    source = """
        from headrace import *
        import headrace

        assert headrace.__version__ == __version__

        @model
        def f(x: Float32[N]) -> list[float]:
            return [1.0]
    """
    worker = PythonBackend().load_apart(spec(tmp_path, source))
    assert [t.name for t in worker.completed(ModelConfig(name="m")).input] == ["x"]
    worker.close()


def test_a_model_that_exits_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LoadFailed, match="SystemExit: 3"):
        PythonBackend().load_apart(spec(tmp_path, "import sys\nsys.exit(3)"))
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().endswith(": SystemExit: 3")
    assert "sys.exit(3)" in getattr(record, "trace", "")


def test_a_failure_leaves_no_process(tmp_path: Path) -> None:
    children = set(psutil.Process().children())  # those of earlier tests may end
    with pytest.raises(LoadFailed, match="RuntimeError: no"):
        PythonBackend().load_apart(spec(tmp_path, "raise RuntimeError('no')"))
    assert not set(psutil.Process().children()) - children


# What asyncio leaves of an event loop that it could not create.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_asking_a_worker_needs_free_descriptors(tmp_path: Path) -> None:
    process = PythonBackend().load_apart(spec(tmp_path, GOOD)).process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(NoResources, match="cannot ask a worker process: Too many open files"):
            ask_worker(process, FrameKind.START, {}, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
