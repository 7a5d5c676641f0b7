"""Servers of scripts, notebooks and tests: served models, and shutdown."""

import linecache
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import headrace
from headrace import Float32, N, ServeError, model
from headrace.serving.sources import SourceError, source_of
from tests.support.client import strings
from tests.support.scrape import until
from tests.support.server_process import EXAMPLES, onnx_examples

FACTOR = 3
PEOPLE = Path(__file__).parents[1] / "models" / "functions" / "people.py"
BOUNDS = {"low": 0.0, "high": 10.0}
LOADED = np.ones(3)
pytest_plugins = ["headrace.testing"]


def clipped(x: Float32[N]) -> Float32[N]:
    """A dependency of a model, which has one itself."""
    return np.clip(x, BOUNDS["low"], BOUNDS["high"])


@model(max_batch_size=8)
def scaled(x: Float32[N], LOADED: Float32[N]) -> Float32[N]:
    return clipped(x * np.float32(FACTOR) + LOADED)  # a parameter, not the module's


@model
def imported(x: float) -> str:
    return str(strings([b"from the tests"])) * int(x)


@model
class Counter:
    step: int

    def load(self) -> None:
        self.step = FACTOR

    def predict(self, x: float) -> float:
        return x + self.step


class Scale:
    """An object of the notebook."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, x: float) -> float:
        return self.factor * x


SCALE = Scale(2)
LOCK = Lock()


def uses_objects(x: float) -> float:
    return float(LOADED[0]) + SCALE.of(x)


def uses_a_lock(x: float) -> float:
    with LOCK:
        return x


def test_functions_classes_and_files(serve_model: Any) -> None:
    exponent = 2

    def power(x: float) -> float:
        return float(x**exponent)

    digits = EXAMPLES / "digits"
    server = serve_model(
        scaled, imported, Counter, EXAMPLES / "simple" / "1" / "model.onnx",
        {"power": power, "digits": digits, "one": digits / "1" / "model.onnx"},
        max_request_bytes=1 << 20,
    )  # fmt: skip
    client = server.client
    assert {entry["name"] for entry in client.index(ready=True)} == {
        "scaled", "imported", "Counter", "model", "power", "digits", "one",
    }  # fmt: skip
    assert client.model("scaled")(x=[1, 2, 5], LOADED=[0, 1, 0]).array.tolist() == [3, 7, 10]
    assert client.model("Counter")(x=1.0).array.tolist() == [4]
    assert "from the tests" in client.model("imported")(x=1.0).texts()[0]
    assert client.model("power")(x=3.0).array.tolist() == [9]
    with headrace.Client(server.grpc_url) as grpc:
        assert grpc.ready("one")
    with pytest.raises(headrace.ClientError, match="1048576"):
        client.infer("digits", {"image": np.zeros((1 << 12, 8, 8), np.float32)})


@model(instances=3)
def process(x: float) -> int:
    return os.getpid()


def test_instances(tmp_path: Path) -> None:
    """A configuration takes precedence over the code."""
    with headrace.serve({"three": process}) as server:
        groups = server.client.model_config("three")["instance_group"]
        assert [(group["name"], group["count"]) for group in groups] == [("three_0", 3)]
        assert server.client.model_metadata("three")["properties"]["instances"] == "3"
        three = server.client.model("three")
        found: set[int] = set()
        with ThreadPoolExecutor(8) as pool:
            while len(found) < 3:
                found |= set(pool.map(lambda x: three(x=x).array.item(), range(50)))
        assert len(found) == 3
    (tmp_path / "two" / "1").mkdir(parents=True)
    (tmp_path / "two" / "1" / "model.py").write_text(source_of(process).text)
    (tmp_path / "two" / "config.pbtxt").write_text("instance_group { count: 2 }")
    with headrace.serve(tmp_path) as server:
        assert server.client.model_metadata("two")["properties"]["instances"] == "2"


def test_objects_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    scale = Scale(10)

    def nested(x: float) -> float:
        return scale.of(x)

    with headrace.serve(uses_objects, nested) as server:
        LOADED[0] += 1
        scale.factor = 0
        try:
            assert server.client.model("uses_objects")(x=3).array.tolist() == [7]
            assert server.client.model("nested")(x=3).array.tolist() == [30]
        finally:
            LOADED[0] -= 1
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(SourceError, match=r"cloudpickle: pip install 'headrace\[notebook\]'"):
        source_of(uses_objects)


def test_data_frames_of_functions() -> None:
    """Missing values in both directions."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    with headrace.serve({"people": PEOPLE}) as server:
        ages = [36, None, 7]
        columns = {"name": ["Ada", "Bob", "Cy"], "age": ages}
        frame = pd.DataFrame({**columns, "age": pd.array(ages, "Int64")})
        ask = server.client.model("people")
        for given in (columns, frame, pd.DataFrame(columns), frame[["age", "name"]]):
            for found in (ask.infer(given), server.client.infer("people", given)):
                assert list(found) == ["name", "next", "adult"]
                table = pd.DataFrame(dict(found))
                assert table["next"].tolist()[::2] == [37, 8]
                assert table["next"].isna().tolist() == [False, True, False]
                assert found.columns()["name"].tolist() == columns["name"]
        with pytest.raises(headrace.ClientError, match=r"name.*missing values"):
            ask.infer({"name": ["Ada", None, "Cy"], "age": ages})
        with pytest.raises(headrace.ClientError, match="has no input 'city'"):
            ask(frame.assign(city="x"))


