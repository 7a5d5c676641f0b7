"""Engines in the program's own process."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import AsyncEngine, Engine, Float32, N, ServeError
from headrace.client import StatusError
from headrace.options import SettingsError
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.scrape import until

ONE = np.ones((1, 1), np.float32)


@headrace.model
def doubled(x: Float32[N]) -> Float32[N]:
    return x * np.float32(2)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "same", identity(dims=["rows", 1]), "max_batch_size: 8")
    return tmp_path / "models"


def test_the_process_stays_as_it_was(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def state() -> list[object]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
        policy = type(asyncio.get_event_loop_policy())
        return [handlers, gc.isenabled(), gc.get_threshold(), policy, sys.getswitchinterval()]

    before, threads = state(), threading.active_count()
    with Engine(repository) as engine:
        np.testing.assert_array_equal(engine.infer("same", {"INPUT0": ONE}).array, ONE)
        assert state() == before
    assert state() == before
    until(lambda: threading.active_count() <= threads, "the end of threads")
    assert capfd.readouterr() == ("", "")


def test_models_of_a_program(repository: Path) -> None:
    file = next(repository.glob("same/1/*"))
    with Engine(doubled, {"also": str(file)}, repository) as engine:
        assert engine.model("doubled")(x=[1, 2]).array.tolist() == [2, 4]
        assert {model["name"] for model in engine.index()} == {"doubled", "also", "same"}
        assert b'nv_inference_request_success{model="doubled"' in engine.metrics()


def test_arrays_are_those_of_the_caller(repository: Path) -> None:
    with Engine(repository) as engine:
        model = engine.model("same")
        given = np.arange(4, dtype=np.float32).reshape(4, 1)
        given.flags.writeable = False
        kept = [model(INPUT0=given)["OUTPUT0"] for _ in range(100)]
        for found in kept:
            np.testing.assert_array_equal(found, given)


def test_many_threads(repository: Path) -> None:
    with Engine(repository, timeout=60) as engine, ThreadPoolExecutor(16) as pool:
        model = engine.model("same")

        def ask(number: int) -> float:
            return float(model(INPUT0=np.full((1, 1), number, np.float32)).array[0, 0])

        assert list(pool.map(ask, range(500))) == list(range(500))


async def test_an_engine_on_the_callers_loop(repository: Path) -> None:
    async with AsyncEngine(repository) as engine, AsyncEngine(repository) as other:
        asked = [e.infer("same", {"INPUT0": ONE * n}) for n in range(50) for e in (engine, other)]
        found = [float(one.array[0, 0]) for one in await asyncio.gather(*asked)]
        assert found == [n for n in range(50) for _ in range(2)]
    with pytest.raises(RuntimeError, match="closed"):
        await engine.infer("same", {"INPUT0": ONE})


def test_a_model_that_cannot_be_loaded(repository: Path) -> None:
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ServeError, match="broken"):
        Engine(repository)
    with Engine(repository, exit_on_error=False) as engine:
        assert engine.ready("same")
        assert not engine.ready("broken")


def test_wrong_arguments(repository: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'load_model'"):
        Engine(repository, load_models="x")
    with pytest.raises(SettingsError, match="whole number"):
        Engine(repository, max_admitted_requests="x")
    with pytest.raises(ServeError, match="nonexistent"):
        Engine("/nonexistent")
    with pytest.raises(headrace.ClientError, match="path of servers"), Engine(repository) as engine:
        engine.fetch("/metrics")


def test_calls_under_way_are_answered_before_the_end(tmp_path: Path) -> None:
    begun, ends = tmp_path / "begun", tmp_path / "ends"
    paths = str(begun), str(ends)

    def slow(x: Float32[N]) -> Float32[N]:
        Path(paths[0]).touch()
        while not Path(paths[1]).exists():
            time.sleep(0.002)
        return x

    with ThreadPoolExecutor(2) as pool, Engine({"slow": slow}) as engine:
        asked = pool.submit(engine.infer, "slow", {"x": ONE[0]})
        until(lambda: begun.exists() or asked.done(), "a call under way")
        closing = pool.submit(engine.close)
        until(lambda: not engine.ready(), "the begin of the end")
        ends.touch()
        closing.result()
        assert asked.result().array.tolist() == [1]
        with pytest.raises(RuntimeError, match="closed"):
            engine.infer("slow", {"x": ONE[0]})


def test_a_model_with_many_responses_is_streamed_only(tmp_path: Path) -> None:
    write_python_model(tmp_path / "models", "teller", TELLER, TELLER_CONFIG)
    with Engine(tmp_path / "models", exit_timeout_secs=1) as engine:
        with pytest.raises(StatusError, match="call stream"):
            engine.infer("teller", {"TEXT": np.array([["x"]]), "COUNT": np.array([[3]], np.int32)})
        assert len(list(engine.stream("teller", {"TEXT": "x", "COUNT": 3}))) == 3
        unread = engine.stream("teller", {"TEXT": "x", "COUNT": 300})
        next(unread)
        engine.close()  # though nobody reads the rest
    with pytest.raises((RuntimeError, StatusError)):
        list(unread)


def test_limits_of_calls_under_way(repository: Path) -> None:
    with Engine(repository, max_admitted_bytes=100) as engine, ThreadPoolExecutor(16) as pool:
        engine.infer("same", {"INPUT0": ONE})
        many = {"INPUT0": np.ones((8, 1), np.float32)}
        asked = [pool.submit(engine.infer, "same", many) for _ in range(2_000)]
        errors = [error for one in asked if (error := one.exception()) is not None]
        assert {type(error) for error in errors} <= {StatusError}
        assert all("--max-admitted-bytes" in str(error) for error in errors)
        assert engine.infer("same", {"INPUT0": ONE}).array.tolist() == [[1]]


IN_PROCESS = """
import numpy as np
from headrace import Float32, N, model

