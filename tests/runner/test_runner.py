"""A model as a value: calls, tables in order, copies in other processes, and lost servers."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ClientError, Runner, ServeError
from headrace.client import ConnectionFailed, InputError, StatusError
from headrace.client.transport import Result
from headrace.core.tensors import Array
from tests.support.remote import free_ports
from tests.support.server_process import ServerProcess, clean_server


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    with clean_server(models) as process:
        yield process


@pytest.fixture(params=["directory", "http", "grpc"])
def place(request: pytest.FixtureRequest, models: Path) -> str:
    if request.param == "directory":
        return str(models)
    server: ServerProcess = request.getfixturevalue("server")
    return server.url if request.param == "http" else f"grpc://{server.grpc}"


def table(rows: int, first: int = 0) -> dict[str, Array]:
    return {
        "INPUT0": np.arange(first, first + rows, dtype=np.int32),
        "INPUT1": np.full(rows, 2, np.int32),
    }


def test_calls(place: str) -> None:
    runner = Runner(place, "add_sub")
    one, two = np.array([[1]], np.int32), np.array([[2]], np.int32)
    for found in (
        runner(INPUT0=one, INPUT1=two), runner(one, two), runner(one, INPUT1=two),
        asyncio.run(runner.call(one, INPUT1=two)), runner(INPUT0=[[1]], INPUT1=[[2]]),
    ):  # fmt: skip
        assert isinstance(found, Result)
        assert {name: found[name].tolist() for name in found} == {
            "OUTPUT0": [[3]], "OUTPUT1": [[-1]],
        }  # fmt: skip
    only = Runner(place, "add_sub", outputs=["OUTPUT1"], timeout=20)
    assert list(only(one, two)) == ["OUTPUT1"]
    assert list(only(table(3))) == ["OUTPUT1"]


def test_tables_in_order(place: str) -> None:
    runner = Runner(place, "add_sub", in_flight=3, keep=["id"])
    sizes = [0, 1, 30, 8, 0, 3, 100, 9]
    given = [
        {**table(size, 1000 * place), "id": np.full(size, place)}
        for place, size in enumerate(sizes)
    ]
    found = list(runner.tables(iter(given)))
    assert [len(one["id"]) for one in found] == sizes
    for number, one in enumerate(found):
        np.testing.assert_array_equal(one["OUTPUT0"], given[number]["INPUT0"] + 2)
        np.testing.assert_array_equal(one["id"], given[number]["id"])
    assert list(runner.tables([])) == []
    assert asyncio.run(runner.call(given[2]))["OUTPUT1"].tolist() == list(range(1998, 2028))


def test_many_coroutines_and_threads(place: str) -> None:
    runner = Runner(place, "add_sub")
    two = np.array([[2]], np.int32)

    async def ask() -> list[Any]:
        numbers = (np.array([[number]], np.int32) for number in range(200))
        return await asyncio.gather(*(runner.call(number, two) for number in numbers))

    assert [int(one["OUTPUT0"][0, 0]) for one in asyncio.run(ask())] == list(range(2, 202))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: runner(table(20, number)), range(50)))
    assert [int(one["OUTPUT0"][0]) for one in found] == list(range(2, 52))


def test_no_more_tables_are_taken_than_are_in_flight(models: Path) -> None:
    taken = 0

    def endless() -> Iterator[dict[str, Array]]:
        nonlocal taken
        while True:
            taken += 1
            yield table(8)

    found = Runner(models, "add_sub", in_flight=3).tables(endless())
    for number in range(20):
        next(found)
        assert taken <= number + 1 + 3
    assert isinstance(found, Iterator)


def test_an_error_comes_after_the_tables_before_it(place: str) -> None:
    runner = Runner(place, "add_sub", in_flight=4)
    good, bad = table(20), {**table(20), "INPUT1": [*range(13), None, *range(6)]}

    def source() -> Iterator[dict[str, Any]]:
        yield from (good, good, good)
        raise OSError("the source has ended")

    cases: list[tuple[Any, type[Exception], str]] = [
        ([good, good, good, bad, good], InputError, "row 13 is null"),
        (source(), OSError, "the source has ended"),
    ]
    for given, error, text in cases:
        found = runner.tables(given)
        assert [len(next(found)["OUTPUT0"]) for _ in range(3)] == [20] * 3
        with pytest.raises(error, match=text):
            next(found)


def test_wrong_calls(place: str) -> None:
    runner = Runner(place, "add_sub")
    one = np.array([[1]], np.int32)
    for call, text in (
        (lambda: runner(one, one, one), "got 3 values for its inputs: INPUT0, INPUT1"),
        (lambda: runner(one, INPUT0=one), "'INPUT0' is given by position and by name"),
        (lambda: runner({"INPUT0": one, "INPUT1": [1, 2]}), "differ in their numbers of rows"),
        (lambda: list(runner.tables([5])), "expected a table or a dict of arrays, got int"),
        (lambda: runner({"INPUT0": [1], "INPUT1": ["x"]}), "expected numbers for INT32"),
        (lambda: Runner(place, "add_sub", outputs=["x"])(table(1)), "no output 'x', only OUTPUT0"),
        (lambda: Runner(place, "add_sub", keep=["x"])(table(1)), "lacks the column 'x'"),
        (lambda: Runner(place, "add_sub", keep=["OUTPUT0"])({**table(1), "OUTPUT0": [1]}),
         "has the name of an output"),
        (lambda: Runner(place, "add_sub", columns={"INPUT0": "a"})({"b": [1]}),
         "lacks the column 'a', it has b"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            call()


def test_wrong_places_and_options(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in_flight is 0"):
        Runner(models, "add_sub", in_flight=0)
    with pytest.raises(TypeError, match="lists of names"):
        Runner(models, "add_sub", keep="id")
    with pytest.raises(ConnectionFailed, match=r"no server at grpc://127\.0\.0\.1:1"):
        Runner("grpc://127.0.0.1:1", "add_sub", retries=0)(table(1))
    for place in (tmp_path / "nowhere", "localhost:8001"):
        with pytest.raises(ServeError, match=f"{place} is neither a directory nor an address"):
            Runner(place, "add_sub")(table(1))
    for _ in range(2):  # a model that is not there leaves the place usable
        with pytest.raises((ClientError, ServeError), match="absent"):
            Runner(models, "absent")(table(1))
    assert Runner(models, "add_sub")(table(1))["OUTPUT0"].tolist() == [2]
    with pytest.raises(TypeError, match="unexpected keyword"):
        Runner("http://127.0.0.1:1", "add_sub", load_model="x")(table(1))


def test_a_pickled_runner(place: str) -> None:
    runner = Runner(place, "add_sub", keep={"id": "int64"}, in_flight=2, timeout=20)
    before = pickle.dumps(runner)
    given = {**table(3), "id": [1, 2, 3]}
    assert list(runner(given)) == ["id", "OUTPUT0", "OUTPUT1"]
    assert len(pickle.dumps(runner)) == len(before) < 1000
    assert pickle.loads(before)(given)["OUTPUT0"].tolist() == [2, 3, 4]
    tables = pickle.loads(pickle.dumps(runner.tables))
    assert [len(one["id"]) for one in tables([given, given])] == [3, 3]
    program = (
        "import pickle, sys, numpy as np\n"
        "runner = pickle.loads(sys.stdin.buffer.read())\n"
        "print(runner({'INPUT0': [1, 2], 'INPUT1': [3, 4], 'id': [5, 6]})['OUTPUT0'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], input=before, capture_output=True,
        check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"[4 6]\n", b"")


FORKING = """
import os, sys
import numpy as np
from headrace import Runner