def test_fitted_estimators() -> None:
    for name in ("cloudpickle", "sklearn", "pandas"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    import pandas as pd
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    table = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [0.0, 1, 0, 1]})
    target = table["a"] * 10 + table["b"]
    own = make_pipeline(FunctionTransformer(lambda x: x), LinearRegression()).fit(table, target)
    regression = LinearRegression()
    for wrong, text in (
        ({"m": regression}, "not fitted yet"), (regression, r'serve\(\{"name": LinearRegression'),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=text):
            headrace.serve(wrong)
    with headrace.serve({"rf": regression.fit(table, target), "own": own}) as server:
        assert server.client.model_config("rf")["max_batch_size"] == 4096
        for name in ("rf", "own"):
            found = server.client.infer(name, table[["b", "a"]])
            np.testing.assert_allclose(found["predict"].ravel(), target)


def test_two_models_with_one_name() -> None:
    with pytest.raises(ServeError, match="two models are called 'clipped'"):
        headrace.serve(clipped, {"clipped": __file__})


def test_a_repository(tmp_path: Path) -> None:
    with headrace.serve(str(onnx_examples(tmp_path)), allow_grpc=False) as server:
        assert server.grpc_url == ""
        assert server.client.ready("simple")
        assert server.url in repr(server)
        server.stop()  # leaving stops it again
    assert "stopped; every admitted request was answered" in server.log


@pytest.mark.parametrize(("given", "kind", "text"), [
    (uses_a_lock, SourceError, r"LOCK, a lock, cannot be copied to another process \(.*: load it"),
    (lambda x: x, SourceError, "has no source"), (len, SourceError, "has no source"),
    (42, SourceError, "42 has no source: a model is a function or class, a path, or a mapping"),
    ({"it": 42}, SourceError, "42 has no source"),
    ("/nowhere/model.onnx", ServeError, "there is no model file /nowhere/model.onnx"),
    ({"broken": __file__}, ServeError, "broken version 1 cannot be loaded"),
])  # fmt: skip
def test_models_that_cannot_be_served(given: Any, kind: type[Exception], text: str) -> None:
    before = set(psutil.Process().children(recursive=True))  # those of earlier tests may end
    with pytest.raises(kind, match=text):
        headrace.serve(given)
    assert not set(psutil.Process().children(recursive=True)) - before


def test_cells_of_a_notebook(serve_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell is a file of its own, which only `linecache` has; all are in `__main__`."""
    main = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", main)
    cells = (
        "from __future__ import annotations\nimport numpy as np",
        "from headrace import model, Float32 as F",
        "offset = 1.5",
        "def moved(x):\n    return x + np.float32(offset)",
        "@model\ndef cell(x: F['n']) -> F['n']:\n    return moved(x)",
    )
    flags = 0
    for number, source in enumerate(cells):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        code = compile(source, name, "exec", flags)
        flags = code.co_flags & __import__("__future__").annotations.compiler_flag
        exec(code, vars(main))
    assert source_of(vars(main)["cell"]).text.startswith("from __future__ import annotations\n")
    server = serve_model(vars(main)["cell"])
    assert server.client.model("cell")(x=[1, 2]).array.tolist() == [2.5, 3.5]


SCRIPT = """
import headrace

def double(x: float) -> float:
    return 2 * x

server = headrace.serve(double)
print(server.client.model("double")(x=4).array.tolist(), flush=True)
print(server.url, flush=True)
server.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "[8.0]\n"
        assert ran.stdout.readline().startswith("http://127.0.0.1:")
        children = psutil.Process(ran.pid).children(recursive=True)
        assert len(children) >= 3  # the reaper, the server, its worker
        while "ready after" not in ran.stdout.readline():
            pass
        ran.send_signal(number)
        rest = ran.stdout.read()
    assert ("every admitted request was answered" in rest) is (number == signal.SIGINT)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("headrace-serve-*")):
        assert time.monotonic() < deadline
        os.sched_yield()


def prints(lines: int) -> int:
    for number in range(lines):
        print("line", number, "x" * 15_000)
    return lines


def test_a_long_log_loses_its_beginning(serve_model: Any) -> None:
    server = serve_model(prints, {"more": prints})  # each within a worker's output limit
    assert server.log.startswith("headrace ")
    for name in ("prints", "more"):
        server.client.model(name)(lines=60)
    until(lambda: re.search("more worker .* line 59 ", server.log) is not None, "the last line")
    assert len(server.log) == 1 << 20
    assert "headrace 0" not in server.log


HEADRACE_MODELS = [Counter]


@pytest.mark.parametrize("number", [1, 2])
def test_a_server_for_the_module(headrace_client: headrace.Client, number: int) -> None:
    assert headrace_client.model("Counter")(x=number).array.tolist() == [number + FACTOR]