@model
def same(x: Float32[N]) -> Float32[N]:
    return x
"""
THREAD = 'parameters { key: "execution" value { string_value: "thread" } }'


def test_arrays_of_callers_stay_theirs(tmp_path: Path) -> None:
    (tmp_path / "models" / "same" / "1").mkdir(parents=True)
    (tmp_path / "models" / "same" / "1" / "model.py").write_text(IN_PROCESS)
    (tmp_path / "models" / "same" / "config.pbtxt").write_text(THREAD)
    with Engine(tmp_path / "models", allow_in_process_python=True) as engine:
        given = np.arange(4, dtype=np.float32)
        found = engine.infer("same", {"x": given}).array
        given[:] = 7
        assert found.tolist() == [0, 1, 2, 3]


def test_an_engine_that_is_open_at_the_end_of_the_program(repository: Path, tmp_path: Path) -> None:
    program = "import headrace, sys; engine = headrace.Engine(sys.argv[1]); print(engine.ready())"
    ran = subprocess.run(
        [sys.executable, "-c", program, repository], capture_output=True, text=True, timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (ran.stdout, ran.stderr, ran.returncode) == ("True\n", "", 0)
    assert not list(tmp_path.glob("headrace-engine-*"))


def test_an_engine_belongs_to_its_process(repository: Path) -> None:
    with Engine(repository) as engine:
        with pytest.raises(TypeError, match="create one in each process"):
            pickle.dumps(engine)
        read, write = os.pipe()
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if not child:
            try:
                engine.infer("same", {"INPUT0": ONE})
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        assert b"the process that has created it" in os.read(read, 1000)
        os.waitpid(child, 0)
        os.close(read)
        assert engine.ready("same")


def test_an_engine_that_is_never_closed(repository: Path) -> None:
    engine = Engine(repository)
    names = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="not closed"):
        names.clear()
