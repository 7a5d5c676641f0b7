"""`headrace tune` with real servers: its own, and running ones that get their models back."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from google.protobuf import json_format

from headrace.client.blocking import Client
from headrace.plugins.explain.config_text import changed, settings_in
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import read_config
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.models.sequence_models import write_adder
from tests.support.command import run
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

# A batch takes as long as a row: whoever may not batch answers few requests.
LINGERING = """
    import time

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            time.sleep(0.02)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())])
                for request in requests
            ]
"""
CONFIG = "# one at a time\nmax_batch_size: 1\n" + "".join(
    (tensors("input", ("X", "FP32", "1")), tensors("output", ("Y", "FP32", "1")))
)
SHORT = ("--seconds=0.3", "--instances=1")
ENSEMBLE = ensemble(
    (("x", "FP32", "2"),), (("y", "FP32", "2"),), step("plain", {"INPUT0": "x"}, {"OUTPUT0": "y"})
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_python_model(root, "lingering", LINGERING, CONFIG)
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("tune")
    write_model(root, "plain", identity(), "max_batch_size: 8")
    write_ensemble(root, "graph", ENSEMBLE)
    write_adder(root, "stateful", "direct { }")
    write_python_model(root, "lingering", LINGERING, CONFIG)
    groups = "max_batch_size: 8 instance_group [ { count: 1 }, { count: 2 } ]"
    write_model(root, "groups", identity(), groups)
    options = ["--model-control-mode=explicit", "--load-model=*"]
    with ServerProcess(root, options=options) as process:
        yield process


@pytest.mark.slow
def test_the_best_settings_are_found_and_written(repository: Path, tmp_path: Path) -> None:
    plot, path = tmp_path / "plot.svg", repository / "lingering" / "config.pbtxt"
    mode = path.stat().st_mode
    given = ("--p99=60s", f"--model-repository={repository}", "--clients=16", *SHORT)
    ran = run("tune", "lingering", *given, f"--plot={plot}", "--write", "--json", "--trials=4")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["kept"], found["interrupted"]) == (True, False)
    assert found["written"] == str(path)
    first, *others = found["trials"]
    assert (first["change"], first["settings"]["max_batch_size"]) == ({}, 1)
    assert 0 < len(others) <= 3
    assert found["best"]["max_batch_size"] > 1
    assert found["best"] in [trial["settings"] for trial in others]
    for trial in found["trials"]:
        for level in trial["levels"]:
            assert 0 < level["p50_ns"] <= level["p99_ns"]
            assert level["mean_ns"] >= 20_000_000  # the model's own
            assert level["requests"] > 0 < level["per_second"]
        assert trial["best"] in trial["levels"]
    written = read_config(path, "lingering").config
    assert written.max_batch_size == found["best"]["max_batch_size"]
    delay = written.dynamic_batching.max_queue_delay_microseconds
    assert delay == found["best"]["max_queue_delay_microseconds"]
    assert "# one at a time" in path.read_text()
    assert ([each.name for each in written.input], [each.name for each in written.output]) == (
        ["X"],
        ["Y"],
    )
    assert path.stat().st_mode == mode
    assert [*path.parent.glob(".*")] == []
    picture = ElementTree.parse(plot).getroot()
    curves = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == len(found["trials"])
    assert len(ran.stderr.splitlines()) == len(found["trials"])  # the progress


@pytest.mark.slow
def test_the_highest_rate_is_searched(repository: Path) -> None:
    # A batch takes 20 ms, so that more rows of one carry a higher rate.
    given = ("--p99=1s", f"--model-repository={repository}", "--seconds=0.1", "--instances=1")
    ran = run("tune", "lingering", *given, "--trials=2")
    assert ran.returncode == 0, ran.stderr
    table, _, rest = ran.stdout.partition("\n\nrequests/s over p99; ")
    heads, first, second = (line.split("  ") for line in table.splitlines())
    assert [head.strip() for head in heads if head][:3] == ["SETTINGS", "RATE", "REQ/S"]
    assert [first[0], second[0]] == ["a", "b"]
    assert "\nbest: max_batch_size: " in rest
    assert re.search(r": \d+ requests/s, \d+\.\d\d times as many\n", rest)
    assert " requests/s, p99 " in ran.stderr.splitlines()[0]


@pytest.mark.slow
def test_requests_that_arrive_at_a_rate(repository: Path) -> None:
    # A batch of one row takes 20 ms: it answers 50 a second, so that of 80 more and more wait.
    given = ("--p99=60s", f"--model-repository={repository}", "--rate=80", *SHORT, "--trials=3")
    ran = run("tune", "lingering", *given, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["rate"], found["kept"]) == (80, True)
    first, *others = (trial["best"] for trial in found["trials"])
    assert all(len(trial["levels"]) == 1 for trial in found["trials"])
    assert first["clients"] == 0
    assert first["p99_ns"] > 200_000_000  # from the moments when they were due: 120 in 1.5 s
    assert others
    assert found["best"]["max_batch_size"] > 1
    assert " requests/s of 80, p99 " in ran.stderr.splitlines()[0]


@pytest.mark.slow
def test_a_target_that_nothing_keeps(repository: Path) -> None:
    path = repository / "lingering" / "config.pbtxt"
    before = path.read_text()
    given = ("--p99=1us", f"--model-repository={repository}", "--clients=2", "--trials=1")
    ran = run("tune", "lingering", *given, *SHORT, "--write")
    assert ran.returncode == 1, ran.stderr
    assert "nothing keeps a p99 of 1 µs; the nearest is as it is with " in ran.stdout
    assert path.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("override", [
    "", '{"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [2]}}',
])  # fmt: skip
def test_a_running_server_gets_its_model_back(server: ServerProcess, override: str) -> None:
    with Client(server.url) as client:
        if override:
            whole = client.model_config("lingering") | json.loads(override)
            client.load("lingering", json.dumps(whole))
        before = client.model_config("lingering")
        url = f"--url={server.url}"
        ran = run("tune", "lingering", "--p99=60s", url, "--clients=8", "--trials=2", *SHORT)
        assert ran.returncode == 0, ran.stderr
        assert "best: max_batch_size: " in ran.stdout
        table, _, plot = ran.stdout.partition("\n\nrequests/s over p99; ")
        letters = [line.split()[0] for line in table.splitlines()[1:]]
        assert letters == ["a", "b"]
        assert "\na  as it is " in table
        area = [line.partition("|")[2] for line in plot.splitlines() if "|" in line]
        assert sum(line.count("*") for line in area) == 1
        assert any(letter in line for line in area for letter in letters)
        assert client.model_config("lingering") == before
        client.load("lingering")


def test_a_server_takes_a_preferred_size(server: ServerProcess) -> None:
    with Client(server.url) as client:
        config = json_format.ParseDict(client.model_config("plain"), ModelConfig())
        present = settings_in(config)
        wanted = present._replace(max_queue_delay_microseconds=1000, preferred_batch_size=2)
        found = changed(config, present, wanted)
        text = json_format.MessageToJson(found, preserving_proto_field_name=True)
        client.load("plain", text)
        batching = client.model_config("plain")["dynamic_batching"]
        assert batching["preferred_batch_size"] == [2]
        client.load("plain")


@pytest.mark.slow
def test_an_interrupt_restores_the_model(server: ServerProcess) -> None:
    words = [sys.executable, "-m", "headrace", "tune", "lingering", "--p99=60s", "--clients=4"]
    words += [f"--url={server.url}", "--seconds=600", "--json"]
    with Client(server.url) as client:
        before = client.model_config("lingering")

        def answered() -> int:
            [stats] = client.statistics("lingering")["model_stats"]
            return int(stats["inference_stats"]["success"]["count"])

        known = answered()
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as tune:
            until(lambda: answered() not in (0, known), "requests of the first trial")
            os.kill(tune.pid, signal.SIGINT)
            output, errors = tune.communicate(timeout=120)
        assert (tune.returncode, errors) == (130, "headrace tune: interrupted\n")
        found = json.loads(output)
        assert (found["interrupted"], found["trials"], found["best"]) == (True, [], None)
        assert client.model_config("lingering") == before
        assert client.infer("lingering", {"X": np.ones((1, 1), np.float32)})["Y"] == 1


def test_inputs_of_a_file(server: ServerProcess, tmp_path: Path) -> None:
    few, many = tmp_path / "few.json", tmp_path / "many.json"
    few.write_text(json.dumps({"INPUT0": [[1.5, 2.5]] * 3}))
    many.write_text(json.dumps({"INPUT0": [[1.5, 2.5]] * 9}))
    given = ("tune", "plain", "--p99=60s", f"--url={server.url}", "--clients=1", "--trials=1")
    ran = run(*given, *SHORT, f"--input={few}", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["rows"] == 3
    ran = run(*given, *SHORT, f"--input={many}")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "a request has 9 rows, and the model takes 8" in ran.stderr


@pytest.mark.parametrize(("words", "status", "error"), [
    (["plain"], 2, "--p99"),
    (["plain", "--p99=20"], 2, "expected a time such as 20ms, 500us or 1.5s, got '20'"),
    (["plain", "--p99=20ms", "--trials=0"], 2, "expected a number from 1 to 1000, got '0'"),
    (["plain", "--p99=20ms", "--rate=0.5"], 2, "expected a number from 1 to 1048576, got '0.5'"),
    (["plain", "--p99=20ms", "--write"], 2, "--write needs --model-repository"),
    (["plain", "--p99=20ms", "--model-repository=x"], 2, "are for a running server"),
    (["plan", "--p99=20ms"], 1, "did you mean 'plain'?"),
    (["plain", "--p99=20ms", "--input=none.json"], 1, "none.json"),
    (["graph", "--p99=20ms"], 1, "cannot be tuned: ensemble_scheduling: its batches"),
    (["stateful", "--p99=20ms"], 1, "cannot be tuned: sequence_batching: its batches"),
    (["groups", "--p99=20ms"], 1, "one group can be tuned, the model has 2"),
])  # fmt: skip
def test_refusals(server: ServerProcess, words: list[str], status: int, error: str) -> None:
    ran = run("tune", *words, f"--url={server.url}")
    assert (ran.returncode, ran.stdout) == (status, "")
    assert error in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(("options", "error"), [
    (["--model-control-mode=none"], "--model-control-mode=explicit allows it"),
    (["--model-control-mode=explicit", "--load-model=*", "--load-overrides=none"],
     "--load-overrides=config takes them"),
])  # fmt: skip
def test_a_server_that_loads_nothing(tmp_path: Path, options: list[str], error: str) -> None:
    write_model(tmp_path, "plain", identity(), "max_batch_size: 8")
    with ServerProcess(tmp_path, options=options) as server:
        ran = run("tune", "plain", "--p99=60s", f"--url={server.url}", "--clients=1", *SHORT)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("headrace tune: ")
    assert ran.stderr.endswith(f"; {error}\n")


def test_repositories_without_the_model(repository: Path) -> None:
    ran = run("tune", "gone", "--p99=20ms", f"--model-repository={repository}")
    assert ran.returncode == 1
    assert "there is no directory of a model 'gone'" in ran.stderr
    (repository / "broken" / "1").mkdir(parents=True)
    ran = run("tune", "broken", "--p99=20ms", f"--model-repository={repository}")
    assert ran.returncode == 1
    assert "the server has ended:" in ran.stderr
    assert "Traceback" not in ran.stderr