runner, unused = Runner(sys.argv[1], "add_sub"), Runner(sys.argv[1], "matrix")
one = {"INPUT0": np.arange(20, dtype=np.int32), "INPUT1": np.ones(20, np.int32)}

def ask(where):
    for _ in range(3):
        assert (runner(one)["OUTPUT0"] == one["INPUT0"] + 1).all()
    assert unused(np.ones((1, 2), np.float32))["OUTPUT0"].shape == (1, 2)
    print(where, flush=True)

def child(depth):
    number = os.fork()
    if not number:
        status = 1
        try:
            ask(f"child {depth}")
            if depth:
                status = os.waitstatus_to_exitcode(os.waitpid(child(depth - 1), 0)[1])
            else:
                status = 0
        finally:
            os._exit(status)
    return number

assert (runner(one)["OUTPUT0"] == one["INPUT0"] + 1).all()
numbers = [child(1), child(1)]
assert [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers] == [0, 0]
ask("parent")
"""


def test_a_forked_runner(place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, place], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(["child 1", "child 0"] * 2 + ["parent"])


def test_a_server_that_is_killed_and_started_again(models: Path) -> None:
    for scheme in ("http", "grpc"):
        http, grpc = free_ports(2)
        ports = [f"--http-port={http}", f"--grpc-port={grpc}"]
        with ServerProcess(models, options=ports) as first:
            place = first.url if scheme == "http" else f"grpc://{first.grpc}"
            # With pauses of 51 seconds in all, in which the next server must have started.
            runner = Runner(place, "add_sub", in_flight=2, retries=9)
            found = runner.tables(table(8, 8 * number) for number in range(40))
            results = [next(found) for _ in range(5)]
            os.kill(first.pid, signal.SIGKILL)
            assert first.process is not None
            first.process.wait()
        with clean_server(models, options=ports):
            results += found
        whole = np.concatenate([one["OUTPUT0"] for one in results])
        np.testing.assert_array_equal(whole, np.arange(2, 322))


def test_no_repetition_without_retries(models: Path) -> None:
    with ServerProcess(models) as server:
        runner = Runner(server.url, "add_sub", retries=0)
        found = runner.tables(table(8) for _ in range(40))
        next(found)
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None
        server.process.wait()
        with pytest.raises(ConnectionFailed):
            list(found)


def test_a_models_own_error_is_not_repeated(place: str) -> None:
    with pytest.raises(StatusError) as caught:
        Runner(place, "absent" if "://" in place else "add_sub", version="7")(table(1))
    assert caught.value.status in (400, 404)


def test_schemas_of_results(place: str) -> None:
    arrow, pandas = import_module("pyarrow"), import_module("pandas")
    runner = Runner(place, "matrix", keep={"id": "int64", "at": "string"})
    assert runner.ddl == "`id` BIGINT, `at` STRING, `OUTPUT0` ARRAY<FLOAT>"
    given = arrow.table({"id": [1, 2], "at": ["x", None], "a": [1.5, 2], "b": [3, 4]})
    found = runner(given)
    assert found.schema.equals(runner.schema)
    assert found.to_pylist() == [
        {"id": 1, "at": "x", "OUTPUT0": [1.5, 3]}, {"id": 2, "at": None, "OUTPUT0": [2, 4]},
    ]  # fmt: skip
    batch = given.to_batches()[0]
    assert isinstance(runner(batch), arrow.RecordBatch)
    assert runner(batch).schema.equals(runner.schema)
    frame = runner(given.to_pandas())
    assert dict(frame.dtypes) == dict(runner.meta.dtypes)
    assert isinstance(runner.meta, pandas.DataFrame)
    assert len(runner.meta) == 0
    with pytest.raises(InputError, match=r"keep=\{'id': 'int64'\}"):
        _ = Runner(place, "matrix", keep=["id"]).schema
    with pytest.raises(InputError, match="no name of a type"):
        _ = Runner(place, "matrix", keep={"id": "whole"}).schema
    with pytest.raises(InputError, match="Spark has no type for column 'OUTPUT0'"):
        _ = Runner(place, "one_UINT64").ddl


def test_engines_end_with_their_last_runner(models: Path) -> None:
    runner, other = Runner(models, "add_sub"), Runner(models, "matrix")
    runner(table(1))
    other(np.ones((1, 2), np.float32))
    engine_threads = {thread for thread in sys._current_frames()}
    del runner
    gc.collect()
    assert other(np.ones((1, 2), np.float32))["OUTPUT0"].shape == (1, 2)
    del other
    gc.collect()
    assert len(set(sys._current_frames()) & engine_threads) < len(engine_threads)


def test_a_wrong_key_is_told_at_once(models: Path) -> None:
    """Over gRPC too, where the refusal has the status of servers that are not there for now."""
    rule = "inference:authorization=Bearer secret"
    with ServerProcess(models, options=[f"--grpc-restricted-protocol={rule}"]) as server:
        runner = Runner(f"grpc://{server.grpc}", "add_sub", token="wrong", retries=100)
        with pytest.raises(StatusError, match="restricted") as raised:
            list(runner.tables([table(1)]))
        assert (raised.value.status, raised.value.grpc_status) == (403, 14)
