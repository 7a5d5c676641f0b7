"""Warm-up: each instance before its first request, and not counted."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ServerError
from tests.contract.conftest import CLIENTS
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import execution, write_python_model
from tests.models.warmup_models import ASKER, LOADER, RECORDER, RECORDER_CONFIG, sample
from tests.support.client import Client
from tests.support.http_socket import ask
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

SAMPLES = (
    sample("zeros", "zero_data: true", 2)
    + sample("file", 'input_data_file: "rows"', 2, "count: 2")
    + sample("skipped", "random_data: true", 0)
)
RUNS = [[[[0, 0]], [[0, 0]]], [[[1, 2]], [[3, 4]]], [[[1, 2]], [[3, 4]]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("warmup")
    config = RECORDER_CONFIG + SAMPLES
    write_python_model(root, "two", RECORDER, config + "instance_group { count: 2 }")
    write_python_model(root, "here", RECORDER, config + execution("thread"))
    for name in ("two", "here"):
        (root / name / "warmup").mkdir()
        (root / name / "warmup" / "rows").write_bytes(np.arange(1, 5, dtype="<f4").tobytes())
    write_model(root, "onnx", identity(), sample("random", "random_data: true", 8, "count: 3"))
    write_python_model(root, "below", RECORDER, RECORDER_CONFIG + _below("python"))
    (root / "below" / "warmup").mkdir()
    (root / "below" / "warmup" / "rows").write_bytes(np.array([[-1, 2]], "<f4").tobytes())
    write_model(root, "wrong", identity(), sample("w", "zero_data: true", kind="INT32"))
    return root


def _below(name: str) -> str:
    return sample("fine", "zero_data: true") + sample(f"bad {name}", 'input_data_file: "rows"')


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    options = ("--exit-on-error=false", "--allow-in-process-python")
    with clean_server(root, options=options) as process:
        yield process


def seen(root: Path, model: str) -> dict[int, list[object]]:
    batches: dict[int, list[object]] = {}
    for line in (root / model / "seen").read_text().splitlines():
        pid, batch = json.loads(line)
        batches.setdefault(pid, []).append(batch)
    return batches


def test_every_instance_runs_every_sample(root: Path, server: ServerProcess) -> None:
    assert list(seen(root, "two").values()) == [RUNS, RUNS]
    [runs] = seen(root, "here").values()
    assert runs[:3] == RUNS


def test_warm_up_runs_are_not_counted(caller: Client, server: ServerProcess) -> None:
    for model in ("two", "here", "onnx"):
        [found] = caller.statistics(model)
        assert (found.inference_count, found.execution_count, found.last_inference) == (0, 0, 0)
        assert not found.batch_stats
        assert found.inference_stats.success.count == found.inference_stats.fail.count == 0
    with Scraper(server.metrics) as metrics:
        now = metrics.now()
    for name in ("nv_inference_request_success", "nv_inference_exec_count"):
        assert now.value(name, model="two") == now.value(name, model="onnx") == 0


def test_a_sample_that_fails_keeps_the_model_from_being_served(
    caller: Client, server: ServerProcess
) -> None:
    reasons = {entry.name: entry.reason for entry in caller.index().models}
    told = "failed to run warmup sample 'bad python': Failed to process the request(s)"
    assert told in reasons["below"]
    assert "model_warmup[0].inputs['INPUT0'].value.data_type" in reasons["wrong"]
    with pytest.raises(ServerError):
        caller.infer("below", {"INPUT0": np.zeros((1, 2), np.float32)})
    assert "has no effect on this server" not in server.log


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    """A server that loads models on request: one of them calls the other."""
    root = tmp_path_factory.mktemp("asking")
    write_python_model(root, "recorder", RECORDER, RECORDER_CONFIG)
    for name, value in (("asker", "zero_data: true"), ("unlucky", 'input_data_file: "rows"')):
        write_python_model(root, name, ASKER, RECORDER_CONFIG + sample(name, value, 2))
        (root / name / "warmup").mkdir()
        (root / name / "warmup" / "rows").write_bytes(np.array([[-1, 2]], "<f4").tobytes())
    for name, following in (("one", "two"), ("two", "one"), ("self", "self")):
        write_python_model(root, name, LOADER, RECORDER_CONFIG + sample(name, "zero_data: true"))
        (root / name / "next").write_text(following)
    options = ("--model-control-mode=explicit", "--load-model=recorder")
    with clean_server(root, options=options) as process:
        yield root, process


def test_a_model_that_calls_another(asking: tuple[Path, ServerProcess]) -> None:
    root, server = asking
    loaded = ask(server.http, "POST", "/v2/repository/models/asker/load", b"{}")
    assert loaded.status == 200, loaded.body
    [runs] = seen(root, "recorder").values()
    assert runs in ([[[[0, 0]], [[0, 0]]]], [[[[0, 0]]], [[[0, 0]]]])  # one batch, or two
    refused = ask(server.http, "POST", "/v2/repository/models/unlucky/load", b"{}")
    assert refused.status == 400
    assert b"failed to run warmup sample 'unlucky'" in refused.body
    assert b"below zero" in refused.body


@pytest.mark.parametrize(("name", "way"), [("one", "two -> one -> two"), ("self", "self -> self")])
def test_models_that_wait_for_one_another(
    asking: tuple[Path, ServerProcess], name: str, way: str
) -> None:
    """Their load fails, and succeeds once they do not wait for one another."""
    root, server = asking
    refused = ask(server.http, "POST", f"/v2/repository/models/{name}/load", b"{}")
    assert refused.status == 400
    assert f"each has the next one loaded: {way}".encode() in refused.body
    (root / name / "next").write_text("recorder")
    loaded = ask(server.http, "POST", f"/v2/repository/models/{name}/load", b"{}")
    assert loaded.status == 200, loaded.body


def test_a_restarted_worker_is_warmed_up_first(root: Path, server: ServerProcess) -> None:
    first = set(seen(root, "two"))
    os.kill(min(first), signal.SIGKILL)
    until(lambda: sorted(map(len, seen(root, "two").values())) == [3, 3, 3], "the third to be warm")
    [new] = set(seen(root, "two")) - first
    assert seen(root, "two")[new] == RUNS
    with CLIENTS["http"](server) as client:
        zeros = np.zeros((1, 2), np.float32)
        assert client.infer("two", {"INPUT0": zeros})["OUTPUT0"].tolist() == [[0, 0]]
